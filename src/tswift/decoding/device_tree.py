"""A draft tree on the device: who descends from whom, and the walk along what was drawn.

Nothing waits for the host.

In plain PyTorch, some 45 operators for a step; :mod:`tswift.decoding.device_tree_triton` is two
kernels that do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tswift.sampling.rule import Sampler


@dataclass
class TreeState:
    """Where a decode stands on the device, and its draft tree of up to ``n`` nodes;
    all is written in place.

    Attributes:
        tokens: ``[n]`` int64 of the draft tree, root first; -1 where there is no candidate.
        parents: ``[n]`` int64, indices of nodes; the root's is 0.
        position: ``[1]`` int64, the root's position in the text.
        length: ``[]`` int32, tokens in the cache; the root's slot.
        last: ``[1]`` int64, the node of the last verification that drew the root.
    """

    tokens: Tensor
    parents: Tensor
    position: Tensor
    length: Tensor
    last: Tensor


class Tree(NamedTuple):
    """What a pass has to know of the ``n`` nodes of a tree."""

    tokens: Tensor  # ``[n]`` int64; 0 where there is no candidate
    positions: Tensor  # ``[n]`` int64, in the text
    # ``[n, n]`` bool, true where the column is an ancestor of the row, or the row itself
    ancestors: Tensor
    depths: Tensor  # ``[n]`` int64


class Path:
    """What a walk leaves, of up to ``longest`` nodes; all stays in place.

    Attributes:
        result: ``[2 + 2 * longest]`` int64: ``count``, how many nodes carried a token, then
            ``tokens`` and ``nodes``.
        count: ``[1]`` int64, nodes on the path; 0 where nothing could be drawn, or no token was
            wanted.
        tokens: ``[longest]``, the accepted draft, and behind it the token that was drawn after it.
        nodes: ``[longest]``, the path from the root on, then zeros.
        places: ``[longest]`` int64, where the keys of these nodes are in the cache.
        slots: ``[longest]`` int64, where they go.
    """

    def __init__(self, longest: int, result: Tensor) -> None:
        self.longest = longest
        self.result = result[: 2 + 2 * longest]
        self.count = result[:1]
        self.tokens = result[2 : 2 + longest]
        self.nodes = self.result[2 + longest :]
        self.places, self.slots = torch.zeros(2, longest, dtype=torch.int64, device=result.device)


def ancestors_of(parents: Tensor, index: Tensor, depth: int) -> Tensor:
    """As :meth:`DraftTree.ancestors`, on the device: ``[n, n]`` bool.

    The root is node 0 and its own parent; ``index`` is 0, 1, ...; ``depth`` the most edges between
    a node and the root.
    """
    # of each node its nearest ancestors, itself first, and the next one above
    lines = index[:, None]
    above = parents
    while lines.shape[1] <= min(depth, len(index) - 1):  # twice as many each time
        lines = torch.cat([lines, lines[above]], 1)
        above = above[above]
    found = torch.zeros(len(index), len(index), dtype=torch.bool, device=index.device)
    return found.scatter_(1, lines, True)


def reached_node(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    drawn: Tensor,
    max_new: Tensor,
) -> Tensor:
    """As :meth:`DraftTree.walk`, on the device: ``[1]`` int64, the last node of the accepted path.

    The token of a node that is not there is -1; two children of a node may carry the same one. The
    root is its own parent. A path has no more nodes than ``max_new`` ``[1]``, the most tokens to
    add.
    """
    # a node is reached if it and all its ancestors carry what their parents drew; the root is
    # reached anyway where nothing could be drawn, a node that is not there carries the same: -1
    carried = ((tokens == drawn[parents]) & (tokens >= 0)) | (depths == 0)
    reached = (carried | ~ancestors).all(1) & (depths < max_new)
    return torch.where(reached, depths, 0).argmax(0, keepdim=True)


def lay_out(state: TreeState, nodes: int, depth: int) -> Tree:
    """The first so many nodes of the state's tree, no deeper than ``depth``."""
    index = torch.arange(nodes, device=state.tokens.device)
    ancestors = ancestors_of(state.parents[:nodes], index, depth)
    depths = index if nodes == 1 else ancestors.sum(1) - 1
    return Tree(state.tokens[:nodes].clamp(min=0), state.position + depths, ancestors, depths)


def walk(
    state: TreeState, tree: Tree, drawn: Tensor, control: Tensor, sampler: Sampler, path: Path
) -> None:
    """Walk down the tree to the last node that is accepted, and move the state on: root,
    position and length.

    Args:
        state: its ``last`` is set, too.
        tree: of the state.
        drawn: ``[n]`` int64, the token drawn after each node; -1 where there is none.
        control: ``[2]`` int64: the most tokens to add, and the node to end at, below 0 for the one
            by the rule.
        sampler: what is penalised is to know of the new tokens.
        path: set, but for what is behind the number of nodes.
    """
    count = len(drawn)
    wanted = control[:1]
    forced = control[1:]
    tokens = state.tokens[:count]
    index = torch.arange(count, device=drawn.device)
    steps = index[: path.longest]
    last = reached_node(tokens, state.parents[:count], tree.ancestors, tree.depths, drawn, wanted)
    last = torch.where(forced >= 0, forced, last)
    kept = torch.where((drawn[last] < 0) | (wanted <= 0), 0, tree.depths[last] + 1)
    # nodes that are not on it go to a spare entry
    place = torch.where(tree.ancestors[last][0], tree.depths, count)
    nodes = torch.zeros(count + 1, dtype=torch.int64, device=drawn.device).scatter_(
        0, place, index
    )[: len(steps)]
    following = tokens[nodes.roll(-1)].clamp(min=0)
    emitted = torch.where(steps < kept - 1, following, drawn[last])
    sampler.extend_rows(emitted, state.position + 1 + steps, kept)
    path.tokens[: len(steps)].copy_(emitted)
    path.nodes[: len(steps)].copy_(nodes)
    path.places[: len(steps)].copy_(state.length + nodes)
    path.slots[: len(steps)].copy_(state.length + steps)
    torch.cat([kept, (tokens >= 0).sum(0, keepdim=True)], out=path.result[:2])
    state.last.copy_(last)
    # where nothing is committed, the root stays
    state.tokens[:1].copy_(torch.where(kept > 0, drawn[last], state.tokens[:1]))
    state.position.add_(kept)
    state.length.add_(kept[0])
