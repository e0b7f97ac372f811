"""The sampling rule as two Triton kernels; ``sampler_check`` sees whether they draw the same tokens.

The rule itself, in float64 by PyTorch, stays :meth:`~tswift.sampling.rule.Sampler.draw_rows`. The
kernels draw the same tokens from logits read in the model's dtype, without a float64 copy of them
in memory. ``kernels.use_kernels`` alone imports this module: triton may not be installed.

A program works on some rows of logits (nodes of a draft tree) and one part of the vocabulary: rows
that share a part read its newest positions once, and one row's parts fill the device. Arithmetic is
that of :mod:`tswift.sampling.parameters` and :mod:`tswift.sampling.rule`, in float64 and in the
same order. NaN is carried as infinity: both draw nothing. ``reals`` is float64: temperature,
penalty, log(min-p); ``integers`` is int64: the seed's stream, the window. Which tokens are
penalised, ``PENALTY`` says: 0 none, 1 those in the text's window, 2 those on the node's path in the
draft tree, too, 3 those of a mask.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tswift.sampling.parameters import SamplingParams, constants
from tswift.sampling.rule import seed_stream

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _mixed(value):
    """SplitMix64's output function on int64, which wraps;
    after a shift the sign's copies are masked out.
    """
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
    logits, tokens, positions, ancestors, newest, seen, bias, banned, reals, integers, stride, seen_stride, rows,
    vocab, row, first,
    BLOCK: tl.constexpr, NODES: tl.constexpr, BIASED: tl.constexpr, BANNED: tl.constexpr,
    SCALED: tl.constexpr, PENALTY: tl.constexpr,
):  # fmt: skip
    """Warped logits ``[rows, block]`` before any filter;
    ``-inf`` outside the rows and the vocabulary.
    """
    ids = first + tl.arange(0, BLOCK)
    used = row < rows
    held = ids < vocab
    there = used[:, None] & held[None, :]
    at = logits + row.to(tl.int64)[:, None] * stride + ids[None, :]
    logit = tl.load(at, mask=there, other=float("-inf"))
    if logits.dtype.element_ty != tl.float64:
        logit = logit.to(tl.float32).to(tl.float64)
    if BIASED:
        logit = logit + tl.load(bias + ids, mask=held, other=0.0)[None, :]
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
            behind = (
                position[:, None] - tl.load(positions + node, mask=node < rows, other=0)[None, :]
            )
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
def rank_parts(
    logits, tokens, positions, ancestors, newest, seen, bias, banned, reals, integers, stride, seen_stride, rows,
    vocab, tops, scores, ranked,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr, BIASED: tl.constexpr, BANNED: tl.constexpr,
    SCALED: tl.constexpr, PENALTY: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr, MIN_P: tl.constexpr,
    NOISY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The best ``COUNT`` tokens of each row in each part, and their scores:
    both ``[rows, parts, COUNT]``.

    Noise is that of ``AHEAD`` places after ``positions``; grid ``(row blocks, parts)``. Where min-p
    is on, ``tops`` ``[rows, parts]`` are the parts' best scores without it, and without noise.
    Without ``ranked`` the scores alone are wanted, of one token each: that saves registers.
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
        every = tl.load(
            tops + row[:, None] * parts + other[None, :], mask=mask, other=float("-inf")
        )
        limit = tl.max(every, 1) + tl.load(reals + 2)
        top = tl.load(tops + row * parts + part, mask=used, other=float("-inf"))
    at = (row * parts + part) * COUNT
    # most parts have no token that min-p keeps: neither logits nor noise are looked at there
    if tl.max((used & (top >= limit)).to(tl.int32), 0) > 0:
        score = _warped(
            logits, tokens, positions, ancestors, newest, seen, bias, banned, reals, integers, stride, seen_stride,
            rows, vocab, row, first, BLOCK, NODES, BIASED, BANNED, SCALED, PENALTY,
        )  # fmt: skip
        ids = first + tl.arange(0, BLOCK)
        if MIN_P:
            score = tl.where(score < limit[:, None], float("-inf"), score)
        if NOISY:
            place = tl.load(positions + row, mask=used, other=0) + AHEAD
            stream = _mixed((place + 1) * -0x61C8864680B583EB + tl.load(integers))
            score = score + _gumbel(stream[:, None], ids[None, :])
        for rank in tl.static_range(COUNT):
            best = tl.max(score, 1)
            tl.store(scores + at + rank, best, mask=used)
            if ranked is not None:
                token = tl.min(tl.where(score == best[:, None], ids[None, :], first + BLOCK), 1)
                tl.store(ranked + at + rank, token, mask=used)
                score = tl.where(ids[None, :] == token[:, None], float("-inf"), score)
    else:
        for rank in tl.static_range(COUNT):
            tl.store(scores + at + rank, tl.full([ROWS], float("-inf"), tl.float64), mask=used)
            if ranked is not None:
                tl.store(ranked + at + rank, tl.full([ROWS], 0, tl.int32) + first, mask=used)


@triton.jit(do_not_specialize=["rows", "found"])
def rank_rows(
    scores, ranked, best_scores, best_tokens, rows, found,
    ROWS: tl.constexpr, FOUND: tl.constexpr, COUNT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """A row's best tokens and their scores, both ``[rows, COUNT]``,
    from the ``found`` ones of its parts.

    Of equal ones the lowest comes first. Where it is tokens drawn that are wanted, -1 stands for
    none, and no score is stored; grid ``(row blocks,)``.
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


