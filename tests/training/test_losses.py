"""Losses in stretches against losses in one piece, memory, and the step of a training."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from recipes import demo_draft
from recipes.demo_draft import agreements
from tests.drafters import BLOCK, Dense, drafter_folder, qwen3, target_of
from tests.helpers import HIDDEN, VOCAB, tiny_heads, tiny_llama, tiny_target
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.models.drafters import BlockDrafter
from tswift.models.drafters_io import find_drafter
from tswift.models.heads import HEAD_TYPES, Heads
from tswift.models.target import Target
from tswift.training import tasks
from tswift.training.config import OBJECTIVES
from tswift.training.losses import CAUSAL, BlockLoss, DraftLoss, HeadsLoss
from tswift.training.tasks import Trainer, learning_rate, measure_agreement, muon

ROWS, LENGTH, COUNT = 2, 23, 3
IDS = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
USED = LENGTH - COUNT - 1


def heads_of(kind: str) -> Heads:
    heads = HEAD_TYPES[kind](HIDDEN, COUNT).double()
    heads.load_state_dict(tiny_heads(kind=kind).state_dict())
    return heads


@functools.cache
def stock() -> LlamaForCausalLM:
    return tiny_llama("gqa", torch.float64).requires_grad_(False)


def in_one_piece(heads: Heads, objective: str) -> tuple[Tensor, Tensor]:
    """Losses ``[count]`` with gradients, and hits ``[count, 3]``, by transformers' own pass and whole logits."""
    model = stock()
    hidden = model.model(IDS, use_cache=False).last_hidden_state
    embedded = model.get_input_embeddings()(IDS)
    own = model.lm_head(hidden).softmax(-1)
    losses, hits, state = [], [], hidden[:, :USED]
    for index in range(COUNT):
        told = embedded[:, 1 + index : 1 + index + USED] if heads.conditioned else None
        state, out = heads.step(index, state, told)
        logits = model.lm_head(out)
        follows = IDS[:, 2 + index : 2 + index + USED]
        goal = F.one_hot(follows, VOCAB).double() if objective == "text" else own[:, 1 + index : 1 + index + USED]
        losses.append(-(goal * logits.log_softmax(-1)).sum(-1).mean())
        order = logits.argsort(-1, descending=True)
        hits.append(torch.stack([(order[..., : k + 1] == follows.unsqueeze(-1)).sum() for k in range(3)]))
    return torch.stack(losses), torch.stack(hits)


@pytest.mark.parametrize("max_logits", [1, 5 * ROWS * VOCAB, 1 << 30])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", HEAD_TYPES)
def test_stretches_give_the_loss_and_the_gradients_of_one_piece(kind: str, objective: str, max_logits: int) -> None:
    heads, twin = heads_of(kind), heads_of(kind)
    wanted, hits = in_one_piece(twin, objective)
    (0.25 * wanted.sum()).backward()
    for _ in range(2):  # gradients are added up
        metrics = HeadsLoss(heads, tiny_target(), objective, max_logits)(IDS)
        (0.125 * metrics.loss.sum() / metrics.positions).backward()
    torch.testing.assert_close(metrics.loss / metrics.positions, wanted, rtol=1e-12, atol=0)
    assert metrics.positions == ROWS * USED
    assert metrics.hits.tolist() == hits.tolist()
    for (name, ours), theirs in zip(heads.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator has made, weights and views of weights apart."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        weights = 300 * 10_000
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(count for count in made if count != weights)])
        return out


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_more_logits_than_there_is_room_for(objective: str) -> None:
    vocabulary, hidden, length = 10_000, 300, 515
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        head_dim=16, num_key_value_heads=1, max_position_embeddings=1024,
    )  # fmt: skip
    target, heads = Target(LlamaForCausalLM(config)), HEAD_TYPES["conditioned"](hidden, 1)
    ids = torch.randint(vocabulary, (1, length))
    most = 40 * vocabulary
    with Largest() as largest:
        HeadsLoss(heads, target, objective, most)(ids).loss.sum().backward()
    states = length * 2 * hidden  # what a conditioned head makes of a row
    assert states < largest.elements <= most  # all logits would be 5 million


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_stretches_change_no_gradient_of_a_draft_model(objective: str) -> None:
    target, network = Target(tiny_llama("gqa", torch.float64)), tiny_llama("gqa", torch.float64)
    network.set_attn_implementation(CAUSAL)
    network.requires_grad_(True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCAB, (3, 9), generator=generator)
    positions = torch.arange(9).repeat(3, 1)
    positions[:, 4:] += 50
    logits = network(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].flatten(0, 1)
    goal = ids[:, 1:].flatten()
    if objective == "distill":
        twin = tiny_llama("gqa", torch.float64)
        twin.set_attn_implementation(CAUSAL)
        goal = twin(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].softmax(-1).flatten(0, 1)
    wanted = F.cross_entropy(logits, goal.detach(), reduction="sum")
    wanted.backward()
    gradients = {name: weight.grad.clone() for name, weight in network.named_parameters()}
    best = (logits.topk(3).indices == ids[:, 1:].flatten()[:, None]).cumsum(-1).double().sum(0)
    for most in (1 << 20, 2 * 3 * VOCAB, 1):
        network.zero_grad()
        metrics = DraftLoss(network, target, objective, most)(ids, positions)
        metrics.loss.sum().backward()
        torch.testing.assert_close(metrics.loss, wanted[None])
        torch.testing.assert_close(metrics.hits, best[None])
        for name, weight in network.named_parameters():
            torch.testing.assert_close(weight.grad, gradients[name], msg=name)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("layout", ["dspark", "dspark-gated", "dspark-rnn"])
