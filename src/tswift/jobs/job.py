"""A job: a decode whose tokens and text go to a run's folder as they are made,
and that can be resumed.

It is made of its configuration (:func:`start`), or of a run that stopped (``resuming``): the tokens
so far and the seed are its whole state. Everything cheap is checked before anything heavy is
loaded. Signals (Ctrl-C, ``kill``, a terminal that is closed) stop it between two steps.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any

from tswift.decoding.kept import KeptCaches
from tswift.decoding.stats import DecodeStats, distinct
from tswift.decoding.text import TextStream
from tswift.decoding.work import Work, side_by_side
from tswift.drafting.methods import cut_note
from tswift.drafting.options import (
    MEASURED,
    DraftOptions,
    find_method,
    used_options,
)
from tswift.engine import Generation, Request, begin
from tswift.errors import DecodeError, Object
from tswift.forward.text import OnProgress
from tswift.jobs.config import RunConfig, Text, banned_ids, fingerprint, preset_note
from tswift.jobs.folder import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    Record,
    RunFolder,
    SaveFailed,
    default_path,
)
from tswift.loading.model import LoadedModel, load_model
from tswift.loading.plan import ModelPlan, plan_model
from tswift.machine import environment, gigabytes, now, peak_bytes, ran_out
from tswift.memory import Demand, fit_length, preflight
from tswift.models.config import ModelConfig
from tswift.models.hashes import config_hash, weights_hash
from tswift.options import changed
from tswift.sampling.generation_config import PAPERS, SOURCES, params_of, usual_source
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import row_type

_STOPPING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Stopped(KeyboardInterrupt):
    """A signal, by its number, asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def code(self) -> int:
        """The exit code that shells know for it."""
        return 128 + self.number


class Signals:
    """While entered, signals to stop raise :class:`Stopped`; or are noted, where work must not be
    interrupted.

    A signal that the process was told to ignore (``nohup``) stays ignored. Outside the main thread
    nothing is done.

    Attributes:
        patience: how many signals are noted before one raises.
        number: the first signal that came; 0 if none did.
    """

    def __init__(self) -> None:
        self.patience = self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.patience = self.patience - 1
        if self.patience < 0:
            raise Stopped(number)


_NOTHING_STOPS = 1 << 20
BY_STRING, BY_LOOP = "stop", "loop"  # in a record: how a finished text ended
OnStep = Callable[[str, DecodeStats], None]


