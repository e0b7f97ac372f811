"""Heads alone: text of the model's own, and losses that fall."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.helpers import tiny_llama
from tswift.decoding.params import SamplingParams
from tswift.models.kinds import KINDS
from tswift.training.heads import HeadsPlan, train_heads, write_text


def trainable() -> LlamaForCausalLM:
    tiny = tiny_llama("gqa", torch.float32)
    model = LlamaForCausalLM(tiny.config)
    model.load_state_dict(tiny.state_dict())
    return model.requires_grad_(False)


def starts_of(rows: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, 97, size=(rows, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_lower_every_heads_loss(kind: str) -> None:
    model, lines = trainable(), []
    text = write_text(model, starts_of(6), 64, SamplingParams(min_p=0.05), 3, lines.append)
    assert text.shape == (6, 64)
    torch.manual_seed(2)
    heads = KINDS[kind](model.config.hidden_size, 2)
    plan = HeadsPlan(steps=41, matrix_lr=0.02, tokens_per_step=128, rows=(32, 64), position_limit=512)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lines.clear()
    train_heads(model, heads, text.ravel(), plan, lines.append)
    first, last = ([float(loss) for loss in line.split("losses ")[1].split()[:2]] for line in (lines[0], lines[-1]))
    assert all(later < earlier for earlier, later in zip(first, last, strict=True))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())  # the base is frozen


def test_own_text_starts_as_told_and_never_ends() -> None:
    model = trainable()
    text = write_text(model, starts_of(3), 40, SamplingParams(), 2, lambda line: None)
    assert (text[:, :4] == starts_of(3)).all()
    assert not (text[:, 4:] == model.config.eos_token_id).any()


def test_rows_longer_than_the_penalty_window_are_refused() -> None:
    with pytest.raises(ValueError, match="penalty window of 16"):
        write_text(trainable(), starts_of(1), 17, SamplingParams(window=16), 1, lambda line: None)
