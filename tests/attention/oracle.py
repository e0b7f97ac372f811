"""What attention has to compute, densely and in float64, and inputs laid out as models and caches give them."""

from __future__ import annotations

from random import Random

import torch

from tests.helpers import random_tree
from tswift.attention.sdpa import AttentionSpec

NOTHING = AttentionSpec()


KV_HEADS, GROUP, DIM = 2, 3, 8
SINKS = torch.linspace(-1, 2, KV_HEADS * GROUP)
WANTS = {
    "window": AttentionSpec(window=9),
    "a window of one": AttentionSpec(window=1),
    "soft cap": AttentionSpec(softcap=1.5),
    "sinks": AttentionSpec(sinks=SINKS),
    "all": AttentionSpec(9, 1.5, SINKS),
}


def dense(query, keys, values, ancestors, scale, wants=NOTHING, places=None, positions=None):
    """Expanded, masked, in float64: all that tree attention avoids.

    With a window, ``places`` ``[kv heads, prefix]`` and ``positions`` ``[nodes]`` say where in the text keys and nodes
    are; by default the keys are in order, and a node is as far behind them as it has ancestors.
    """
    nodes, kv_heads, group = query.shape[1], len(keys), len(query) // len(keys)
    query, keys, values = query.double(), keys.double(), values.double()
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    prefix = keys.shape[1] - nodes
    scores = query @ keys.transpose(1, 2) * scale
    if wants.softcap is not None:
        scores = wants.softcap * torch.tanh(scores / wants.softcap)
    sees = torch.cat([ancestors.new_ones(nodes, prefix), ancestors], 1).expand(kv_heads, -1, -1)
    if wants.window is not None:
        positions = prefix + ancestors.sum(1) - 1 if positions is None else positions
        places = torch.arange(prefix, device=query.device).expand(kv_heads, -1) if places is None else places
        where = torch.cat([places, positions.expand(kv_heads, -1)], 1)
        sees = sees & (positions[None, :, None] - where[:, None] < wants.window)
    scores = scores.masked_fill(~sees.repeat_interleave(group, 0), -torch.inf)
    if wants.sinks is not None:
        scores = torch.cat([scores, wants.sinks.double()[:, None, None].expand(-1, nodes, 1)], 2)
    return scores.softmax(-1)[..., : keys.shape[1]] @ values


def case(kv_heads, group, dim, prefix, nodes, dtype, seed=0, sharp=1.0, device="cpu"):
    """Query, keys, values, ancestors and scale; the query is a transposed view, as models give it."""
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


def other_bits(attend, start, group, dim, dtype, count, sizes, device="cpu"):
    """Where a path's nodes have other bits in larger passes than one by one, as plain decoding has them.

    Args:
        attend: query, keys, values, ancestors, scale, nodes, prefix; keys and values may be longer than the text.
        start: tokens before the path.
        group: query heads per KV head, of which there are 2.
        dim: head size.
        dtype: of all.
        count: nodes of the path.
        sizes: of the passes; a path may be cut short in one, or have other nodes beside and behind it.
        device: to calculate on.

    Returns:
        The size, and whether the pass was a tree.
    """
    made = torch.Generator().manual_seed(start + group)

    def random(*shape):
        return torch.randn(*shape, generator=made).to(device, dtype)

    heads, end, scale = 2 * group, start + count, dim**-0.5
    query, keys, values = random(heads, count, dim), random(2, end, dim), random(2, end, dim)
    plain = []
    for at in range(count):
        slots = slice(0, start + at + 1)
        plain.append(attend(query[:, at : at + 1], keys[:, slots], values[:, slots], None, scale, 1, start + at))
    differ = []
    for nodes in sizes:
        shown = min(nodes, count)
        wholes = torch.full((2, 2, end + 300, dim), torch.nan, dtype=dtype, device=device)
        wholes[0, :, :end], wholes[1, :, :end] = keys, values
        wholes[:, :, start + shown : start + nodes] = random(2, 2, nodes - shown, dim)
        rows = torch.cat([query[:, :shown], random(heads, nodes - shown, dim)], dim=1)
        tree = random_tree(nodes, Random(nodes)).ancestors()
        tree[:shown] = False
        tree[:shown, :shown] = chain(shown)
        for ancestors in (None, tree.to(device)):
            out = attend(rows, *wholes, ancestors, scale, nodes, start)
            if not torch.equal(out[:, :shown], torch.cat(plain[:shown], dim=1)):
                differ.append((nodes, ancestors is not None))
    return differ
