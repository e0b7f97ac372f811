"""From a loaded model and what is asked of it to a decode that runs, checked against positions and memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import torch

from tswift.decoding.costs import costs_of, measure
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.decoding.ranked import AgreedDrafter, in_step
from tswift.decoding.step import Step, Walk
from tswift.decoding.trust import try_steps
from tswift.drafting.methods import (
    draft_slots,
    make_drafter,
    partial_slots,
    recall_bytes,
    resolve,
    resolve_for,
)
from tswift.drafting.options import MEASURED, DraftOptions, find_method, refuse_unused
from tswift.errors import InputError
from tswift.kv.policies import POLICIES
from tswift.models.devices import available_bytes, gigabytes
from tswift.models.draft import DRAFT_OPTION
from tswift.models.loaded import LoadedModel
from tswift.models.passes import NOMINAL
from tswift.models.prospect import ModelSpec, inspect_draft_model, inspect_model
from tswift.models.ranks import ALONE, Ranks
from tswift.models.target import CHUNK, Target

_PARAMS = SamplingParams()
_OPTIONS = DraftOptions()
_ROWS = 3  # of scores in float64, for each node of a pass: those, what a filter makes of them, and the noise


@dataclass(frozen=True)
class MemoryEstimate:
    """What a decode needs.

    Attributes:
        positions: tokens of prompt and text together.
        full_bytes: bytes of the full KV cache, slots for the draft tree included.
        partial_bytes: bytes of the partial KV cache that drafting reads; 0 if there is none.
        logits_bytes: bytes of one pass's scores.
        weight_bytes, heads_bytes, draft_bytes, copy_bytes: bytes of what is to be loaded first, model, heads, draft
            model and a copy of the model with weights of fewer bits; 0 for what is there already.
        draft_kv_bytes: bytes of the draft model's KV cache, at least; 0 if there is none.
        recall_bytes: bytes of what is kept to be recalled, in the machine's own memory whatever the device; 0 for none.
        workspace_bytes: bytes of temporary results, at least; 0 on the CPU.
    """

    positions: int
    full_bytes: int
    partial_bytes: int
    logits_bytes: int = 0
    weight_bytes: int = 0
    heads_bytes: int = 0
    draft_bytes: int = 0
    copy_bytes: int = 0
    draft_kv_bytes: int = 0
    recall_bytes: int = 0
    workspace_bytes: int = 0

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
        return self.loaded_bytes + self.kv_bytes + self.recall_bytes + self.logits_bytes + self.workspace_bytes

    def held_bytes(self, device: torch.device) -> int:
        """Bytes that a device holds for as long as the decode lasts: caches, and what is recalled if it is the CPU."""
        return self.kv_bytes + (self.recall_bytes if device.type == "cpu" else 0)

    def __str__(self) -> str:
        parts = {
            "weights": self.weight_bytes,
            "heads": self.heads_bytes,
            "draft model": self.draft_bytes,
            "draft weights": self.copy_bytes,
            "KV": self.full_bytes,
            "drafting KV": self.partial_bytes,
            "draft model's KV": self.draft_kv_bytes,
            "recall": self.recall_bytes,
            "logits": self.logits_bytes,
            "workspace": self.workspace_bytes,
        }
        return " + ".join(f"{name} {gigabytes(count)}" for name, count in parts.items() if count)


def check(
    target: Target,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    option: str | None = "--len",
    draft: Target | None = None,
) -> MemoryEstimate:
    """What a decode of ``length`` tokens after ``prompt`` tokens needs, now that the model is loaded.

    Args:
        target: the model.
        prompt: tokens.
        length: tokens.
        method: one of ``METHODS``.
        options: resolved ones.
        option: what the user gave the length with, for the error.
        draft: the draft model, if there is one.

    Raises:
        InputError: more than the positions of the model or of its draft model, or than the free memory of its device;
            or there is no draft model, and the method needs one.
    """
    need = _need(prompt, length, method, options, target.kv_shape.bytes_per_token, target.vocab_size)
    _refuse_positions(f"{prompt:,} prompt tokens", length, need, target.max_positions, option)
    if find_method(method).draft:
        if draft is None:
            raise InputError(f"{method} drafts with a smaller model, and none is loaded", DRAFT_OPTION)
        _refuse_draft_positions(f"{prompt:,} prompt tokens", length, need, draft.max_positions)
        need = replace(
            need, draft_kv_bytes=draft_slots(method, options, need.positions) * draft.kv_shape.bytes_per_token
        )
    need = _with_workspace(need, prompt, length, method, options, target, target.kv_shape.bytes_per_token)
    _refuse_memory(need, target.device, option)
    return need


def preflight(
    model: str,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    draft: str | None = None,
    draft_weights: str | None = None,
    option: str = "--len",
) -> MemoryEstimate:
    """What a decode needs at least, weights included: before the model is loaded. See :func:`tswift.load` for that.

    It reads the model's configuration and the header of its heads. What it lets through may still be refused by
    :func:`check`; what it refuses cannot be done.

    Args:
        model: as for :func:`tswift.load`.
        prompt: tokens it will have at least.
        length: tokens.
        method: one of ``METHODS``.
        options: as asked for.
        device, dtype, attention, heads, draft, draft_weights: as for :func:`tswift.load`. A draft model that the method
            does not need is not looked at.
        option: what the user gave the length with, for the error.

    Raises:
        InputError: more positions or memory than there are, no such model, heads that are none, that were made for
            another model or that the method lacks, or options that do not fit.
    """
    seen = inspect_model(
        model, device=device, dtype=dtype, attention=attention, heads=heads, draft_weights=draft_weights
    )
    if seen.heads is not None or not find_method(method).with_heads:
        options = resolve_for(method, seen.device, seen.groups, seen.most_nodes, seen.heads or 0, options)
    loads = seen.weight_bytes, seen.heads_bytes
    need = _need(prompt, length, method, options, seen.token_bytes, seen.vocab_size, *loads)
    need = replace(need, copy_bytes=seen.copy_bytes)
    _refuse_positions(f"at least {prompt:,} prompt tokens", length, need, seen.positions, option)
    if draft is not None and find_method(method).draft:
        small = inspect_draft_model(draft, seen, attention)
        _refuse_draft_positions(f"at least {prompt:,} prompt tokens", length, need, small.positions)
        kv_bytes = draft_slots(method, options, need.positions) * small.token_bytes
        need = replace(need, draft_bytes=small.weight_bytes, draft_kv_bytes=kv_bytes)
    need = _with_workspace(need, prompt, length, method, options, seen, seen.token_bytes)
    _refuse_memory(need, seen.device, option)
    return need


def _need(
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    token_bytes: int,
    vocab_size: int,
    weight_bytes: int = 0,
    heads_bytes: int = 0,
) -> MemoryEstimate:
    nodes = options.nodes or (options.gamma or 0) + 1
    partial = partial_slots(method, options)
    slots, scores = prompt + length + nodes, _ROWS * nodes * vocab_size
    return MemoryEstimate(
        prompt + length,
        slots * token_bytes,
        partial * token_bytes,
        scores * torch.float64.itemsize,
        weight_bytes,
        heads_bytes,
        recall_bytes=recall_bytes(method, options, prompt + length, vocab_size),
    )


def _with_workspace(
    need: MemoryEstimate,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    model: Target | ModelSpec,
    token_bytes: int,
) -> MemoryEstimate:
    """The need with what a decode on CUDA holds for a while, as far as an 8B model at 100,000 tokens has 40 MB of it.

    Queries of a prompt's chunk (134 MB, and two chunks' at a time), partial results of attention (44 MB for 128 rows,
    more for a long prompt's chunks), and what a selection copies of the keys, then of the values (268 MB for 4,096
    tokens). Less are outputs of graphs (30 MB), the table of n-grams (16 MB), and the state of a step (1 MB).
    """
    if model.device.type != "cuda":
        return need
    nodes, whole = options.nodes or (options.gamma or 0) + 1, max(0, prompt - 1) // CHUNK
    queries = min(2, whole) * CHUNK * token_bytes // 2 * model.groups
    prefill = queries + (model.partials_bytes(whole * CHUNK, CHUNK) if whole else 0)
    step = model.partials_bytes(need.positions + nodes, nodes)
    if need.partial_bytes:
        found = find_method(method)
        budget = options.budget or found.budget
        policy = POLICIES[(options.kv or found.kv[0]) if "kv" in found.uses else "retrieval"]
        selection = budget * token_bytes // 2
        if prompt > budget:
            prefill = max(prefill, selection)
        if policy.renews and length > budget:  # once more, beside the graphs
            step += selection
    # no logits are there while the prompt is read
    return replace(need, workspace_bytes=max(step, prefill - need.logits_bytes, 0))


def _refuse_positions(prompt: str, length: int, need: MemoryEstimate, positions: int, option: str | None) -> None:
    if need.positions > positions:
        message = f"{prompt} and {length:,} new ones need {need.positions:,} positions, the model has {positions:,}"
        raise InputError(message, option)


def _refuse_draft_positions(prompt: str, length: int, need: MemoryEstimate, positions: int) -> None:
    if need.positions > positions:
        needed = f"{prompt} and {length:,} new ones need {need.positions:,} positions"
        raise InputError(f"{needed}, the draft model has {positions:,}", DRAFT_OPTION)


def _refuse_memory(need: MemoryEstimate, device: torch.device, option: str | None) -> None:
    if device.type != "cpu":
        beside = MemoryEstimate(need.positions, 0, 0, recall_bytes=need.recall_bytes)
        _refuse_memory(beside, torch.device("cpu"), option)
        need = replace(need, recall_bytes=0)
    free = available_bytes(device)
    if free is None or need.total_bytes <= free:
        return
    # a shorter text would not help
    option = "--model" if need.loaded_bytes > free else option
    raise InputError(f"{need} = {gigabytes(need.total_bytes)}, {device.type} has {gigabytes(free)} free", option)


@dataclass(frozen=True)
class Generation:
    """A decode ready to run.

    Attributes:
        decoding: the decode; its KV cache is allocated.
        depth: most tokens drafted along a path, for :class:`~tswift.decoding.stats.DecodeStats`.
        stop: token ids that end the text early.
        params: the sampling parameters, banned end-of-text tokens included.
        options: the drafting options with tree and nodes filled in.
        need: what it needs of positions and memory; of a rank, for its own part.
        ranks: those that make it together.
    """

    decoding: Decoding
    depth: int
    stop: tuple[int, ...]
    params: SamplingParams
    options: DraftOptions
    need: MemoryEstimate
    ranks: Ranks = ALONE

    def steps(self) -> Iterator[Step]:
        """The steps of the decode; prefills first unless that was done, as all ranks have to have done alike."""
        steps = self.decoding.steps(self.stop)
        return steps if self.ranks.count == 1 else in_step(steps, self.ranks)


def ending(params: SamplingParams, eos_ids: Sequence[int], stop_at_eos: bool) -> tuple[SamplingParams, tuple[int, ...]]:
    """How the text ends: by an end-of-text token, or at an exact length because those tokens are never drawn.

    Returns:
        The parameters to sample with, and the token ids to stop at.
    """
    if stop_at_eos:
        return params, tuple(eos_ids)
    return replace(params, banned=tuple(sorted({*params.banned, *eos_ids}))), ()


def begin(
    model: LoadedModel,
    prompt: Sequence[int],
    length: int,
    *,
    method: str = "tokenswift",
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    options: DraftOptions = _OPTIONS,
    stop_at_eos: bool = False,
    written: Sequence[int] = (),
    walk: Callable[[int], Walk] | None = None,
) -> Generation:
    """Check what is asked, and allocate what it takes. See :func:`generate` for the arguments.

    Where ranks hold the model together, all of them have to call this, and what the first asks for counts.

    Args:
        walk: makes a walk for :class:`Decoding` from the most tokens that are drafted along a path.

    Raises:
        InputError: an empty prompt, a length that leaves nothing to generate, an unknown method, options that do not
            fit the model, or more positions or memory than there are; on any rank.
    """
    ranks = model.ranks
    prompt, length, method, params, seed, options, stop_at_eos, written = ranks.share(
        (prompt, length, method, params, seed, options, stop_at_eos, written)
    )
    with ranks.alike():
        if length <= len(written):
            so_far = f", as {len(written):,} tokens are there already" if written else ""
            raise InputError(f"must be at least {len(written) + 1:,}, got {length:,}{so_far}", "--len")
        if not prompt:
            raise InputError("has no tokens", "--prompt")
        params, stop = ending(params, model.eos_ids, stop_at_eos)
        if model.target.device.type == "cuda":
            try_steps(model.target, params)
        target = model.target.reference() if find_method(method).reference else model.target
        resolved = resolve(method, target, model.heads, options)
        need = check(target, len(prompt), length, method, resolved, draft=model.draft)
    costs, draft_costs = NOMINAL, None
    if resolved.costs == MEASURED and ranks.count == 1:
        costs = costs_of(target, model.heads)
        if model.drafting is not None and find_method(method).partial:
            draft_costs = costs_of(model.drafting, model.heads)
    elif resolved.costs == MEASURED:  # by all together, and of one mind
        with ranks.together():
            costs = ranks.share(measure(target, model.heads))
    with ranks.alike():
        # clocks of ranks differ, and what they were told of costs does not
        drafting = resolved if ranks.count == 1 or not resolved.costs else replace(resolved, costs="nominal")
        positions = len(prompt) + length
        copied = model.drafting, draft_costs
        drafter = make_drafter(method, target, model.heads, drafting, model.draft, positions, costs, *copied)
        if ranks.count > 1:
            drafter = AgreedDrafter(drafter, ranks)
        decoding = Decoding(target, prompt, params, seed, drafter, length, walk and walk(drafter.depth), written)
    return Generation(decoding, drafter.depth, stop, params, resolved, need, ranks)


def generate(
    model: LoadedModel,
    prompt: str | Sequence[int],
    length: int,
    *,
    method: str = "tokenswift",
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    options: DraftOptions | None = None,
    stop_at_eos: bool = False,
    written: Sequence[int] = (),
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
            call's would have. One that has come to its end is not to be gone on with: that is not looked at.

    Returns:
        An iterator of steps, each with one or more new tokens. The text so far is prefilled when the first is asked
        for.

    Raises:
        InputError: a wrong argument, named: as :func:`begin`, or one of another type.
    """
    _refuse_types(prompt, length, seed, params, options)
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
    )
    return run.steps()


def _refuse_types(prompt: object, length: object, seed: object, params: object, options: object) -> None:
    """Refuse arguments of other types, by name."""
    ids = isinstance(prompt, Sequence) and all(isinstance(token, Integral) for token in prompt)
    for name, fine, expected, value in (
        ("prompt", isinstance(prompt, str) or ids, "a text or token ids", prompt),
        ("length", isinstance(length, Integral), "an integer", length),
        ("seed", isinstance(seed, Integral), "an integer", seed),
        ("params", isinstance(params, SamplingParams), "SamplingParams", params),
        ("options", options is None or isinstance(options, DraftOptions), "DraftOptions", options),
    ):
        if not fine or isinstance(value, bool):
            raise InputError(f"must be {expected}, got {value!r:.60}", name)
