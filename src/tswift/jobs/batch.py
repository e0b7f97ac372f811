"""Many texts as one job: a folder with a run for every line of a file of prompts,
and at last one file of all texts.

The runs are the state: what a kill leaves is found in their folders, and the same command, or
``--resume``, makes exactly what is missing. ``batch.json`` holds the command's options and a hash
of the file, so that neither can change under a batch. Several processes share one by shards.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from tswift.errors import InputError, Object, did_you_mean, notice, read_file
from tswift.files import LOCK, Lock, unwritable, write_whole
from tswift.jobs.config import FIELDS, MAX_BYTES, RunConfig, Text, options_from
from tswift.jobs.folder import (
    FINISHED,
    RECORD,
    SKIPPED,
    TEXT,
    TOKENS,
    Record,
    RunFolder,
    read_json,
    read_own,
    read_record,
)
from tswift.jobs.prompts import read_lines
from tswift.options import Values, changed, of_json, refuse_changes

if TYPE_CHECKING:
    from tswift.decoding.kept import KeptCaches
    from tswift.decoding.stats import DecodeStats
    from tswift.decoding.work import Work
    from tswift.jobs.job import Job, Signals
    from tswift.loading.model import LoadedModel

OPTION = "prompts"
BATCH = "batch.json"
OUT = "out.jsonl"
_OWN = {"len": "length", **FIELDS}  # of a line
_DEFAULTS = 2  # a number in ``batch.json`` for the defaults of options that are not in it
MOST_TEXTS = 64  # at once
_TOLD = 5  # bad lines that are named
_PLACES = 6  # digits of a run's name: its line
_PATIENCE = 60.0  # seconds that another process may take to write what all share


@dataclass(frozen=True)
class Task:
    """A text to be made."""

    text: Text
    config: RunConfig  # its folder among it
    folder: Path

    @property
    def done(self) -> bool:
        """Whether it is finished, or skipped."""
        made = (self.folder / RECORD).exists()
        return made and read_record(self.folder).state in (FINISHED, SKIPPED)


class Batch:
    """The texts that a file of prompts asks for.

    Args:
        prompts: the file.
        out: the folder of all runs.
        values: options of ``tswift generate`` as they were typed; a line's own come before them.

    Raises:
        InputError: lines that ask for no text or cannot have what they ask for, the first of them
            named; or the folder has been begun with other options, or another file.

    Attributes:
        skips: leave out texts for which the model has not enough positions.
    """

    skips = False

    def __init__(self, prompts: Path, out: Path, values: Values) -> None:
        self.out = out
        self._values = values
        self._prompts = prompts
        self._model: LoadedModel | None = None
        self._kept: KeptCaches | None = None
        self.config = RunConfig.of(**{**_before(out, values), **values}, prompt_text="a line's")
        _, self._system = self.config.read()
        self.tasks = list(self._read())

    def _read(self) -> Iterator[Task]:
        bad = []
        lines: dict[str, str] = {}  # by the names of their texts
        for line in read_lines(self._prompts, OPTION):
            folder = self.out / f"{line.number:0{_PLACES}}"
            names: dict[str, str] = {}
            try:
                text = line.text(self._prompts.stem, None, OPTION)
                unread = [f"{name!r:.60}{did_you_mean(name, _OWN)}" for name in line.unread(_OWN)]
                if unread:
                    raise InputError(f"{line.where}: nothing reads {', '.join(unread)}", OPTION)
                if text.messages and not self.config.chat:
                    raise InputError(f"{line.where} has messages, which need --chat", OPTION)
                if (other := lines.setdefault(text.name, line.where)) != line.where:
                    raise InputError(f"{line.where} has the id of {other}", OPTION)
                own, names = options_from(line.fields, _OWN)
                yield Task(
                    text,
                    changed(self.config, {**own, "prompt_text": text.text, "out": folder}),
                    folder,
                )
            except InputError as error:
                field = str(error.field)
                bad.append(
                    error.message
                    if field == OPTION
                    else f"{line.where}: {names.get(field, field)} {error.message}"
                )
        if bad:
            more = f"; and {len(bad) - _TOLD:,} more" if len(bad) > _TOLD else ""
            raise InputError("; ".join(bad[:_TOLD]) + more, OPTION)

    def claim(self) -> None:
        """Make the folder, or see that it was begun by the same command and file."""
        if not self.tasks:
            raise InputError(f"{self._prompts} has no prompts", OPTION)
        options = {name: value for name, value in self._values.items() if name != "out"}
        digest = sha256(read_file(self._prompts, MAX_BYTES, OPTION)).hexdigest()
        asked = {
            "prompts": str(self._prompts.resolve()),
            "sha256": digest,
            "defaults": _DEFAULTS,
            "options": options,
        }
        with self._alone() as made:
            if not (self.out / BATCH).exists():
                if any(path.name not in made for path in self.out.iterdir()):
                    raise InputError(
                        f"{self.out} is not empty; texts need a folder of their own", "out"
                    )
                write_whole(self.out / BATCH, json.dumps(asked, default=str, indent=1).encode())
        known = _read_batch(self.out)
        began = known["options"]
        refuse_changes(str(self.out), {**dict.fromkeys(began), **options}, began)
        if known["sha256"] != digest:
            raise InputError(
                f"{self._prompts} is not the file that {self.out} was begun with", OPTION
            )

    @contextmanager
    def _alone(self) -> Iterator[Sequence[str]]:
        """While no other process writes what all shards share;
        yields what a kill may have left of that.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with Lock(self.out, _PATIENCE):
                yield LOCK, f"{BATCH}.new"
        except OSError as error:
            raise unwritable(self.out, error) from None

    def of_shard(self, index: int, count: int) -> list[Task]:
        """The texts of the shard ``index`` of ``count``, from 1."""
        return self.tasks[index - 1 :: count]

    def make(
        self,
        tasks: Sequence[Task],
        command: Sequence[str],
        signals: Signals,
        deliver: Callable[[Task, str], None] = lambda task, line: None,
        on_step: Callable[[Task, DecodeStats], None] = lambda task, stats: None,
        again: str = "",
        parallel: int | None = None,
    ) -> None:
        """Make those of some texts that are missing.

        Args:
            deliver: called with each as a line when it ends.
            on_step: called after every step of a text.
            again: the command that goes on with all.
            parallel: texts whose passes are shared, at most; None for as many as usually pay.

        Raises:
            InputError, DecodeError, Stopped: as a single run's.
        """
        from tswift.decoding.kept import KeptCaches
        from tswift.decoding.work import side_by_side, texts_at_once
        from tswift.jobs.job import start
        from tswift.jobs.resuming import resume
        from tswift.memory import NoRoom

        left = deque(task for task in tasks if not task.done)
        if not left:
            return
        # workers ask for some texts at a time
        model = self._model = self._model or self._load(left)
        kept = self._kept = self._kept or KeptCaches()
        full: int | None = None  # texts for which memory has room, while another waits for it

        def made(task: Task, job: Job | None) -> Work[None]:
            if job is not None:
                job.again = again
                yield from job.running(lambda piece, stats: on_step(task, stats), None, signals)
                kept.keep(job.generation.decoding)
                kept.settle()
            deliver(task, line_of(task))

        def more(begun: int) -> Work[None] | None:
            nonlocal full
            if not left or begun == full:
                return None
            task = left[0]
            job: Job | None = None
            try:
                if not (task.folder / RECORD).exists():
                    ids = self._ids(task, model)
                    job = start(task.config, command, loaded=model, ids=ids, kept=kept)
                elif not task.done:
                    job = resume(task.folder, {}, False, command, loaded=model, kept=kept)
            except NoRoom:
                if not begun:
                    raise
                full = begun
                return None
            full = None
            return made(left.popleft(), job)

        side_by_side(more, texts_at_once(model.target, parallel))

    def gather(self) -> Path | None:
        """The file of all texts, in the order of the prompts; None while some are missing."""
        if not all(task.done for task in self.tasks):
            return None
        with self._alone():
            write_whole(
                self.out / OUT, "".join(f"{line_of(task)}\n" for task in self.tasks).encode()
            )
        return self.out / OUT

    def _load(self, left: Sequence[Task]) -> LoadedModel:
        from tswift.loading.model import load_model
        from tswift.memory import fit_length

        model = load_model(self.config.to_load())
        most = model.target.max_positions
        bad = []
        for task in left:
            length = task.config.text.length
            prompt = len(self._ids(task, model))
            if "length" not in task.config.given:
                length = fit_length(length, prompt, most)
            if prompt + length <= most:
                continue
            bad.append(f"{task.text.name} has {prompt:,} tokens and wants {length:,} more")
            if self.skips:
                folder = RunFolder.create(task.folder)
                folder.record(
                    Record(
                        state=SKIPPED,
                        end={"reason": "too long"},
                        options=task.config.recorded(),
                        model=model.about(),
                        prompt={"tokens": prompt},
                    )
                )
                folder.close()
        told = f"{'; '.join(bad[:_TOLD])}; the model has {most:,} positions"
        if bad and not self.skips:
            raise InputError(f"{told}; --skip-too-long leaves such texts out", OPTION)
        if bad:
            notice(f"{len(bad):,} texts are skipped: {told}")
        return model

    def _ids(self, task: Task, model: LoadedModel) -> list[int]:
        return task.text.encode(model, self.config.chat, self._system)


