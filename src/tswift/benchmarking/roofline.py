"""The least time that a decode can take on a machine: the roofline (paper, table 2).

A pass must read the weights and the KV cache once, and must compute on every node. Both can go on at the same time, so
the floor of a pass is the longer of the two. What a pass reads and computes beside that (activations, the draft tree's
own keys and values, sampling) is left out: it is little, and a floor may lie below the truth but never above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tswift.errors import InputError
from tswift.models.shapes import Shape


@dataclass(frozen=True)
class Machine:
    """What a machine can do.

    Attributes:
        bandwidth: bytes per second read from its memory.
        flops: operations per second in matrix products of the dtype at hand.
    """

    bandwidth: float
    flops: float


# Published: the paper's table 2 for the A100; NVIDIA's data sheets for the others. FLOP rates are dense and of 16 bits.
MACHINES = {
    "a100-80g": Machine(2.04e12, 312e12),
    "h100-sxm": Machine(3.35e12, 989e12),
    "h200": Machine(4.8e12, 989e12),
}
_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Drafting:
    """What a step does before its verification pass.

    Attributes:
        budget: tokens of the partial KV cache that a drafting pass of the model reads; None where there is none.
        head_bytes: bytes of the heads, and of a smaller model's weights as often as they are read.
        passes: drafting passes of the model.
        bits: of the weights that they read, the LM head's apart; None for the model's own.
    """

    budget: int | None = None
    head_bytes: int = 0
    passes: int = 1
    bits: int | None = None


def find_machine(name: str, dtype: str) -> Machine:
    """The machine of a name.

    Raises:
        InputError: there is none, or its rate in this dtype is not known.
    """
    if name not in MACHINES:
        raise InputError(f"no device {name!r}; there are here, cpu, cuda, {', '.join(MACHINES)}", "--device")
    if dtype not in _DTYPES:
        raise InputError(
            f"{name} is known by its rate in {' and '.join(_DTYPES)}, not in {dtype}; give --bandwidth and --flops",
            "--dtype",
        )
    return MACHINES[name]


def loading_seconds(shape: Shape, machine: Machine, context: Any, extra_bytes: int = 0) -> Any:
    """Seconds to read the weights and the keys and values of ``context`` tokens (a number or an array).

    ``extra_bytes`` are read beside those; below 0, so many are not.
    """
    return (shape.weight_bytes + extra_bytes + context * shape.kv_bytes) / machine.bandwidth


def computing_seconds(shape: Shape, machine: Machine, context: Any, nodes: float) -> Any:
    """Seconds to compute on so many nodes, each of which attends to ``context`` tokens (a number or an array)."""
    return nodes * shape.flops(context) / machine.flops


def pass_seconds(shape: Shape, machine: Machine, context: Any, nodes: float, extra_bytes: int = 0) -> Any:
    """The floor of a pass: the longer of loading and computing. Arguments as for those."""
    return np.maximum(
        loading_seconds(shape, machine, context, extra_bytes), computing_seconds(shape, machine, context, nodes)
    )


def decode_seconds(
    shape: Shape,
    machine: Machine,
    context: int,
    tokens: int,
    passes: int,
    nodes: float,
    drafting: Drafting | None = None,
) -> float:
    """The floor of a decode or of a part of it: that of its steps, summed while the context grows.

    Args:
        shape: the model's.
        machine: what it runs on.
        context: tokens there at its beginning.
        tokens: generated; the passes are taken to be evenly spaced over them.
        passes: verification passes.
        nodes: of all those passes together.
        drafting: what comes before each; None for nothing.
    """
    if not passes:
        return 0.0
    contexts = context + np.arange(passes) * (tokens / passes)
    total = pass_seconds(shape, machine, contexts, nodes / passes)
    if drafting and drafting.budget is not None:
        read = np.minimum(contexts, drafting.budget)
        spared = 0 if drafting.bits is None else shape.spared_bytes(drafting.bits)
        total += pass_seconds(shape, machine, read, 1, drafting.head_bytes - spared)
        total += (drafting.passes - 1) * pass_seconds(shape, machine, read, 1, -spared)
    elif drafting:
        total += drafting.head_bytes / machine.bandwidth
    return float(total.sum())
