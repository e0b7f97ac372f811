"""Guesses against a search through all of the text with whole distributions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import VOCAB
from tswift.decoding.drafter import Context
from tswift.decoding.params import SamplingParams, warp
from tswift.decoding.sampling import Sampler
from tswift.drafting.history import LogitHistory
from tswift.models.passes import Forwarded

PENALTY = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=9)


def words(count: int) -> list[int]:
    """A text that comes back to what it said."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 5, (count,), generator=generator).tolist()


def thoughts(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2


def recalled(text, logits, pieces, params, *, kept: int = VOCAB, noise: bool = True) -> tuple[LogitHistory, Sampler]:
    """What is recalled of a text that came in pieces; the first is the prompt, which is prefilled in two chunks."""
    sampler = Sampler(params, 7, VOCAB, torch.device("cpu"))
    recall = LogitHistory(SimpleNamespace(vocab_size=VOCAB, logits=lambda hidden: hidden), noise, kept)
    known = pieces[0] - 1
    for chunk in (logits[: known // 2], logits[known // 2 : known]):
        recall.prefilled(chunk, sampler)
    context = Context(text[: pieces[0]], sampler, None)
    sampler.extend(context.text)
    recall.committed(context)
    for piece in pieces[1:]:
        done = len(context.text)
        context.text += text[done : done + piece]
        sampler.extend(text[done : done + piece])
        # the tree had a node more, which was not accepted, before the ones that were
        rows = torch.cat([logits[done - 1 : done], torch.full((1, VOCAB), 99.0), logits[done : done + piece - 1]])
        context.path = [0, *range(2, piece + 1)]
        context.last, context.logits = Forwarded(rows, []), rows
        recall.committed(context)
    assert context.text == text
    return recall, sampler


def expected(text, logits, path, params, noise: Sampler | None) -> tuple[torch.Tensor, int]:
    """Scores ``[V]``, and the longest match."""
    whole = [*text[:-1], *path]
    matches = []
    for end in range(len(text) - 1):
        length = 0
        while length < min(12, end + 1) and whole[end - length] == whole[-1 - length]:
            length += 1
        if length:
            matches.append((length, end))
    matches = sorted(matches, reverse=True)[:4]
    weights = torch.tensor([math.exp(2.0 * (length - matches[0][0])) for length, _ in matches])
    weights = (weights / weights.sum()).double()
    mean, scale = torch.zeros(VOCAB, dtype=torch.float64), 0.0
    for weight, (_, end) in zip(weights, matches, strict=True):
        mean += weight * logits[end].softmax(-1)
        scale += float(weight * logits[end].logsumexp(-1))
    row = (mean.log() + scale).unsqueeze(0)
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    if params.penalises:
        seen[0, whole[-params.window :]] = True
    scores = warp(row, seen if params.penalises else None, params)[0]
    return scores + (noise.noise([len(whole)]).squeeze() if noise else 0.0), matches[0][0]


@pytest.mark.parametrize(
    ("params", "noise"),
    [
        (PENALTY, True),
        (PENALTY, False),
        (SamplingParams(min_p=0.0, penalty=1.0), True),
        (SamplingParams(temperature=0.0, penalty=1.2, window=30), True),
        (SamplingParams(top_k=9, eta=0.01, top_p=0.9, penalty=1.1), True),
    ],
)
def test_guesses_are_those_of_all_that_was_thought(params: SamplingParams, noise: bool) -> None:
    text, logits = words(120), thoughts(120)
    recall, sampler = recalled(text, logits, [21, 1, 3, 40, *[2] * 27, 1], params, noise=noise)
    assert len(recall) == 119
    paths = [[text[-1]], [text[-1], 2], [text[-1], 4, 4, 1], [text[-1], 2, 0]]
    guesses = recall.guess(paths, sampler, 3)
    assert len(guesses) == len(paths)
    for path, guess in zip(paths, guesses, strict=True):
        scores, match = expected(text, logits, path, params, sampler if noise else None)
        best = scores.topk(3)
        finite = int((best.values > -torch.inf).sum())
        assert guess.match == match
        assert guess.tokens == best.indices[:finite].tolist()
        assert guess.scores == pytest.approx(best.values[:finite].tolist(), abs=0.02)


def test_banned_tokens_are_not_guessed() -> None:
    text, logits = words(60), thoughts(60)
    logits[:, 11] = 50.0
    params = SamplingParams(min_p=0.0, penalty=1.0, banned=(11,))
    recall, sampler = recalled(text, logits, [2, *[2] * 29], params)
    assert all(11 not in guess.tokens for guess in recall.guess([[text[-1]], [text[-1], 1]], sampler, 90))
    recall, sampler = recalled(text, logits, [2, *[2] * 29], SamplingParams(min_p=0.0, penalty=1.0))
    assert recall.guess([[text[-1]]], sampler, 1)[0].tokens == [11]


def test_it_takes_about_what_is_said() -> None:
    for count in (100_000, 131_072):
        assert 316 * count <= LogitHistory.bytes_for(count, 2048, 64) - 8 * 2048 <= 340 * count
        more = (
            LogitHistory.bytes_for(count, 128_256, 64) - LogitHistory.bytes_for(count, 2048, 64) - 8 * (128_256 - 2048)
        )
        assert more == 128 * count


def test_nothing_is_guessed_where_nothing_was() -> None:
    recall, sampler = recalled([1, 2, 3], thoughts(3), [1, 1, 1], PENALTY)
    guesses = recall.guess([[3], [3, 2], [3, 50]], sampler, 3)
    assert [len(guess.tokens) > 0 for guess in guesses] == [False, True, False]
    assert recall.guess([], sampler, 3) == []
