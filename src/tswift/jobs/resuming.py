"""To go on with a run that stopped: what may change, what is refused,
and the job that begins at its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from tswift.decoding.kept import KeptCaches
from tswift.decoding.stats import DecodeStats
from tswift.decoding.text import TextStream, text_of
from tswift.drafting.options import find_method, used_options
from tswift.errors import InputError, Object
from tswift.files import Lock, lock_folder, write_whole
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import (
    FINISHED,
    TEXT,
    RunFolder,
    RunRecord,
    Saved,
    read_record,
    read_run,
    read_saved,
)
from tswift.jobs.job import BY_LOOP, BY_STRING, Job, begin_run, identity_of, row_bytes
from tswift.loading.model import INTEGERS, PRODUCTS, LoadedModel, load_model
from tswift.machine import environment, now
from tswift.models.checkpoint import Checkpoint
from tswift.models.config import NO_HEADS, ModelConfig
from tswift.options import Values, changed, refuse_changes
from tswift.sampling.generation_config import PAPERS

OPTION = "resume"
# A resumed run may change these: none changes a token, and memory may want nodes and budget lower.
_MAY_CHANGE = ("length", "nodes", "budget", "draft_model", "drafter")
# to another place; that it is the same model is seen once it is loaded
_MAY_MOVE = ("model", "heads")


def resume(
    path: Path,
    asked: Values,
    discard_damaged: bool,
    command: Sequence[str],
    loaded: LoadedModel | None = None,
    kept: KeptCaches | None = None,
) -> Job | None:
    """A job that goes on with a run; None if that is finished.

    Args:
        asked: options that were typed, by the names that :meth:`RunConfig.of` takes. Those that
            could change the text must be the run's own.
        discard_damaged: go on from the last sound token where something after it is broken.
        command, loaded, kept: as :func:`start` takes them.

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
        free = {name: asked[name] for name in (*_MAY_CHANGE, *_MAY_MOVE) if name in asked}
        config = changed(run.config, free)
        made = len(saved.tokens)
        if saved.damage and not discard_damaged:
            sound = f"the {made:,} sound tokens before"
            raise InputError(f"{saved.damage}; --discard-damaged goes on from {sound}", OPTION)
        if (length := config.text.length) < made:
            raise InputError(f"{path} has {made:,} tokens already, got {length:,}", "length")
        ended = made > 0 and saved.tokens[-1] in run.rules.ends
        stopped = (run.record.end or {}).get("reason") in (BY_STRING, BY_LOOP)
        if run.record.state == FINISHED and (length == made or ended or stopped):
            _refuse_conflicts(run, asked, _MAY_CHANGE)  # no model is loaded
            _check_text(run, saved, loaded, discard_damaged)
            return None
        wanted = config.to_load()
        if run.record.model["heads"] is None and wanted.heads is None:
            # some may have been installed since
            wanted = replace(wanted, heads=NO_HEADS)
        model = loaded or load_exact_or_not(wanted, "exact" in asked)
        model = replace(model, eos_ids=run.eos_ids)  # other versions know of others
        draft = _refuse_other_model(run, config, model).get("draft")
        job = _continued(run, saved, config, model, lock, ended, kept)
        unlocking.pop_all()
    moved = {name: asked[name] for name in ("length", *_MAY_MOVE) if name in asked}
    job.about = replace(
        run.record,
        options={**run.record.options, **moved},
        model={**run.record.model, "name": model.name},
    )
    session = {
        "at": len(job.tokens),
        "started": now(),
        "command": list(command),
        "drafting": used_options(find_method(config.method), job.generation.options),
        "draft": draft,
        "drafter": model.drafter_name,
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
    kept: KeptCaches | None,
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
    generation = begin_run(model, run.prompt, config, run.params, tokens, kept)
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


def _refuse_conflicts(run: RunRecord, asked: Values, free: Sequence[str]) -> None:
    """Refuse what was typed and is neither free to change nor the run's own."""
    record = run.record
    # what was typed may have been cut to what fits
    typed = {**asdict(ModelConfig()), **record.options, **record.options.get("drafting", {})}
    known = {
        "sampling_from": PAPERS,
        **typed,
        **asdict(run.config.model),
        **record.sampling,
        **record.drafting,
        "attention": record.model["attention"],
    }
    refuse_changes("the run", asked, known, typed, free=free)


def load_exact_or_not(config: ModelConfig, typed: bool) -> LoadedModel:
    """A run's model loaded as it was then; where exact passes cannot be had, and were not typed,
    without them.
    """
    try:
        return load_model(config)
    except InputError as error:  # on other machines; notes tell
        if error.field != "exact" or typed:
            raise
        return load_model(replace(config, exact=False))


def refuse_other_model(run: RunRecord, model: LoadedModel, hashes: Values) -> None:
    """Refuse a model that did not make the run, as far as some hashes of it tell."""
    for what, found in hashes.items():
        if found != run.record.model.get(what):
            raise InputError(
                f"{model.name} is not the model that {run.path} was made with: {what} differ",
                "model",
            )


def refuse_other_text(run: RunRecord, model: LoadedModel) -> None:
    """Refuse a model with another tokenizer than the run was made with, where its record has one,
    or with codes that are multiplied in another way: texts go on otherwise.
    """
    if run.record.model.get("tokenizer", model.tokenizer_hash) != model.tokenizer_hash:
        then = run.record.environment.get("transformers")
        now = environment(model.target.device)["transformers"]
        versions = "" if then == now else f" (transformers {then} then, {now} now)"
        raise InputError(
            f"{model.name} has another tokenizer than {run.path} was made with{versions}", "model"
        )
    own = model.about().get("products")
    then = run.record.model.get("products", INTEGERS)
    if own is not None and own != then:
        raise InputError(
            f"{run.path} was made with {PRODUCTS[then]}; here are {PRODUCTS[own]}, which make "
            "another text",
            "model",
        )


def _refuse_other_model(run: RunRecord, config: RunConfig, model: LoadedModel) -> Object:
    """Refuse a model that is not the one the run was made with; returns what it is."""
    identity = identity_of(model)
    hashes = {name: identity[name] for name in ("weights", "config", "heads")}
    refuse_other_model(run, model, hashes)
    refuse_other_text(run, model)
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
