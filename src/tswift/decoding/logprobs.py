"""Log-probabilities of the drawn tokens, and of the likeliest others, by the model and by the sampling rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # what a row holds is known without it
    from torch import Tensor

    from tswift.decoding.sampling import Sampler

MOST_TOP = 20  # likeliest tokens, as in OpenAI's interface


def row_type(top: int) -> np.dtype[Any]:
    """A token's log-probabilities (natural logarithms, float64), as arrays and files hold them.

    ``raw`` is by the model's own distribution; ``warped`` by that which the token is drawn from, after biases, penalty,
    temperature and filters; at temperature 0, where nothing is drawn, after biases and penalty. Then the ``top``
    likeliest tokens by each: ``raw_ids`` and ``raw_top``, ``warped_ids`` and ``warped_top``, ``-inf`` where the filters
    leave fewer.
    """
    ids, logs = ("<u4", (top,)), ("<f8", (top,))
    fields = {"raw": "<f8", "warped": "<f8", "raw_ids": ids, "raw_top": logs, "warped_ids": ids, "warped_top": logs}
    return np.dtype(list(fields.items())[: 6 if top else 2])  # type: ignore[arg-type]


class LogprobRecorder:
    """Log-probabilities of a text's tokens, step by step.

    Args:
        sampler: the sampling rule, with the text so far; it is copied.
        last: the text's last token.
        top: number of likeliest tokens.
    """

    def __init__(self, sampler: Sampler, last: int, top: int) -> None:
        self._sampler, self._last, self._top = sampler.copy(), last, top

    def record(self, logits: Tensor, tokens: Sequence[int]) -> NDArray[Any]:
        """The rows ``[n]`` of :func:`row_type` of the text's next tokens, which were drawn from logits ``[n, V]``."""
        import torch

        device, sampler = logits.device, self._sampler
        before = torch.tensor([self._last, *tokens[:-1]]).to(device)
        positions = torch.arange(sampler.length - 1, sampler.length - 1 + len(tokens)).to(device)
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril().to(device)
        seen = sampler.seen(before, positions, causal)
        sampler.extend(tokens)
        self._last = tokens[-1]
        rows = np.empty(len(tokens), row_type(self._top))
        drawn = torch.tensor(tokens).to(device)[:, None]
        for name, scores in (("raw", logits.double()), ("warped", sampler.warp(logits, seen))):
            logs = scores.log_softmax(-1)
            rows[name] = logs.gather(1, drawn).squeeze(1).numpy(force=True)
            if self._top:
                best = logs.topk(self._top)
                rows[f"{name}_ids"] = best.indices.numpy(force=True)
                rows[f"{name}_top"] = best.values.numpy(force=True)
        return rows
