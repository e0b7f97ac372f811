"""What a user asks of a job, and the job made of it: everything cheap is checked before anything heavy is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tswift.decoding.params import SamplingParams
from tswift.decoding.stats import DecodeStats
from tswift.drafting.methods import OF_CHOICE, OF_NGRAMS, cut_note, find_method, used
from tswift.drafting.options import FULL, DraftOptions
from tswift.engine import begin, preflight
from tswift.errors import InputError
from tswift.jobs.environment import environment, now
from tswift.jobs.folder import RunFolder, default_path
from tswift.jobs.job import Job
from tswift.jobs.presets import banned_ids, choose, remark
from tswift.jobs.prompt import (
    BUNDLED_PREFILL,
    TextStream,
    fingerprint,
    read_prompt,
    read_system,
    refuse_with_chat,
    render,
    special_tokens_in,
    take,
)
from tswift.models import quantizing
from tswift.models.devices import gigabytes
from tswift.models.draft import DRAFT_OPTION
from tswift.models.fingerprint import config_hash, weights_hash
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load
from tswift.models.ranks import ALONE, Ranks
from tswift.models.shapes import refuse_shape
from tswift.models.source import DEMO, DEMO_DRAFT

UNQUANTISED = "none"  # drafting passes run on the model as it is


def draft_for(methods: Sequence[str], model: str, asked: str | None) -> str | None:
    """The draft model to load for methods; None if none of them needs one.

    Args:
        methods: names.
        model: the large model's name.
        asked: what was typed, or None: that is the bundled draft model for the bundled model.

    Raises:
        InputError: no such method, one was typed and none needs it, or none was typed and one is needed.
    """
    needing = [method for method in methods if find_method(method).draft]
    if asked is not None and not needing:
        message = f"{methods[0]} does not use it" if len(methods) == 1 else f"none of {', '.join(methods)} uses it"
        raise InputError(message, DRAFT_OPTION)
    if not needing or asked is not None:
        return asked
    if model != DEMO:
        raise InputError(f"names a smaller model with the tokens of {model}, which {needing[0]} needs", DRAFT_OPTION)
    return DEMO_DRAFT


def weights_for(methods: Sequence[str], asked: str | None) -> str | None:
    """What the model's own drafting passes are to be quantised by; None for nothing.

    Args:
        methods: names.
        asked: what was typed, ``none`` for nothing; or None.

    Raises:
        InputError: no such method or kind, or one was typed and none of the methods drafts with the model itself.
    """
    kinds = (UNQUANTISED, *quantizing.KINDS)
    if asked is not None and asked not in kinds:
        raise InputError(f"no {asked!r:.40}; there are {', '.join(kinds)}", quantizing.DRAFT_OPTION)
    if asked is not None and not any(find_method(method).partial for method in methods):
        one = f"{methods[0]} does not draft with the model itself"
        message = one if len(methods) == 1 else f"none of {', '.join(methods)} drafts with the model itself"
        raise InputError(message, quantizing.DRAFT_OPTION)
    return None if asked == UNQUANTISED else asked


def about_draft(model: LoadedModel) -> dict[str, Any] | None:
    """For records: a loaded model's draft model, down to every bit of its weights; None if it has none."""
    if model.draft is None:
        return None
    return {"name": model.draft_name, "weights": weights_hash(model.draft.model)}


_BYTES_PER_TOKEN = 4 + 6  # its id, and its text
_BYTES_BESIDE = 100_000  # journal and record


@dataclass(frozen=True)
class Settings:
    """A job as asked for; see ``tswift generate --help`` for what each field means.

    Attributes:
        preset: name of the settings that count where nothing else was given.
        sampling: fields of ``SamplingParams`` that were given.
        drafting: fields of ``DraftOptions`` that were given. One that the method does not use is refused.
        model: None for the preset's, or the bundled one.
        draft_model: None for the bundled one, where the method needs one and the model is the bundled one.
        draft_weights: ``int8``, ``fp8`` or ``int4``; ``none`` is what None is.
        out: folder for the run; None for one named after the time and the method.
    """

    length: int
    method: str = "tokenswift"
    prompt: str | None = None
    prefill: int | None = None
    seed: int = 0
    stop_at_eos: bool = False
    chat: bool = False
    system: str | None = None
    preset: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)
    heads: str | None = None
    model: str | None = None
    draft_model: str | None = None
    draft_weights: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    exact: bool | None = None
    quantize: str | None = None
    out: Path | None = None


