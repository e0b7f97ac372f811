"""What a decode needs of positions and memory, and whether the model and the machine have it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from tswift.drafting.making import draft_slots, partial_slots, recall_bytes
from tswift.drafting.methods import find_method
from tswift.drafting.options import DraftOptions
from tswift.drafting.resolving import resolve_for
from tswift.errors import InputError
from tswift.kv.policies import POLICIES
from tswift.models.draft import DRAFT_OPTION
from tswift.models.memory import available_bytes, gigabytes
from tswift.models.prospect import Prospect, foresee, foresee_draft
from tswift.models.target import CHUNK, Target

_ROWS = 3  # of scores in float64, for each node of a pass: those, what a filter makes of them, and the noise


@dataclass(frozen=True)
class Need:
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
) -> Need:
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


def check_ahead(
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
) -> Need:
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
    seen = foresee(model, device=device, dtype=dtype, attention=attention, heads=heads, draft_weights=draft_weights)
    if seen.heads is not None or not find_method(method).with_heads:
        options = resolve_for(method, seen.device, seen.groups, seen.most_nodes, seen.heads or 0, options)
    loads = seen.weight_bytes, seen.heads_bytes
    need = _need(prompt, length, method, options, seen.token_bytes, seen.vocab_size, *loads)
    need = replace(need, copy_bytes=seen.copy_bytes)
    _refuse_positions(f"at least {prompt:,} prompt tokens", length, need, seen.positions, option)
    if draft is not None and find_method(method).draft:
        small = foresee_draft(draft, seen, attention)
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
) -> Need:
    nodes = options.nodes or (options.gamma or 0) + 1
    partial = partial_slots(method, options)
    slots, scores = prompt + length + nodes, _ROWS * nodes * vocab_size
    return Need(
        prompt + length,
        slots * token_bytes,
        partial * token_bytes,
        scores * torch.float64.itemsize,
        weight_bytes,
        heads_bytes,
        recall_bytes=recall_bytes(method, options, prompt + length, vocab_size),
    )


def _with_workspace(
    need: Need,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    model: Target | Prospect,
    token_bytes: int,
) -> Need:
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


def _refuse_positions(prompt: str, length: int, need: Need, positions: int, option: str | None) -> None:
    if need.positions > positions:
        message = f"{prompt} and {length:,} new ones need {need.positions:,} positions, the model has {positions:,}"
        raise InputError(message, option)


def _refuse_draft_positions(prompt: str, length: int, need: Need, positions: int) -> None:
    if need.positions > positions:
        needed = f"{prompt} and {length:,} new ones need {need.positions:,} positions"
        raise InputError(f"{needed}, the draft model has {positions:,}", DRAFT_OPTION)


def _refuse_memory(need: Need, device: torch.device, option: str | None) -> None:
    if device.type != "cpu":
        beside = Need(need.positions, 0, 0, recall_bytes=need.recall_bytes)
        _refuse_memory(beside, torch.device("cpu"), option)
        need = replace(need, recall_bytes=0)
    free = available_bytes(device)
    if free is None or need.total_bytes <= free:
        return
    # a shorter text would not help
    option = "--model" if need.loaded_bytes > free else option
    raise InputError(f"{need} = {gigabytes(need.total_bytes)}, {device.type} has {gigabytes(free)} free", option)
