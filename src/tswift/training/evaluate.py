"""Held-out loss of a model at far positions, with the whole text before them in its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.kv.full import FullKV
from tswift.models.target import Target


def held_out_losses(
    model: PreTrainedModel,
    stream: np.ndarray,
    positions: Sequence[int],
    log: Callable[[str], None],
    window: int,
    texts: int,
) -> dict[int, float]:
    """Mean next-token loss over a window from each position on, averaged over texts.

    Args:
        model: the model; its attention is replaced by ours.
        stream: ``[n]`` token ids nobody trained on.
        positions: where to measure, rising.
        log: takes a line of progress.
        window: tokens measured at each position.
        texts: places of the stream to begin at; each is read from its beginning.

    Returns:
        Position -> loss in nats per token.
    """
    target = Target(model)
    length = positions[-1] + window
    starts = np.linspace(0, len(stream) - length - 1, texts).astype(int)
    sums = dict.fromkeys(positions, 0.0)
    for start in starts:
        ids = stream[start : start + length + 1].astype(np.int64)
        kv = FullKV(target.kv_shape, length)
        for position in positions:
            target.prefill(ids[kv.length : position].tolist(), kv)
            inputs = ids[position : position + window]
            hidden = torch.cat([pass_.hidden for pass_ in target.chunks(inputs.tolist(), kv)])
            goal = torch.from_numpy(ids[position + 1 : position + 1 + window]).to(target.device)
            sums[position] += F.cross_entropy(target.logits(hidden), goal).item()
        log(f"held-out text from token {start}: { ({p: round(s, 3) for p, s in sums.items()}) } (sums)")
    return {position: total / texts for position, total in sums.items()}