def start(settings: Settings, command: Sequence[str], ranks: Ranks = ALONE) -> Job:
    """Check the settings, make the run's folder, load the model: a job ready to run.

    Args:
        settings: what is asked.
        command: the words of the command line, for ``run.json``.
        ranks: those that do it together, of which this is the first; the others follow (``tswift.jobs.following``).

    Raises:
        InputError: something asked cannot be done. No folder is left behind then.
    """
    settings, chosen = _filled(settings)
    params, options = _checked(settings)
    text = read_prompt(settings.prompt)
    system = None if settings.system is None else read_system(settings.system)
    name = DEMO if settings.model is None else settings.model
    how: dict[str, Any] = {
        "draft": draft_for([settings.method], name, settings.draft_model),
        "draft_weights": weights_for([settings.method], settings.draft_weights),
        "device": settings.device,
        "dtype": settings.dtype,
        "attention": settings.attention,
        "heads": settings.heads,
    }
    if ranks.count == 1 and settings.quantize is None:  # else how much memory it takes is seen when it is loaded
        least = settings.prefill or (BUNDLED_PREFILL if settings.prompt is None else 1)
        larger = "--prefill" if settings.prefill and settings.prefill > settings.length else "--len"
        preflight(name, least, settings.length, settings.method, options, option=larger, **how)
    path = settings.out or default_path(settings.method)
    refuse_full_disk(path, settings.length, "--out")
    folder = RunFolder.create(path)
    try:
        exact = False if find_method(settings.method).reference else settings.exact
        model = load(name, quantize=settings.quantize, exact=exact, ranks=ranks, **how)
        if settings.preset is not None:
            params = replace(params, banned=banned_ids(settings.preset, model.tokenizer, model.target.vocab_size))
        if settings.chat:
            prompt = model.encode(render(model.tokenizer, model.name, text, system), bare=True)
        else:
            prompt = take(model.encode(text), settings.prefill, bundled=settings.prompt is None)
        generation = begin(
            model,
            prompt,
            settings.length,
            method=settings.method,
            params=params,
            seed=settings.seed,
            options=options,
            stop_at_eos=settings.stop_at_eos,
        )
        folder.keep_prompt(prompt)
    except BaseException:
        folder.discard()
        raise
    about = {
        "command": list(command),
        "options": asdict(settings),
        "sampling": asdict(generation.params),
        "drafting": used_options(settings.method, generation.options),
        "model": identity(model),
        "prompt": {
            "source": settings.prompt or "bundled",
            "tokens": len(prompt),
            "sha256": fingerprint(prompt),
        },
        "started": now(),
        "environment": environment(model.target.device),
    }
    stats = DecodeStats(generation.depth)
    notes = [] if settings.preset is None else [remark(settings.preset, chosen, params.banned)]
    cut = cut_note(options, model.target.width)
    if cut is not None:
        notes.append(cut)
    spelled = () if settings.chat else special_tokens_in(model.tokenizer, text, len(prompt))
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


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters with the fields that were given.

    Raises:
        InputError: a value outside its range.
    """
    try:
        return SamplingParams(**given)
    except ValueError as error:
        # the message begins with the field's name
        name, _, rest = str(error).partition(" ")
        raise InputError(f"--{name.replace('_', '-')} {rest}") from None


def refuse_below_one(options: Mapping[str, int | None]) -> None:
    """Refuse counts of nothing.

    Raises:
        InputError: a number below 1.
    """
    for option, value in options.items():
        if value is not None and value < 1:
            raise InputError(f"must be at least 1, got {value}", option)


def refuse_unused(
    methods: Sequence[str],
    given: Mapping[str, Any],
    trees: Mapping[str, tuple[int, ...] | str] | None = None,
) -> None:
    """No option is silently ignored: refuse what none of the methods uses.

    Args:
        methods: names.
        given: fields of ``DraftOptions`` that were given, and ``heads``; None for what was not.
        trees: those of single methods, where they have others than the one that was given.

    Raises:
        InputError: no such method, or an option for none of them.
    """
    options = DraftOptions(kv=given.get("kv"), tree=given.get("tree"), recall=given.get("recall"))
    trees = trees or {}
    looked_at = {
        name for method in methods for name in used(method, replace(options, tree=trees.get(method, options.tree)))
    }
    if "tree" in looked_at:
        looked_at |= {"gamma"}
    if any(find_method(method).with_heads for method in methods):
        looked_at |= {"heads"}
    for name, value in given.items():
        if value is not None and name not in looked_at:
            message = f"{methods[0]} does not use it" if len(methods) == 1 else f"none of {', '.join(methods)} uses it"
            message += " with --kv full" if options.kv == FULL else ""
            message += " without --tree auto" if name in OF_CHOICE and "tree" in looked_at else ""
            reused = name in OF_NGRAMS and any(name in find_method(method).uses for method in methods)
            message += " with --tree auto, but for --recall 0" if reused else ""
            raise InputError(message, f"--{name.replace('_', '-')}")


def _filled(settings: Settings) -> tuple[Settings, Sequence[str]]:
    """The settings with those of the preset where nothing was given, and which of the preset's do not count."""
    if settings.preset is None:
        return replace(settings, model=DEMO if settings.model is None else settings.model), ()
    chosen = choose(
        settings.preset,
        settings.method,
        settings.sampling,
        settings.drafting,
        model=settings.model,
    )
    filled = replace(settings, model=chosen.model, sampling=chosen.sampling, drafting=chosen.drafting)
    return filled, chosen.instead


def _checked(settings: Settings) -> tuple[SamplingParams, DraftOptions]:
    refuse_below_one({"--len": settings.length, "--prefill": settings.prefill})
    refuse_with_chat(settings.chat, settings.prompt, settings.prefill, settings.system)
    refuse_shape(DEMO if settings.model is None else settings.model)
    heads = {} if settings.heads is None else {"heads": settings.heads}
    refuse_unused([settings.method], {**settings.drafting, **heads})
    if settings.exact and find_method(settings.method).reference:
        raise InputError(f"cannot be had with {settings.method}, which sums as reference implementations do", "--exact")
    return sampling_params(settings.sampling), DraftOptions(**settings.drafting)
