"""Tree attention from stock operators: the prefix without a mask, the tree with a small one, merged by log-sum-exps.

The query heads that share a KV head are packed into rows, so keys and values are never expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 8192  # keys scored at a time where no operator returns log-sum-exps


def attend(query: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, scale: float) -> Tensor:
    """Attention of drafted tokens to the whole prefix and to their own ancestors.

    Args:
        query: ``[query heads, n, d]``, rotated.
        keys: ``[kv heads, prefix + n, d]``, rotated; the last n are the drafted tokens' own.
        values: like ``keys``.
        ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row itself.
        scale: factor of the scores.

    Returns:
        ``[query heads, n, d]``.
    """
    heads, nodes, dim = query.shape
    kv_heads = keys.shape[0]
    prefix = keys.shape[1] - nodes
    rows = query.reshape(kv_heads, -1, dim)
    parts = 1 if query.device.type != "cpu" else _parts(prefix, kv_heads, rows.shape[1])
    even = prefix - prefix % parts  # what the parts do not divide goes with the tree, whose slots follow
    tail = keys[:, even:]
    scores = torch.matmul(rows, tail.transpose(1, 2)) * scale
    if nodes > 1:
        blocked = ~ancestors
        if prefix > even:
            blocked = torch.cat([blocked.new_zeros(nodes, prefix - even), blocked], dim=1)
        scores = scores.view(kv_heads, -1, nodes, tail.shape[1]).masked_fill(blocked, -torch.inf)
        scores = scores.view(kv_heads, -1, tail.shape[1])
    if even == 0:
        return torch.matmul(scores.softmax(-1), values).view(heads, nodes, dim)
    tail_lse = scores.logsumexp(-1)
    tail_out = torch.matmul(torch.exp(scores - tail_lse.unsqueeze(-1)), values[:, even:])
    outs, lses = _prefix(rows, keys[:, :even], values[:, :even], parts, scale)
    all_lses = torch.cat([lses.to(tail_lse.dtype), tail_lse.unsqueeze(0)])
    weights = all_lses.softmax(0).unsqueeze(-1)
    merged = (outs * weights[:-1]).sum(0) + tail_out * weights[-1]
    return merged.view(heads, nodes, dim)


def _parts(prefix: int, kv_heads: int, rows: int) -> int:
    # the CPU operator works in parallel over heads and blocks of rows only; few of both leave cores idle
    if rows > 64 or prefix < 256:
        return 1
    return -(-torch.get_num_threads() // kv_heads)


def _prefix(rows: Tensor, keys: Tensor, values: Tensor, parts: int, scale: float) -> tuple[Tensor, Tensor]:
    """Unmasked attention over the prefix in ``parts`` equal parts.

    Returns:
        Outputs ``[parts, kv heads, rows, d]`` and log-sum-exps ``[parts, kv heads, rows]``.
    """
    if rows.device.type == "cpu":
        size = keys.shape[1] // parts
        split = [x.unflatten(1, (parts, size)).transpose(0, 1) for x in (keys, values)]
        query = rows.expand(parts, *rows.shape)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, *split, 0.0, False, scale=scale)
    outs, lses = [], []
    for start in range(0, keys.shape[1], _BLOCK):
        scores = torch.matmul(rows, keys[:, start : start + _BLOCK].transpose(1, 2)).to(_wide(rows)) * scale
        lse = scores.logsumexp(-1)
        probs = torch.exp(scores - lse.unsqueeze(-1)).to(values.dtype)
        outs.append(torch.matmul(probs, values[:, start : start + _BLOCK]))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _wide(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32
