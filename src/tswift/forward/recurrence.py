"""The recurrence of gated delta nets and Mamba2: what a state is stepped by, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Rows:
    """What states are stepped by: a key, what is to be found by it, and how much of that is added.

    ``queries`` and ``keys`` are ``[n, heads, keys]``, perhaps of fewer heads, each for as many that
    follow each other. ``contents`` are ``[n, heads, values]``; ``decays`` and ``rates``
    ``[n, heads]``, factors of the state and of what is added: what the state does not give for the
    key yet (``corrects``), or all.
    """

    queries: Tensor
    keys: Tensor
    contents: Tensor
    decays: Tensor
    rates: Tensor
    corrects: bool = True


def step_plainly(
    rows: Rows,
    state: Tensor,
    nodes: Sequence[int],
    parents: Sequence[int],
    after: Tensor | None = None,
) -> Tensor:
    """As :func:`step_states`, by PyTorch's operators."""
    group = state.shape[0] // rows.keys.shape[1]
    last = _last_children(parents)
    states = dict[int, Tensor]()
    out = []
    for node, (row, parent) in enumerate(zip(nodes, parents, strict=True)):
        query, key = (
            each[row].repeat_interleave(group, 0).unsqueeze(-1)
            for each in (rows.queries, rows.keys)
        )
        kept = (state if parent < 0 else states[parent]) * rows.decays[row, :, None, None]
        change = rows.contents[row]
        if rows.corrects:
            change = change - neighbours_sum(kept * key)
        change = change * rows.rates[row, :, None]
        states[node] = kept + key * change.unsqueeze(1)
        out.append(neighbours_sum(states[node] * query))
        if last[parent] == node:
            states.pop(parent, None)
    if after is not None:
        after.copy_(states[len(nodes) - 1])
    return torch.stack(out)


def neighbours_sum(numbers: Tensor) -> Tensor:
    """Sums over the keys ``[heads, keys, values]``: of neighbours, then of neighbouring sums, and
    so on, as the kernel adds them.
    """
    while (count := numbers.shape[1]) > 1:
        numbers = F.pad(numbers, (0, 0, 0, count % 2))
        numbers = numbers[:, 0::2] + numbers[:, 1::2]
    return numbers[:, 0]


def _last_children(parents: Sequence[int]) -> dict[int, int]:
    """Of each node that has children the last one, after which nobody asks for its state."""
    return {parent: node for node, parent in enumerate(parents)}
