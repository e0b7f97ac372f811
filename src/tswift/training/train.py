"""Train heads for a loaded model, from a plan to a heads file and what it brings; the work behind ``tswift train``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tswift.errors import Fault, InputError, renamed
from tswift.jobs.environment import environment, now
from tswift.jobs.folder import default_path
from tswift.jobs.signals import Signals, Stopped
from tswift.models.fingerprint import fingerprint_in_any_dtype, fingerprint_of
from tswift.models.heads import KINDS, Heads, load_heads
from tswift.models.loading import find_device, load
from tswift.models.memory import ran_out
from tswift.training.corpus import corpus_files
from tswift.training.documents import Documents, prepare
from tswift.training.folder import HEADS, TrainFolder
from tswift.training.held_out import HeldOut, Judged
from tswift.training.loop import Loop, Show
from tswift.training.plan import TrainPlan
from tswift.training.ranks import Ranks, open_ranks
from tswift.training.trainer import HeadTrainer, adamw

RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"
_SAME = {  # what a training that is gone on with must find as it was, and by which option it is said
    "processes": ("--resume", "number of processes"),
    "dtype": ("--dtype", "dtype"),
    "base": ("--model", "model's weights"),
    "corpus": ("--corpus", "corpus"),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a training.

    Attributes:
        folder: where it is.
        plan: what was asked.
        steps: how many are done.
        before: the untrained heads; None if it was stopped before that was known, or in a process that does not write.
        after: the heads file; None if it is not there yet, or in a process that does not write.
        signum: the signal that stopped it; None if it ran to its end.
    """

    folder: Path
    plan: TrainPlan
    steps: int
    before: Judged | None
    after: Judged | None
    signum: int | None = None


class Silence:
    """A :class:`~tswift.training.loop.Show` that nobody sees."""

    def say(self, message: str) -> None:
        """Nothing."""

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Nothing."""


_SILENCE = Silence()


def train(plan: TrainPlan, out: Path | None = None, show: Show = _SILENCE, command: Sequence[str] = ()) -> Outcome:
    """Train heads from the beginning. Under torchrun every process calls this, and the first one writes.

    Args:
        plan: what is asked.
        out: a folder that is empty or does not exist; None for ``runs/<UTC time>-train``.
        show: who is told of the progress.
        command: the words of the command line, for ``train.json``.

    Raises:
        InputError: something asked cannot be done.
        Fault: it broke on the way. What was kept can be resumed.
    """
    folder = TrainFolder(out or default_path("train"))
    with open_ranks(plan.device) as ranks:
        if ranks.first:
            folder.begin()
        try:
            training = _Training(plan.settled(), folder, ranks, show, None, command)
        except BaseException:
            folder.discard()
            raise
        outcome = training.run()
        del training  # and with it the gradients' reducer, which hangs if it goes after the process group is closed
        return outcome


def resume(path: Path, given: Mapping[str, Any], show: Show = _SILENCE, command: Sequence[str] = ()) -> Outcome:
    """Go on with a training that was interrupted. On a CPU the weights are those that it would have come to.

    Args:
        path: its folder.
        given: fields of the plan that are asked for now; what decides about weights must be what it was.
        show: who is told of the progress.
        command: the words of the command line, for ``train.json``.

    Raises:
        InputError: no training is there, or not the one that was begun.
        Fault: it broke on the way.
    """
    folder = TrainFolder(path)
    record = folder.record()
    try:
        began = TrainPlan(**record["plan"])
        steps, before, after = int(record["steps"]), _judged(record, "before"), _judged(record, "after")
    except (TypeError, ValueError, KeyError):
        raise InputError(f"{path} holds a plan that is damaged, or of another version of tswift", "--resume") from None
    plan = began.resumed(given, path)
    with open_ranks(plan.device) as ranks:
        if record["state"] == FINISHED:
            show.say(f"the training in {path} is finished")
            return Outcome(path, plan, steps, before, after)
        return _Training(plan, folder, ranks, show, record, command).run()


class _Training:
    """A model, a corpus, heads, and the record of what is done with them."""

    def __init__(
        self,
        plan: TrainPlan,
        folder: TrainFolder,
        ranks: Ranks,
        show: Show,
        record: Mapping[str, Any] | None,
        command: Sequence[str],
    ) -> None:
        self._plan, self._folder, self._ranks = plan, folder, ranks
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
        rows = [documents.beginning(document, plan.seq_len) for document in documents.held_out]
        self._held_out = HeldOut(model, rows, plan, show.update)
        # where the model is in bf16, small updates would be lost on weights in bf16
        self._fresh = untrained(plan, target.hidden_size).to(torch.promote_types(target.dtype, torch.float32))
        heads = deepcopy(self._fresh).to(target.device)
        optimizers = adamw(heads, plan.lr, plan.weight_decay)
        self._trainer = HeadTrainer(target, heads, optimizers, plan.objective, ranks.wrap(heads))
        self._loop = Loop(plan, self._trainer, documents, self._held_out, folder, ranks, show)
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
            raise InputError(f"{self._folder.path} holds a checkpoint of other heads", "--resume") from None

    def run(self) -> Outcome:
        """Train to the end, or until a signal comes."""
        first, signals, signum = self._ranks.first, Signals(), None
        with self._folder.held() if first else nullcontext(), signals, _in_memory(self._folder.path):
            try:
                self._write(RUNNING)
                if first:
                    self._folder.forget_after(self._loop.step)
                    self._judge("before", self._fresh)
                signals.patience = 1
                signum = self._loop.run(signals)
                signals.patience = 0
                if first and signum is None:
                    base = fingerprint_in_any_dtype(self._target.model)
                    self._folder.write(HEADS, partial(self._trainer.heads.save, base=base))
                    # what was written is what is judged: weights rounded to bf16
                    path, hidden, dtype = self._folder.path / HEADS, self._target.hidden_size, self._target.dtype
                    self._judge("after", load_heads(path, hidden, dtype, self._target.device))
                    self._write(FINISHED)
            except Stopped as stopped:
                signum = stopped.number
            finally:
                if self._record["state"] != FINISHED:
                    self._write(INTERRUPTED)
        before, after = _judged(self._record, "before"), _judged(self._record, "after")
        return Outcome(self._folder.path, self._plan, self._loop.step, before, after, signum)

    def _judge(self, when: str, heads: Heads) -> None:
        """Judge heads on the held-out texts, if that was not done before the training was interrupted."""
        if when in self._record:
            return
        found = asdict(self._held_out.judge(heads.to(self._target.device), when))
        self._folder.log({"step": self._loop.step, "held_out": found})
        self._record[when] = found
        self._write(RUNNING)

    def _write(self, state: str) -> None:
        loop = self._loop
        self._record |= {"state": state, "steps": loop.step, "seconds": round(loop.seconds, 3), "written": now()}
        if self._ranks.first:
            self._folder.write_record(self._record)


def untrained(plan: TrainPlan, hidden_size: int) -> Heads:
    """The heads that a training begins with, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return KINDS[plan.kind](hidden_size, plan.heads_count)


def _documents(plan: TrainPlan, tokenizer: Any, vocabulary: int, ranks: Ranks, show: Show) -> Documents:
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


def _judged(record: Mapping[str, Any], when: str) -> Judged | None:
    return Judged(**record[when]) if when in record else None
