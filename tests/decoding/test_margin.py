"""The margin: a witness for every one, the closed form where there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tswift.decoding.margin import RoundingMargin, contested
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler

CPU = torch.device("cpu")


@st.composite
def rows(draw: st.DrawFn) -> tuple[Sampler, Tensor, Tensor | None, list[int], Tensor]:
    """A sampler with any parameters, and rows of logits, windows, positions and tokens in question."""
    vocab, count = draw(st.integers(3, 24)), draw(st.integers(1, 4))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.4, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 2, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        eta=draw(st.sampled_from([0.0, 0.01, 0.3])),
        penalty=draw(st.sampled_from([1.0, 1.2, 3.0])),
        banned=draw(st.sampled_from([(), (1,), (0, 2)])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    logits = torch.randn(count, vocab, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.1, 1, 6]))
    seen = torch.rand(count, vocab, generator=generator) < 0.4 if params.penalises else None
    tokens = torch.randint(vocab, (count,), generator=generator)
    positions = draw(st.lists(st.integers(0, 500), min_size=count, max_size=count))
    return Sampler(params, draw(st.integers(0, 99)), vocab, CPU), logits, seen, positions, tokens


def noise_of(sampler: Sampler, logits: Tensor, positions: Sequence[int]) -> Tensor:
    return sampler.noise(positions).expand(logits.shape)


@settings(deadline=None, max_examples=150)
@given(case=rows(), near=st.sampled_from([0.0, 1e-9, 0.01, 5.0]))
def test_a_change_of_the_margin_s_size_makes_the_rule_draw_the_token(case, near: float) -> None:  # type: ignore[no-untyped-def]
    sampler, logits, seen, positions, tokens = case
    before = logits.clone()
    doubt = RoundingMargin(sampler, logits, seen, noise_of(sampler, logits, positions), tokens)
    margins = doubt.margins(near)
    assert torch.equal(logits, before)
    assert set(doubt.patterns.unique().tolist()) <= {-1, 0, 1}
    for row, (token, margin) in enumerate(zip(tokens.tolist(), margins.tolist(), strict=True)):
        if token in sampler.params.banned:
            assert margin == math.inf
            continue
        assert math.isfinite(margin)
        window = None if seen is None else seen[row : row + 1]
        for size in (margin, margin * (1 + 1e-9) + 1e-12):
            changed = [logits[row : row + 1] + size * signs[row].double() for signs in doubt.patterns]
            assert all(float((other - logits[row]).abs().max()) <= size + 1e-12 for other in changed)
            assert token in [sampler.draw(other, window, positions[row : row + 1])[0] for other in changed]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]), near=st.sampled_from([1e-6, 0.3, 40])
)
def test_without_filters_it_is_half_the_gap(seed: int, temperature: float, near: float) -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    sampler = Sampler(SamplingParams(temperature=temperature, min_p=0, penalty=1), seed, 12, CPU)
    scores = sampler.scores(logits, None, [7, 8, 9])
    tokens = torch.tensor([2, 5, 11])
    gaps = scores.amax(-1) - scores.gather(1, tokens[:, None]).squeeze(1)
    found = RoundingMargin(sampler, logits, None, noise_of(sampler, logits, [7, 8, 9]), tokens).margins(near)
    assert found.tolist() == pytest.approx((gaps * (temperature or 1) / 2).tolist(), rel=1e-5, abs=near * 1e-5)


def test_a_gap_that_the_penalty_shrinks() -> None:
    sampler = Sampler(SamplingParams(temperature=0, penalty=2.0), 0, 3, CPU)
    logits, seen = torch.tensor([[4.0, 1.5, 0.0]]), torch.tensor([[True, False, False]])
    # the first token counts 2, and half of any change; 2 - e/2 = 1.5 + e
    margins = RoundingMargin(sampler, logits, seen, torch.zeros(1, 3), torch.tensor([1])).margins(0.01)
    assert margins.tolist() == pytest.approx([1 / 3], rel=1e-5)


def test_only_the_rows_asked_for() -> None:
    sampler = Sampler(SamplingParams(temperature=0, penalty=1), 0, 3, CPU)
    logits = torch.tensor([[4.0, 1.0, 0.0], [4.0, 3.0, 0.0], [4.0, 0.0, 2.0]])
    doubt = RoundingMargin(sampler, logits, None, torch.zeros(3, 3), torch.tensor([1, 1, 2]))
    assert doubt.explained(0.75).tolist() == [False, True, False]
    assert doubt.explained(torch.tensor([2.0, 1.5]), torch.tensor([0, 2])).tolist() == [True, True]
    assert doubt.margins(0.75, torch.tensor([2, 1])).tolist() == pytest.approx([1.0, 0.5], rel=1e-5)


@pytest.mark.parametrize(
    "filters",
    [{"min_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 20}, {"eta": 0.02}, {"temperature": 0.0}, {}],
    ids=str,
)
def test_what_a_random_change_of_the_logits_has_turned_is_explained_by_one_of_about_its_size(
    filters: dict[str, Any],
) -> None:
    size, count, vocab = 0.2, 600, 300
    generator = torch.Generator().manual_seed(3)
    sampler = Sampler(SamplingParams(**{"min_p": 0.0, **filters}), 5, vocab, CPU)
    logits = torch.randn(count, vocab, generator=generator, dtype=torch.float64) * 2.5
    seen = torch.rand(count, vocab, generator=generator) < 0.2
    changed = logits + (torch.rand(logits.shape, generator=generator, dtype=torch.float64) * 2 - 1) * size
    before, after = (torch.tensor(sampler.draw(rows, seen, range(count))) for rows in (logits, changed))
    turned = (before != after).nonzero().squeeze(1)
    assert len(turned) > 20
    noise = noise_of(sampler, logits, range(count))
    doubt = RoundingMargin(sampler, logits[turned], seen[turned], noise[turned], after[turned])
    margins = doubt.margins(size)
    assert float((margins <= size).double().mean()) > 0.9
    assert float(margins.max()) <= 2 * size  # the bound is twice what was measured
    assert float(margins.min()) > 0
    # and by none much smaller: what it takes is the distance, not something that always suffices
    assert bool((~doubt.explained(margins * 0.98)).float().mean() > 0.9)
    # the row was known to be open to that before anything was turned
    open_ = contested(sampler, logits, seen, noise, before, size)
    assert float(open_[turned].double().mean()) > 0.97
    far = contested(sampler, logits, seen, noise, before, 1e-9)
    assert not bool(far.any())
    assert bool((open_ <= contested(sampler, logits, seen, noise, before, 4 * size)).double().mean() > 0.97)
