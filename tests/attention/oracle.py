"""What attention has to compute, densely and in float64,
and inputs laid out as models and caches give them.
"""

from __future__ import annotations

from random import Random

import torch

from tests.helpers import random_tree
from tswift.attention.sdpa import AttentionSpec, Layout

NOTHING = AttentionSpec()


KV_HEADS, GROUP, DIM = 2, 3, 8
SINKS = torch.linspace(-1, 2, KV_HEADS * GROUP)
SPECS = {
    "window": AttentionSpec(window=9),
    "a window of one": AttentionSpec(window=1),
    "soft cap": AttentionSpec(softcap=1.5),
    "sinks": AttentionSpec(sinks=SINKS),
    "all": AttentionSpec(9, 1.5, SINKS),
}


def dense(query, keys, values, ancestors, scale, spec=NOTHING, places=None, positions=None):
    """Expanded, masked, in float64: all that tree attention avoids.

    With a window, ``places`` ``[kv heads, prefix]`` and ``positions`` ``[nodes]`` say where in the
    text keys and nodes are; by default the keys are in order, and a node is as far behind them as
    it has ancestors.
    """
    nodes = query.shape[1]
    kv_heads = len(keys)
    group = len(query) // len(keys)
    query = query.double()
    keys = keys.double()
    values = values.double()
    keys = keys.repeat_interleave(group, 0)
    values = values.repeat_interleave(group, 0)
    ancestors = chain(nodes, query.device) if ancestors is None else ancestors
    prefix = keys.shape[1] - nodes
    scores = query @ keys.transpose(1, 2) * scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    sees = torch.cat([ancestors.new_ones(nodes, prefix), ancestors], 1).expand(kv_heads, -1, -1)
    if spec.window is not None:
        positions = prefix + ancestors.sum(1) - 1 if positions is None else positions
        places = (
            torch.arange(prefix, device=query.device).expand(kv_heads, -1)
            if places is None
            else places
        )
        where = torch.cat([places, positions.expand(kv_heads, -1)], 1)
        sees = sees & (positions[None, :, None] - where[:, None] < spec.window)
    scores = scores.masked_fill(~sees.repeat_interleave(group, 0), -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks.double()[:, None, None].expand(-1, nodes, 1)], 2)
    return scores.softmax(-1)[..., : keys.shape[1]] @ values


def case(kv_heads, group, dim, prefix, nodes, dtype, seed=0, sharp=1.0, device="cpu"):
    """Query, keys, values, ancestors and scale; the query is a transposed view,
    as models give it.
    """
    made = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    capacity = prefix + nodes + 7  # what the caches give is a view into a larger buffer
    buffers = [torch.randn(2, kv_heads, capacity, dim, **made).to(dtype) for _ in range(2)]
    keys, values = (buffer[1, :, : prefix + nodes] for buffer in buffers)
    assert kv_heads == 1 or not keys.is_contiguous()
    query = (torch.randn(nodes, kv_heads * group, dim, **made) * sharp).to(dtype).transpose(0, 1)
    return query, keys, values, random_tree(nodes, Random(seed)).ancestors().to(device), dim**-0.5


def chain(nodes, device="cpu"):
    """Ancestors where every node descends from all before it."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


def tree_of(nodes: int, reach: int, seed: int) -> torch.Tensor:
    """Ancestors in a tree whose parents are at most ``reach`` nodes before their children;
    1 is a chain.
    """
    random = Random(seed)
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[max(0, node - random.randint(1, reach))]
    return ancestors


def by(backend):
    """A function that attends by a backend; the query's nodes are behind ``prefix`` keys,
    or the last of them.
    """

    def attend(query, keys, values, ancestors, scale, spec=NOTHING, prefix=None):
        nodes = query.shape[1]
        layout = Layout(len(keys), len(query) // len(keys), query.dtype, query.device)
        run = backend(layout, keys.shape[1] - nodes if prefix is None else prefix, nodes, ancestors)
        return run(query, keys, values, scale, *([spec] if spec else []))

    return attend


HUGE = (1e4, -1e4, 3e37)  # scores


def bears_huge_scores(attend, nodes: int, size: float):
    """Scores up to such a size rise and fall along a text,
    so that what was added up before has to shrink to nothing and to stay.
    """
    query, keys, values, ancestors, _ = case(1, 1, 16, 1000, nodes, torch.float32)
    query, keys = torch.zeros_like(query), torch.zeros_like(keys)
    query[..., 0] = 1
    keys[..., 0] = torch.sin(torch.arange(keys.shape[1]) / 50) * size
    out = attend(query, keys, values, ancestors, 1.0).double()
    torch.testing.assert_close(out, dense(query, keys, values, ancestors, 1.0), rtol=0, atol=2e-3)


def error(out, exact) -> float:
    """The largest error over the largest output."""
    return ((out.double() - exact).abs().max() / exact.abs().max()).item()


def odd_nodes(
    attend,
    ancestors,
    prefix,
    dtype,
    shape=(1, 1, 16),
    spec=NOTHING,
    sharp=1.0,
    nodes=None,
    made=case,
    tile=1,
) -> list[int]:
    """Nodes of a pass that have other bits than in passes of their own, their paths committed,
    as in plain decoding.

    What is behind the pass is NaN, and so are, but for what shares a ``tile`` with others, the keys
    before all windows.

    Args:
        attend: as :func:`by` gives it.
        ancestors: of the tree; a number for a chain of so many nodes, told by giving none.
        shape: KV heads, query heads per KV head, head size.
        nodes: those that are looked at; None for all.
        made: gives the case.
    """
    count = ancestors if isinstance(ancestors, int) else len(ancestors)
    query, keys, values, _, scale = made(*shape, prefix, count, dtype, prefix, sharp)
    end = prefix + count
    empty = torch.nan if keys.is_floating_point() else 0
    wholes = keys.new_full((2, len(keys), end + 300, keys.shape[2]), empty)
    wholes[0, :, :end], wholes[1, :, :end] = keys, values
    if spec.window is not None:
        wholes[:, :, : max(0, prefix - spec.window + 1) // tile * tile] = empty
    told = None if isinstance(ancestors, int) else ancestors.to(keys.device)
    out = attend(query, *wholes, told, scale, spec, prefix)
    found = []
    assert out.isfinite().all()
    lines = chain(count) if told is None else ancestors
    for node in range(count) if nodes is None else nodes:
        path = torch.cat([torch.arange(prefix), prefix + lines[node].nonzero().flatten()])
        alone = attend(query[:, node : node + 1], keys[:, path], values[:, path], None, scale, spec)
        if not torch.equal(out[:, node : node + 1], alone):
            found.append(node)
    return found
