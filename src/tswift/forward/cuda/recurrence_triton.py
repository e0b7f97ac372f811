"""The recurrence of gated delta nets and Mamba2 as one Triton kernel; only ``recurrent`` imports
this module.

A program holds some columns of one head's state in registers and goes through the nodes: each reads
its parent's state, lets it decay, adds its own and reads the sum. Between a parent and the child
behind it the state stays where it is; what a later branch goes on from is kept in memory meanwhile.
Columns know nothing of each other, and sums over keys are trees of pairs, in float32: the bits are
those of plain PyTorch in ``recurrent``, whatever the tree, and no product is fused with a sum.
Before use they are compared, on the device itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tswift.forward.cuda.layer_kernels import UNFUSED, levels_of, tree_sum
from tswift.forward.recurrence import Rows

_COLUMNS = 32  # of a program; no GPU has timed others yet
# where a node's parent's state is, but for places in memory
_HERE = tl.constexpr(-1)
_COMMITTED = tl.constexpr(-2)


@triton.jit(do_not_specialize=["nodes"])
def step_nodes(
    state, after, queries, keys, contents, decays, rates, plan, out, branches, count, nodes,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Step some columns of one head's state by all nodes, or the first ``count`` ``[1]`` of them;
    grid ``(heads, blocks of columns)``.

    The ``plan`` ``[nodes, 3]`` says each node's row, where its parent's state is, and where its own
    goes, below 0 for nowhere; ``branches`` ``[places, heads, keys, values]`` are these places.
    """
    steps = nodes
    if count is not None:
        steps = tl.load(count).to(tl.int32)
    head = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, 1 << LEVELS)
    used = column < VALUES
    inside = place < KEYS
    there = used[:, None] & inside[None, :]
    at = head.to(tl.int64) * KEYS * VALUES + place[None, :] * VALUES + column[:, None]
    size = tl.num_programs(0).to(tl.int64) * KEYS * VALUES  # of a layer's state
    now = tl.load(state + at, mask=there, other=0.0)
    for node in range(steps):
        row = tl.load(plan + 3 * node)
        source = tl.load(plan + 3 * node + 1)
        target = tl.load(plan + 3 * node + 2)
        if source == _COMMITTED:
            now = tl.load(state + at, mask=there, other=0.0)
        elif source != _HERE:
            now = tl.load(branches + source * size + at, mask=there, other=0.0)
        rank = row * HEADS + head
        own = (row * (HEADS // GROUP) + head // GROUP) * KEYS + place
        key = tl.load(keys + own, mask=inside, other=0.0)[None, :]
        query = tl.load(queries + own, mask=inside, other=0.0)[None, :]
        kept = now * tl.load(decays + rank)
        change = tl.load(contents + rank * VALUES + column, mask=used, other=0.0)
        if CORRECTS:
            change = change - tree_sum(kept * key, COLUMNS, LEVELS)
        change = change * tl.load(rates + rank)
        now = kept + key * change[:, None]
        found = tree_sum(now * query, COLUMNS, LEVELS)
        tl.store(out + (node * HEADS + head) * VALUES + column, found, mask=used)
        if target >= 0:
            tl.store(branches + target * size + at, now, mask=there)
            tl.debug_barrier()  # other threads may read it
    if after is not None:
        tl.store(after + at, now, mask=there)


def step_states(
    rows: Rows,
    state: Tensor,
    nodes: Sequence[int],
    parents: Sequence[int],
    after: Tensor | None = None,
) -> Tensor:
    """As :func:`tswift.forward.recurrent.step_states`, in float32."""
    far = {parent for node, parent in enumerate(parents) if -1 < parent != node - 1}
    places = {parent: place for place, parent in enumerate(sorted(far))}
    plan = [
        (
            row,
            _HERE.value if parent == node - 1 else places.get(parent, _COMMITTED.value),
            places.get(node, -1),
        )
        for node, (row, parent) in enumerate(zip(nodes, parents, strict=True))
    ]
    sent = torch.tensor(plan).to(state.device, non_blocking=True)
    return _launched(rows, state, sent, len(places), None, after)


def tree_plan(parents: Tensor) -> Tensor:
    """The kernel's plan for a tree whose parents ``[n]`` the device alone knows, below 0 for the
    committed state: what a later branch goes on from is at its node's place.
    """
    index = torch.arange(len(parents), device=parents.device)
    here = parents == index - 1
    far = ((parents == index[:, None]) & ~here).any(1)
    source = torch.where(here, _HERE.value, parents.where(parents >= 0, _COMMITTED.value))
    return torch.stack([index, source, index.where(far, -1)], 1)


def path_plan(nodes: Tensor) -> Tensor:
    """The kernel's plan for a path of these rows ``[n]``."""
    return torch.stack([nodes, torch.full_like(nodes, _HERE.value), torch.full_like(nodes, -1)], 1)


def step_tree(rows: Rows, state: Tensor, plan: Tensor) -> Tensor:
    """As :func:`step_states`, by the nodes of a plan of the device's."""
    # the last two nodes have no later branch
    return _launched(rows, state, plan, max(0, len(plan) - 2), None, None)


def step_path(rows: Rows, state: Tensor, plan: Tensor, count: Tensor | None) -> None:
    """Step a state in place by the first ``count`` ``[1]`` nodes of a path, or by all."""
    _launched(rows, state, plan, 0, count, state)


def _launched(
    rows: Rows, state: Tensor, plan: Tensor, places: int, count: Tensor | None, after: Tensor | None
) -> Tensor:
    heads, keys, values = state.shape
    branches = state.new_empty(places, heads, keys, values)
    out = state.new_empty(len(plan), heads, values)
    given = (rows.queries, rows.keys, rows.contents, rows.decays, rows.rates)
    columns = min(_COLUMNS, triton.next_power_of_2(values))
    with torch.cuda.device_of(state):
        step_nodes[heads, triton.cdiv(values, columns)](
            state, after, *(each.contiguous() for each in given), plan, out, branches, count, len(plan),
            HEADS=heads, GROUP=heads // rows.keys.shape[1], KEYS=keys, VALUES=values, LEVELS=levels_of(keys),
            COLUMNS=columns, CORRECTS=rows.corrects, **UNFUSED,
        )  # fmt: skip
    return out
