"""The sampling rule in two or three Triton kernels, and how it is seen that they draw what the rule draws.

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
_INTERPRETED = not isinstance(kernels.draw_row, triton.JITFunction)
_CHECKED: dict[tuple[object, ...], str | None] = {}


class FusedDraw:
    """Draws what :meth:`Sampler.draw_rows` draws, for parameters that :func:`served` approves of.

    Args:
        params: the sampling parameters.
        seed: the sampler's.
        vocab_size: number of token ids ``V``.
        device: where logits will be.
    """

    MOST_NODES: ClassVar[int] = 128  # of a draft tree
    BLOCK: ClassVar[int] = 1024  # tokens of a part

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, device: torch.device) -> None:
        min_p = params.min_p if params.temperature else 0.0
        reals = [params.temperature, params.penalty, math.log(min_p) if min_p else 0.0]
        self._reals = torch.tensor(reals, dtype=torch.float64).to(device)
        self._integers = torch.tensor([seed_stream(seed), params.window], dtype=torch.int64).to(device)
        self._banned = None
        if params.banned:
            self._banned = torch.zeros(vocab_size, dtype=torch.int8)
            self._banned[list(params.banned)] = 1
            self._banned = self._banned.to(device)
        self._warping = {
            "BANNED": bool(params.banned),
            "SCALED": params.temperature not in (0, 1),
            "PENALISED": params.penalises,
        }
        self._min_p, self._noisy = min_p > 0, params.temperature > 0

    def __call__(self, logits: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor, newest: Tensor) -> Tensor:
        """As :meth:`Sampler.draw_rows`, for at most 128 nodes.

        Args:
            logits: ``[n, V]`` float32, bfloat16 or float16.
            tokens: ``[n]`` int64.
            positions: ``[n]`` int64.
            ancestors: ``[n, n]`` bool.
            newest: the sampler's.
        """
        nodes, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        parts = triton.cdiv(vocab, self.BLOCK)
        scores = logits.new_empty(nodes, parts, dtype=torch.float64)
        drawn = logits.new_empty(nodes, parts, dtype=torch.int32)
        out = logits.new_empty(nodes, dtype=torch.int64)
        tops = torch.empty_like(scores) if self._min_p else None
        mask = ancestors.contiguous().view(torch.int8)
        read = (logits, tokens, positions, mask, newest, self._banned, self._reals, self._integers)
        shape = (logits.stride(0), nodes, vocab)
        some = triton.next_power_of_2(parts)
        # a product and a sum rounded once would not be what PyTorch's two operators give
        options = {"BLOCK": self.BLOCK, "NODES": self.MOST_NODES, "TREE": nodes > 1, "enable_fp_fusion": False}
        options |= self._warping
        with torch.cuda.device_of(logits):
            if self._min_p:
                rows, warps = _rows(nodes, shared=True)
                kernels.top_logits[triton.cdiv(nodes, rows), parts](
                    *read, tops, *shape, ROWS=rows, num_warps=warps, **options
                )
            rows, warps = _rows(nodes, shared=False)
            kernels.draw_parts[triton.cdiv(nodes, rows), parts](
                *read,
                tops,
                scores,
                drawn,
                *shape,
                ROWS=rows,
                PARTS=some,
                MIN_P=self._min_p,
                NOISY=self._noisy,
                num_warps=warps,
                **options,
            )
            kernels.draw_row[triton.cdiv(nodes, rows),](scores, drawn, out, nodes, parts, ROWS=rows, PARTS=some)
        return out


def _rows(nodes: int, shared: bool) -> tuple[int, int]:
    """Rows that a program works on, and its warps.

    Args:
        nodes: how many rows there are.
        shared: whether rows together save as much reading as they take registers.
    """
    if _INTERPRETED:  # what costs is the number of programs
        return triton.next_power_of_2(nodes), 4
    return (4, 8) if shared and nodes > 1 else (1, 4)


def served(params: SamplingParams) -> bool:
    """Whether the kernels have all that these parameters ask for: top-k, top-p and eta they have not."""
    return params.temperature == 0 or (params.top_k == 0 and params.top_p == 1 and params.eta == 0)


def fused_sampler_fault(
    params: SamplingParams, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the kernels are not to be used for such parameters; None if they are.

    They are compared with the rule in PyTorch on the device itself, on some hundred rows with all that is odd; once for
    every dtype, vocabulary, and set of kernels that parameters need. It takes as long as they take to compile.
    """
    if not served(params):
        return "top-k, top-p and eta have no kernel"
    if dtype not in DTYPES:
        return f"the kernels do not read {str(dtype).removeprefix('torch.')}"
    scaled = params.temperature not in (0, 1)
    kind = (params.temperature > 0, scaled, params.penalises, params.min_p > 0, bool(params.banned))
    key = (dtype, vocab_size, device, *kind)
    if key not in _CHECKED:
        try:
            random, wrong = Random(0), 0
            for index, nodes in enumerate(TRIED):
                short = replace(params, window=random.randint(1, 5)) if params.penalises and index % 2 else params
                wrong += mismatches(short, vocab_size, nodes, dtype, device, random)
            _CHECKED[key] = f"{wrong} of {sum(TRIED)} rows drew another token than the rule" if wrong else None
        except Exception as error:  # whatever it is that a compiler or a driver dislikes
            _CHECKED[key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return _CHECKED[key]


def mismatches(
    params: SamplingParams, vocab_size: int, nodes: int, dtype: torch.dtype, device: torch.device, random: Random
) -> int:
    """In a random draft tree over a random text, the nodes after which the kernels do not draw what the rule draws."""
    seed = random.getrandbits(64)
    sampler = Sampler(params, seed, vocab_size, device)
    logits = odd_rows(nodes, vocab_size, dtype, random)
    tree = _random_tree(sampler, logits, random)
    rows, tokens, positions, ancestors = (each.to(device) for each in (logits, *tree))
    fused = FusedDraw(params, seed, vocab_size, device)
    drawn = fused(rows, tokens, positions, ancestors, sampler.newest)
    return int((drawn != sampler.draw_rows(rows, tokens, positions, ancestors)).sum())


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
