"""A training, from a plan to a result: begun, stopped, gone on with. What is trained is a matter of its course."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tswift.errors import Fault, InputError, renamed
from tswift.jobs.environment import environment, now
from tswift.jobs.folder import default_path
from tswift.jobs.signals import Signals, Stopped
from tswift.models.devices import find_device
from tswift.models.fingerprint import fingerprint_of
from tswift.models.loading import load
from tswift.models.memory import ran_out
from tswift.training.corpus import corpus_files
from tswift.training.course import AFTER, BEFORE, Course, Outcome, Silence
from tswift.training.documents import Documents, prepare
from tswift.training.folder import TrainFolder
from tswift.training.loop import Loop, Show
from tswift.training.plan import Schedule
from tswift.training.ranks import Ranks, open_ranks

RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"
_SAME = {  # what a training that is gone on with must find as it was, and by which option it is said
    "processes": ("--resume", "number of processes"),
    "dtype": ("--dtype", "dtype"),
    "base": ("--model", "model's weights"),
    "corpus": ("--corpus", "corpus"),
}


def begin(course: Course, plan: Schedule, out: Path | None, show: Show, command: Sequence[str]) -> Outcome:
    """Train from the beginning. Under torchrun every process calls this, and the first one writes.

    Args:
        course: the kind of training.
        plan: what is asked.
        out: a folder that is empty or does not exist; None for one named after the time and the course.
        show: who is told of the progress.
        command: the words of the command line, for ``train.json``.

    Raises:
        InputError: something asked cannot be done.
        Fault: it broke on the way. What was kept can be resumed.
    """
    folder = TrainFolder(out or default_path(course.kind), course.kind)
    with open_ranks(plan.device) as ranks:
        if ranks.first:
            folder.begin()
        try:
            training = _Training(course, plan.settled(), folder, ranks, show, None, command)
        except BaseException:
            folder.discard()
            raise
        outcome = training.run()
        del training  # and with it the gradients' reducer, which hangs if it goes after the process group is closed
        return outcome


def go_on(course: Course, path: Path, given: Mapping[str, Any], show: Show, command: Sequence[str]) -> Outcome:
    """Go on with a training that was interrupted. On a CPU the weights are those that it would have come to.

    Args:
        course: the kind of training.
        path: its folder.
        given: fields of the plan that are asked for now; what decides about weights must be what it was.
        show: who is told of the progress.
        command: the words of the command line, for ``train.json``.

    Raises:
        InputError: no training is there, or not the one that was begun.
        Fault: it broke on the way.
    """
    folder = TrainFolder(path, course.kind)
    record = folder.record()
    try:
        began = course.plan(**record["plan"])
        steps, before, after = int(record["steps"]), _judged(course, record, BEFORE), _judged(course, record, AFTER)
    except (TypeError, ValueError, KeyError):
        raise InputError(f"{path} holds a plan that is damaged, or of another version of tswift", "--resume") from None
    plan = began.resumed(given, path)
    with open_ranks(plan.device) as ranks:
        if record["state"] == FINISHED:
            show.say(f"the training in {path} is finished")
            return Outcome(path, plan, steps, before, after)
        return _Training(course, plan, folder, ranks, show, record, command).run()


class _Training:
    """A model, a corpus, a pupil, and the record of what is done with them."""

    def __init__(
        self,
        course: Course,
        plan: Schedule,
        folder: TrainFolder,
        ranks: Ranks,
        show: Show,
        record: Mapping[str, Any] | None,
        command: Sequence[str],
    ) -> None:
        self._course, self._plan, self._folder, self._ranks = course, plan, folder, ranks
        show = show if ranks.first else Silence()
        corpus_files(plan.corpus)  # what is wrong with these can be said at once
        place = find_device(ranks.device)
        dtype = plan.dtype if plan.dtype != "auto" else "bfloat16" if place.type == "cuda" else "float32"
        try:
            model = load(plan.model, device=str(place), dtype=dtype, attention=plan.attention)
        except InputError as error:  # heads that lie beside it are read, too
            raise renamed(error, {"--heads": "--model"}) from None
        target = self._target = model.target
        if plan.seq_len > target.max_positions:
            raise InputError(f"is {plan.seq_len:,}, the model has {target.max_positions:,} positions", "--seq-len")
        show.say(f"model {plan.model}, {target.device}, {dtype}" + f", {ranks.count} processes" * (ranks.count > 1))
        documents = _documents(plan, model.tokenizer, target.vocab_size, ranks, show)
        self._pupil = course.pupil(plan, model, documents, ranks, show)
        self._trainer = self._pupil.trainer
        self._loop = Loop(plan, self._trainer, documents, self._pupil.score, folder, ranks, show)
        found = {
            "device": str(target.device),
            "dtype": dtype,
            "processes": ranks.count,
            "base": fingerprint_of(target.model),
            "corpus": documents.about(),
            "environment": environment(target.device),
            "command": list(command),
            "plan": asdict(plan),
        }
        if record:
            self._go_on(record, found)
            show.say(f"goes on after step {self._loop.step:,}")
        self._record = {"started": now(), **(record or {}), **found}

    def _go_on(self, record: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Take up the last checkpoint, if all is as it was."""
        for name, (option, words) in _SAME.items():
            if record.get(name) != found[name]:
                message = f"the {words} changed since the training in {self._folder.path} was begun"
                raise InputError(message, option)
        kept = self._folder.kept()
        if kept is None:
            return
        tensors, self._loop.step, self._loop.seconds = kept
        try:
            self._trainer.load(tensors)
        except (KeyError, RuntimeError, ValueError, TypeError, IndexError):
            raise InputError(f"{self._folder.path} holds a checkpoint of something else", "--resume") from None

    def run(self) -> Outcome:
        """Train to the end, or until a signal comes."""
        first, signals, signum = self._ranks.first, Signals(), None
        with self._folder.held() if first else nullcontext(), signals, _in_memory(self._folder.path):
            try:
                self._write(RUNNING)
                if first:
                    self._folder.forget_after(self._loop.step)
                    self._judge(BEFORE)
                signals.patience = 1
                signum = self._loop.run(signals)
                signals.patience = 0
                if first and signum is None:
                    self._pupil.write(self._folder)
                    self._judge(AFTER)
                    self._write(FINISHED)
            except Stopped as stopped:
                signum = stopped.number
            finally:
                if self._record["state"] != FINISHED:
                    self._write(INTERRUPTED)
        before, after = (_judged(self._course, self._record, when) for when in (BEFORE, AFTER))
        return Outcome(self._folder.path, self._plan, self._loop.step, before, after, signum)

    def _judge(self, when: str) -> None:
        """Judge on the held-out texts, if that was not done before the training was interrupted."""
        if when in self._record:
            return
        found = asdict(self._pupil.judge(when, self._folder))
        self._folder.log({"step": self._loop.step, "held_out": found})
        self._record[when] = found
        self._write(RUNNING)

    def _write(self, state: str) -> None:
        loop = self._loop
        self._record |= {"state": state, "steps": loop.step, "seconds": round(loop.seconds, 3), "written": now()}
        if self._ranks.first:
            self._folder.write_record(self._record)


