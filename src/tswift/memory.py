"""The memory that a decode needs: with a loaded model, or before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from tswift.drafting.history import LogitHistory
from tswift.drafting.methods import cache_slots, resolve
from tswift.drafting.options import DraftOptions, find_method
from tswift.errors import InputError
from tswift.forward.target import Target
from tswift.loading.plan import ModelPlan
from tswift.machine import available_bytes, gigabytes
from tswift.sampling.parameters import SamplingParams

_PARAMS = SamplingParams()
_ROWS = 3  # of float64 for each node of a pass: logits, filtered logits, noise
# of weights and caches, that a CUDA pass takes beside them at least: queries of a prompt's chunk,
# partial results of attention, what a selection copies. It is 0.3 to 0.45 GB beside 29 GB for an 8B
# model and 100,000 tokens
_SHARE = 0.01


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that a decode needs: bytes by what they are for.

    Attributes:
        positions: tokens of prompt and text together.
        options: of drafting, by which it was reckoned.
        loaded: what is to be loaded first; empty where all is there.
        caches: keys, values and states, held all along.
        recall_bytes: top logits kept for drafting, in the machine's own memory whatever the device.
        passing: the logits of a pass and, on CUDA, other temporary results.
    """

    positions: int
    options: DraftOptions = field(default_factory=DraftOptions)
    loaded: Mapping[str, int] = field(default_factory=dict)
    caches: Mapping[str, int] = field(default_factory=dict)
    recall_bytes: int = 0
    passing: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of everything, by what they are for."""
        return {**self.loaded, **self.caches, "recall": self.recall_bytes, **self.passing}

    @property
    def kv_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(self.caches.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return sum(self.parts.values())

    def held_bytes(self, device: torch.device) -> int:
        """Bytes held on a device for all of the decode: caches,
        and on the CPU the logits kept for drafting.
        """
        return self.kv_bytes + (self.recall_bytes if device.type == "cpu" else 0)

    def __str__(self) -> str:
        return " + ".join(
            f"{name} {gigabytes(count)}" for name, count in self.parts.items() if count
        )


@dataclass(frozen=True)
class Demand:
    """The sizes a decode's memory is estimated from."""

    prompt: int  # tokens, at least
    length: int  # new tokens
    method: str
    options: DraftOptions
    # nobody asked for this length: it gives way to the positions that there are
    flexible: bool = False

    @property
    def nodes(self) -> int:
        """Nodes of its passes, at most."""
        return self.options.nodes or (self.options.gamma or 0) + 1


def fit_length(length: int, prompt: int, positions: int) -> int:
    """As much of a length as a model has positions for behind a prompt; one token at least,
    which may be refused.
    """
    return max(1, min(length, positions - prompt))


def preflight(
    plan: ModelPlan, demand: Demand, *, option: str = "length", params: SamplingParams = _PARAMS
) -> MemoryEstimate:
    """Memory that a decode needs at least, weights included:
    as :func:`check`, before anything is loaded.

    What it lets through may still
    be refused by :func:`check`; what it refuses cannot be done.

    Args:
        plan: what is to be loaded. A draft model that the method does not need is not read.
        demand: with options as asked for, not resolved.
        option: what the user gave the length with, for the error.
        params: sampling parameters, whose token ids are to be the model's.

    Raises:
        InputError: as :func:`check`; no such model, heads of another model or none for a method
            that needs some, or options that do not fit.
    """
    kind = find_method(demand.method)
    if demand.flexible:
        demand = replace(
            demand, length=fit_length(demand.length, demand.prompt, plan.max_positions)
        )
    refuse_ids(plan.vocab_size, logit_bias=params.logit_bias, stop_token_ids=params.stop_token_ids)
    heads = plan.heads_count
    if heads is not None or "heads" not in kind.needs:
        beside = plan.asked.draft_model is not None
        options = resolve(demand.method, plan, heads, demand.options, beside)
        demand = replace(demand, options=options)
    draft = plan.draft if "draft_model" in kind.loads else None
    return check(plan, demand, option, draft)


