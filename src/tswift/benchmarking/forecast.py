"""What to expect before a job is started: the floors of passes at growing contexts, and of whole decodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tswift.benchmarking.grid import NOTHING, Grid, duration, method_name, quantity
from tswift.benchmarking.measurement import BASELINE
from tswift.benchmarking.question import Question
from tswift.benchmarking.roofline import (
    Drafting,
    Machine,
    computing_seconds,
    decode_seconds,
    loading_seconds,
    pass_seconds,
)
from tswift.errors import InputError
from tswift.models.quantizing import BITS
from tswift.models.shapes import Shape

CONTEXTS = (4096, 20_000, 40_000, 60_000, 80_000, 100_000, 131_072)


@dataclass(frozen=True)
class PassFloor:
    """A pass: its context and nodes, the bytes that it reads, and what that and the computing take, in seconds."""

    context: int
    nodes: int
    read_bytes: int
    loading_seconds: float
    computing_seconds: float
    floor_seconds: float


@dataclass(frozen=True)
class DecodeFloor:
    """A decode.

    Attributes:
        method: its name.
        alpha: the share of drafted tokens that is accepted; None where nothing is drafted.
        tokens_per_step: generated tokens per verification pass.
        passes: verification passes.
        floor_seconds: the least time of all.
        speedup: plain decoding's floor over it.
        step_seconds: the least time of a step, on the average.
        needed: tokens per step with which it would be as quick as plain decoding.
        draft_weights: how those of the draft are quantised; None for not at all.
        draft_bits: of the weights that the draft reads, the LM head's apart; None where nothing is drafted.
        even_alpha: the alpha at which a cheaper draft is as quick as one of the model's own bits at the alpha asked
            for; None where there is no cheaper one.
    """

    method: str
    alpha: float | None
    tokens_per_step: float
    passes: int
    floor_seconds: float
    speedup: float
    step_seconds: float
    needed: float
    draft_weights: str | None = None
    draft_bits: int | None = None
    even_alpha: float | None = None


@dataclass(frozen=True)
class Forecast:
    """The answers.

    Attributes:
        shape: the model's.
        machine: what it would run on.
        question: what is told; its contexts are filled in.
        passes: one for each context and number of nodes.
        decodes: plain decoding, and the drafting method if an alpha is given; once more with a cheaper draft, if asked.
    """

    shape: Shape
    machine: Machine
    question: Question
    passes: tuple[PassFloor, ...]
    decodes: tuple[DecodeFloor, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        shape = {**asdict(self.shape), "weight_bytes": self.shape.weight_bytes, "kv_bytes": self.shape.kv_bytes}
        return {**asdict(self), "shape": shape}

    def grids(self, label: str) -> list[Grid]:
        """As tables: the figures of the paper's table 2, the floors of passes, and those of decodes.

        Args:
            label: model, dtype and machine.
        """
        return [self._table2(label), self._passes(label), self._decodes(label)]

    def _table2(self, label: str) -> Grid:
        shape, machine, longest = self.shape, self.machine, max(self.contexts)
        rows = {
            "memory bandwidth": quantity(machine.bandwidth, "B/s"),
            "peak": quantity(machine.flops, "FLOP/s"),
            "parameters": f"{shape.parameters:,}",
            "model weights, read by every pass": quantity(shape.weight_bytes, "B"),
            "KV cache of a token": f"{shape.kv_bytes:,} B",
            f"operations of a node at {longest:,} tokens": quantity(shape.flops(longest), "FLOP"),
            "loading time of the weights": _milliseconds(loading_seconds(shape, machine, 0)),
            f"computing time of a node at {longest:,} tokens": _milliseconds(
                computing_seconds(shape, machine, longest, 1)
            ),
        }
        return Grid(f"Roofline: {label}", ["what", "value"], list(rows.items()), left=1)

    def _passes(self, label: str) -> Grid:
        rows = [
            [
                f"{each.context:,}",
                f"{each.nodes:,}",
                quantity(each.context * self.shape.kv_bytes, "B"),
                quantity(each.read_bytes, "B"),
                *(_milliseconds(x, 2) for x in (each.loading_seconds, each.computing_seconds, each.floor_seconds)),
            ]
            for each in self.passes
        ]
        columns = ["context", "nodes", "KV cache", "read", "loading", "computing", "floor"]
        notes = ["floor: the longer of the two, since a machine can load and compute at the same time."]
        return Grid(f"Least time of a pass: {label}", columns, rows, notes=notes)

    def _decodes(self, label: str) -> Grid:
        question = self.question
        rows = [
            [
                method_name(each.method),
                NOTHING if each.draft_bits is None else each.draft_weights or f"{each.draft_bits} bits",
                NOTHING if each.alpha is None else f"{each.alpha:g}",
                f"{each.tokens_per_step:.2f}",
                f"{each.needed:.2f}",
                f"{each.passes:,}",
                _milliseconds(each.step_seconds, 2),
                duration(each.floor_seconds),
                f"{each.speedup:.2f}",
            ]
            for each in self.decodes
        ]
        notes = [
            f"Predicted, not measured: {question.length:,} tokens after a prompt of {question.prefill:,}, prefill "
            "apart, every pass at its floor. Real passes take longer: tswift bench says by how much.",
            "step: its passes, on the average. needed: tokens per step with which it would be as quick as AR.",
        ]
        if question.alpha is None:
            notes.append("--alpha predicts tokenswift too.")
        else:
            notes.append(
                f"tokenswift: a drafting pass over {question.budget:,} tokens of KV cache with {question.depth - 1} "
                f"chained heads, then a verification of {max(question.nodes)} nodes; {question.depth} tokens are "
                "drafted along a path."
            )
        notes += [
            f"A draft in {each.draft_weights} (but for the LM head; scales are not counted) is as quick at alpha "
            f"{each.even_alpha:.2f} as one of {8 * self.shape.itemsize} bits at {each.alpha:g}. What alpha it has is "
            "not predicted."
            for each in self.decodes
            if each.even_alpha is not None
        ]
        columns = ["method", "draft", "alpha", "tokens/step", "needed", "passes", "step", "least time", "x"]
        return Grid(f"Least time of a decode: {label}", columns, rows, left=1, notes=notes)

    @property
    def contexts(self) -> Sequence[int]:
        """Those that were told of."""
        return self.question.contexts or ()


def forecast(shape: Shape, machine: Machine, question: Question, positions: int) -> Forecast:
    """Answer a question.

    Args:
        shape: the model's.
        machine: what it would run on.
        question: what is to be told.
        positions: most tokens that the model was made for.

    Raises:
        InputError: more tokens than that.
    """
    beyond = [context for context in question.contexts or () if context > positions]
    if beyond:
        raise InputError(f"{beyond[0]:,} is more than the model's {positions:,} positions", "--context")
    if question.prefill + question.length > positions:
        raise InputError(
            f"{question.prefill:,} prompt tokens and {question.length:,} new ones need "
            f"{question.prefill + question.length:,} positions, the model has {positions:,}",
            "--len",
        )
    known = tuple(context for context in CONTEXTS if context <= positions) or (positions,)
    told = replace(question, contexts=question.contexts or known)
    passes = tuple(
        PassFloor(
            context,
            nodes,
            shape.weight_bytes + context * shape.kv_bytes,
            loading_seconds(shape, machine, context),
            computing_seconds(shape, machine, context, nodes),
            float(pass_seconds(shape, machine, context, nodes)),
        )
        for context in told.contexts or ()
        for nodes in told.nodes
    )
    return Forecast(shape, machine, told, passes, _decodes(shape, machine, told))


def _decodes(shape: Shape, machine: Machine, question: Question) -> tuple[DecodeFloor, ...]:
    prefill, length, alpha = question.prefill, question.length, question.alpha
    plain = decode_seconds(shape, machine, prefill, length, length, length)
    found = [DecodeFloor(BASELINE, None, 1.0, length, plain, 1.0, plain / length, 1.0)]
    if alpha is None:
        return tuple(found)
    per_step = question.depth * alpha + 1
    passes = math.ceil(length / per_step)
    heads = (question.depth - 1) * shape.hidden_size**2 * shape.itemsize
    own_bits, own_step = 8 * shape.itemsize, 0.0
    for kind in (None,) if question.draft_weights is None else (None, question.draft_weights):
        bits = own_bits if kind is None else BITS[kind]
        drafting = Drafting(question.budget, heads, bits=bits)
        seconds = decode_seconds(shape, machine, prefill, length, passes, passes * max(question.nodes), drafting)
        step, even = seconds / passes, None
        if own_step:
            even = max(0.0, (per_step * step / own_step - 1) / question.depth)
        own_step = own_step or step
        needed = step * length / plain
        found.append(
            DecodeFloor("tokenswift", alpha, per_step, passes, seconds, plain / seconds, step, needed, kind, bits, even)
        )
    return tuple(found)


def _milliseconds(seconds: float, digits: int = 1) -> str:
    """With so many decimals, of which the paper's table 2 has one; more where nothing would be left."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{digits}f} ms" if milliseconds >= 0.1 else f"{milliseconds:.2g} ms"
