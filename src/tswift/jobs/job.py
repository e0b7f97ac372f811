"""A job: a decode whose tokens and text go to a run's folder as they are made,
and that can be resumed.

It is made of its configuration (:func:`start`), or of a run that stopped (:func:`resume`): the
tokens so far and the seed are its whole state. Everything cheap is checked before anything heavy is
loaded. Signals (Ctrl-C, ``kill``, a terminal that is closed) stop it between two steps.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from tswift.decoding.loop import Decoding
from tswift.decoding.stats import DecodeStats, distinct
from tswift.decoding.text import TextStream, text_of
from tswift.distributed import ALONE, Dist
from tswift.drafting.methods import cut_note
from tswift.drafting.options import (
    AUTO_TREE,
    MEASURED,
    DraftOptions,
    find_method,
    refuse_unused,
    used_options,
)
from tswift.engine import Generation, Request, begin
from tswift.errors import DecodeError, InputError, Object
from tswift.files import Lock, lock_folder, write_whole
from tswift.forward.text import OnProgress
from tswift.jobs.config import (
    BUNDLED_PREFILL,
    RunConfig,
    Text,
    banned_ids,
    fingerprint,
    first_tokens,
    preset_note,
)
from tswift.jobs.folder import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    TEXT,
    Record,
    RunFolder,
    RunRecord,
    Saved,
    SaveFailed,
    default_path,
    read_record,
    read_run,
    read_saved,
)
from tswift.loading.model import INTEGERS, PRODUCTS, LoadedModel, load_model
from tswift.loading.plan import ModelPlan, plan_model
from tswift.machine import environment, gigabytes, now, peak_bytes, ran_out
from tswift.memory import Demand, fit_length, preflight
from tswift.models.checkpoint import Checkpoint
from tswift.models.config import NO_HEADS, ModelConfig
from tswift.models.hashes import config_hash, weights_hash
from tswift.options import Values, changed, fields_of
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

    @property
    def text(self) -> TextStream:
        """What turns tokens into the text."""
        assert self.generation.text is not None
        return self.generation.text

    @property
    def length(self) -> int:
        """Tokens asked for, those made before included."""
        return self.config.text.length

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

        Raises:
            Stopped: a signal stopped it.
            DecodeError: the disk is full, the folder was removed, memory ran out, or logits are no
                numbers.
        """
        signals = signals or Signals()
        self.folder.record(self._record())
        try:
            self._decode(on_step, on_progress, signals)
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

    def _decode(self, on_step: OnStep, on_progress: OnProgress | None, signals: Signals) -> None:
        seconds = self.generation.decoding.prefill(on_progress)
        if self.resumed:
            self.resumed[-1]["prefill_seconds"] = seconds
        else:
            self.about = replace(self.about, prefill_seconds=seconds)
        self.folder.record(self._record())
        on_step("", self.stats)
        signals.patience = 1
        for step in self.generation.steps():
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
        return f"{saved} saved in {path}, and tswift generate --resume {path} goes on from there"

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
            + self.model.remarks(),
            ", ".join(how),
            self._sampling(),
            f"prompt {len(self.prompt):,} tokens{made}, {self.length - len(self.tokens):,} to "
            f"generate, KV memory {gigabytes(need.caches['KV'])}{partial}",
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


OPTION = "resume"
_DEAR = 0.4  # of drafted tokens; hardly a draft comes true more often
# A resumed run may change these: none changes a token, and memory may want nodes and budget lower.
_MAY_CHANGE = ("length", "nodes", "budget", "draft_model", "drafter", "draft_weights")
# to another place; that it is the same model is seen once it is loaded
_MAY_MOVE = ("model", "heads")


