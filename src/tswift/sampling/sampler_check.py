"""Whether the kernels of the sampler draw what the rule draws,
on random rows with all that is odd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from tswift.checking import Compared, kernel_fault
from tswift.errors import NoFault
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import FAR, NO_TOKEN, Sampler
from tswift.sampling.sampler_triton import DTYPES, INTERPRETED, TritonSampler

# nodes of the trees with which the kernels are tried on a device
TRIED = (*range(1, 9), 41, 41, 41, 41, 41, 41, 41)
RANKED = (1, 1, 1, 4, 4, 16)  # rows with which the ranking of candidates is


def triton_sampler_fault(
    params: SamplingParams,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    candidates: int = 0,
) -> str | None:
    """Why the kernels are not to be used for such parameters; None if they are.

    They are compared with the rule in PyTorch on the device itself, on random rows with all that is
    odd; once for every dtype, vocabulary, and set of kernels that parameters need. It takes as long
    as they take to compile. The drawing is tried, or the ranking of so many ``candidates`` of a
    row, with noise and without.
    """
    unserved = [name for name in params.filters if name != "min_p"]
    if unserved:
        return NoFault(f"no kernel has {' and '.join(unserved)}")
    if dtype not in DTYPES and not (params.counts or params.repeats):
        return NoFault(f"the kernels do not read {str(dtype).removeprefix('torch.')}")
    if candidates > TritonSampler.MAX_CANDIDATES:
        return NoFault(f"the kernels rank at most {TritonSampler.MAX_CANDIDATES} candidates")
    # logits have been lowered before a kernel reads them
    params = replace(
        params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0
    )
    asked = (
        *(candidates, dtype, vocab_size, params.greedy, params.temperature == 1),
        *(params.penalises, params.filters, bool(params.logit_bias), bool(params.banned)),
    )
    compared = _compared(params, vocab_size, dtype, device, candidates)
    return kernel_fault("sampler", compared, device, *asked)


def _compared(
    params: SamplingParams,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    candidates: int,
) -> Iterator[Compared]:
    random = Random(0)
    for rows in RANKED if candidates else ():
        yield from ranked(*both(params, vocab_size, rows, dtype, device, random), candidates)
    for index, nodes in enumerate(() if candidates else TRIED):
        short = params
        if params.penalises and index % 2:
            short = replace(params, window=random.randint(1, 5))
        yield drawn(*both(short, vocab_size, nodes, dtype, device, random))


def both(
    params: SamplingParams,
    vocab_size: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    random: Random,
) -> tuple[Sampler, TritonSampler, Tensor, Random]:
    """The rule and its kernels, of a random seed, and random logits."""
    given = params, random.getrandbits(64), vocab_size, device
    logits = odd_rows(rows, vocab_size, dtype, random).to(device)
    return Sampler(*given), TritonSampler(*given), logits, random


def drawn(sampler: Sampler, kernels: TritonSampler, logits: Tensor, random: Random) -> Compared:
    """What kernels and rule draw after the nodes of a random draft tree."""
    tree = _random_tree(sampler, logits, random)
    given = [logits, *(each.to(logits.device) for each in tree), sampler.newest]
    ours, plain = kernels.draw(*given), sampler.draw_rows(*given[:-1])
    return f"tokens drawn in {len(logits)}-node trees", ours, plain


def ranked(
    sampler: Sampler, kernels: TritonSampler, logits: Tensor, random: Random, count: int
) -> Iterator[Compared]:
    """Candidates of random rows by kernels and rule, with noise and without.

    What is equal may come in any order, and a score may be off by its last place: candidates are
    but guesses.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    generator = torch.Generator().manual_seed(random.getrandbits(63))
    seen = torch.rand(random.choice((1, rows)), vocab_size, generator=generator)
    share = random.random()
    penalised = (seen < share).to(device) if sampler.penalises else None
    place = random.choice((0, 7, 5000, 1 << 40))
    for places in (None, torch.arange(place, place + rows, device=device)):
        noise = 0 if places is None else sampler.noise(places)
        scores = sampler.warp(logits, penalised) + noise
        best = scores.topk(count).values
        tokens, theirs = kernels.candidates(logits, penalised, places, count)
        real = best > -math.inf
        alone = ((tokens[:, :, None] == tokens[:, None]) & real[:, None]).sum(-1) == 1
        own = scores.gather(1, tokens)
        same = _close(theirs, best) & (~real | (_close(own, best) & alone))
        # a row with NaN or infinity has no candidates
        same |= ~(scores.amax(-1, keepdim=True) < math.inf)
        yield "candidates", same, torch.ones_like(same)


def _close(one: Tensor, other: Tensor) -> Tensor:
    return torch.isclose(one, other, rtol=1e-12, atol=1e-12)


def odd_rows(rows: int, vocab_size: int, dtype: torch.dtype, random: Random) -> Tensor:
    """Logits ``[rows, V]``, peaked and flat, some with ties, impossible tokens, NaN, infinity,
    or huge or tiny ones.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(63))
    # some tokens are likely everywhere, so that it matters which are penalised along a path
    logits = torch.randn(rows, vocab_size, generator=generator) + 2 * torch.randn(
        vocab_size, generator=generator
    )
    # subnormal numbers, but those of bfloat16 in Triton's interpreter, which misreads them
    tiny = 1e-30 if INTERPRETED and dtype == torch.bfloat16 else torch.finfo(dtype).tiny / 100
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
    """Tokens, positions and ancestors of a draft tree, at whose nodes ``logits`` are,
    after a text for the sampler.
    """
    nodes, vocab = logits.shape
    generator = torch.Generator().manual_seed(random.getrandbits(63))
    place = random.choice((0, 7, 5000, 1 << 40))
    span = min(2 * sampler.params.window + 2, 5000)
    ages = torch.randint(span, (vocab,), generator=generator)
    newest = (place - ages).masked_fill_(
        torch.rand(vocab, generator=generator) < random.random(), FAR
    )
    likely = logits.float().argmax(-1).tolist()
    ancestors = torch.eye(nodes, dtype=torch.bool)
    depths = [0] * nodes
    tokens = [random.randrange(vocab)]
    deep = random.random() < 0.2
    for node in range(1, nodes):
        parent = max(0, node - random.randint(1, 3)) if deep else random.randrange(node)
        ancestors[node] |= ancestors[parent]
        depths[node] = depths[parent] + 1
        tokens.append(
            random.choice((likely[parent], likely[node], random.randrange(vocab), NO_TOKEN))
        )
    newest[tokens[0]] = place
    sampler.newest.copy_(newest)
    return torch.tensor(tokens), torch.tensor(depths) + place, ancestors