@dataclass
class Job:
    """A decode and the folder it fills."""

    model: LoadedModel
    generation: Generation
    folder: RunFolder
    config: RunConfig
    about: Record  # what ``run.json`` says of the command, its options, the prompt and the machine
    prompt: Sequence[int]  # token ids
    stats: DecodeStats  # figures so far
    tokens: list[int] = field(default_factory=list)  # token ids so far
    # each time that the run was resumed, this one last
    resumed: list[Object] = field(default_factory=list)
    notes: Sequence[str] = ()  # lines for people
    rows: bytes = b""  # log-probabilities of the last step's tokens, as in ``logprobs.bin``
    state: str = RUNNING  # or finished, interrupted, failed
    reason: str = ""  # why it failed
    again: str = ""  # the command that goes on with it; empty for its own

    @property
    def text(self) -> TextStream:
        """What turns tokens into the text."""
        assert self.generation.text is not None
        return self.generation.text

    def run(
        self, on_step: OnStep, on_progress: OnProgress | None = None, signals: Signals | None = None
    ) -> None:
        """Run to the end, or until something stops it.

        Whatever does, what was made until then is saved.

        Args:
            on_step: called after the prefill and after every step, with the new text and the
                figures so far.
            on_progress: called with the tokens prefilled so far and their number.
            signals: entered by the caller. The first to stop lets the step under way be finished.
        """
        works = iter([self.running(on_step, on_progress, signals)])
        side_by_side(lambda _: next(works, None))

    def running(
        self, on_step: OnStep, on_progress: OnProgress | None = None, signals: Signals | None = None
    ) -> Work[None]:
        """As :meth:`run`, in passes that other texts may share.

        Raises:
            Stopped: a signal stopped it.
            DecodeError: the disk is full, the folder was removed, memory ran out, or logits are no
                numbers.
        """
        signals = signals or Signals()
        self.folder.record(self._record())
        try:
            yield from self._decode(on_step, on_progress, signals)
        except (KeyboardInterrupt, OSError) as error:
            signals.patience = _NOTHING_STOPS
            self.state = INTERRUPTED
            rest = self._end()
            if isinstance(error, KeyboardInterrupt):
                with suppress(OSError):  # a terminal that was closed
                    on_step(rest, self.stats)
            raise
        except BaseException as error:
            signals.patience = _NOTHING_STOPS
            self.state = FAILED
            self.reason = str(error) if isinstance(error, DecodeError) else repr(error)
            if ran_out(error):
                device = self.model.target.device.type
                made = self.stats.tokens
                advice = "a lower --nodes or --budget needs less"
                self.reason = f"{device} has no memory left after {made:,} tokens; {advice}"
            elif not isinstance(error, DecodeError):
                self._end()
                raise
            with suppress(DecodeError):  # the first fault is the one to tell of
                if isinstance(error, SaveFailed):
                    # no second sync: it can succeed although the first lost something
                    self.folder.close()
                    self.folder.record(self._record())
                else:
                    self._end()
            raise DecodeError(f"{self.reason}; {self.saved()}") from error
        signals.patience = _NOTHING_STOPS
        self.state = FINISHED
        on_step(self._end(), self.stats)

    def _decode(
        self, on_step: OnStep, on_progress: OnProgress | None, signals: Signals
    ) -> Work[None]:
        decoding = self.generation.decoding
        seconds = yield from decoding.prefilling(on_progress)
        if self.resumed:
            self.resumed[-1]["prefill_seconds"] = seconds
        else:
            self.about = replace(self.about, prefill_seconds=seconds)
        self.folder.record(self._record())
        on_step("", self.stats)
        signals.patience = 1
        while not decoding.ended:
            step = yield from self.generation.stepping()
            self.tokens += step.tokens
            self.stats.add(step)
            self.rows = b"" if step.logprobs is None else step.logprobs.tobytes()
            self.folder.append(step.tokens, step.text, self.stats.counters, self.rows)
            on_step(step.text, self.stats)
            if signals.number:
                raise Stopped(signals.number)

    def _end(self) -> str:
        """Save everything and close the folder; returns the text that was held back."""
        rest = self.text.finish()
        try:
            self.folder.append((), rest, self.stats.counters)
            self.folder.checkpoint(self.stats.counters(), last=True)
            self.folder.record(self._record())
        except SaveFailed as error:
            self.state = FAILED
            self.reason = str(error)
            raise DecodeError(f"{error}; {self.saved()}") from error
        finally:
            self.folder.close()
        return rest

    def saved(self) -> str:
        """How much is on the disk, and how to go on; for people."""
        path = self.folder.path
        made = len(self.tokens)
        if not path.is_dir():
            return f"{made:,} tokens could not be saved"
        saved = (
            f"{self.folder.saved:,} of {made:,} tokens are"
            if self.folder.saved < made
            else f"{made:,} tokens are"
        )
        again = self.again or f"tswift generate --resume {shlex.quote(str(path))}"
        return f"{saved} saved in {path}, and {again} goes on from there"

    def end(self) -> dict[str, str]:
        """How a finished text ended: ``stop`` (and at which ``string`` or ``token``), ``loop``,
        ``eos`` or ``length``.
        """
        if self.text.stopped is not None:
            return {"reason": BY_STRING, "string": self.text.stopped}
        if self.text.looped:
            return {"reason": BY_LOOP}
        if self.text.end in self.generation.params.stop_token_ids:
            return {"reason": BY_STRING, "token": str(self.text.end)}
        return {"reason": "length" if self.text.end is None else "eos"}

    def statement(self) -> list[str]:
        """What is about to be done, in lines for people."""
        about = self.about
        need = self.generation.need
        how = [self.config.method]
        for name, value in about.drafting.items():
            words = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            words = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else words
            how.append(f"{name.replace('_', ' ')} {words}")
        drafting = need.caches["drafting KV"]
        partial = f" + {gigabytes(drafting)} partial" if drafting else ""
        made = f" and {len(self.tokens):,} made before" if self.tokens else ""
        return [
            "model {name}, {device}, {dtype}, attention {attention}".format(**about.model)
            + f"{self.model.remarks()}, ends {self.model.ends}",
            ", ".join(how),
            self._sampling(),
            f"prompt {len(self.prompt):,} tokens{made}, "
            f"{self.config.text.length - len(self.tokens):,} to generate, KV memory "
            f"{gigabytes(need.caches['KV'])}{partial}",
            *self._dear_drafts(),
            *self.notes,
            f"run folder {self.folder.path}",
        ]

    def _dear_drafts(self) -> list[str]:
        """That drafts hardly pay here, if that is so."""
        share = self.generation.costs.must_come_true(len(self.prompt) + len(self.tokens))
        if self.generation.options.costs != MEASURED or share < _DEAR:
            return []
        return [
            f"a step over two tokens takes {1 + share:.2f} times one over one here: drafting pays "
            f"only where more than {share:.0%} of drafted tokens come true"
        ]

    def _sampling(self) -> str:
        """How tokens are drawn, and who says so."""
        options = self.about.options
        source = SOURCES[self.config.sampling_from or PAPERS]
        if options.get("preset") is not None:
            source = f"of preset {options['preset']}"
        elif options.get("sampling"):
            source += ", but for what was typed"
        return f"sampling: {self.generation.params} ({source})"

    def figures(self) -> Object:
        """What was measured, over all of the run: times in seconds, memory in bytes."""
        stats = self.stats
        return {
            "tokens": stats.tokens,
            "prefill_tokens": len(self.prompt),
            "prefill_copied": self.generation.decoding.copied,
            "prefill_seconds": sum(
                (session.get("prefill_seconds", 0.0) for session in self.resumed),
                self.about.prefill_seconds or 0.0,
            ),
            "decode_seconds": stats.seconds,
            "tokens_per_second": stats.tokens_per_second,
            "target_passes": stats.passes,
            "tree_nodes": stats.nodes,
            "drafted_per_path": stats.depth,
            "tokens_per_step": stats.tokens_per_step,
            "alpha": stats.alpha,
            "beta": stats.beta,
            "distinct": {str(n): distinct(self.tokens, n) for n in (1, 2, 3, 4)},
            "kv_bytes": self.generation.need.kv_bytes,
            "peak_bytes": peak_bytes(self.model.target.device),
        }

    def _record(self) -> Record:
        running = self.state == RUNNING
        counted = self.stats.counters()
        return replace(
            self.about,
            state=self.state,
            reason=self.reason or None,
            end=self.end() if self.state == FINISHED else None,
            resumed=self.resumed,
            process={"pid": os.getpid(), "host": socket.gethostname()},
            ended=None if running else now(),
            figures=None if running else self.figures(),
            accepted=counted["accepted"],
            sizes=counted["sizes"],
            choices=counted["choices"] or None,
        )


