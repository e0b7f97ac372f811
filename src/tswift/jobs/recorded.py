"""What a run left in its folder, read back: to draw its text again, to go on with it, or to list it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tswift.decoding.params import SamplingParams
from tswift.errors import InputError
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import (
    CHECKSUM,
    JOURNAL,
    PROMPT,
    RECORD,
    SCHEMA,
    TOKENS,
    Checkpoint,
    bytes_of,
    checksum,
    in_use,
    parse_journal,
    refuse_other,
)
from tswift.jobs.prompt import fingerprint
from tswift.reading import MOST_RECORD, read_file

_MOST_BYTES = 1 << 30  # of a file: tokens take four


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it, finished or not.

    Attributes:
        path: the folder.
        record: all of ``run.json``.
        state: ``running``, ``finished``, ``interrupted`` or ``failed``, as it was last written.
        config: what made the run: its model as it was loaded, its drafting options as they were resolved. Attention is
            ``auto`` where that was ``native``, which needs a C compiler and some dtypes: another machine has none,
            perhaps, or the text is checked in another dtype.
        params: the sampling parameters, banned end-of-text tokens included.
        prompt: the prompt's token ids.
        bits: hash of the arithmetic of all its sessions; None if it was not exact, or they differ.
        eos_ids: the model's end-of-text tokens.
    """

    path: Path
    record: Mapping[str, Any]
    state: str
    config: RunConfig
    params: SamplingParams
    prompt: list[int]
    bits: str | None
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class JournalState:
    """How far a run came, as its journal vouches for it.

    Attributes:
        tokens: the generated token ids that are vouched for.
        places: the checkpoints that hold, and the bytes of the journal up to each; the first is the beginning.
        torn: the journal's last line was cut short, so that a checkpoint before it is the last.
        unsure: tokens in the file behind the last checkpoint. They may be right; they are drawn again.
        damage: what is broken; empty if nothing is. A torn end is no damage.
    """

    tokens: list[int]
    places: list[tuple[Checkpoint, int]]
    torn: bool
    unsure: int
    damage: str

    def last(self, below: int) -> tuple[Checkpoint, int]:
        """The last place with fewer tokens than ``below``, which is at least 1."""
        return next(place for place in reversed(self.places) if place[0].tokens < below)


def read_run(path: Path) -> RunRecord:
    """Read a run's folder, its tokens apart.

    Raises:
        InputError: it is no such folder, or what it holds is broken or does not fit together.
    """
    record = read_record(path)
    prompt = read_tokens(path / PROMPT)
    try:
        run = RunRecord(path, record, prompt=prompt, **_fields(record))
        known = record["prompt"]["sha256"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path / RECORD} is broken: {reason}") from None
    if known != fingerprint(prompt):
        raise InputError(f"{path / PROMPT} is not the prompt of {RECORD}: their SHA-256 differ")
    return run


def read_record(path: Path) -> dict[str, Any]:
    """``run.json`` of a run's folder, seen to be as it was written.

    Raises:
        InputError: there is no such folder, no record in it, or a broken one.
    """
    refuse_no_folder(path)
    content = _content(path / RECORD, f"{path} holds no run: there is no {RECORD} in it")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        raise InputError(f"{path / RECORD} is broken: it is not JSON") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InputError(f"{path / RECORD} is not of schema {SCHEMA}, which is all this version reads")
    if record.get(CHECKSUM) != checksum(record):
        raise InputError(f"{path / RECORD} is not as it was written: its checksum differs")
    return record


