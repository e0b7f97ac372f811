"""Pretraining at toy size: the heads' loss looks at the right tokens, and a few steps lower the loss."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import HIDDEN, tiny_heads
from tswift.models.refining_heads import ChainedHeads
from tswift.training.pretrain import Plan, head_losses, pretrain


def test_head_losses_are_cross_entropies_at_their_offsets() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 9, HIDDEN, generator=generator)
    weight = torch.randn(11, HIDDEN, generator=generator)
    ids = torch.randint(11, (2, 9), generator=generator)
    heads = tiny_heads(torch.float32)
    losses = head_losses(hidden, ids, heads, lambda x: x @ weight.T)
    states = heads(hidden)
    for index in range(3):
        expected = [
            F.cross_entropy(states[index, row, at] @ weight.T, ids[row, at + index + 2])
            for row in range(2)
            for at in range(9 - index - 2)
        ]
        torch.testing.assert_close(losses[index], torch.stack(expected).mean())


def test_a_few_steps_lower_the_loss_of_model_and_heads() -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=4096,
    )  # fmt: skip
    model, heads = LlamaForCausalLM(config), ChainedHeads(16, 2)
    stream = np.tile(np.arange(17, dtype=np.uint16), 60)  # counting: easy to learn
    ids = torch.from_numpy(stream[:64].astype(np.int64)).unsqueeze(0)

    def losses() -> tuple[float, float]:
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            own = F.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            return own.item(), head_losses(hidden, ids, heads, model.lm_head).mean().item()

    before = losses()
    plan = Plan(steps=60, tokens_per_step=128, short_row=32, long_row=64, warmup=3, position_limit=4096)
    pretrain(model, heads, stream, plan, lambda line: None)
    after = losses()
    assert after[0] < 0.7 * before[0]
    assert after[1] < 0.9 * before[1]
