"""Triton kernels that lay out a draft tree and walk it; only ``device_step`` imports this module.

What they write is what :mod:`tswift.decoding.device_tree` writes: integers, and never rounded.
Before use they are compared with it on random trees, on the device itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tswift.decoding import device_tree
from tswift.decoding.device_tree import Path, Tree, TreeState
from tswift.sampling.rule import Sampler

MOST_NODES = 128


@triton.jit(do_not_specialize=["nodes", "depth"])
def lay_out_node(
    tokens, parents, position, ids, positions, ancestors, depths, nodes, depth, NODES: tl.constexpr
):  # fmt: skip
    """Go up from one node to the root, which is its own parent; grid ``(nodes,)``."""
    node = tl.program_id(0)
    index = tl.arange(0, NODES)
    at = node.to(tl.int64)
    own = tl.zeros([], tl.int64)
    line = index == node
    for _ in range(depth):
        above = tl.load(parents + at)
        own += (above != at).to(tl.int64)
        at = above
        line = line | (index == at)
    tl.store(ancestors + node * nodes + index, line.to(tl.int8), mask=index < nodes)
    tl.store(depths + node, own)
    tl.store(positions + node, tl.load(position) + own)
    tl.store(ids + node, tl.maximum(tl.load(tokens + node), 0))


@triton.jit(do_not_specialize=["nodes", "longest"])
def walk_tree(
    tokens, parents, position, length, last, ancestors, depths, drawn, control, newest, result, places, slots, nodes,
    longest,
    NODES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Find the last accepted node, write its path, and move the state on; one program.

    ``newest`` are the positions of the vocabulary's last occurrences, if tokens are penalised.
    """
    node = tl.arange(0, NODES)
    used = node < nodes
    token = tl.load(tokens + node, mask=used, other=-1)
    after = tl.load(drawn + tl.load(parents + node, mask=used, other=0), mask=used, other=-1)
    depth = tl.load(depths + node, mask=used, other=0)
    lines = node[:, None] * nodes + node[None, :]
    above = tl.load(ancestors + lines, mask=used[:, None] & used[None, :], other=0) != 0
    # a node is reached if it and all its ancestors carry what their parents drew; the root is
    # reached anyway
    carried = ((token == after) & (token >= 0)) | (depth == 0)
    missed = tl.sum((above & (~carried[None, :])).to(tl.int32), 1)
    wanted = tl.load(control)
    reached = used & (missed == 0) & (depth < wanted)
    # the deepest one, and of those the first
    best = tl.max(tl.where(reached, depth * NODES + NODES - 1 - node, NODES - 1), 0)
    end = NODES - 1 - best % NODES
    forced = tl.load(control + 1)
    end = tl.where(forced >= 0, forced, end)
    new = tl.load(drawn + end)
    deepest = tl.load(depths + end)
    count = tl.where((new < 0) | (wanted <= 0), 0, deepest + 1)
    live = tl.sum((token >= 0).to(tl.int64), 0)
    place = tl.load(position)
    held = tl.load(length)
    tl.debug_barrier()  # all is read before anything of it is written
    step = tl.arange(0, STEPS).to(tl.int64)
    some = (step < longest) & (step < nodes)
    on_path = (
        used
        & (tl.load(ancestors + end * nodes + node, mask=used, other=0) != 0)
        & (depth < longest)
    )
    # a block compared with a number: a block and a number's comparison are no mask to triton 3.9's
    # interpreter
    taken = on_path & (depth > tl.where(count > 0, 0, STEPS))
    tl.store(result, count)
    tl.store(result + 1, live)
    path = result + 2 + longest
    tl.store(path + depth, node.to(tl.int64), mask=on_path)
    tl.store(path + step, tl.zeros_like(step), mask=some & (step > deepest))
    tl.store(places + depth, held.to(tl.int64) + node, mask=on_path)
    tl.store(places + step, held.to(tl.int64) + tl.zeros_like(step), mask=some & (step > deepest))
    tl.store(result + 1 + depth, tl.maximum(token, 0), mask=taken)
    tl.store(result + 2 + step, tl.zeros_like(step) + new, mask=some & (step >= count - 1))
    tl.store(slots + step, held + step, mask=some)
    if newest is not None:
        # of a token twice on the path the last one counts, whichever is written first
        tl.atomic_max(newest + tl.maximum(token, 0), place + depth, mask=taken)
        tl.atomic_max(newest + tl.maximum(new, 0), place + count, mask=count > 0)
    tl.store(last, end)
    tl.store(tokens, new, mask=count > 0)
    tl.store(position, place + count)
    tl.store(length, held + count.to(tl.int32))


def _padded(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def lay_out(state: TreeState, nodes: int, depth: int) -> Tree:
    """As :func:`device_tree.lay_out`."""
    if nodes > MOST_NODES:
        return device_tree.lay_out(state, nodes, depth)
    made = state.tokens.new_empty(3, nodes)
    ids, positions, depths = made
    ancestors = state.tokens.new_empty(nodes, nodes, dtype=torch.bool)
    with torch.cuda.device_of(made):
        lay_out_node[nodes,](
            state.tokens, state.parents, state.position, ids, positions, ancestors.view(torch.int8), depths, nodes,
            min(depth, nodes - 1), NODES=_padded(nodes), num_warps=1,
        )  # fmt: skip
    return Tree(ids, positions, ancestors, depths)


def walk(
    state: TreeState, tree: Tree, drawn: Tensor, control: Tensor, sampler: Sampler, path: Path
) -> None:
    """As :func:`device_tree.walk`."""
    nodes = len(drawn)
    if nodes > MOST_NODES:
        device_tree.walk(state, tree, drawn, control, sampler, path)
        return
    newest = sampler.newest if sampler.needs_positions else None
    with torch.cuda.device_of(drawn):
        walk_tree[1,](
            state.tokens, state.parents, state.position, state.length, state.last, tree.ancestors.view(torch.int8),
            tree.depths, drawn, control, newest, path.result, path.places, path.slots, nodes, path.longest,
            NODES=_padded(nodes), STEPS=_padded(path.longest), num_warps=max(4, _padded(nodes) // 8),
        )  # fmt: skip
