"""The heads of the bundled model: trained on text that the model itself writes,
to predict its own distributions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from recipes.corpus import jumping_positions, random_rows
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.heads import Heads
from tswift.training.config import DISTILL
from tswift.training.losses import HeadsLoss
from tswift.training.tasks import Trainer, learning_rate
from tswift.training.teacher import teach


@dataclass(frozen=True)
class HeadsPlan:
    """A schedule for heads alone.

    Row lengths alternate, so that short and long contexts are both seen.
    """

    steps: int
    matrix_lr: float
    tokens_per_step: int = 4096
    rows: Sequence[int] = (512, 4096)
    other_lr: float = 1e-3
    warmup: int = 20
    position_limit: int = 131_072
    seed: int = 2


@torch.inference_mode()
def write_text(
    model: PreTrainedModel,
    starts: np.ndarray,
    length: int,
    params: SamplingParams,
    batch: int,
    log: Callable[[str], None],
) -> np.ndarray:
    """Text of the model's own, sampled by transformers' batched generation as it will be sampled in
    use.

    Args:
        model: the model.
        starts: ``[rows, s]`` token ids to begin from.
        length: of a finished row; at most ``params.window``: transformers' repetition penalty knows
            no window.
        params: temperature, min-p and penalty are used.
        batch: rows written at a time.
        log: takes a line of progress.

    Returns:
        ``[rows, length]`` token ids.
    """
    if length > params.window:
        raise ValueError(f"rows of {length} tokens outgrow the penalty window of {params.window}")
    model.set_attn_implementation("sdpa")
    rows = []
    for first in range(0, len(starts), batch):
        torch.manual_seed(first)
        ids = torch.from_numpy(starts[first : first + batch]).to(model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=params.temperature,
            min_p=params.min_p,
            top_k=0,
            repetition_penalty=params.penalty,
            max_new_tokens=length - ids.shape[1],
            suppress_tokens=[model.config.eos_token_id],
        )
        rows.append(out.cpu().numpy())
        log(f"written {first + len(ids)}/{len(starts)} rows")
    return np.concatenate(rows)


def train_heads(
    model: PreTrainedModel,
    heads: Heads,
    stream: np.ndarray,
    plan: HeadsPlan,
    log: Callable[[str], None],
) -> None:
    """Train ``heads`` in place on a ``[n]`` stream of token ids to predict the frozen model's own
    distributions.
    """
    rng = np.random.default_rng(plan.seed)
    target = Target(model)
    matrices = [weight for weight in heads.parameters() if weight.ndim == 2]
    others = [weight for weight in heads.parameters() if weight.ndim != 2]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=plan.matrix_lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(others, lr=plan.other_lr, weight_decay=0.0),
    ]
    trainer = Trainer(heads, optimizers, "heads")
    judge = HeadsLoss(heads, target, DISTILL)
    started = time.monotonic()
    smooth = np.zeros(heads.count)
    for step in range(plan.steps):
        length = plan.rows[step % len(plan.rows)]
        rows = max(1, plan.tokens_per_step // length)
        ids = torch.from_numpy(random_rows(stream, rows, length, rng)).to(model.device)
        positions = torch.from_numpy(jumping_positions(rows, length, plan.position_limit, rng)).to(
            model.device
        )
        found = judge(*teach(target, ids, positions=positions))
        (found.loss.sum() / found.positions).backward()
        losses = np.array(found.mean_loss)
        trainer.step(learning_rate(step, step / plan.steps, plan.warmup))
        smooth = losses if step == 0 else 0.95 * smooth + 0.05 * losses
        if step % 20 == 0 or step == plan.steps - 1:
            shown = " ".join(f"{loss:.3f}" for loss in smooth)
            log(f"heads step {step}/{plan.steps} losses {shown} {time.monotonic() - started:.0f} s")
