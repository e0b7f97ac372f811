"""The LM head that drafts read: the model's logits, of a draft vocabulary alone."""

from __future__ import annotations

import copy
from math import inf

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.forward.test_integers import target_of
from tests.helpers import HIDDEN, VOCAB, needs_program, seeded, tiny_heads, tiny_target
from tswift.forward.target import Target
from tswift.speculators.heads import DraftHead

IDS = torch.arange(2, VOCAB, 5, dtype=torch.int32)


def states(width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, width, generator=seeded(2), dtype=dtype)


def check(target: Target, ids: Tensor, bound: float) -> Tensor:
    """The logits of a draft vocabulary, which are the model's but for a share of their size."""
    hidden = states(target.hidden_size, target.dtype)
    wanted = target.logits(hidden)
    found = DraftHead(target, ids)(hidden)
    assert found.shape == wanted.shape
    drafted = torch.zeros(target.vocab_size, dtype=torch.bool)
    drafted[ids.long()] = True
    assert (found[:, ~drafted] == -inf).all()
    near = (found - wanted)[:, drafted]
    assert near.abs().max() <= bound * wanted.std()
    return found


def with_output(change: str) -> Target:
    target = copy.deepcopy(tiny_target())
    lm_head = target.model.get_output_embeddings()
    if change == "bias":
        lm_head.bias = torch.nn.Parameter(states(VOCAB, torch.float64)[0])
    elif change == "quantised":
        lm_head.register_parameter("weight", None)
        plain = tiny_target().model.get_output_embeddings().weight
        lm_head.forward = lambda hidden: F.linear(hidden, plain)
    return target


@pytest.mark.parametrize("change", ["", "bias", "quantised"])
def test_by_pytorch(change):
    check(with_output(change), IDS, 1e-12)


def test_a_factor_and_a_soft_cap(monkeypatch):
    target = tiny_target()
    hidden = states(HIDDEN, torch.float64)
    plain = DraftHead(target, IDS)(hidden)
    for rule, wanted in (((0.5, 0.0), plain * 0.5), ((0.0, 2.0), torch.tanh(plain / 2) * 2)):
        monkeypatch.setattr("tswift.forward.hf.output_rule", lambda config, rule=rule: rule)
        found = DraftHead(target, IDS)(hidden)
        assert torch.equal(found[:, IDS.long()], wanted[:, IDS.long()])


@needs_program
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("scale", "cap"), [(0, 0), (0.5, 0), (0, 2)])
def test_by_codes(bits, scale, cap):
    """The model's own codes, with the factor and the cap of its outputs."""
    target = target_of("llama", bits)
    assert target.runner.program is not None
    target.runner.program.lm_head_c.scale, target.runner.program.lm_head_c.softcap = scale, cap
    ids = torch.arange(1, target.vocab_size, 3, dtype=torch.int32)
    found = check(target, ids, 0.03)
    head = DraftHead(target, ids)
    assert (head.c.outputs, head.c.bits) == (len(ids), bits)
    assert torch.equal(head._linear.weight, target.model.get_output_embeddings().weight[ids.long()])
    assert torch.equal(head(states(target.hidden_size, target.dtype)), found)


def test_of_all_tokens_it_is_the_models_own():
    target = tiny_target()
    hidden = states(HIDDEN, torch.float64)
    assert torch.equal(DraftHead(target, None)(hidden), target.logits(hidden))


def test_heads_make_it_once_for_a_model_and_a_vocabulary():
    heads = copy.deepcopy(tiny_heads())
    target = tiny_target()
    first = heads.draft_head(target)
    assert heads.draft_head(target) is first
    assert copy.deepcopy(heads)._draft_head is None
    heads.draft_ids = IDS
    second = heads.draft_head(target)
    assert second.ids is IDS
    assert heads.draft_head(copy.copy(target)) is not second
