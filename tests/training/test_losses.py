"""Losses in stretches against losses in one piece, memory, and the step of a training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.pretrain import CAUSAL, muon
from tests.helpers import HIDDEN, VOCAB, seeded, tiny_heads, tiny_llama, tiny_target
from tswift.forward.target import Target
from tswift.speculators.heads import HEAD_TYPES, Heads
from tswift.training.config import OBJECTIVES
from tswift.training.losses import HeadsLoss, Metrics
from tswift.training.tasks import Trainer, learning_rate
from tswift.training.teacher import teach

ROWS, LENGTH, COUNT = 2, 23, 3
IDS = torch.randint(VOCAB, (ROWS, LENGTH), generator=seeded(3))
USED = LENGTH - COUNT - 1
JUMPING = torch.arange(LENGTH).repeat(ROWS, 1)
JUMPING[1, 9:] += 50


def heads_of(kind: str) -> Heads:
    heads = HEAD_TYPES[kind](HIDDEN, COUNT).double()
    heads.load_state_dict(tiny_heads(kind=kind).state_dict())
    return heads


@functools.cache
def stock() -> LlamaForCausalLM:
    model = tiny_llama("gqa", torch.float64).requires_grad_(False)
    model.set_attn_implementation(CAUSAL)
    return model


def hits_of(logits: Tensor, tokens: Tensor) -> list[float]:
    order = logits.argsort(-1, descending=True)
    return [float((order[..., : k + 1] == tokens.unsqueeze(-1)).sum()) for k in range(3)]


def check(
    network: nn.Module,
    loss: Callable[[int], Metrics],
    room: Sequence[int],
    wanted: Tensor,
    hits: list,
):
    """Whatever logits there is room for, losses, hits and gradients are those of ``wanted``."""
    wanted.sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in network.named_parameters()}
    for most in room:
        network.zero_grad()
        for _ in range(2):  # gradients are added up
            metrics = loss(most)
            (metrics.loss.sum() / 2).backward()
        torch.testing.assert_close(
            metrics.loss, wanted.to(metrics.loss.dtype), rtol=1e-6, atol=1e-6
        )
        assert metrics.hits.tolist() == hits
        for name, weight in network.named_parameters():
            torch.testing.assert_close(
                weight.grad, gradients[name], rtol=1e-6, atol=1e-6, msg=f"{name}, {most}"
            )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", HEAD_TYPES)
def test_heads_learn_in_stretches_as_in_one_piece(kind, objective):
    heads = heads_of(kind)
    model = stock()
    positions = None if kind == "chained" else JUMPING
    hidden = model.model(IDS, position_ids=positions, use_cache=False).last_hidden_state
    embedded = model.get_input_embeddings()(IDS)
    own = model.lm_head(hidden).softmax(-1)
    losses = []
    hits = []
    state = hidden[:, :USED]
    for index in range(COUNT):
        told = embedded[:, 1 + index : 1 + index + USED] if heads.conditioned else None
        state, out = heads.step(index, state, told)
        logits = model.lm_head(out)
        follows = IDS[:, 2 + index : 2 + index + USED]
        goal = (
            F.one_hot(follows, VOCAB).double()
            if objective == "text"
            else own[:, 1 + index : 1 + index + USED]
        )
        losses.append(-(goal * logits.log_softmax(-1)).sum())
        hits.append(hits_of(logits, follows))
    room = (1, 5 * ROWS * VOCAB, 1 << 30)
    taught = teach(
        tiny_target(), IDS, positions=positions, count=VOCAB if objective == "distill" else 0
    )
    check(
        heads,
        lambda most: HeadsLoss(heads, tiny_target(), objective, most)(*taught),
        room,
        torch.stack(losses),
        hits,
    )
    assert HeadsLoss(heads, tiny_target(), objective)(*taught).positions == ROWS * USED


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator has made,
    weights and views of weights apart.
    """

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(count for count in made if count != 300 * 10_000)])
        return out


@pytest.mark.parametrize("what", OBJECTIVES)
def test_no_more_logits_than_there_is_room_for(what):
    vocabulary, hidden, length = 10_000, 300, 515
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=16,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    target = Target(LlamaForCausalLM(config))
    most = 40 * vocabulary
    ids = torch.randint(vocabulary, (1, length))
    loss = HeadsLoss(HEAD_TYPES["conditioned"](hidden, 1), target, what, most)
    given = teach(target, ids, count=64 * (what == "distill"))
    with Largest() as largest:
        loss(*given).loss.sum().backward()
    states = length * 2 * hidden  # what a conditioned head makes of a row
    assert states < largest.elements <= most  # all logits would be 5 million


def test_the_rate_rises_and_falls_along_a_cosine():
    rates = [learning_rate(step, step / 200, 50) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 50)
    assert rates[24] == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 24 / 200)))
    assert max(range(200), key=rates.__getitem__) == 49
    assert rates[100] == pytest.approx(0.5)
    assert rates[199] < 1e-4
    assert all(later < earlier for earlier, later in pairwise(rates[49:]))
    # the rise ends after a quarter of the training
    assert learning_rate(30, 0.25, 1000) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert (learning_rate(0, 0.0, 0), learning_rate(10, 1.5, 5)) == (1.0, 0.0)


def test_a_state_is_gone_on_with_and_another_ones_is_refused():
    def made(learnt, state=None):
        network = tiny_llama("gqa", torch.float64)
        trainer = Trainer(
            network, muon(network, [network.get_input_embeddings().weight], 1e-2, 0.1), "draft"
        )
        if state is not None:
            trainer.load({name: value.clone() for name, value in state.items()})
        for step in range(2 if state else 0, learnt):
            ids = torch.randint(VOCAB, (2, 12), generator=seeded(step))
            network(input_ids=ids, labels=ids).loss.backward()
            trainer.step(0.5)
        return {name: value.clone() for name, value in trainer.tensors().items()}

    half, whole = made(2), made(3)
    again = made(3, half)
    assert again.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(again[name], value), name
        assert not torch.equal(half[name], value)
    heads = heads_of("chained")
    with pytest.raises(KeyError, match=r"linear\.weight"):
        Trainer(heads, [torch.optim.AdamW(heads.parameters())], "draft").load(half)