def start(
    config: RunConfig,
    command: Sequence[str],
    ranks: Dist = ALONE,
    said: tuple[str, str | None] | None = None,
    loaded: LoadedModel | None = None,
    ids: Sequence[int] | None = None,
) -> Job:
    """Make the run's folder, load the model: a job ready to run.

    InputError leaves no folder behind.

    Args:
        command: the words of the command line, for ``run.json``.
        ranks: those that do it together, of which this is the first; the others follow
            (``tswift.cli.generate``).
        said: what :meth:`RunConfig.read` gives, if it was read already.
        ids: the prompt's token ids, if they are known already.
        loaded: the model, if it was loaded already; as ``config`` says, and perhaps with more to
            draft with.
    """
    wanted = config.to_load()
    asked = config.text.length
    plan: ModelPlan | ModelConfig = wanted
    flexible = "length" not in config.given
    text, system = said or (config.read() if ids is None else ("", None))
    if ranks.count == 1 and loaded is None:  # else it is seen when it is loaded
        least = config.text.prefill or (BUNDLED_PREFILL if config.text.bundled else 1)
        larger = "prefill" if least > config.text.length and config.text.prefill else "length"
        demand = Demand(least, config.text.length, config.method, config.drafting, flexible)
        plan = plan_model(wanted)
        preflight(plan, demand, option=larger, params=config.sampling)
    folder = RunFolder.create(
        config.out or default_path(config.method), config.logprobs is not None
    )
    try:
        model = loaded or load_model(plan, ranks)
        config, params = with_sampling(config, model)
        if config.preset is not None:
            params = replace(
                params, banned=banned_ids(config.preset, model.tokenizer, model.target.vocab_size)
            )
        prompt = list(ids or ())
        if ids is None:
            encoded = Text(config.text.source, text).encode(model, config.chat, system)
            prompt = first_tokens(encoded, config.text.prefill, bundled=config.text.bundled)
        if flexible:
            length = fit_length(config.text.length, len(prompt), model.target.max_positions)
            config = replace(config, text=replace(config.text, length=length))
        generation = begin_run(model, prompt, config, params)
        folder.keep_prompt(prompt)
    except BaseException:
        folder.discard()
        raise
    about = Record(
        command=list(command),
        options=config.recorded(),
        sampling=asdict(generation.params),
        drafting=used_options(find_method(config.method), generation.options),
        model=_used_identity(model, wanted),
        prompt={"source": config.text.source, "tokens": len(prompt), "sha256": fingerprint(prompt)},
        started=now(),
        environment=environment(model.target.device),
    )
    notes = [] if config.preset is None else [preset_note(config.preset, params.banned)]
    cut = cut_note(config.drafting, model.target.width)
    notes += [] if cut is None else [cut]
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


def resume(
    path: Path,
    asked: Values,
    discard_damaged: bool,
    command: Sequence[str],
    ranks: Dist = ALONE,
    loaded: LoadedModel | None = None,
) -> Job | None:
    """A job that goes on with a run; None if that is finished.

    Args:
        asked: options that were typed, by the names that :meth:`RunConfig.of` takes. Those that
            could change the text must be the run's own.
        discard_damaged: go on from the last sound token where something after it is broken.
        command, ranks, loaded: as :func:`start` takes them; the ranks need not be as many as
            before.

    Raises:
        InputError: no run, one that is in use, broken or made by another model, or an option in
            conflict with it. The folder is as it was then.
    """
    with ExitStack() as unlocking:
        lock = lock_folder(path, OPTION, _in_use(path))
        unlocking.callback(lock.release)
        run = read_run(path)
        saved = read_saved(path, run.prompt, row_bytes(run.config))
        _refuse_conflicts(run, asked, (*_MAY_CHANGE, *_MAY_MOVE))
        config = _changed(run.config, asked)
        made = len(saved.tokens)
        _refuse_tokens(saved, path, config.text.length, discard_damaged)
        ended = made > 0 and saved.tokens[-1] in run.rules.ends
        stopped = (run.record.end or {}).get("reason") in (BY_STRING, BY_LOOP)
        if run.record.state == FINISHED and (config.text.length == made or ended or stopped):
            _refuse_conflicts(run, asked, _MAY_CHANGE)  # no model is loaded
            _check_text(run, saved, loaded, discard_damaged)
            return None
        wanted = config.to_load()
        if run.record.model["heads"] is None and wanted.heads is None:
            # some may have been installed since
            wanted = replace(wanted, heads=NO_HEADS)
        model = loaded or load_exact_or_not(wanted, "exact" in asked, ranks)
        draft = _refuse_other_model(run, config, model).get("draft")
        job = _continued(run, saved, config, model, lock, ended)
        unlocking.pop_all()
    moved = {name: asked[name] for name in _MAY_MOVE if name in asked}
    job.about = replace(
        run.record,
        options={**run.record.options, "length": config.text.length, **moved},
        model={**run.record.model, "name": model.name},
    )
    session = {
        "at": len(job.tokens),
        "started": now(),
        "command": list(command),
        "drafting": used_options(find_method(config.method), job.generation.options),
        "draft": draft,
        "drafter": model.drafter_name,
        "draft_weights": model.draft_weights,
        "exact": model.about()["exact"],
        "environment": environment(model.target.device),
    }
    job.resumed = [*map(dict, run.record.resumed), session]
    job.notes = _resume_notes(run, saved, len(job.tokens), model)
    return job