INTERPRETED = not isinstance(rank_rows, triton.JITFunction)


class TritonSampler:
    """The sampling rule in Triton kernels: draws what :meth:`Sampler.draw_rows` draws, and ranks
    candidates.

    It serves parameters with no filter but min-p, and logits of one of :data:`DTYPES`, or of
    float64 where presence and frequency have been taken off them; made as a :class:`Sampler` is.
    """

    MAX_NODES: ClassVar[int] = 128  # of a draft tree
    MAX_CANDIDATES: ClassVar[int] = 16  # of a row; they are looked for one after the other
    BLOCK: ClassVar[int] = 1024  # tokens of a part

    def __init__(
        self, params: SamplingParams, seed: int, vocab_size: int, device: torch.device
    ) -> None:
        self._params = params
        self._min_p = "min_p" in params.filters
        self._noisy = not params.greedy
        reals = [params.temperature, params.penalty, math.log(params.min_p) if self._min_p else 0.0]
        self._reals = torch.tensor(reals, dtype=torch.float64).to(device)
        self._integers = torch.tensor([seed_stream(seed), params.window], dtype=torch.int64).to(
            device
        )
        self._bias = self._banned = None
        biased, biases, banned = constants(params, "cpu")
        if params.logit_bias:
            self._bias = (
                torch.zeros(vocab_size, dtype=torch.float64)
                .index_copy_(0, biased, biases)
                .to(device)
            )
        if params.banned:
            self._banned = (
                torch.zeros(vocab_size, dtype=torch.int8).index_fill_(0, banned, 1).to(device)
            )

    def draw(
        self, logits: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor, newest: Tensor
    ) -> Tensor:
        """As :meth:`Sampler.draw_rows`, for at most ``MAX_NODES`` nodes; ``newest`` is the
        sampler's.
        """
        penalty = 1 + (len(tokens) > 1) if self._params.penalises else 0
        nodes = tokens, positions, ancestors.contiguous().view(torch.int8), newest, None
        return self._best(logits, nodes, penalty, self._noisy, 1, drawn=True)[0].squeeze(1)

    def candidates(
        self, logits: Tensor, seen: Tensor | None, positions: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`Sampler.candidates`.

        Of equal ones the lowest comes first; a NaN's score is infinity.
        """
        mask = None if seen is None else seen.contiguous().view(torch.int8)
        nodes = None, positions, None, None, mask
        return self._best(
            logits, nodes, 0 if mask is None else 3, self._noisy and positions is not None, count
        )

    def _best(
        self,
        logits: Tensor,
        nodes: tuple[Tensor | None, ...],
        penalty: int,
        noisy: bool,
        count: int,
        drawn: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The best tokens of each row and their scores, both ``[n, count]``."""
        rows, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        parts = triton.cdiv(vocab, self.BLOCK)
        tops = logits.new_empty(rows, parts, dtype=torch.float64) if self._min_p else None
        scores = logits.new_empty(rows, parts * count, dtype=torch.float64)
        ranked = logits.new_empty(rows, parts * count, dtype=torch.int32)
        best_scores = logits.new_empty(rows, count, dtype=torch.float64)
        best_tokens = logits.new_empty(rows, count, dtype=torch.int64)
        seen = nodes[-1]
        seen_stride = vocab if seen is not None and len(seen) > 1 else 0
        arguments = (
            logits, *nodes, self._bias, self._banned, self._reals, self._integers, logits.stride(0), seen_stride, rows,
            vocab,
        )  # fmt: skip
        options = {
            "BLOCK": self.BLOCK,
            "NODES": self.MAX_NODES,
            "BIASED": self._bias is not None,
            "BANNED": self._banned is not None,
            "SCALED": self._noisy and self._params.temperature != 1,
            "PENALTY": penalty,
            "PARTS": triton.next_power_of_2(parts),
            "AHEAD": int(drawn),
            # a product and a sum rounded once would not be what PyTorch's two operators give
            "enable_fp_fusion": False,
        }
        # rows of a program: of the first kernel four where there are several, as its rows share
        # what they read; an interpreter wants few programs
        block = triton.next_power_of_2(rows) if INTERPRETED else 1
        shared, warps = (block, 4) if INTERPRETED or rows == 1 else (4, 8)
        with torch.cuda.device_of(logits):
            if self._min_p:
                rank_parts[triton.cdiv(rows, shared), parts](
                    *arguments, None, tops, None, ROWS=shared, COUNT=1, MIN_P=False, NOISY=False, num_warps=warps,
                    **options,
                )  # fmt: skip
            rank_parts[triton.cdiv(rows, block), parts](
                *arguments, tops, scores, ranked, ROWS=block, COUNT=count, MIN_P=self._min_p, NOISY=noisy, num_warps=4,
                **options,
            )  # fmt: skip
            rank_rows[triton.cdiv(rows, block),](
                scores, ranked, best_scores, best_tokens, rows, parts * count, ROWS=block,
                FOUND=triton.next_power_of_2(parts * count), COUNT=count, DRAWN=drawn,
            )  # fmt: skip
        return best_tokens, best_scores
