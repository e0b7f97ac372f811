"""The runs in a folder: how far each came, and whether it is still at work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tswift.errors import InputError
from tswift.jobs.folder import JOURNAL, RECORD
from tswift.jobs.journal import parse_journal
from tswift.jobs.lock import in_use
from tswift.jobs.recorded import read_record, refuse_no_folder

RUNNING, KILLED, BROKEN = "running", "killed", "broken"


@dataclass(frozen=True)
class Entry:
    """A run, as a list shows it.

    Attributes:
        path: its folder.
        state: ``running``, ``finished``, ``interrupted``, ``failed``; ``killed`` if it is recorded as running and no
            process has its lock; ``broken`` if its record cannot be read.
        reason: why it failed or is broken; empty otherwise.
        tokens: saved so far.
        length: asked for; None where that is not known, like all that follows.
        method: how it drafts.
        model: the model's name.
        tokens_per_second: of decoding; None before the first checkpoint.
        started: UTC time.
    """

    path: Path
    state: str
    reason: str = ""
    tokens: int = 0
    length: int | None = None
    method: str | None = None
    model: str | None = None
    tokens_per_second: float | None = None
    started: str | None = None


def list_runs(folder: Path) -> list[Entry]:
    """The runs in a folder, the oldest first; the folder itself, if it is a run's.

    Raises:
        InputError: there is no such folder.
    """
    refuse_no_folder(folder)
    try:
        paths = [folder] if (folder / RECORD).exists() else [path for path in folder.iterdir() if _is_run(path)]
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror})") from None
    return sorted(map(_entry, paths), key=lambda entry: (entry.started or "", str(entry.path)))


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / RECORD).exists() or (path / JOURNAL).exists())


def _entry(path: Path) -> Entry:
    tokens, seconds = _saved(path)
    try:
        record = read_record(path)
        state, reason = _state(path, str(record["state"])), str(record.get("reason", ""))
        length, started = int(record["options"]["length"]), str(record["started"])
        method, model = str(record["options"]["method"]), str(record["model"]["name"])
    except InputError as error:
        working = not (path / RECORD).exists() and in_use(path)  # its model is being loaded
        return Entry(path, RUNNING if working else BROKEN, "" if working else str(error), tokens)
    except (KeyError, TypeError, ValueError) as error:
        return Entry(path, BROKEN, f"{path / RECORD} is broken: {error!r}", tokens)
    speed = tokens / seconds if seconds else None
    return Entry(path, state, reason, tokens, length, method, model, speed, started)


def _state(path: Path, recorded: str) -> str:
    if in_use(path):
        return RUNNING
    return KILLED if recorded == RUNNING else recorded


def _saved(path: Path) -> tuple[int, float]:
    """Tokens and seconds at the last checkpoint."""
    try:
        checkpoints = parse_journal((path / JOURNAL).read_bytes()).checkpoints
    except OSError:
        return 0, 0.0
    if not checkpoints:
        return 0, 0.0
    seconds: Any = checkpoints[-1].counters.get("seconds")
    return checkpoints[-1].tokens, seconds if isinstance(seconds, float) else 0.0
