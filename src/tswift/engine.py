"""Set up a decode: check positions and memory, resolve options, make the drafter, and run it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch

from tswift.attention.backends import partials_bytes
from tswift.decoding.costs import costs_of, measure
from tswift.decoding.device_step import try_steps
from tswift.decoding.drafter import AcceptFn, Step
from tswift.decoding.loop import Decoding, agree, lockstep
from tswift.decoding.params import MOST_TOP, SamplingParams
from tswift.decoding.text import TextStream, check_stop
from tswift.distributed import ALONE, Dist, guard
from tswift.drafting.history import LogitHistory
from tswift.drafting.methods import cache_slots, make_drafter, resolve
from tswift.drafting.options import MEASURED, DraftOptions, find_method, refuse_unused
from tswift.errors import InputError
from tswift.kv import POLICIES
from tswift.models.devices import available_bytes, gigabytes
from tswift.models.load import LoadedModel, ModelSpec, inspect_draft_model, inspect_model
from tswift.models.passes import NOMINAL
from tswift.models.target import CHUNK, Target

_PARAMS = SamplingParams()
_OPTIONS = DraftOptions()
_ROWS = 3  # of float64 for each node of a pass: logits, filtered logits, noise


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that a decode needs, in bytes, part by part."""

    positions: int  # tokens of prompt and text together
    weight_bytes: int = 0  # of what is to be loaded first; 0 for what is loaded already
    heads_bytes: int = 0
    draft_bytes: int = 0  # of the draft model, or the published drafter
    copy_bytes: int = 0  # of a copy of the model with weights of fewer bits
    full_bytes: int = 0  # the full KV cache, slots for the draft tree included
    partial_bytes: int = 0  # the partial KV cache that drafting reads
    draft_kv_bytes: int = 0  # at least
    recall_bytes: int = 0  # top logits kept for drafting, in the machine's own memory whatever the device
    logits_bytes: int = 0  # of one pass
    workspace_bytes: int = 0  # temporary results, at least; 0 on the CPU

    @property
    def kv_bytes(self) -> int:
        """Bytes of all caches."""
        return self.full_bytes + self.partial_bytes + self.draft_kv_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes of what is to be loaded."""
        return self.weight_bytes + self.heads_bytes + self.draft_bytes + self.copy_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return sum(astuple(self)[1:])

    def held_bytes(self, device: torch.device) -> int:
        """Bytes held on a device for all of the decode: caches, and on the CPU the logits kept for drafting."""
        return self.kv_bytes + (self.recall_bytes if device.type == "cpu" else 0)

    def __str__(self) -> str:
        names = ("weights", "heads", "draft model", "draft weights", "KV", "drafting KV", "draft model's KV")
        parts = zip((*names, "recall", "logits", "workspace"), astuple(self)[1:], strict=True)
        return " + ".join(f"{name} {gigabytes(count)}" for name, count in parts if count)


def check(
    target: Target,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    option: str | None = "length",
    draft: Target | None = None,
) -> MemoryEstimate:
    """Memory that a decode of ``length`` tokens after ``prompt`` tokens needs with a loaded model.

    Args:
        options: resolved ones.
        option: what the user gave the length with, for the error.
        draft: the draft model, if there is one.

    Raises:
        InputError: more than the positions of the model or of its draft model, or than the free memory of its device;
            or there is no draft model, and the method needs one.
    """
    if find_method(method).draft and draft is None:
        raise InputError(f"{method} drafts with a smaller model, and none is loaded", "draft_model")
    return _needed(target, draft, prompt, length, method, options, option)


def preflight(
    model: str,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    *,
    draft_model: str | None = None,
    option: str = "length",
    params: SamplingParams = _PARAMS,
    **how: Any,
) -> MemoryEstimate:
    """Memory that a decode needs at least, weights included: as :func:`check`, before anything is loaded.

    It reads the model's configuration and the header of its heads. What it lets through may still be refused by
    :func:`check`; what it refuses cannot be done.

    Args:
        prompt: number of tokens, at least.
        options: as asked for, not resolved.
        model, draft_model, how: as for :func:`tswift.load`. A draft model that the method does not need is not read.
        option: what the user gave the length with, for the error.
        params: sampling parameters, whose token ids are to be the model's.

    Raises:
        InputError: as :func:`check`; no such model, heads of another model or none for a method that needs some, or
            options that do not fit.
    """
    spec, kind, draft = inspect_model(model, **how), find_method(method), None
    _refuse_ids(spec.vocab_size, logit_bias=params.logit_bias)
    if spec.heads is not None or not kind.needs_heads:
        options = resolve(method, spec, spec.heads, options)
    if draft_model is not None and (kind.draft or kind.may_draft):
        draft = inspect_draft_model(str(draft_model), spec, how.get("attention", "auto"))
    return _needed(spec, draft, prompt, length, method, options, option)


def _needed(
    model: Target | ModelSpec,
    draft: Target | ModelSpec | None,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    option: str | None,
) -> MemoryEstimate:
    """Memory that a decode needs, of a model that is not loaded its weights included; more than there is is refused."""
    kind, positions, ahead = find_method(method), prompt + length, isinstance(model, ModelSpec)
    draft = draft if kind.draft or kind.may_draft else None
    needed = f"{'at least ' * ahead}{prompt:,} prompt tokens and {length:,} new ones need {positions:,} positions"
    if positions > model.max_positions:
        raise InputError(f"{needed}, the model has {model.max_positions:,}", option)
    if draft is not None and positions > draft.max_positions:
        raise InputError(f"{needed}, the draft model has {draft.max_positions:,}", "draft_model")
    network, nodes, token_bytes = model.network_spec, _nodes(options), model.kv_shape.bytes_per_token
    partial, small, window = cache_slots(method, options, positions, network)
    draft_kv_bytes = 0 if draft is None else small * draft.kv_shape.bytes_per_token
    if network is not None:
        draft_kv_bytes += window * network.kv_shape(model.dtype, model.device).bytes_per_token
    estimate = MemoryEstimate(
        positions,
        full_bytes=(positions + nodes) * token_bytes,
        partial_bytes=partial * token_bytes,
        draft_kv_bytes=draft_kv_bytes,
        recall_bytes=LogitHistory.bytes_for(positions, model.vocab_size, options.recall) if options.recall else 0,
        logits_bytes=_ROWS * nodes * model.vocab_size * torch.float64.itemsize,
    )
    if model.device.type == "cuda":
        workspace = _workspace(estimate, model, prompt, length, method, options)
        estimate = replace(estimate, workspace_bytes=workspace)
    if isinstance(model, ModelSpec):
        estimate = replace(
            estimate,
            weight_bytes=model.weight_bytes,
            heads_bytes=model.heads_bytes,
            draft_bytes=model.network_bytes + (draft.weight_bytes if isinstance(draft, ModelSpec) else 0),
            copy_bytes=model.copy_bytes,
        )
    _refuse_memory(estimate, model.device, option)
    return estimate


def _refuse_ids(vocab_size: int, **named: Collection[int]) -> None:
    for name, ids in named.items():
        if not all(0 <= token < vocab_size for token in ids):
            raise InputError(f"has token ids outside the model's vocabulary of {vocab_size:,}", name)


def _nodes(options: DraftOptions) -> int:
    return options.nodes or (options.gamma or 0) + 1


def _workspace(
    estimate: MemoryEstimate, model: Target | ModelSpec, prompt: int, length: int, method: str, options: DraftOptions
) -> int:
    """Bytes of temporary results on CUDA: those of which an 8B model at 100,000 tokens has at least 40 MB.

    Queries of a prompt's chunk (134 MB, and two chunks' at a time), partial results of attention (44 MB for 128 rows,
    more for a long prompt's chunks), and what a selection copies of the keys, then of the values (268 MB for 4,096
    tokens). Less are outputs of graphs (30 MB), the table of n-grams (16 MB), and the state of a step (1 MB).
    """
    nodes, token_bytes, whole = _nodes(options), model.kv_shape.bytes_per_token, max(0, prompt - 1) // CHUNK
    queries, shape = min(2, whole) * CHUNK * token_bytes // 2 * model.groups, model.kv_shape
    partials = partial(partials_bytes, model.attention, (shape.heads, model.groups), shape.head_dim)
    prefill = queries + (partials(whole * CHUNK, CHUNK) if whole else 0)
    step = partials(estimate.positions + nodes, nodes)
    if estimate.partial_bytes:
        chosen = find_method(method)
        budget = options.budget or chosen.budget
        policy = POLICIES[(options.kv or chosen.kv[0]) if "kv" in chosen.uses else "retrieval"]
        selection = budget * token_bytes // 2
        if prompt > budget:
            prefill = max(prefill, selection)
        if policy.renews and length > budget:  # once more, beside the graphs
            step += selection
    return max(step, prefill - estimate.logits_bytes, 0)  # there are no logits while the prompt is read


def _refuse_memory(estimate: MemoryEstimate, device: torch.device, option: str | None) -> None:
    if device.type != "cpu":
        on_cpu = MemoryEstimate(estimate.positions, recall_bytes=estimate.recall_bytes)
        _refuse_memory(on_cpu, torch.device("cpu"), option)
        estimate = replace(estimate, recall_bytes=0)
    free = available_bytes(device)
    if free is None or estimate.total_bytes <= free:
        return
    # a shorter text would not help
    option = "model" if estimate.loaded_bytes > free else option
    needed = f"{estimate} = {gigabytes(estimate.total_bytes)}"
    raise InputError(f"{needed}, {device.type} has {gigabytes(free)} free", option)


@dataclass(frozen=True)
class Generation:
    """A decode ready to run."""

    decoding: Decoding  # its KV cache is allocated
    depth: int  # maximum tokens drafted along a path
    stop: tuple[int, ...]  # token ids that end the text early
    params: SamplingParams  # banned end-of-text tokens included
    options: DraftOptions  # resolved
    need: MemoryEstimate  # of a rank, for its own part
    ranks: Dist = ALONE  # those that decode together
    text: TextStream | None = None  # the text so far and its stop strings; None without any

    def steps(self) -> Iterator[Step]:
        """The steps of the decode; prefills first unless that was done (by all ranks or by none)."""
        steps = self.decoding.steps(self.stop, self.text)
        return steps if self.ranks.count == 1 else lockstep(steps, self.ranks)


def ending(params: SamplingParams, eos_ids: Sequence[int], stop_at_eos: bool) -> tuple[SamplingParams, tuple[int, ...]]:
    """Sampling parameters and stop tokens: end at an end-of-text token, or at an exact length by never drawing one."""
    if stop_at_eos:
        return params, tuple(eos_ids)
    return replace(params, banned=tuple(sorted({*params.banned, *eos_ids}))), ()


def begin(
    model: LoadedModel,
    prompt: Sequence[int],
    length: int,
    *,
    method: str = "auto",
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    options: DraftOptions = _OPTIONS,
    stop_at_eos: bool = False,
    written: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    walk: Callable[[int], AcceptFn] | None = None,
) -> Generation:
    """Check the arguments of :func:`generate`, and allocate the caches.

    Where ranks hold the model together, all of them have to call this, and what rank 0 asks for counts.

    Args:
        walk: makes a walk for :class:`Decoding` from the maximum tokens drafted along a path.

    Raises:
        InputError: an empty prompt, a length that leaves nothing to generate, an unknown method, options that do not
            fit the model, or more positions or memory than there are; on any rank.
    """
    ranks = model.ranks
    prompt, length, method, params, seed, options, stop_at_eos, written, stop, logprobs = ranks.share(
        (prompt, length, method, params, seed, options, stop_at_eos, written, stop, logprobs)
    )
    with ranks.fail_together():
        if length <= len(written):
            so_far = f", as {len(written):,} tokens are there already" if written else ""
            raise InputError(f"must be at least {len(written) + 1:,}, got {length:,}{so_far}", "length")
        if not prompt:
            raise InputError("has no tokens", "prompt")
        named = {"banned": params.banned, "logit_bias": params.logit_bias}
        _refuse_ids(model.target.vocab_size, prompt=prompt, written=written, **named)
        most = min(MOST_TOP, model.target.vocab_size)
        if logprobs is not None and not 0 <= logprobs <= most:
            raise InputError(f"must be between 0 and {most}, got {logprobs}", "logprobs")
        strings = check_stop(stop)
        text = TextStream(model.tokenizer, strings) if strings else None
        if text is not None:
            text.add(written)
            if text.stopped is not None:
                raise InputError(f"the text so far has {text.stopped!r} in it already", "stop")
        params, eos_ids = ending(params, model.eos_ids, stop_at_eos)
        if model.target.device.type == "cuda":
            try_steps(model.target, params)
        target = model.target.reference() if find_method(method).reference else model.target
        resolved = resolve(method, target, model.heads, options)
        need = check(target, len(prompt), length, method, resolved, draft=model.draft)
    costs, draft_costs, drafting = NOMINAL, None, resolved
    if resolved.costs == MEASURED and ranks.count == 1:
        costs = costs_of(target, model.heads)
        if model.drafting is not None and find_method(method).partial:
            draft_costs = costs_of(model.drafting, model.heads)
    elif resolved.costs == MEASURED:  # by all ranks together, which must decide alike: their clocks differ
        drafting = replace(resolved, costs="nominal")
        with guard():
            costs = ranks.share(measure(target, model.heads))
    with ranks.fail_together():
        positions, copy = len(prompt) + length, (model.drafting, draft_costs)
        drafter = make_drafter(method, target, model.heads, drafting, model.draft, positions, costs, *copy)
        if ranks.count > 1:
            agree(drafter, ranks)
        decoding = Decoding(
            target, prompt, params, seed, drafter, length, walk and walk(drafter.depth), written, logprobs
        )
    return Generation(decoding, drafter.depth, eos_ids, params, resolved, need, ranks, text)


def generate(
    model: LoadedModel,
    prompt: str | Sequence[int],
    length: int,
    *,
    method: str = "auto",
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    options: DraftOptions | None = None,
    stop_at_eos: bool = False,
    written: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
) -> Iterator[Step]:
    """Continue a text. The tokens depend on model, prompt, params and seed; never on the method or its options.

    Args:
        model: from :func:`tswift.load`.
        prompt: a text, or its token ids.
        length: tokens to generate, exactly unless ``stop_at_eos``; those in ``written`` count.
        method: one of ``tswift.drafting.options.METHODS``.
        params: how each token is drawn.
        seed: any integer.
        options: how the method drafts; an option that it does not use is refused if it is not the default.
        stop_at_eos: end at an end-of-text token, which is the last one then. Otherwise those are never drawn.
        written: the tokens that an earlier call with the same arguments has generated so far: the text goes on as that
            call's would have. It must not have come to its end; that is not checked of end-of-text tokens.
        stop: strings that end the text. The last token is the one that completes the first of them; see
            :class:`tswift.decoding.text.TextStream` for the text up to there.
        logprobs: give each step the log-probabilities of its tokens, and of so many likeliest ones (0 to 20):
            ``Step.logprobs``, see :func:`tswift.decoding.sampling.row_type`.

    Returns:
        An iterator of steps, each with one or more new tokens. The text so far is prefilled when the first is asked
        for.

    Raises:
        InputError: a wrong argument, named: as :func:`begin`, or one of another type.
    """
    _refuse_types(model, prompt, length, method, seed, params, options, stop_at_eos, written, logprobs)
    if options is not None:
        refuse_unused([method], options.changed())
    run = begin(
        model,
        model.encode(prompt) if isinstance(prompt, str) else list(prompt),
        length,
        method=method,
        params=params,
        seed=seed,
        options=options or _OPTIONS,
        stop_at_eos=stop_at_eos,
        written=written,
        stop=stop,
        logprobs=logprobs,
    )
    return run.steps()


def _refuse_types(
    model: object,
    prompt: object,
    length: object,
    method: object,
    seed: object,
    params: object,
    options: object,
    stop_at_eos: object,
    written: object,
    logprobs: object,
) -> None:
    """Refuse arguments of other types, by name."""
    if not isinstance(stop_at_eos, bool):
        raise InputError(f"must be True or False, got {stop_at_eos!r:.60}", "stop_at_eos")
    for name, fine, expected, value in (
        ("model", isinstance(model, LoadedModel), "what tswift.load returns", model),
        ("prompt", isinstance(prompt, str) or _are_ids(prompt), "a text or token ids", prompt),
        ("length", isinstance(length, Integral), "an integer", length),
        ("method", isinstance(method, str), "a name", method),
        ("seed", isinstance(seed, Integral), "an integer", seed),
        ("params", isinstance(params, SamplingParams), "SamplingParams", params),
        ("options", options is None or isinstance(options, DraftOptions), "DraftOptions", options),
        ("written", _are_ids(written), "token ids", written),
        ("logprobs", logprobs is None or isinstance(logprobs, Integral), "an integer", logprobs),
    ):
        if not fine or isinstance(value, bool):
            raise InputError(f"must be {expected}, got {value!r:.60}", name)


def _are_ids(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(token, Integral) for token in value)
