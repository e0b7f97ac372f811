"""The Triton kernels of the sampling rule: a part's most likely token, its best ones, and the best ones of a row.

A program works on some rows of logits (nodes of a draft tree) and one part of the vocabulary: rows that share a part
read its newest positions once, and one row's parts fill the device. Arithmetic is that of
:mod:`tswift.decoding.params` and :mod:`tswift.decoding.noise`, in float64 and in the same order. NaN is carried as
infinity: both draw nothing. ``reals`` is float64: temperature, penalty, log(min-p); ``integers`` is int64: the seed's
stream, the window. Which tokens are penalised, ``PENALTY`` says: 0 none, 1 those in the text's window, 2 those on the
node's path in the draft tree, too, 3 those of a mask. Only :mod:`tswift.decoding.fused` imports this module: triton may
not be installed.
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
    seen,
    banned,
    reals,
    integers,
    stride,
    seen_stride,
    rows,
    vocab,
    row,
    first,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    BANNED: tl.constexpr,
    SCALED: tl.constexpr,
    PENALTY: tl.constexpr,
):
    """Warped logits ``[rows, block]`` before any filter; ``-inf`` outside the rows and the vocabulary."""
    ids = first + tl.arange(0, BLOCK)
    used = row < rows
    held = ids < vocab
    there = used[:, None] & held[None, :]
    at = logits + row.to(tl.int64)[:, None] * stride + ids[None, :]
    logit = tl.load(at, mask=there, other=float("-inf")).to(tl.float32).to(tl.float64)
    if BANNED:
        never = tl.load(banned + ids, mask=held, other=0)
        logit = tl.where((never != 0)[None, :], float("-inf"), logit)
    logit = tl.where(logit == logit, logit, float("inf"))
    if SCALED:
        logit = logit / tl.load(reals)
    if PENALTY > 0:
        if PENALTY == 3:
            at = seen + row.to(tl.int64)[:, None] * seen_stride + ids[None, :]
            lower = tl.load(at, mask=there, other=0) != 0
        else:
            position = tl.load(positions + row, mask=used, other=0)
            window = tl.load(integers + 1)
            last = tl.load(newest + ids, mask=held, other=0)
            lower = last[None, :] > (position - window)[:, None]
        if PENALTY == 2:
            node = tl.arange(0, NODES)
            token = tl.load(tokens + node, mask=node < rows, other=0)
            token = tl.minimum(tl.maximum(token, 0), vocab - 1)
            inside = (token >= first) & (token < first + BLOCK) & (node < rows)
            mask = used[:, None] & inside[None, :]
            near = tl.load(ancestors + row[:, None] * rows + node[None, :], mask=mask, other=0) != 0
            behind = position[:, None] - tl.load(positions + node, mask=node < rows, other=0)[None, :]
            left = tl.where(mask & near & (behind < window), token[None, :], -1)
            # few of a path's tokens are in this part, so they are taken out one by one
            some = tl.max(left, 1)
            while tl.max(some, 0) >= 0:
                lower = lower | (ids[None, :] == some[:, None])
                left = tl.where(left == some[:, None], -1, left)
                some = tl.max(left, 1)
        penalty = tl.load(reals + 1)
        logit = tl.where(lower, tl.where(logit > 0, logit / penalty, logit * penalty), logit)
    return logit


@triton.jit(do_not_specialize=["rows", "seen_stride"])
def top_logits(
    logits,
    tokens,
    positions,
    ancestors,
    newest,
    seen,
    banned,
    reals,
    integers,
    stride,
    seen_stride,
    rows,
    vocab,
    tops,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    BANNED: tl.constexpr,
    SCALED: tl.constexpr,
    PENALTY: tl.constexpr,
):
    """The largest warped logit of each row in each part, ``tops`` ``[rows, parts]``; grid ``(row blocks, parts)``."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    logit = _warped(
        logits,
        tokens,
        positions,
        ancestors,
        newest,
        seen,
        banned,
        reals,
        integers,
        stride,
        seen_stride,
        rows,
        vocab,
        row,
        part * BLOCK,
        BLOCK,
        NODES,
        BANNED,
        SCALED,
        PENALTY,
    )
    tl.store(tops + row * tl.num_programs(1) + part, tl.max(logit, 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "seen_stride"])
