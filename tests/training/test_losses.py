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

from recipes import demo_draft
from recipes.demo_draft import agreements
from tests.helpers import CPU, HIDDEN, VOCAB, first, seeded, tiny_heads, tiny_llama, tiny_target
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler
from tswift.speculators.heads import HEAD_TYPES, Heads
from tswift.training import agreement
from tswift.training.agreement import measure_agreement
from tswift.training.config import OBJECTIVES
from tswift.training.losses import CAUSAL, DraftLoss, HeadsLoss, Metrics
from tswift.training.tasks import Trainer, learning_rate, muon
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


def changed(share: float, seed: int) -> LlamaForCausalLM:
    """The stock model with other weights."""
    network = tiny_llama("gqa", torch.float64)
    generator = seeded(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight += (
                share
                * weight.std()
                * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            )
    return network.requires_grad_(True)


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


def test_a_draft_model_learns_in_stretches_as_in_one_piece():
    network = changed(0.02, 3)
    network.set_attn_implementation(CAUSAL)
    found = network(input_ids=IDS, position_ids=JUMPING, use_cache=False)
    logits = found.logits[:, :-1].flatten(0, 1)
    follows = IDS[:, 1:].flatten()
    check(
        network,
        lambda most: DraftLoss(network, most)(IDS, JUMPING),
        (1 << 20, 2 * ROWS * VOCAB, 1),
        F.cross_entropy(logits, follows, reduction="sum")[None],
        [hits_of(logits, follows)],
    )


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


@pytest.mark.parametrize("what", first(2, ["text", "distill", "draft"]))
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
    if what == "draft":
        network = LlamaForCausalLM(config)
        network.set_attn_implementation(CAUSAL)
        loss = DraftLoss(network, most)
        given = (ids, None)
    else:
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


# -------------------------------------------------------------------------------------------------
# How often two models draw the same, against drawing token by token


@pytest.mark.parametrize(
    "params", [SamplingParams(window=30, penalty=4), SamplingParams(penalty=1, min_p=0)]
)
def test_agreement_counts_tokens_that_both_draw(params, monkeypatch):
    monkeypatch.setattr(agreement, "_ROWS", 7)
    monkeypatch.setattr(demo_draft, "_ROWS", 7)
    large = stock()
    small = changed(0.3, 5)
    text = torch.randint(VOCAB, (140,), generator=seeded(5)).tolist()
    all_logits = [model(torch.tensor([text])).logits[0].float() for model in (large, small)]
    target, draft = Target(tiny_llama("gqa", torch.float64)), Target(small)
    scores = agreements(target, draft, text, (0, 70), 60, params, recent=140)
    for (whole, recent), start in zip(scores, (0, 70), strict=True):
        assert recent == whole  # so many that they are the whole text
        same = 0
        for node in range(start, start + 60):
            sampler = Sampler(params, 0, large.config.vocab_size, CPU)
            sampler.extend(text[: node + 1])
            seen = sampler.seen(
                torch.tensor([text[node]]), torch.tensor([node]), torch.ones(1, 1, dtype=torch.bool)
            )
            one, other = (
                sampler.draw(logits[node : node + 1], seen, [node + 1]) for logits in all_logits
            )
            same += one == other
        goal = torch.tensor(text[start + 1 : start + 61])
        target_loss, loss = (
            F.cross_entropy(logits[start : start + 60], goal).item() for logits in all_logits
        )
        assert whole == pytest.approx(
            {"loss": loss, "target_loss": target_loss, "agreement": same / 60}, abs=1e-5
        )
        assert 0 < same < 60
    assert measure_agreement(target, draft, text[:61], params) == scores[0][0]


def test_recent_tokens_are_read_at_their_own_positions():
    small = tiny_llama("gqa", torch.float64)
    text = torch.randint(small.config.vocab_size, (400,), generator=seeded(5)).tolist()
    ((whole, recent),) = agreements(
        Target(small), Target(small), text, (390,), 5, SamplingParams(), recent=16
    )
    positions = torch.arange(374, 395).unsqueeze(0)
    logits = tiny_llama("gqa", torch.float64)(
        torch.tensor([text[374:395]]), position_ids=positions
    ).logits[0, 16:]
    wanted = F.cross_entropy(logits.float(), torch.tensor(text[391:396]))
    assert recent["loss"] == pytest.approx(wanted.item(), abs=1e-5)
    assert recent["loss"] != pytest.approx(whole["loss"], abs=1e-3)