def _documents(plan: Schedule, tokenizer: Any, vocabulary: int, ranks: Ranks, show: Show) -> Documents:
    """The corpus; the first process tokenises it, and the others find what that has kept."""
    if not ranks.first:
        ranks.wait()
    tick = partial(show.update, "tokenise")
    documents = prepare(plan.corpus, tokenizer, vocabulary, plan.seq_len, plan.held_out, plan.documents, tick)
    if ranks.first:
        ranks.wait()
    about = documents.about()
    twice = f", {about['twice']:,} there twice" if about["twice"] else ""
    show.say(
        f"corpus {plan.corpus}: {about['kept']:,} of {about['documents']:,} documents have more than "
        f"{plan.seq_len:,} tokens{twice}; {about['held_out']:,} of them held out, "
        f"{about['train_tokens']:,} tokens to train on"
    )
    return documents


@contextmanager
def _in_memory(folder: Path) -> Iterator[None]:
    """Say in one line that memory ran out.

    Raises:
        Fault: it did.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        advice = "a lower --batch or --seq-len takes less"
        raise Fault(f"memory ran out; {advice}. Checkpoints are in {folder}") from None


def _judged(course: Course, record: Mapping[str, Any], when: str) -> Any:
    return course.judged(**record[when]) if when in record else None
