"""The sampling rule as two or three Triton kernels, and the check that they draw the same tokens.

The rule itself, in float64 by PyTorch, stays :meth:`~tswift.decoding.sampling.Sampler.draw_rows`. What is here draws
the same tokens from logits read in the model's dtype, without a float64 copy of them in memory. Only the sampler
imports this module, where it is asked to: triton may not be installed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import ClassVar

import torch
import triton
from torch import Tensor

from tswift.decoding import sampling_kernels as kernels
from tswift.decoding.noise import seed_stream
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import FAR, NO_TOKEN, Sampler

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRIED = (*range(1, 9), 41, 41, 41, 41, 41, 41, 41)  # nodes of the trees with which the kernels are tried on a device
RANKED = (1, 1, 1, 4, 4, 16)  # rows with which the ranking of candidates is
_INTERPRETED = not isinstance(kernels.rank_rows, triton.JITFunction)
_CHECKED: dict[tuple[object, ...], str | None] = {}


class FusedRule:
    """Draws what :meth:`Sampler.draw_rows` draws, and ranks candidates, where :func:`unserved` is empty.

    Logits are float32, bfloat16 or float16, and every other tensor is int64, or bool where it is a mask.

    Args:
        params: the sampling parameters.
        seed: the sampler's.
        vocab_size: number of token ids ``V``.
        device: where logits will be.
    """

    MOST_NODES: ClassVar[int] = 128  # of a draft tree
    MOST_CANDIDATES: ClassVar[int] = 16  # of a row; they are looked for one after the other
    BLOCK: ClassVar[int] = 1024  # tokens of a part

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, device: torch.device) -> None:
        self._min_p, self._noisy, self._penalises = _min_p(params) > 0, params.temperature > 0, params.penalises
        reals = [params.temperature, params.penalty, math.log(_min_p(params)) if self._min_p else 0.0]
        self._reals = torch.tensor(reals, dtype=torch.float64).to(device)
        self._integers = torch.tensor([seed_stream(seed), params.window], dtype=torch.int64).to(device)
        self._banned = None
        if params.banned:
            self._banned = torch.zeros(vocab_size, dtype=torch.int8)
            self._banned[list(params.banned)] = 1
            self._banned = self._banned.to(device)
        self._scaled = params.temperature not in (0, 1)

    def draw(self, logits: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor, newest: Tensor) -> Tensor:
        """As :meth:`Sampler.draw_rows`, for at most 128 nodes; ``newest`` is the sampler's."""
        penalty = (1 + (len(tokens) > 1)) if self._penalises else 0
        mask = ancestors.contiguous().view(torch.int8)
        drawn, _ = self._best(logits, (tokens, positions, mask, newest, None), penalty, self._noisy, 1, drawn=True)
        return drawn.squeeze(1)

    def candidates(
        self, logits: Tensor, seen: Tensor | None, positions: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`Sampler.candidates`. Of equal ones the lowest comes first; a NaN is told as infinity."""
        penalty, mask = 0, None
        if seen is not None:
            penalty, mask = 3, seen.contiguous().view(torch.int8)
        noisy = self._noisy and positions is not None
        return self._best(logits, (None, positions, None, None, mask), penalty, noisy, count, drawn=False)

    def _best(
        self, logits: Tensor, given: tuple[Tensor | None, ...], penalty: int, noisy: bool, count: int, drawn: bool
    ) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        parts = triton.cdiv(vocab, self.BLOCK)
        tops = logits.new_empty(rows, parts, dtype=torch.float64) if self._min_p else None
        scores = logits.new_empty(rows, parts * count, dtype=torch.float64)
        ranked = logits.new_empty(rows, parts * count, dtype=torch.int32)
        best_scores = logits.new_empty(rows, count, dtype=torch.float64)
        best_tokens = logits.new_empty(rows, count, dtype=torch.int64)
        seen = given[-1]
        seen_stride = vocab if seen is not None and len(seen) > 1 else 0
        arguments = (
            logits, *given, self._banned, self._reals, self._integers, logits.stride(0), seen_stride, rows, vocab
        )  # fmt: skip
        options = {
            "BLOCK": self.BLOCK,
            "NODES": self.MOST_NODES,
            "BANNED": self._banned is not None,
            "SCALED": self._scaled,
            "PENALTY": penalty,
            # a product and a sum rounded once would not be what PyTorch's two operators give
            "enable_fp_fusion": False,
        }
        with torch.cuda.device_of(logits):
            if self._min_p:
                block, warps = _rows(rows, shared=True)
                kernels.top_logits[triton.cdiv(rows, block), parts](
                    *arguments, tops, ROWS=block, num_warps=warps, **options
                )
            block, warps = _rows(rows, shared=False)
            blocks = triton.cdiv(rows, block)
            kernels.rank_parts[blocks, parts](
                *arguments,
                tops,
                scores,
                ranked,
                ROWS=block,
                PARTS=triton.next_power_of_2(parts),
                COUNT=count,
                MIN_P=self._min_p,
                NOISY=noisy,
                AHEAD=int(drawn),
                num_warps=warps,
                **options,
            )
            kernels.rank_rows[blocks,](
                scores,
                ranked,
                best_scores,
                best_tokens,
                rows,
                parts * count,
                ROWS=block,
                FOUND=triton.next_power_of_2(parts * count),
                COUNT=count,
                DRAWN=drawn,
            )
        return best_tokens, best_scores


def _rows(nodes: int, shared: bool) -> tuple[int, int]:
    """Rows that a program works on, and its warps.

    Args:
        nodes: how many rows there are.
        shared: whether rows together save as much reading as they take registers.
    """
    if _INTERPRETED:  # what costs is the number of programs
        return triton.next_power_of_2(nodes), 4
    return (4, 8) if shared and nodes > 1 else (1, 4)


def _min_p(params: SamplingParams) -> float:
    return params.min_p if params.temperature else 0.0


def unserved(params: SamplingParams) -> tuple[str, ...]:
    """The filters of these sampling parameters that the kernels do not have."""
    return tuple(name for name in params.filters if name != "min_p")


def fused_sampler_fault(
    params: SamplingParams, vocab_size: int, dtype: torch.dtype, device: torch.device, candidates: int = 0
) -> str | None:
    """Why the kernels are not to be used for such parameters; None if they are.

    They are compared with the rule in PyTorch on the device itself, on some hundred rows with all that is odd; once for
    every dtype, vocabulary, and set of kernels that parameters need. It takes as long as they take to compile.

    Args:
        params: the sampling parameters.
        vocab_size: number of token ids.
        dtype: of the logits.
        device: where they will be.
        candidates: look at how so many candidates of a row are ranked, with noise and without; 0 looks at the drawing.
    """
    if unserved(params):
        return f"no kernel has {' and '.join(unserved(params))}"
    if dtype not in DTYPES:
        return f"the kernels do not read {str(dtype).removeprefix('torch.')}"
    if candidates > FusedRule.MOST_CANDIDATES:
        return f"the kernels rank at most {FusedRule.MOST_CANDIDATES} candidates"
    scaled = params.temperature not in (0, 1)
    kind = (params.temperature > 0, scaled, params.penalises, _min_p(params) > 0, bool(params.banned))
    key = (candidates, dtype, vocab_size, device, *kind)
    if key not in _CHECKED:
        try:
            _CHECKED[key] = _disagreement(params, vocab_size, dtype, device, candidates)
        except Exception as error:  # whatever it is that a compiler or a driver dislikes
            _CHECKED[key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return _CHECKED[key]


def _disagreement(
    params: SamplingParams, vocab_size: int, dtype: torch.dtype, device: torch.device, candidates: int
) -> str | None:
    random, wrong = Random(0), 0
    if candidates:
        for rows in RANKED:
            wrong += misranked(params, vocab_size, rows, dtype, device, candidates, random)
        return f"{wrong} of {sum(RANKED)} rows had other candidates than by the rule" if wrong else None
    for index, nodes in enumerate(TRIED):
        short = replace(params, window=random.randint(1, 5)) if params.penalises and index % 2 else params
        wrong += mismatches(short, vocab_size, nodes, dtype, device, random)
    return f"{wrong} of {sum(TRIED)} rows drew another token than the rule" if wrong else None


def mismatches(
    params: SamplingParams, vocab_size: int, nodes: int, dtype: torch.dtype, device: torch.device, random: Random
) -> int:
    """Number of nodes of a random draft tree after which kernels and rule draw different tokens."""
    seed = random.getrandbits(64)
    sampler = Sampler(params, seed, vocab_size, device)
    logits = odd_rows(nodes, vocab_size, dtype, random)
    tree = _random_tree(sampler, logits, random)
    rows, tokens, positions, ancestors = (each.to(device) for each in (logits, *tree))
    fused = FusedRule(params, seed, vocab_size, device)
    drawn = fused.draw(rows, tokens, positions, ancestors, sampler.newest)
    return int((drawn != sampler.draw_rows(rows, tokens, positions, ancestors)).sum())


def misranked(
    params: SamplingParams,
    vocab_size: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    count: int,
    random: Random,
) -> int:
    """Of random rows, those whose candidates by the kernels are not those by the rule, with noise or without.

    What is equal may come in any order, and a score may be off by its last place: candidates are but guesses.
    """
    seed = random.getrandbits(64)
    sampler = Sampler(params, seed, vocab_size, device)
    fused = FusedRule(params, seed, vocab_size, device)
    logits = odd_rows(rows, vocab_size, dtype, random).to(device)
    generator = torch.Generator().manual_seed(random.getrandbits(63))
    seen = torch.rand(random.choice((1, rows)), vocab_size, generator=generator).to(device) < random.random()
    place = random.choice((0, 7, 5000, 1 << 40))
    count = min(count, vocab_size)
    wrong = torch.zeros(rows, dtype=torch.bool, device=device)
    for places in (None, torch.arange(place, place + rows, device=device)):
        given = (logits, seen if params.penalises else None, places, count)
        scores = sampler.warp(*given[:2]) if places is None else sampler.scores(logits, given[1], places)
        best = scores.topk(count).values
        tokens, theirs = fused.candidates(*given)
        own, real = scores.gather(1, tokens), best > -math.inf
        alone = ((tokens[:, :, None] == tokens[:, None]) & real[:, None]).sum(-1) == 1
        same = _close(theirs, best) & (~real | (_close(own, best) & alone))
        wrong |= (scores.amax(-1) < math.inf) & ~same.all(-1)  # what is broken is no guess
    return int(wrong.sum())


def _close(one: Tensor, other: Tensor) -> Tensor:
    return torch.isclose(one, other, rtol=1e-12, atol=1e-12)


def odd_rows(rows: int, vocab_size: int, dtype: torch.dtype, random: Random) -> Tensor:
    """Logits ``[rows, V]``, peaked and flat, some with ties, impossible tokens, NaN, infinity, or huge or tiny ones."""
    generator = torch.Generator().manual_seed(random.getrandbits(63))
    # some tokens are likely everywhere, so that it matters which are penalised along a path
    logits = torch.randn(rows, vocab_size, generator=generator) + 2 * torch.randn(vocab_size, generator=generator)
    # subnormal numbers, but those of bfloat16 in Triton's interpreter, which misreads them
    tiny = 1e-30 if _INTERPRETED and dtype == torch.bfloat16 else torch.finfo(dtype).tiny / 100
    for row in logits:
        token = random.randrange(vocab_size)
        row *= random.choice((0.1, 1.0, 3.0, 10.0))
        kind = random.randrange(24)
        if kind == 0:
            row[token] = math.nan
        elif kind == 1:
            row[token] = math.inf
        elif kind == 2:
            row.fill_(-math.inf if token % 2 else 1.5)
        elif kind == 3:
            row[row < row[token]] = -math.inf
        elif kind == 4:
            row *= random.choice((tiny, 1e-6, 1e4, 1e37))
        elif kind in (5, 6):
            row.round_()
        elif kind in (7, 8):
            row[token] += 15
        elif kind == 9:
            row -= 100
    return logits.to(dtype)


def _random_tree(sampler: Sampler, logits: Tensor, random: Random) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and ancestors of a draft tree, at whose nodes ``logits`` are, after a text for the sampler."""
    nodes, vocab = logits.shape
    generator = torch.Generator().manual_seed(random.getrandbits(63))
    place = random.choice((0, 7, 5000, 1 << 40))
    span = min(2 * sampler.params.window + 2, 5000)
    ages = torch.randint(span, (vocab,), generator=generator)
    newest = (place - ages).masked_fill_(torch.rand(vocab, generator=generator) < random.random(), FAR)
    likely = logits.float().argmax(-1).tolist()
    ancestors = torch.eye(nodes, dtype=torch.bool)
    depths, tokens = [0] * nodes, [random.randrange(vocab)]
    deep = random.random() < 0.2
    for node in range(1, nodes):
        parent = max(0, node - random.randint(1, 3)) if deep else random.randrange(node)
        ancestors[node] |= ancestors[parent]
        depths[node] = depths[parent] + 1
        tokens.append(random.choice((likely[parent], likely[node], random.randrange(vocab), NO_TOKEN)))
    newest[tokens[0]] = place
    sampler.newest.copy_(newest)
    return torch.tensor(tokens), torch.tensor(depths) + place, ancestors
