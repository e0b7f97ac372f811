"""A training from settings to a result: started, interrupted, resumed;
by one process or by several under torchrun.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tswift.errors import DecodeError, InputError, Object, reason_of
from tswift.files import NEW, Lock, lock_folder, open_own, status_of_regular_file, write_whole
from tswift.jobs.folder import (
    FINISHED,
    INTERRUPTED,
    RUNNING,
    create_folder,
    default_path,
    read_json,
    read_own,
)
from tswift.jobs.job import Signals, Stopped
from tswift.loading.model import load
from tswift.machine import environment, now, ran_out
from tswift.models.config import NO_HEADS
from tswift.models.devices import find_device
from tswift.models.hashes import fingerprint_of
from tswift.options import Values, fields_of
from tswift.tables import Reporter
from tswift.training.config import HeadsConfig, corpus_files
from tswift.training.data import prepare
from tswift.training.losses import TOP, Metrics, total
from tswift.training.ranks import Dist, open_ranks
from tswift.training.tasks import HEADS, TEACHER, Scores, Trainee, learning_rate

RECORD, METRICS, CHECKPOINT = "train.json", "metrics.jsonl", "checkpoint.safetensors"
_KIND, _SCHEMA = "train", 1
_FIELD = "resume"
BEFORE, AFTER, EVALUATING = "before", "after", "evaluation_seconds"
_UNCHANGED = {  # what a resumed training must find as it was, and the setting that names it
    "processes": ("resume", "number of processes"),
    "dtype": ("dtype", "dtype"),
    "base": ("model", "model's weights"),
    "corpus": ("corpus", "corpus"),
}


@dataclass(frozen=True)
class Outcome:
    """Result of a training, with the signal that stopped it.

    Scores are as in ``train.json``; None if they are not known yet, or in a process that does not
    write.
    """

    folder: Path
    config: HeadsConfig
    steps: int
    before: Scores | None
    after: Scores | None
    signum: int | None = None


def train(
    config: HeadsConfig,
    out: Path | None = None,
    progress: Reporter | None = None,
    command: Sequence[str] = (),
    note: str = "",
) -> Outcome:
    """Train heads; under torchrun every process calls this.

    Args:
        config: the settings.
        out: a folder that is empty or does not exist; None for one named after the time.
        progress: shows how it goes on.
        command: the words of the command line, for ``train.json``.
        note: a line for people, shown once settings, model and corpus are checked.

    Raises:
        InputError: a setting, the model or the corpus cannot be used.
        DecodeError: it broke on the way. Its last checkpoint can be resumed.
    """
    folder = TrainFolder(out or default_path("train"))
    with open_ranks(config.device) as ranks:
        progress = progress if progress and ranks.first else Reporter()
        with folder.created() if ranks.first else nullcontext():
            training = _Training(config.resolved(), folder, ranks, progress, {}, command)
        if note:
            progress.say(note)
        outcome = training.run()
        # the gradients' reducer hangs if it is freed after the process group is closed
        del training
        return outcome


def resume(
    path: Path,
    changes: Values | None = None,
    progress: Reporter | None = None,
    command: Sequence[str] = (),
) -> Outcome:
    """Continue an interrupted training.

    On a CPU it comes to the weights of one that was not interrupted, bit for bit.

    Args:
        path: its folder.
        changes: fields of the settings; those that decide about weights must be as they were.
        progress, command: as for :func:`train`.

    Raises:
        InputError: there is no such training, or model, corpus or settings differ.
        DecodeError: it broke on the way.
    """
    progress = progress or Reporter()
    folder = TrainFolder(path)
    record = folder.read_record()
    try:
        began = HeadsConfig(**fields_of(HeadsConfig, record["plan"]))
        steps = int(record["steps"])
        state = record["state"]
        before, after = (dict(record[when]) if when in record else None for when in (BEFORE, AFTER))
    except (TypeError, ValueError, KeyError):
        raise InputError(
            f"{path} holds a plan that is damaged, or of another version of tswift", "resume"
        ) from None
    for name, value in {**record["plan"]}.items():
        if not hasattr(began, name) and value is not None:
            raise InputError(
                f"{path} was begun with --{name} {value}, which this version does not have", _FIELD
            )
    config = began.resumed(changes or {}, path)
    with open_ranks(config.device) as ranks:
        if state == FINISHED:
            progress.say(f"the training in {path} is finished")
            return Outcome(path, config, steps, before, after)
        progress = progress if ranks.first else Reporter()
        return _Training(config, folder, ranks, progress, record, command).run()


class _Training:
    """A training in progress. All processes run it; the first one evaluates, writes and shows."""

    def __init__(
        self,
        config: HeadsConfig,
        folder: TrainFolder,
        ranks: Dist,
        progress: Reporter,
        record: Values,
        command: Sequence[str],
    ) -> None:
        self._config = config
        self._folder = folder
        self._ranks = ranks
        self._progress = progress
        self._step = 0
        self._seconds = 0.0
        self._saved = time.monotonic()
        corpus_files(config.corpus)  # before a model is loaded
        device = ranks.device or find_device(config.device)
        usual = "bfloat16" if device.type == "cuda" else "float32"
        dtype = usual if config.dtype == "auto" else config.dtype
        model = load(  # rows of a training are no text: they may be as wide as they are
            config.model,
            device=str(device),
            dtype=dtype,
            attention=config.attention,
            heads=NO_HEADS,
            exact=False,
        )
        target = model.target
        if config.seq_len > target.max_positions:
            raise InputError(
                f"is {config.seq_len:,}, the model has {target.max_positions:,} positions",
                "seq_len",
            )
        processes = f", {ranks.count} processes" * (ranks.count > 1)
        progress.say(f"model {config.model}, {target.device}, {dtype}{processes}")
        if not ranks.first:
            # the first process tokenises the corpus, the others find what datasets has kept
            ranks.wait()
        on_progress = partial(progress.update, "tokenise")
        documents = prepare(config, model.tokenizer, target.vocab_size, on_progress)
        if ranks.first:
            ranks.wait()
        corpus = documents.summary()
        _describe(config, corpus, progress)
        self._trainee = Trainee(config, model, documents, ranks, progress, folder.path)
        facts = {
            "device": str(target.device),
            "dtype": dtype,
            "processes": ranks.count,
            "base": fingerprint_of(target.model),
            "corpus": corpus,
            "environment": environment(target.device),
            "command": list(command),
            "plan": asdict(config),
        }
        if record:
            self._restore(record, facts)
            progress.say(f"goes on after step {self._step:,}")
        self._record = {"started": now(), **record, **facts}

    def _restore(self, record: Values, facts: Values) -> None:
        """Load the last checkpoint, if all is as it was."""
        for name, (field, words) in _UNCHANGED.items():
            if record.get(name) != facts[name]:
                raise InputError(
                    f"the {words} changed since the training in {self._folder.path} was begun",
                    field,
                )
        checkpoint = self._folder.load_checkpoint()
        if checkpoint is None:
            return
        tensors, self._step, self._seconds = checkpoint
        try:
            self._trainee.trainer.load(tensors)
        except (KeyError, RuntimeError, ValueError, TypeError, IndexError):
            raise InputError(
                f"{self._folder.path} holds a checkpoint of something else", "resume"
            ) from None

    def run(self) -> Outcome:
        """Train to the end, or until a signal comes."""
        first = self._ranks.first
        signals = Signals()
        signum = None
        with self._folder.locked() if first else nullcontext(), signals:
            try:
                self._write_record(RUNNING)
                if first:
                    self._folder.truncate_log(self._step)
                    self._evaluate(BEFORE)
                signals.patience = 1
                signum = self._loop(signals)
                signals.patience = 0
                if first and signum is None:
                    self._folder.write(HEADS, self._trainee.save)
                    self._evaluate(AFTER)
                    self._write_record(FINISHED)
                if signum is None:
                    (self._folder.path / TEACHER.format(self._ranks.rank)).unlink(missing_ok=True)
            except Stopped as stopped:
                signum = stopped.number
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                advice = (
                    "a lower --batch or --seq-len takes less. Checkpoints are in "
                    f"{self._folder.path}"
                )
                raise DecodeError(f"memory ran out; {advice}") from None
            finally:
                if self._record["state"] != FINISHED:
                    self._write_record(INTERRUPTED)
        scores = self._record.get(BEFORE), self._record.get(AFTER)
        return Outcome(self._folder.path, self._config, self._step, *scores, signum)

    def _loop(self, signals: Signals) -> int | None:
        """Train until all steps are done (returns None) or a signal comes (returns it),
        then save a checkpoint.
        """
        config = self._config
        ranks = self._ranks
        while True:
            started = time.monotonic()
            stop, share = ranks.highest(signals.number, self._share())
            metrics = None if stop or share >= 1 else self._gradients(signals, share)
            if metrics is None:
                self._save()
                return int(ranks.highest(signals.number)[0]) or None
            factor = learning_rate(self._step, share, config.warmup)
            self._trainee.trainer.step(factor)
            self._step += 1
            self._seconds += time.monotonic() - started
            self._log(metrics, factor)
            done = self._share()
            if (
                config.eval_every
                and self._step % config.eval_every == 0
                and done < 1
                and ranks.first
            ):
                started = time.monotonic()
                scores = self._trainee.evaluate(quick=True).items()
                self._seconds += time.monotonic() - started
                known = {name: score for name, score in scores if score is not None}
                self._folder.log({"step": self._step, "held_out": known})
            by_steps = config.save_every is not None and self._step % config.save_every == 0
            if by_steps or time.monotonic() - self._saved >= 60 * config.save_minutes:
                self._save()

    def _share(self) -> float:
        """Share of the training that is done."""
        if self._config.minutes is None:
            return self._step / self._config.last_step
        return self._seconds / self._allowed(self._config.minutes)

    def _allowed(self, minutes: float) -> float:
        """Seconds for training of minutes that include the evaluations before and after it;
        at least half of them.
        """
        return max(30 * minutes, 60 * minutes - 2 * self._record.get(EVALUATING, 0.0))

    def _gradients(self, signals: Signals, share: float) -> Metrics | None:
        """Add up the gradients of a step; None if a signal came meanwhile."""
        config = self._config
        ranks = self._ranks
        metrics = []
        for number in range(config.accumulate):
            if number and ranks.highest(signals.number)[0]:
                return None
            metrics.append(self._trainee.learn(self._step, number, share))
        whole = total(metrics)
        ranks.total(whole.loss, whole.hits)
        if not whole.loss.isfinite().all():
            advice = f"a lower --lr may help; checkpoints are in {self._folder.path}"
            raise DecodeError(f"loss is NaN or infinite at step {self._step + 1:,}; {advice}")
        return replace(whole, positions=whole.positions * ranks.count)

    def _log(self, metrics: Metrics, factor: float) -> None:
        config = self._config
        scores = metrics.scores()
        if self._ranks.first:
            tokens = self._step * config.step_tokens * self._ranks.count
            line = {
                "step": self._step,
                "seconds": round(self._seconds, 3),
                "tokens": tokens,
                "lr": config.lr * factor,
            }
            self._folder.log(line | scores)
        # what matters most comes first: a terminal may have no room for the rest
        figures = f"loss {' '.join(f'{loss:.2f}' for loss in scores['loss'])}"
        for k in range(TOP):
            figures += (
                f", top-{k + 1} {' '.join(f'{100 * head[k]:.0f}' for head in scores['top'])}%"
            )
        if config.minutes is None:
            self._progress.update("train", self._step, config.last_step, figures)
        else:
            whole = f"{figures}, step {self._step:,}"
            self._progress.update(
                "train, s", int(self._seconds), int(self._allowed(config.minutes)), whole
            )

    def _save(self) -> None:
        if self._ranks.first:
            self._folder.save_checkpoint(self._trainee.trainer.tensors(), self._step, self._seconds)
        self._saved = time.monotonic()

    def _evaluate(self, when: str) -> None:
        """Score the held-out texts, unless that was done before the training was interrupted."""
        if when not in self._record:
            started = time.monotonic()
            scores = self._trainee.evaluate(self._folder.path if when == AFTER else None)
            if when == BEFORE:
                self._record[EVALUATING] = round(time.monotonic() - started, 3)
            self._folder.log({"step": self._step, "held_out": scores})
            self._record[when] = scores
            self._write_record(RUNNING)

    def _write_record(self, state: str) -> None:
        self._record |= {
            "state": state,
            "steps": self._step,
            "seconds": round(self._seconds, 3),
            "written": now(),
        }
        if self._ranks.first:
            self._folder.write_record(self._record)


def _describe(config: HeadsConfig, counts: Values, progress: Reporter) -> None:
    """Say how many documents are used, and how many are not."""
    short = counts["documents"] - counts["kept"] - counts["twice"]
    twice = f", {counts['twice']:,} there twice" if counts["twice"] else ""
    progress.say(
        f"corpus {config.corpus}: {counts['kept']:,} of {counts['documents']:,} documents have "
        f"more than {config.seq_len:,} tokens{twice}; {counts['held_out']:,} of them held out, "
        f"{counts['train_tokens']:,} tokens to train on"
    )
    if short:
        progress.say(
            f"warning: {short:,} of {counts['documents']:,} documents are too short, of "
            f"{config.seq_len:,} tokens at most, and left out; a lower --seq-len keeps them"
        )


class TrainFolder:
    """The files of a training.

    What cannot be read raises an ``InputError``; what cannot be written a ``DecodeError``, and what
    was there stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def created(self) -> Iterator[None]:
        """Make the folder, or take an empty one; remove it again if what follows fails."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{self.path} is no UTF-8, and safetensors reads no other names", "out"
            ) from None
        with create_folder(self.path):
            if not os.access(self.path, os.W_OK):
                raise InputError(f"{self.path} cannot be written to", "out")
            yield

    def locked(self) -> Lock:
        """The lock that keeps other processes from training here."""
        return lock_folder(self.path, _FIELD, f"another process is training in {self.path}")

    def read_record(self) -> Object:
        """The contents of ``train.json``."""
        path = self.path / RECORD
        missing = f"{self.path} holds no training: there is no {RECORD} in it"
        record = read_json(path, missing, _FIELD)
        kind, schema = map(record.get, ("kind", "schema"))
        if (kind, schema) != (_KIND, _SCHEMA):
            raise InputError(f"{path} is of kind {kind}, schema {schema}", _FIELD)
        return record

    def write_record(self, record: Values) -> None:
        """Write ``train.json``."""
        text = json.dumps(
            {"schema": _SCHEMA, "kind": _KIND, **record}, indent=2, ensure_ascii=False
        )
        with self._writing(RECORD):  # backslashes for incomplete UTF-8 in a file's name
            write_whole(self.path / RECORD, f"{text}\n".encode(errors="backslashreplace"))

    def write(self, name: str, save: Callable[[Path], object]) -> None:
        """Have a file written by ``save``, whole or not at all.

        It is made in a folder that goes, with what a process that was killed left in it, which may
        be a file of safetensors' own.
        """
        made = self.path / NEW
        new = made / name
        with self._writing(name):
            try:
                with suppress(OSError):
                    made.unlink()  # it could be a link
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir()
                save(new)
                # safetensors would let nobody else read it
                shutil.copymode(self.path / RECORD, new)
                with new.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(new, self.path / name)
            finally:
                shutil.rmtree(made, ignore_errors=True)

    def save_checkpoint(self, tensors: Mapping[str, Tensor], step: int, seconds: float) -> None:
        """Write a checkpoint: all tensors that training continues from, steps done,
        seconds trained.
        """
        contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
        about = {
            "tswift": json.dumps(
                {"kind": _KIND, "schema": _SCHEMA, "step": step, "seconds": seconds}
            )
        }
        self.write(CHECKPOINT, lambda path: save_file(contiguous, path, metadata=about))

    def load_checkpoint(self) -> tuple[dict[str, Tensor], int, float] | None:
        """The last checkpoint: tensors, steps done, seconds trained; None if there is none yet."""
        path = self.path / CHECKPOINT
        if status_of_regular_file(path, _FIELD) is None:
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["tswift"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, int(about["step"]), float(about["seconds"])
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise InputError(f"{path} is damaged ({reason_of(error)})", _FIELD) from None

    def log(self, line: Values) -> None:
        """Append a line to ``metrics.jsonl``."""
        with self._writing(METRICS):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(open_own(self.path / METRICS, flags, _FIELD), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def truncate_log(self, step: int) -> None:
        """Drop the lines of ``metrics.jsonl`` after a step:
        the checkpoint does not know of them.
        """
        path = self.path / METRICS
        known = read_own(path, option=_FIELD) if status_of_regular_file(path, _FIELD) else b""
        lines = known.decode(errors="replace").splitlines()
        with self._writing(METRICS):
            write_whole(
                path, "".join(f"{line}\n" for line in lines if _step(line) <= step).encode()
            )

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Say in one line that a file cannot be written, and how to go on."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            saved = (self.path / CHECKPOINT).is_file()
            again = f"tswift train --resume {shlex.quote(str(self.path))}"
            advice = f"; {again} goes on from the last checkpoint" if saved else ""
            raise DecodeError(f"{self.path / name} cannot be written ({reason}){advice}") from None


def _step(line: str) -> float:
    """The step of a line; infinity if the line is truncated."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