def read_saved(path: Path, prompt: Sequence[int]) -> JournalState:
    """How far a run came, by its journal.

    Raises:
        InputError: a file cannot be read.
    """
    lines = _content(path / JOURNAL, f"there is no file {path / JOURNAL}")
    data = _content(path / TOKENS, f"there is no file {path / TOKENS}")
    journal = parse_journal(lines)
    damage = ""
    if journal.broken:
        damage = f"line {journal.broken:,} of {path / JOURNAL} does not match its checksum"
    good = Checkpoint(0, crc32(bytes_of(prompt)))
    places, end, size = [(good, 0)], 0, 0
    # checksums run on, so each one that holds vouches for everything before it
    for checkpoint, line in zip(journal.checkpoints, lines.splitlines(keepends=True), strict=False):
        size += len(line)
        reach = 4 * checkpoint.tokens
        if reach > len(data):
            damage = damage or f"{path / TOKENS} has {len(data):,} bytes, its journal speaks of {reach:,}"
            break
        if crc32(data[end:reach], good.crc32) != checkpoint.crc32:
            where = f"between tokens {good.tokens:,} and {checkpoint.tokens:,}"
            damage = damage or f"{path / TOKENS} does not match its checksum {where}"
            break
        good, end = checkpoint, reach
        places.append((good, size))
    tokens: list[int] = np.frombuffer(data[:end], "<u4").tolist()
    return JournalState(tokens, places, journal.torn, (len(data) - end) // 4, damage)


def read_tokens(path: Path, option: str | None = None, whole: bool = True) -> list[int]:
    """The token ids in a file of little-endian uint32, at least one.

    Args:
        path: the file.
        option: what the user gave it with, for the error.
        whole: whether the file must end with a whole token; a run that was killed may have left a part of one.

    Raises:
        InputError: there is no such file, or it is none of token ids.
    """
    data = _content(path, f"there is no file {path}", option=option)
    if whole and len(data) % 4:
        raise InputError(f"{path} is not a file of uint32: it has {len(data):,} bytes", option)
    if len(data) < 4:
        raise InputError(f"{path} holds no tokens", option)
    ids: list[int] = np.frombuffer(data[: len(data) // 4 * 4], "<u4").tolist()
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, name: str, option: str | None = None) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InputError: there is one; the first is named.
    """
    for place, token in enumerate(ids):
        if token >= vocab_size:
            message = f"{name} has token id {token:,} at {place:,}, outside the model's vocabulary of {vocab_size:,}"
            raise InputError(message, option)


def refuse_no_folder(path: Path) -> None:
    """Refuse what is no folder.

    Raises:
        InputError: it is none.
    """
    try:
        found = path.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)[:80]} cannot be looked at ({reason})") from None
    if not found:
        raise InputError(f"there is no folder {path}")


def _content(path: Path, missing: str, option: str | None = None) -> bytes:
    if option is None:  # a file that the user names may be reached by a link; one in a run's folder must not
        try:
            refuse_other(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})") from None
    return read_file(path, _MOST_BYTES, option, missing)


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    model, asked, sampling, drafting = (dict(record[part]) for part in ("model", "options", "sampling", "drafting"))
    if isinstance(drafting.get("tree"), list):
        drafting["tree"] = tuple(drafting["tree"])
    own: dict[str, Any] = {name: asked[name] for name in ("length", "method", "seed", "stop_at_eos", "heads")}
    own |= {name: asked.get(name) for name in ("quantize", "draft_weights")}
    config = RunConfig(
        **own,
        model=model["name"],
        device=model["device"],
        dtype=model["dtype"],
        attention="auto" if model["attention"] == "native" else model["attention"],
        draft_model=None if model.get("draft") is None else model["draft"]["name"],
        exact=model.get("exact") is not None,
        drafting=drafting,
    )
    if not all(isinstance(session, dict) for session in record.get("resumed", ())):
        raise ValueError("its sessions are no objects")
    return {
        "state": str(record["state"]),
        "config": config,
        "params": SamplingParams(**{**sampling, "banned": tuple(sampling["banned"])}),
        "bits": _bits(record),
        "eos_ids": tuple(model["eos_ids"]),
    }


def _bits(record: dict[str, Any]) -> str | None:
    sessions = [record["model"].get("exact"), *(session.get("exact") for session in record.get("resumed", ()))]
    found = {None if exact is None else exact["bits"] for exact in sessions}
    return found.pop() if len(found) == 1 else None


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
        checkpoints = parse_journal(read_file(path / JOURNAL, MOST_RECORD)).checkpoints
    except InputError:
        return 0, 0.0
    if not checkpoints:
        return 0, 0.0
    seconds: Any = checkpoints[-1].counters.get("seconds")
    return checkpoints[-1].tokens, seconds if isinstance(seconds, float) else 0.0