_DEAR = 0.4  # of drafted tokens; hardly a draft comes true more often


def start(
    config: RunConfig,
    command: Sequence[str],
    said: tuple[str, str | None] | None = None,
    loaded: LoadedModel | None = None,
    ids: Sequence[int] | None = None,
    kept: KeptCaches | None = None,
) -> Job:
    """Make the run's folder, load the model: a job ready to run.

    InputError leaves no folder behind.

    Args:
        command: the words of the command line, for ``run.json``.
        said: what :meth:`RunConfig.read` gives, if it was read already.
        ids: the prompt's token ids, if they are known already.
        loaded: the model, if it was loaded already; as ``config`` says, and perhaps with more to
            draft with.
        kept: the model's caches of earlier texts.
    """
    wanted = config.to_load()
    asked = config.text.length
    plan: ModelPlan | ModelConfig = wanted
    flexible = "length" not in config.given
    drafting = config.drafting
    text, system = said or (config.read() if ids is None else ("", None))
    if loaded is None:
        demand = Demand(config.text.least, asked, config.method, drafting, flexible)
        plan = plan_model(wanted)
        need = preflight(plan, demand, option=config.text.larger, params=config.sampling)
        drafting = need.options
    folder = RunFolder.create(
        config.out or default_path(config.method), config.logprobs is not None
    )
    try:
        model = loaded or load_model(plan)
        config, params = with_sampling(config, model)
        if config.preset is not None:
            params = replace(
                params, banned=banned_ids(config.preset, model.tokenizer, model.target.vocab_size)
            )
        prompt = list(ids or ())
        if ids is None:
            encoded = Text(config.text.source, text).encode(model, config.chat, system)
            prompt = config.text.first(encoded)
        if flexible:
            length = fit_length(asked, len(prompt), model.target.max_positions)
            config = changed(config, {"length": length})
        generation = begin_run(model, prompt, config, params, kept=kept, drafting=drafting)
        folder.keep_prompt(prompt)
    except BaseException:
        folder.discard()
        raise
    identity = identity_of(model)
    for name, used in (("draft", wanted.draft_model), ("drafter", wanted.drafter)):
        if used is None:  # it was loaded for other methods
            identity.pop(name, None)
    about = Record(
        command=list(command),
        options=config.recorded(),
        sampling=asdict(generation.params),
        drafting=used_options(find_method(config.method), generation.options),
        model=identity,
        prompt={"source": config.text.source, "tokens": len(prompt), "sha256": fingerprint(prompt)},
        started=now(),
        environment=environment(model.target.device),
    )
    notes = [] if config.preset is None else [preset_note(config.preset, params.banned)]
    cut = cut_note(config.drafting, model.target.fixed_rows)
    notes += config.idle(params) + ([] if cut is None else [cut])
    if config.text.length < asked:
        notes.append(
            f"--len is {config.text.length:,}: the model has {model.target.max_positions:,} "
            "positions"
        )
    stats = DecodeStats(generation.depth)
    return Job(model, generation, folder, config, about, prompt, stats, notes=notes)