def rank_parts(
    logits,
    tokens,
    positions,
    ancestors,
    newest,
    seen,
    banned,
    reals,
    integers,
    stride,
    seen_stride,
    rows,
    vocab,
    tops,
    scores,
    ranked,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    BANNED: tl.constexpr,
    SCALED: tl.constexpr,
    PENALTY: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    MIN_P: tl.constexpr,
    NOISY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The best ``COUNT`` tokens of each row in each part, and their scores: both ``[rows, parts, COUNT]``.

    Noise is that of ``AHEAD`` places after ``positions``; grid ``(row blocks, parts)``.
    """
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < rows
    first = part * BLOCK
    limit = tl.full([ROWS], float("-inf"), tl.float64)
    top = limit
    if MIN_P:
        other = tl.arange(0, PARTS)
        mask = used[:, None] & (other < parts)[None, :]
        every = tl.load(tops + row[:, None] * parts + other[None, :], mask=mask, other=float("-inf"))
        limit = tl.max(every, 1) + tl.load(reals + 2)
        top = tl.load(tops + row * parts + part, mask=used, other=float("-inf"))
    at = (row * parts + part) * COUNT
    # most parts have no token that min-p keeps: neither logits nor noise are looked at there
    if tl.max((used & (top >= limit)).to(tl.int32), 0) > 0:
        score = _warped(
            logits,
            tokens,
            positions,
            ancestors,
            newest,
            seen,
            banned,
            reals,
            integers,
            stride,
            seen_stride,
            rows,
            vocab,
            row,
            first,
            BLOCK,
            NODES,
            BANNED,
            SCALED,
            PENALTY,
        )
        ids = first + tl.arange(0, BLOCK)
        if MIN_P:
            score = tl.where(score < limit[:, None], float("-inf"), score)
        if NOISY:
            place = tl.load(positions + row, mask=used, other=0) + AHEAD
            stream = _mixed((place + 1) * -0x61C8864680B583EB + tl.load(integers))
            score = score + _gumbel(stream[:, None], ids[None, :])
        for rank in tl.static_range(COUNT):
            best = tl.max(score, 1)
            token = tl.min(tl.where(score == best[:, None], ids[None, :], first + BLOCK), 1)
            tl.store(scores + at + rank, best, mask=used)
            tl.store(ranked + at + rank, token, mask=used)
            score = tl.where(ids[None, :] == token[:, None], float("-inf"), score)
    else:
        for rank in tl.static_range(COUNT):
            tl.store(scores + at + rank, tl.full([ROWS], float("-inf"), tl.float64), mask=used)
            tl.store(ranked + at + rank, tl.full([ROWS], 0, tl.int32) + first, mask=used)


@triton.jit(do_not_specialize=["rows", "found"])
def rank_rows(
    scores,
    ranked,
    best_scores,
    best_tokens,
    rows,
    found,
    ROWS: tl.constexpr,
    FOUND: tl.constexpr,
    COUNT: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """A row's best tokens and their scores, both ``[rows, COUNT]``, from the ``found`` ones of its parts.

    Of equal ones the lowest comes first. Where it is tokens drawn that are wanted, -1 stands for none, and no score is
    stored; grid ``(row blocks,)``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    each = tl.arange(0, FOUND)
    mask = (row < rows)[:, None] & (each < found)[None, :]
    score = tl.load(scores + row[:, None] * found + each[None, :], mask=mask, other=float("-inf"))
    token = tl.load(ranked + row[:, None] * found + each[None, :], mask=mask, other=0)
    for rank in tl.static_range(COUNT):
        best = tl.max(score, 1)
        first = tl.min(tl.where(score == best[:, None], token, 0x7FFFFFFF), 1)
        score = tl.where(token == first[:, None], float("-inf"), score)
        if DRAWN:
            first = tl.where(tl.abs(best) < float("inf"), first, -1)
        else:
            tl.store(best_scores + row * COUNT + rank, best, mask=row < rows)
        tl.store(best_tokens + row * COUNT + rank, first.to(tl.int64), mask=row < rows)