def _continued(
    run: RunRecord,
    saved: Saved,
    config: RunConfig,
    model: LoadedModel,
    lock: Lock,
    ended: bool,
) -> Job:
    """A job that goes on from a run's last checkpoint; ``ended``: with an end-of-text token."""
    if config.stop or config.stop_on_loop:
        whole = TextStream(model.tokenizer, run.rules)
        whole.add(saved.tokens)
        ended = ended or whole.ended
    # a run that was stopped after its last token and before its last record has to draw that
    # token again
    below = len(saved.tokens) if ended else config.text.length
    checkpoint = next(each for each in reversed(saved.checkpoints) if each.tokens < below)
    tokens = saved.tokens[: checkpoint.tokens]
    generation = begin_run(model, run.prompt, config, run.params, written=tokens)
    try:
        stats = DecodeStats.counted(generation.depth, len(tokens), checkpoint.counters)
    except ValueError as error:
        raise InputError(f"the journal of {run.path} is broken: {error}", OPTION) from None
    before = generation.before
    folder = RunFolder.reopen(run.path, lock, run.record, checkpoint, before, row_bytes(config))
    return Job(model, generation, folder, config, run.record, run.prompt, stats, tokens)


def _in_use(path: Path) -> str:
    """What to tell who cannot have the lock of a run."""
    owner = read_record(path).process
    who = (
        f"process {owner.get('pid')} on {owner.get('host')}"
        if owner and isinstance(owner, dict)  # some have none
        else "another process"
    )
    return f"{path} is in use: {who} is writing it"


def _refuse_tokens(saved: Saved, path: Path, length: int, discard_damaged: bool) -> None:
    """Refuse to go on after what is broken, or after more tokens than are asked for."""
    made = len(saved.tokens)
    if saved.damage and not discard_damaged:
        raise InputError(
            f"{saved.damage}; --discard-damaged goes on from the {made:,} sound tokens before",
            OPTION,
        )
    if length < made:
        raise InputError(f"{path} has {made:,} tokens already, got {length:,}", "length")


def _check_text(
    run: RunRecord, saved: Saved, loaded: LoadedModel | None, discard_damaged: bool
) -> None:
    """Refuse a finished run with another text than that of its tokens, or write that text."""
    name = run.config.model.model
    tokenizer = Checkpoint.find(name).tokenizer() if loaded is None else loaded.tokenizer
    fault = run.text_fault(tokenizer)
    if fault and not discard_damaged:
        raise InputError(f"{fault}; --discard-damaged writes it anew", OPTION)
    if fault:
        write_whole(run.path / TEXT, text_of(tokenizer, saved.tokens, run.rules).encode())


def begin_run(
    model: LoadedModel,
    prompt: Sequence[int],
    config: RunConfig,
    params: SamplingParams,
    written: Sequence[int] = (),
    earlier: Decoding | None = None,
) -> Generation:
    """A job's decode, ready to run; ``written`` and ``earlier`` are as for :class:`Decoding`."""
    request = Request(
        prompt=prompt,
        length=config.text.length,
        method=config.method,
        params=params,
        seed=config.text.seed,
        options=config.drafting,
        stop_at_eos=config.ends_at_eos,
        ignore_eos=config.ignore_eos,
        written=written,
        rules=config.text_rules(params),
        texts=True,
        logprobs=config.logprobs,
    )
    return begin(model, request, earlier=earlier)


def _identity(model: LoadedModel) -> dict[str, object]:
    """What was loaded and how, down to every bit of its weights."""
    weights = model.weights or weights_hash(model.target.model)
    identity = {
        **model.about(),
        "weights": weights,
        "config": config_hash(model.target.model),
        "tokenizer": model.tokenizer_hash,
    }
    if model.draft is not None:
        identity["draft"] = {"name": model.draft_name, "weights": weights_hash(model.draft.model)}
    return identity


def _used_identity(model: LoadedModel, wanted: ModelConfig) -> dict[str, object]:
    """What of a model has a part in a run: not what was loaded for other methods."""
    identity = _identity(model)
    drafts = {
        "draft": wanted.draft_model,
        "drafter": wanted.drafter,
        "draft_weights": wanted.draft_weights,
    }
    for name, asked in drafts.items():
        if asked is None:
            identity.pop(name, None)
    return identity


def row_bytes(config: RunConfig) -> int:
    """Bytes of a token's log-probabilities; 0 if none are wanted."""
    return 0 if config.logprobs is None else row_type(config.logprobs).itemsize