def with_sampling(config: RunConfig, model: LoadedModel) -> tuple[RunConfig, SamplingParams]:
    """A job that knows where its sampling comes from, and how its tokens are drawn: as was typed,
    else by its preset, else by that source.
    """
    if config.preset is not None:
        return config, config.sampling
    own = model.target.model.generation_config
    source = config.sampling_from or (usual_source(own) if config.chat else PAPERS)
    usual = params_of(source, own, model.name)
    return replace(config, sampling_from=source), config.sampling_with(usual)


def begin_run(
    model: LoadedModel,
    prompt: Sequence[int],
    config: RunConfig,
    params: SamplingParams,
    written: Sequence[int] = (),
    kept: KeptCaches | None = None,
    drafting: DraftOptions | None = None,
) -> Generation:
    """A job's decode, ready to run; ``written`` is as for :class:`Decoding`, ``kept`` as for
    :func:`begin`, ``drafting`` has the job's options where they were resolved already.
    """
    request = Request(
        prompt=prompt,
        length=config.text.length,
        method=config.method,
        params=params,
        seed=config.text.seed,
        options=drafting or config.drafting,
        stop_at_eos=config.ends_at_eos,
        ignore_eos=config.ignore_eos,
        written=written,
        rules=config.text_rules,
        texts=True,
        logprobs=config.logprobs,
    )
    return begin(model, request, kept=kept)


def identity_of(model: LoadedModel) -> Object:
    """What was loaded and how, down to every bit of its weights."""
    identity = {
        **model.about(),
        "weights": model.weights_hash,
        "config": config_hash(model.target.model),
        "tokenizer": model.tokenizer_hash,
    }
    if model.draft is not None:
        identity["draft"] = {"name": model.draft_name, "weights": weights_hash(model.draft.model)}
    return identity


def row_bytes(config: RunConfig) -> int:
    """Bytes of a token's log-probabilities; 0 if none are wanted."""
    return 0 if config.logprobs is None else row_type(config.logprobs).itemsize