def check(
    model: Target | ModelPlan,
    demand: Demand,
    option: str | None = "length",
    draft: Target | ModelPlan | None = None,
    spare: int = 0,
) -> MemoryEstimate:
    """Memory that a decode needs; of a model that is not loaded, its weights included.

    Args:
        demand: with resolved options.
        option: what the user gave the length with, for the error.
        draft: the draft model, if there is one.
        spare: bytes of the device that are in use and can be made free.

    Raises:
        InputError: more than the positions of the model or of its draft model, or than the free
            memory of its device.
    """
    kind = find_method(demand.method)
    options = demand.options
    nodes = demand.nodes
    positions = demand.prompt + demand.length
    draft = draft if "draft_model" in kind.loads else None
    least = "at least " if isinstance(model, ModelPlan) else ""
    texts = f"{least}{demand.prompt:,} prompt tokens and {demand.length:,} new ones"
    needed = f"{texts} need {positions:,} positions"
    if positions > model.max_positions:
        more = "--yarn gives more to one with rotary embeddings"
        raise InputError(f"{needed}, the model has {model.max_positions:,}; {more}", option)
    if draft is not None and positions > draft.max_positions:
        raise InputError(f"{needed}, the draft model has {draft.max_positions:,}", "draft_model")
    network = model.speculator_spec
    states = model.kv_shape.states
    partial, small, window = cache_slots(kind, options, positions, network)
    caches = {
        "KV": (positions + nodes) * model.kv_shape.bytes_per_token,
        "drafting KV": partial * model.kv_shape.bytes_per_token,
        "states": 0 if states is None else 2 * states.nbytes,
    }
    if draft is not None:
        caches["draft model's KV"] = small * draft.kv_shape.bytes_per_token
    if network is not None:
        window_shape = network.kv_shape(model.dtype, model.device)
        caches["drafter's KV"] = window * window_shape.bytes_per_token
    loaded = dict(model.loaded_bytes) if isinstance(model, ModelPlan) else {}
    if isinstance(draft, ModelPlan):
        loaded["draft model"] = draft.loaded_bytes["weights"]
    passing = {"logits": _ROWS * nodes * model.vocab_size * torch.float64.itemsize}
    if model.device.type == "cuda":
        passing["workspace"] = int(_SHARE * sum((*loaded.values(), *caches.values())))
    recall = 0
    if options.recall:
        recall = LogitHistory.bytes_for(positions, model.vocab_size, options.recall)
    estimate = MemoryEstimate(positions, options, loaded, caches, recall, passing)
    others = promised(model) if isinstance(model, Target) else 0
    _refuse_memory(estimate, model.device, option, others - spare)
    return estimate


def promised(model: Target) -> int:
    """Bytes that texts under way are still to take: a CPU gives memory when it is written to."""
    texts = () if model.on_cuda else model.caches
    return sum((kv.wanted - kv.length) * kv.shape.bytes_per_token for kv in texts)


def refuse_ids(vocab_size: int, **named: Collection[int]) -> None:
    """Refuse token ids that a vocabulary has not, by the parameter that has them."""
    for name, ids in named.items():
        if not all(0 <= token < vocab_size for token in ids):
            raise InputError(
                f"has token ids outside the model's vocabulary of {vocab_size:,}", name
            )


class NoRoom(InputError):
    """A decode needs more memory than is free now."""


def _refuse_memory(
    estimate: MemoryEstimate, device: torch.device, option: str | None, others: int = 0
) -> None:
    if device.type != "cpu":
        on_cpu = MemoryEstimate(estimate.positions, recall_bytes=estimate.recall_bytes)
        _refuse_memory(on_cpu, torch.device("cpu"), option)
        estimate = replace(estimate, recall_bytes=0)
    free = available_bytes(device)
    if free is None or estimate.total_bytes + others <= free:
        return
    # a shorter text would not help
    option = "model" if sum(estimate.loaded.values()) > free else option
    needed = f"{estimate} = {gigabytes(estimate.total_bytes)}"
    texts = f", {gigabytes(others)} of that for texts under way" if others > 0 else ""
    raise NoRoom(f"{needed}, {device.type} has {gigabytes(free)} free{texts}", option)