def _refuse_conflicts(run: RunRecord, asked: Mapping[str, object], free: Sequence[str]) -> None:
    """No option is silently ignored: what was typed is free to change, or the run's own,
    or refused.
    """
    record = run.record
    options = run.record.options
    typed = options.get("drafting", {})
    drafting = fields_of(DraftOptions, asked)
    if drafting:
        auto = record.drafting.get("tree") == drafting.get("tree", AUTO_TREE) == AUTO_TREE
        kept = {
            name: record.drafting.get(name)
            for name in ("kv", *(("tree", "recall") if auto else ()))
        }
        refuse_unused([run.config.method], {**kept, **drafting})
    known = {
        "sampling_from": PAPERS,
        **options,
        **typed,
        **record.sampling,
        **record.drafting,
        "exact": run.config.model.exact,
    }
    known["kv_dtype"] = run.config.model.kv_dtype
    for name, value in asked.items():
        plain = json.loads(json.dumps(value, default=str))  # as a record has it
        loaded = record.model.get(name), options.get(name, "auto")
        if name in ("device", "dtype", "kv_dtype", "attention") and plain in loaded:
            continue
        # what was typed may have been cut to what fits
        if name not in free and plain not in (known.get(name), typed.get(name)):
            own = "none" if known.get(name) is None else known[name]
            raise InputError(
                f"the run was made with {own}, got {value}; a resumed run keeps its options", name
            )


def _changed(config: RunConfig, asked: Mapping[str, object]) -> RunConfig:
    """The run's configuration with what may change."""
    return changed(
        config, {name: asked[name] for name in (*_MAY_CHANGE, *_MAY_MOVE) if name in asked}
    )


def load_exact_or_not(config: ModelConfig, typed: bool, ranks: Dist = ALONE) -> LoadedModel:
    """A run's model loaded as it was then; where exact passes cannot be had, and were not typed,
    without them.
    """
    try:
        return load_model(config, ranks)
    except InputError as error:  # on other machines, or more ranks; notes tell
        if error.field != "exact" or typed:
            raise
        return load_model(replace(config, exact=False), ranks)


def refuse_other_products(run: RunRecord, model: LoadedModel) -> None:
    """Refuse a model of codes that are multiplied in another way than when the run was made:
    texts go on otherwise.
    """
    own = model.about().get("products")
    then = run.record.model.get("products", INTEGERS)
    if own is not None and own != then:
        raise InputError(
            f"{run.path} was made with {PRODUCTS[then]}; here are {PRODUCTS[own]}, which make "
            "another text",
            "model",
        )


def refuse_other_tokenizer(run: RunRecord, model: LoadedModel) -> None:
    """Refuse a tokenizer that is not the one the run was made with, where its record has one."""
    if run.record.model.get("tokenizer", model.tokenizer_hash) != model.tokenizer_hash:
        then = run.record.environment.get("transformers")
        now = environment(model.target.device)["transformers"]
        versions = "" if then == now else f" (transformers {then} then, {now} now)"
        raise InputError(
            f"{model.name} has another tokenizer than {run.path} was made with{versions}", "model"
        )


def _refuse_other_model(run: RunRecord, config: RunConfig, model: LoadedModel) -> Object:
    """Refuse a model that is not the one the run was made with; returns what it is."""
    identity = _identity(model)
    known = run.record.model
    for what in ("weights", "config", "eos_ids", "heads"):
        if identity[what] != known.get(what):
            message = (
                f"{model.name} is not the model that {run.path} was made with: "
                f"{what.replace('_', ' ')} differ"
            )
            raise InputError(message, "model")
    refuse_other_tokenizer(run, model)
    refuse_other_products(run, model)
    own = identity.get("kv_dtype", identity["dtype"])
    if own != config.model.kv_dtype:
        raise InputError(
            f"{run.path} was made with a KV cache in {config.model.kv_dtype}, not in {own}",
            "kv_dtype",
        )
    return identity


def _resume_notes(run: RunRecord, saved: Saved, kept: int, model: LoadedModel) -> list[str]:
    notes = [f"going on after {kept:,} tokens"]
    if saved.damage:
        notes.append(f"{saved.damage}: what comes after token {kept:,} is drawn again")
    again = len(saved.tokens) - kept + saved.unsure
    if again:
        notes.append(f"{again:,} tokens behind the last checkpoint are drawn again")
    if run.config.model.exact and model.exact != run.bits:
        notes.append(
            "this machine rounds otherwise than the one before: the text may go on differently "
            "than there"
        )
    return notes
