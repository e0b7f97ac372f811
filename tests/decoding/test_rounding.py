"""The test of a whole text: honest ones pass, and what hides below the bound on each token does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tswift.decoding.params import SamplingParams
from tswift.decoding.rounding import FALSE_ALARMS, Rounding, most
from tswift.decoding.sampling import Sampler

VOCAB, USUAL = 200, 0.01


def judged(apart: float, params: SamplingParams, count: int = 3000, seed: int = 1) -> Rounding:
    """A text drawn from logits that differ from the audit's by ``apart`` times what was measured."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int) -> Tensor:
        return torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)

    rounding, sampler = Rounding(), Sampler(params, seed, VOCAB, torch.device("cpu"))
    for _ in range(4):
        logits = random(32) * 2
        rounding.measure(logits, logits + random(32) * USUAL)
    logits = random(count) * 2
    noise = sampler.noise(range(count)).expand(logits.shape)
    drawn, text = (
        (sampler.warp(rows, None) + noise).argmax(-1) for rows in (logits, logits + random(count) * USUAL * apart)
    )
    rounding.judge(sampler, logits, None, noise, drawn, text)
    return rounding


@pytest.mark.parametrize("params", [SamplingParams(penalty=1), SamplingParams(min_p=0, top_p=0.9, penalty=1)], ids=str)
def test_as_much_as_was_measured_is_explained_and_three_times_as_much_is_not(params: SamplingParams) -> None:
    honest = judged(1, params)
    assert honest.usual == pytest.approx(USUAL, rel=0.1)
    assert honest.measured == pytest.approx(4 * USUAL, rel=0.25)
    assert honest.bound == 2 * honest.measured
    levels = honest.levels()
    assert [round(level.margin / honest.usual) for level in levels] == [0, 1, 2, 4]
    assert all(level.observed <= level.most for level in levels)
    assert 0.5 < levels[0].observed / levels[0].expected < 1.3  # a quarter more is expected than was measured
    assert 0 < levels[0].observed < honest.contested < 2000
    assert [level.observed for level in levels] == sorted((level.observed for level in levels), reverse=True)
    wrong = judged(3, params).levels()
    assert sum(level.observed > level.most for level in wrong) >= 2


def test_honest_texts_are_hardly_ever_refused() -> None:
    rows = [judged(1, SamplingParams(penalty=1), 200, seed).levels() for seed in range(40)]
    assert not any(level.observed > level.most for levels in rows for level in levels)


def test_the_most_that_others_do_not_refute() -> None:
    """By simulation: as rare as it is said to be that one count is beyond what 32 others like it allow."""
    for mean in (0.05, 1.0, 8.0):
        counts = torch.poisson(torch.full((20_000, 33), mean), generator=torch.Generator().manual_seed(2)).long()
        made = counts[:, 1:].sum(1)
        limits = {each: most(each, 32, 0.01) for each in made.unique().tolist()}
        share = sum(one > limits[of] for one, of in zip(counts[:, 0].tolist(), made.tolist(), strict=True)) / 20_000
        assert share < 0.012
        assert mean < 1 or share > 0.001  # it is not just always large
    assert [most(0, 32, rate) for rate in (0.1, 0.01, 1e-6)] == [0, 1, 3]
    assert most(32 * 50, 32, FALSE_ALARMS) > 60
