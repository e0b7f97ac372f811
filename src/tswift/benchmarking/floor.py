"""The floor of what a benchmark ran: the least time for the passes that its methods really made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tswift.benchmarking.lineup import Lineup
from tswift.benchmarking.roofline import Drafting, Machine, decode_seconds
from tswift.decoding.stats import DecodeStats
from tswift.drafting.methods import find_method
from tswift.drafting.options import FULL
from tswift.models.quantizing import BITS
from tswift.models.shapes import Shape, routed, shape_of

_EVERYTHING = 1 << 62  # tokens of a budget that is none


@dataclass(frozen=True)
class Floor:
    """What it takes to tell the floor of a measured decode.

    Attributes:
        shape: the model's.
        machine: what it ran on, measured.
        drafting: by label; nothing for those that are not named.
    """

    shape: Shape
    machine: Machine
    drafting: Mapping[str, Drafting] = field(default_factory=dict)

    def seconds(self, label: str, prefill: int, marks: Sequence[DecodeStats]) -> list[float]:
        """The floor up to each of a lane's marks.

        Args:
            label: the lane's.
            prefill: prompt tokens.
            marks: figures at rising lengths; between two of them the passes are taken to be evenly spaced.
        """
        floors, total, before = [], 0.0, DecodeStats(0)
        for mark in marks:
            total += decode_seconds(
                self.shape,
                self.machine,
                prefill + before.tokens,
                mark.tokens - before.tokens,
                mark.passes - before.passes,
                mark.nodes - before.nodes,
                self.drafting.get(label),
            )
            floors.append(total)
            before = mark
        return floors


def floor_of(lineup: Lineup, machine: Machine) -> Floor | None:
    """The floor of a lineup's methods; None for a model that is quantised, or whose passes choose what they read."""
    network, heads = lineup.model.target.model, lineup.model.heads
    if routed(network.config) or lineup.model.quantization:
        return None
    drafting = {}
    for variant in lineup.variants:
        kind, options = find_method(variant.method), variant.options
        extra_bytes, passes = 0, 1
        if heads and isinstance(options.tree, tuple):
            count = len(options.tree) - kind.by_lm_head
            extra_bytes = sum(weight.nbytes for head in heads.heads[:count] for weight in head.parameters())
        if kind.gamma is not None and options.gamma and "costs" not in kind.uses:  # else one is made for certain
            # a chain that is itself drafted takes as many passes as if every draft were accepted, at least
            passes = (
                math.ceil(options.gamma / (1 + options.inner_gamma)) if "inner_gamma" in kind.uses else options.gamma
            )
        if kind.draft and lineup.model.draft is not None:
            small = lineup.model.draft
            extra_bytes += passes * shape_of(small.model, small.dtype.itemsize).weight_bytes
        budget, bits = None, None
        if kind.partial:
            bits = BITS[lineup.model.draft_weights] if lineup.model.draft_weights else None
            budget = _EVERYTHING if options.kv == FULL else options.budget
        drafting[variant.label] = Drafting(budget, extra_bytes, passes, bits)
    return Floor(shape_of(network, lineup.model.target.dtype.itemsize), machine, drafting)