def _before(out: Path, values: Values) -> Values:
    """The defaults of a folder that an older tswift began, in which all texts are to be alike."""
    if not (out / BATCH).exists() or "defaults" in _read_batch(out):
        return {}
    before: Object = {"stop_at_eos": False, "skip_special_tokens": False}
    made = next((path.parent for path in sorted(out.glob(f"*/{RECORD}"))), None)
    if made is not None and "preset" not in values:
        before["sampling_from"] = read_record(made).options.get("sampling_from")
    return before


def _read_batch(out: Path) -> Object:
    known = read_json(out / BATCH, f"{out} holds no texts of --prompts")
    if not isinstance(known.get("options"), dict) or "prompts" not in known:
        raise InputError(f"{out / BATCH} is broken: it is no record of texts")
    return known


def is_batch(folder: Path) -> bool:
    """Whether a folder holds the runs of a file of prompts."""
    return os.path.lexists(folder / BATCH)


def reopen(out: Path) -> Batch:
    """The batch in a folder, with the options that it was begun with."""
    known = _read_batch(out)
    return Batch(Path(known["prompts"]), out, of_json(known["options"]))


def line_of(task: Task) -> str:
    """A finished text as a line of JSON; InputError if it is not there whole."""
    path = task.folder / TEXT
    try:
        text = read_own(path).decode()
    except UnicodeDecodeError:
        raise InputError(f"{path} is no UTF-8") from None
    record = read_record(task.folder)
    line = {
        "id": task.text.name.partition("/")[2],
        "folder": task.folder.name,
        "seed": task.config.text.seed,
        "prompt_tokens": record.prompt["tokens"],
        "tokens": len(read_own(task.folder / TOKENS)) // 4,
        "end": record.end,
        "text": text,
    }
    return json.dumps(line, ensure_ascii=False)
