"""A job made of its configuration: everything cheap is checked before anything heavy is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tswift.decoding.stats import DecodeStats
from tswift.distributed import ALONE, Dist
from tswift.drafting.methods import cut_note
from tswift.drafting.options import DraftOptions, find_method, used
from tswift.engine import begin, preflight
from tswift.errors import InputError
from tswift.jobs.config import RunConfig
from tswift.jobs.environment import environment, now
from tswift.jobs.folder import RunFolder, default_path
from tswift.jobs.job import Job
from tswift.jobs.presets import banned_ids, remark
from tswift.jobs.prompt import (
    BUNDLED_PREFILL,
    TextStream,
    fingerprint,
    read_system,
    render,
    special_tokens_in,
    take,
)
from tswift.models.checkpoint import config_hash, weights_hash
from tswift.models.devices import gigabytes
from tswift.models.load import LoadedModel, load


def about_draft(model: LoadedModel) -> dict[str, Any] | None:
    """For records: a loaded model's draft model, down to every bit of its weights; None if it has none."""
    if model.draft is None:
        return None
    return {"name": model.draft_name, "weights": weights_hash(model.draft.model)}


_BYTES_PER_TOKEN = 4 + 6  # its id, and its text
_BYTES_BESIDE = 100_000  # journal and record


def start(config: RunConfig, command: Sequence[str], ranks: Dist = ALONE, text: str | None = None) -> Job:
    """Make the run's folder, load the model: a job ready to run.

    Args:
        config: what is asked.
        command: the words of the command line, for ``run.json``.
        ranks: those that do it together, of which this is the first; the others follow (``tswift.cli.ranks``).
        text: the prompt, if it was read already.

    Raises:
        InputError: something asked cannot be done. No folder is left behind then.
    """
    params, options = config.params(), config.options()
    text = config.read(config.model) if text is None else text
    system = None if config.system is None else read_system(config.system)
    how = config.loading()
    if ranks.count == 1 and config.quantize is None:  # else how much memory it takes is seen when it is loaded
        least = config.prefill or (BUNDLED_PREFILL if config.bundled else 1)
        larger = "prefill" if config.prefill and config.prefill > config.length else "length"
        preflight(config.model, least, config.length, config.method, options, option=larger, **how)
    path = config.out or default_path(config.method)
    refuse_full_disk(path, config.length, "out")
    folder = RunFolder.create(path)
    try:
        exact = False if find_method(config.method).reference else config.exact
        model = load(config.model, quantize=config.quantize, exact=exact, ranks=ranks, **how)
        if config.preset is not None:
            params = replace(params, banned=banned_ids(config.preset, model.tokenizer, model.target.vocab_size))
        if config.chat:
            prompt = model.encode(render(model.tokenizer, model.name, text, system), bare=True)
        else:
            prompt = take(model.encode(text), config.prefill, bundled=config.bundled)
        generation = begin(
            model,
            prompt,
            config.length,
            method=config.method,
            params=params,
            seed=config.seed,
            options=options,
            stop_at_eos=config.stop_at_eos,
        )
        folder.keep_prompt(prompt)
    except BaseException:
        folder.discard()
        raise
    about = {
        "command": list(command),
        "options": config.as_dict(),
        "sampling": asdict(generation.params),
        "drafting": used_options(config.method, generation.options),
        "model": identity(model),
        "prompt": {
            "source": config.source,
            "tokens": len(prompt),
            "sha256": fingerprint(prompt),
        },
        "started": now(),
        "environment": environment(model.target.device),
    }
    stats = DecodeStats(generation.depth)
    notes = [] if config.preset is None else [remark(config.preset, config.overridden, params.banned)]
    cut = cut_note(options, model.target.width)
    if cut is not None:
        notes.append(cut)
    reused = "ngrams" in used(config.method, generation.options) and generation.options.ngrams
    if reused and params.penalises and not options.reuse_recent and len(prompt) + config.length <= params.window:
        notes.append(
            f"no n-gram is reused: all of the text is in the penalty window of {params.window:,} tokens "
            "(--reuse-recent reuses it)"
        )
    spelled = () if config.chat else special_tokens_in(model.tokenizer, text, len(prompt))
    if spelled:
        notes.append(f"the prompt spells out special tokens, which are taken as such: {', '.join(spelled)}")
    return Job(model, generation, folder, about, prompt, TextStream(model.tokenizer), stats, notes=notes)


def used_options(method: str, options: DraftOptions) -> dict[str, Any]:
    """The drafting options that a method uses, by name."""
    return {name: value for name, value in asdict(options).items() if name in used(method, options)}


def identity(model: LoadedModel) -> dict[str, Any]:
    """What was loaded and how, down to every bit of its weights."""
    weights, draft = model.weights or weights_hash(model.target.model), about_draft(model)
    own = {**model.about(), "weights": weights, "config": config_hash(model.target.model)}
    return own if draft is None else {**own, "draft": draft}


def refuse_full_disk(path: Path, tokens: int, option: str) -> None:
    """Refuse a run whose files would not fit on the disk.

    Args:
        path: the run's folder, there or not.
        tokens: how many are to come.
        option: the one that named the folder.

    Raises:
        InputError: there is too little room.
    """
    need = tokens * _BYTES_PER_TOKEN + _BYTES_BESIDE
    try:
        disk = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists()))
    except OSError:
        return  # what is wrong with it will be said when the folder is made
    if disk.total and disk.free < need:  # some file systems do not say
        raise InputError(
            f"{tokens:,} tokens take about {gigabytes(need)}, {path} has {gigabytes(disk.free)} free", option
        )
