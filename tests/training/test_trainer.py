"""Steps: the rate, gradients from several batches, going on from what was kept."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tests.helpers import HIDDEN, VOCAB, tiny_heads, tiny_target
from tswift.models.base_heads import Heads
from tswift.training.trainer import HeadTrainer, adamw, muon, rate

OPTIMIZERS = {"adamw": lambda heads: adamw(heads, 1e-2, 0.1), "muon": lambda heads: muon(heads, 1e-2, 1e-3)}


def rows(seed: int, count: int = 2) -> torch.Tensor:
    return torch.randint(VOCAB, (count, 12), generator=torch.Generator().manual_seed(seed))


def fresh(name: str) -> tuple[HeadTrainer, Heads]:
    heads = type(tiny_heads(kind="conditioned"))(HIDDEN, 3).double()
    heads.load_state_dict(tiny_heads(kind="conditioned").state_dict())
    return HeadTrainer(tiny_target(), heads, OPTIMIZERS[name](heads)), heads


def test_the_rate_rises_and_falls_along_a_cosine() -> None:
    rates = [rate(step, step / 200, 50) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 50)
    assert rates[24] == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 24 / 200)))
    assert max(range(200), key=rates.__getitem__) == 49
    assert rates[100] == pytest.approx(0.5)
    assert rates[199] < 1e-4
    assert all(later < earlier for earlier, later in pairwise(rates[49:]))


def test_the_rise_ends_after_a_quarter_of_the_training() -> None:
    assert rate(30, 0.25, 1000) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert rate(0, 0.0, 0) == 1.0
    assert rate(10, 1.5, 5) == 0.0


def test_a_step_of_two_batches_is_a_step_of_one_twice_as_large() -> None:
    (one, heads), (two, twins) = fresh("adamw"), fresh("adamw")
    whole = rows(1, 4)
    one.learn(whole)
    two.learn(whole[:2], of=2, last=False)
    two.learn(whole[2:], of=2)
    one.update(0.7)
    two.update(0.7)
    for ours, theirs in zip(heads.parameters(), twins.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert ours.grad is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_from_what_was_kept_is_going_on(name: str) -> None:
    (trainer, heads), (other, twins) = fresh(name), fresh(name)
    for step in range(3):
        trainer.learn(rows(step))
        trainer.update(0.5)
    kept = {key: value.clone() for key, value in trainer.tensors().items()}
    other.load(kept)
    for each in (trainer, other):
        each.learn(rows(9))
        each.update(0.25)
    for (key, ours), theirs in zip(heads.named_parameters(), twins.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
        assert not torch.equal(ours, kept[f"heads.{key}"])


def test_tensors_of_other_heads_are_refused() -> None:
    trainer, _ = fresh("adamw")
    trainer.learn(rows(1))
    trainer.update(1.0)
    kept = dict(trainer.tensors())
    del kept["heads.heads.1.linear.weight"]
    with pytest.raises(KeyError, match=r"heads\.1\.linear\.weight"):
        trainer.load(kept)
