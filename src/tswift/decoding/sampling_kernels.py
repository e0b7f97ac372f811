"""The Triton kernels of the sampling rule: the most likely token's score, the best token of a part, and of the row.

A program works on some rows of logits (nodes of a draft tree) and one part of the vocabulary: rows that share a part
read its newest positions once, and one row's parts fill the device. Arithmetic is that of
:mod:`tswift.decoding.warping` and :mod:`tswift.decoding.noise`, in float64 and in the same order. NaN is carried as
infinity: both draw nothing. ``reals`` is float64: temperature, penalty, log(min-p); ``integers`` is int64: the seed's
stream, the window. Only :mod:`tswift.decoding.fused` imports this module: triton may not be installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(value):
    """SplitMix64's output function on int64, which wraps; after a shift the sign's copies are masked out."""
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(stream, ids):
    """Gumbel noise of token ids at the positions with these streams."""
    bits = _mixed(stream + ids.to(tl.int64) * -0x61C8864680B583EB)
    uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _warped(
    logits,
    tokens,
    positions,
    ancestors,
    newest,
    banned,
    reals,
    integers,
    stride,
    nodes,
    vocab,
    row,
    first,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    BANNED: tl.constexpr,
    SCALED: tl.constexpr,
    PENALISED: tl.constexpr,
    TREE: tl.constexpr,
):
    """Warped logits ``[rows, block]`` before any filter; ``-inf`` outside the rows and the vocabulary."""
    ids = first + tl.arange(0, BLOCK)
    used = row < nodes
    held = ids < vocab
    at = logits + row.to(tl.int64)[:, None] * stride + ids[None, :]
    logit = tl.load(at, mask=used[:, None] & held[None, :], other=float("-inf")).to(tl.float32).to(tl.float64)
    if BANNED:
        never = tl.load(banned + ids, mask=held, other=0)
        logit = tl.where((never != 0)[None, :], float("-inf"), logit)
    logit = tl.where(logit == logit, logit, float("inf"))
    if SCALED:
        logit = logit / tl.load(reals)
    if PENALISED:
        position = tl.load(positions + row, mask=used, other=0)
        window = tl.load(integers + 1)
        last = tl.load(newest + ids, mask=held, other=0)
        seen = last[None, :] > (position - window)[:, None]
        if TREE:
            node = tl.arange(0, NODES)
            token = tl.load(tokens + node, mask=node < nodes, other=0)
            token = tl.minimum(tl.maximum(token, 0), vocab - 1)
            inside = (token >= first) & (token < first + BLOCK) & (node < nodes)
            mask = used[:, None] & inside[None, :]
            near = tl.load(ancestors + row[:, None] * nodes + node[None, :], mask=mask, other=0) != 0
            behind = position[:, None] - tl.load(positions + node, mask=node < nodes, other=0)[None, :]
            left = tl.where(mask & near & (behind < window), token[None, :], -1)
            # few of a path's tokens are in this part, so they are taken out one by one
            some = tl.max(left, 1)
            while tl.max(some, 0) >= 0:
                seen = seen | (ids[None, :] == some[:, None])
                left = tl.where(left == some[:, None], -1, left)
                some = tl.max(left, 1)
        penalty = tl.load(reals + 1)
        logit = tl.where(seen, tl.where(logit > 0, logit / penalty, logit * penalty), logit)
    return logit


@triton.jit(do_not_specialize=["nodes"])
def top_logits(
    logits,
    tokens,
    positions,
    ancestors,
    newest,
    banned,
    reals,
    integers,
    tops,
    stride,
    nodes,
    vocab,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    BANNED: tl.constexpr,
    SCALED: tl.constexpr,
    PENALISED: tl.constexpr,
    TREE: tl.constexpr,
):
    """The largest warped logit of each row in each part, ``tops`` ``[nodes, parts]``; grid ``(row blocks, parts)``."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    logit = _warped(
        logits,
        tokens,
        positions,
        ancestors,
        newest,
        banned,
        reals,
        integers,
        stride,
        nodes,
        vocab,
        row,
        part * BLOCK,
        ROWS,
        BLOCK,
        NODES,
        BANNED,
        SCALED,
        PENALISED,
        TREE,
    )
    tl.store(tops + row * tl.num_programs(1) + part, tl.max(logit, 1), mask=row < nodes)


@triton.jit(do_not_specialize=["nodes"])
def draw_parts(
    logits,
    tokens,
    positions,
    ancestors,
    newest,
    banned,
    reals,
    integers,
    tops,
    scores,
    drawn,
    stride,
    nodes,
    vocab,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    BANNED: tl.constexpr,
    SCALED: tl.constexpr,
    PENALISED: tl.constexpr,
    TREE: tl.constexpr,
    MIN_P: tl.constexpr,
    NOISY: tl.constexpr,
):
    """The best token of each row in each part, and its score: both ``[nodes, parts]``; grid ``(row blocks, parts)``."""
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < nodes
    first = part * BLOCK
    limit = tl.full([ROWS], float("-inf"), tl.float64)
    top = limit
    if MIN_P:
        other = tl.arange(0, PARTS)
        mask = used[:, None] & (other < parts)[None, :]
        every = tl.load(tops + row[:, None] * parts + other[None, :], mask=mask, other=float("-inf"))
        limit = tl.max(every, 1) + tl.load(reals + 2)
        top = tl.load(tops + row * parts + part, mask=used, other=float("-inf"))
    best = tl.full([ROWS], float("-inf"), tl.float64)
    token = tl.full([ROWS], 0, tl.int32)
    # most parts have no token that min-p keeps: neither logits nor noise are looked at there
    if tl.max((used & (top >= limit)).to(tl.int32), 0) > 0:
        logit = _warped(
            logits,
            tokens,
            positions,
            ancestors,
            newest,
            banned,
            reals,
            integers,
            stride,
            nodes,
            vocab,
            row,
            first,
            ROWS,
            BLOCK,
            NODES,
            BANNED,
            SCALED,
            PENALISED,
            TREE,
        )
        ids = first + tl.arange(0, BLOCK)
        score = logit
        if MIN_P:
            score = tl.where(logit < limit[:, None], float("-inf"), logit)
        if NOISY:
            place = tl.load(positions + row, mask=used, other=0) + 1
            stream = _mixed((place + 1) * -0x61C8864680B583EB + tl.load(integers))
            score = score + _gumbel(stream[:, None], ids[None, :])
        best = tl.max(score, 1)
        token = tl.min(tl.where(score == best[:, None], ids[None, :], first + BLOCK), 1)
    tl.store(scores + row * parts + part, best, mask=used)
    tl.store(drawn + row * parts + part, token, mask=used)


@triton.jit(do_not_specialize=["nodes", "parts"])
def draw_row(scores, drawn, out, nodes, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """A row's best token from those of its parts, the lowest of equal ones; grid ``(row blocks,)``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    mask = (row < nodes)[:, None] & (part < parts)[None, :]
    score = tl.load(scores + row[:, None] * parts + part[None, :], mask=mask, other=float("-inf"))
    token = tl.load(drawn + row[:, None] * parts + part[None, :], mask=mask, other=0)
    best = tl.max(score, 1)
    token = tl.min(tl.where(score == best[:, None], token, 0x7FFFFFFF), 1)
    tl.store(out + row, tl.where(tl.abs(best) < float("inf"), token, -1).to(tl.int64), mask=row < nodes)