def test_blocks_are_trained_as_they_are_drafted(layout: str, objective: str, tmp_path: Path) -> None:
    target = target_of()
    network = find_drafter(drafter_folder(tmp_path, layout)).load(target)
    assert isinstance(network, BlockDrafter)
    network.requires_grad_(True)
    ids = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(5))
    roots, dense = torch.tensor([[1, 11, 6], [4, 4, 9]]), Dense(layout, qwen3())
    wanted, best = torch.zeros(BLOCK, dtype=torch.float64), torch.zeros(BLOCK, 3, dtype=torch.float64)
    for text, starts in zip(ids.tolist(), roots.tolist(), strict=True):
        own = qwen3()(torch.tensor([text])).logits[0].softmax(-1).detach()
        for root in starts:
            block = dense.block(text[: root + 1], torch.ones(root, dtype=torch.bool))
            for slot in range(BLOCK):
                logits = dense.biased(block, text[root : root + slot + 1])
                token = text[root + slot + 1]
                goal = own[root + slot] if objective == "distill" else torch.tensor(token)
                wanted[slot] += F.cross_entropy(logits, goal)
                best[slot] += (logits.topk(3).indices == token).cumsum(0)
    gradients: dict[str, Tensor] = {}
    for most in (1 << 30, 1):
        network.zero_grad()
        metrics = BlockLoss(network, target, objective, most)(ids, torch.arange(16).repeat(2, 1), roots)
        torch.testing.assert_close(metrics.loss, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(metrics.hits, best)
        metrics.loss.sum().backward()
        for name, weight in network.named_parameters():
            assert weight.grad is not None, name
            torch.testing.assert_close(weight.grad, gradients.setdefault(name, weight.grad.clone()), msg=name)


def test_the_rate_rises_and_falls_along_a_cosine() -> None:
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


def test_a_state_is_gone_on_with_and_another_ones_is_refused() -> None:
    networks = [tiny_llama("gqa", torch.float64) for _ in range(2)]
    trainers = [
        Trainer(network, muon(network, [network.get_input_embeddings().weight], 1e-2, 0.1), "draft")
        for network in networks
    ]
    inputs = [torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def learn(number: int, step: int) -> None:
        networks[number](input_ids=inputs[step], labels=inputs[step]).loss.backward()
        trainers[number].step(0.5)

    learn(0, 0)
    learn(0, 1)
    state = {name: value.clone() for name, value in trainers[0].tensors().items()}
    trainers[1].load(state)
    learn(0, 2)
    learn(1, 2)
    for (name, ours), theirs in zip(networks[0].named_parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert not torch.equal(ours, state[f"draft.{name}"])
    heads = heads_of("chained")
    with pytest.raises(KeyError, match=r"linear\.weight"):
        Trainer(heads, [torch.optim.AdamW(heads.parameters())], "draft").load(state)


# ---------------------------------------------------------------------------------------------------------------------
# How often two models draw the same, against drawing token by token


@pytest.mark.parametrize("params", [SamplingParams(window=9), SamplingParams(penalty=1, min_p=0)])
def test_agreement_counts_tokens_that_both_draw(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_ROWS", 7)
    monkeypatch.setattr(demo_draft, "_ROWS", 7)
    large, small = tiny_llama("gqa", torch.float64), tiny_llama("gqa", torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in small.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    text = torch.randint(large.config.vocab_size, (80,), generator=generator).tolist()
    all_logits = [model(torch.tensor([text])).logits[0].float() for model in (large, small)]
    target, draft = Target(large), Target(small)
    scores = agreements(target, draft, text, (0, 40), 20, params, recent=80)
    for (whole, recent), start in zip(scores, (0, 40), strict=True):
        assert recent == whole  # so many that they are the whole text
        same = 0
        for node in range(start, start + 20):
            sampler = Sampler(params, 0, large.config.vocab_size, torch.device("cpu"))
            sampler.extend(text[: node + 1])
            seen = sampler.seen(torch.tensor([text[node]]), torch.tensor([node]), torch.ones(1, 1, dtype=torch.bool))
            one, other = (sampler.draw(logits[node : node + 1], seen, [node + 1]) for logits in all_logits)
            same += one == other
        assert whole["agreement"] == same / 20
        goal = torch.tensor(text[start + 1 : start + 21])
        losses = [F.cross_entropy(logits[start : start + 20], goal).item() for logits in all_logits]
        assert (whole["target_loss"], whole["loss"]) == pytest.approx(tuple(losses), abs=1e-5)
    assert 0 < sum(whole["agreement"] for whole, _ in scores) < 2
    assert measure_agreement(target, draft, text[:21], params) == scores[0][0]
    _, recent = agreements(target, draft, text, (0, 40), 20, params, recent=0)[1]
    assert recent["loss"] != pytest.approx(whole["loss"], 1e-3)


def test_recent_tokens_are_read_at_their_own_positions() -> None:
    small = tiny_llama("gqa", torch.float64)
    text = torch.randint(small.config.vocab_size, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    ((_, recent),) = agreements(Target(small), Target(small), text, (390,), 5, SamplingParams(), recent=16)
    positions = torch.arange(374, 395).unsqueeze(0)
    logits = tiny_llama("gqa", torch.float64)(torch.tensor([text[374:395]]), position_ids=positions).logits[0, 16:]
    wanted = F.cross_entropy(logits.float(), torch.tensor(text[391:396]))
    assert recent["loss"] == pytest.approx(wanted.item(), abs=1e-5)
