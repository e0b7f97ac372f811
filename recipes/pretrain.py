"""Train a small Llama from random weights, jointly with chained heads towards the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaForCausalLM

from recipes.corpus import jumping_positions, random_rows
from tswift.speculators.heads import ChainedHeads
from tswift.training.tasks import Trainer

# an attention of transformers: plain causality, whatever the positions
CAUSAL = "tswift_training_causal"


def _causal(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
    # transformers reads a jump in position_ids as the start of another packed text and masks across
    # it
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(CAUSAL, _causal)


@dataclass(frozen=True)
class Plan:
    """A pretraining schedule.

    One step sees ``tokens_per_step`` tokens, as short rows or as one long row.
    """

    steps: int
    tokens_per_step: int = 8192
    short_row: int = 512
    long_row: int = 8192
    long_from: float = 0.75  # share of the steps after which every other step is a long row
    heads_from: float = 0.65  # share after which the heads' loss is added
    heads_weight: float = 0.15
    decay_from: float = 0.45
    warmup: int = 50
    matrix_lr: float = 0.02  # Muon's; 0.15 of it is AdamW's
    position_limit: int = 131_072
    # torch.compile the decoder: about a quarter faster, needs a C++ compiler
    compiled: bool = False
    seed: int = 1

    def rate(self, step: int) -> float:
        """Learning-rate factor: linear warm-up, flat, linear decay to 2%."""
        share = step / self.steps
        if step < self.warmup:
            return (step + 1) / self.warmup
        if share < self.decay_from:
            return 1.0
        return max(0.02, 1 - (share - self.decay_from) / (1 - self.decay_from))


def head_losses(
    hidden: Tensor, ids: Tensor, heads: ChainedHeads, lm_head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Cross-entropy of head i at offset i + 2: ``[count]`` for ``hidden`` [B, T, H] and ``ids`` [B,
    T].
    """
    losses = []
    for index, state in enumerate(heads(hidden)):
        offset = index + 2
        losses.append(
            F.cross_entropy(lm_head(state[:, :-offset]).flatten(0, 1), ids[:, offset:].flatten())
        )
    return torch.stack(losses)


def pretrain(
    model: LlamaForCausalLM,
    heads: ChainedHeads,
    stream: np.ndarray,
    plan: Plan,
    log: Callable[[str], None],
) -> None:
    """Train ``model`` and ``heads`` in place on a token stream (uint array ``[n]``)."""
    rng = np.random.default_rng(plan.seed)
    device = next(model.parameters()).device
    model.set_attn_implementation(CAUSAL)
    both = nn.ModuleList([model, heads])
    decoder = model.get_decoder()
    lm_head = model.get_output_embeddings()
    optimizers = muon(
        both, [model.get_input_embeddings().weight, lm_head.weight], plan.matrix_lr, 0.01
    )
    trainer = Trainer(both, optimizers, "demo")
    outer = optimizers[1].param_groups[0]["params"]
    if plan.compiled:
        decoder = torch.compile(decoder, dynamic=False)
    started = time.monotonic()
    smooth = math.nan
    for step in range(plan.steps):
        share = step / plan.steps
        length = plan.long_row if share >= plan.long_from and step % 2 else plan.short_row
        rows = plan.tokens_per_step // length
        ids = torch.from_numpy(random_rows(stream, rows, length, rng)).to(device)
        positions = torch.from_numpy(jumping_positions(rows, length, plan.position_limit, rng)).to(
            device
        )
        hidden = decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        loss = F.cross_entropy(lm_head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        total = loss
        if share >= plan.heads_from:
            total = loss + plan.heads_weight * head_losses(hidden, ids, heads, lm_head).sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(outer, 1.0)
        trainer.step(plan.rate(step))
        if length == plan.short_row:
            smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if step % 20 == 0:
            took = time.monotonic() - started
            speed = (step + 1) * plan.tokens_per_step / took
            log(f"step {step}/{plan.steps} loss {smooth:.3f} {speed:.0f} tokens/s {took:.0f} s")


def muon(
    network: nn.Module, ends: Sequence[Tensor], rate: float, decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW at 0.15 of its rate for norms and the ``ends``,
    such as embeddings.
    """
    apart = {id(weight) for weight in ends}
    matrices = [
        weight for weight in network.parameters() if weight.ndim == 2 and id(weight) not in apart
    ]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in network.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(
            matrices, lr=rate, momentum=0.95, weight_decay=decay, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(others, lr=0.15 * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
