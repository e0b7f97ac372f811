"""The loss in stretches against the loss in one piece, and what it keeps in memory."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import HIDDEN, VOCAB, tiny_heads, tiny_llama, tiny_target
from tswift.models.base_heads import Heads
from tswift.models.kinds import KINDS
from tswift.models.target import Target
from tswift.training.loss import OBJECTIVES, foresee, hidden_states

ROWS, LENGTH, COUNT = 2, 23, 3
IDS = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
USED = LENGTH - COUNT - 1


def heads_of(kind: str) -> Heads:
    heads = KINDS[kind](HIDDEN, COUNT).double()
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


@pytest.mark.parametrize("room", [1, 5 * ROWS * VOCAB, 1 << 30])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_stretches_give_the_loss_and_the_gradients_of_one_piece(kind: str, objective: str, room: int) -> None:
    heads, twin = heads_of(kind), heads_of(kind)
    wanted, hits = in_one_piece(twin, objective)
    (0.25 * wanted.sum()).backward()
    for _ in range(2):  # gradients are added up
        tally = foresee(tiny_target(), heads, IDS, objective, share=0.125, room=room)
    torch.testing.assert_close(tally.loss / tally.positions, wanted.detach(), rtol=1e-12, atol=0)
    assert tally.positions == ROWS * USED
    assert tally.hits.tolist() == hits.tolist()
    for (name, ours), theirs in zip(heads.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_share_nothing_is_trained(kind: str) -> None:
    heads = heads_of(kind)
    scored = foresee(tiny_target(), heads, IDS)
    assert all(weight.grad is None for weight in heads.parameters())
    trained = foresee(tiny_target(), heads, IDS, share=1.0)
    assert torch.equal(scored.loss, trained.loss)
    assert (scored + trained).losses == pytest.approx(scored.losses)


def test_rows_do_not_see_each_other() -> None:
    both = hidden_states(tiny_target(), IDS)
    for row in range(ROWS):
        torch.testing.assert_close(hidden_states(tiny_target(), IDS[row : row + 1])[0], both[row], rtol=1e-12, atol=0)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operator has made, weights and views of weights apart."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
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
    target, heads = Target(LlamaForCausalLM(config)), KINDS["conditioned"](hidden, 1)
    ids = torch.randint(vocabulary, (1, length))
    room = 40 * vocabulary
    with Largest() as largest:
        foresee(target, heads, ids, objective, share=1.0, room=room)
    states = length * 2 * hidden  # what a conditioned head makes of a row
    assert states < largest.elements <= room  # all logits would be 5 million
    with Largest() as largest:
        foresee(target, heads, ids, objective, share=1.0)
    assert largest.elements == (length - 2) * vocabulary


def test_bfloat16_models_train_heads_in_float32() -> None:
    heads = KINDS["conditioned"](HIDDEN, COUNT)
    tally = foresee(Target(tiny_llama("gqa", torch.bfloat16)), heads, IDS, share=1.0)
    exact = foresee(tiny_target(), heads_of_like(heads), IDS)
    assert tally.losses == pytest.approx(exact.losses, rel=0.02)
    for weight in heads.parameters():
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
    assert heads.heads[0].linear.weight.grad.abs().max() > 0


def heads_of_like(heads: Heads) -> Heads:
    twin = KINDS[heads.kind](HIDDEN, heads.count)
    twin.load_state_dict(heads.state_dict())
    return twin.double()
