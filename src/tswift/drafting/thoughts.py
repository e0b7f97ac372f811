"""What the target thought would come next, after each token of a text: the likeliest tokens and their logits.

A verification pass gives the logits after every token that it commits. What was drawn from them is one sample, taken
with the noise of its own position; the logits say what would be drawn at a like place with any other noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 64  # of logits ranked at a time


class Thoughts:
    """The distributions after each token of a text, each by its likeliest tokens.

    Args:
        vocab_size: number of token ids.
        kept: tokens kept of each distribution.
        banned: token ids that are never drawn, and not kept.
    """

    def __init__(self, vocab_size: int, kept: int = 64, banned: Sequence[int] = ()) -> None:
        kept, kind = _kept_as(vocab_size, kept)
        self._banned = torch.tensor(banned, dtype=torch.int64)
        self._count = 0
        self._ids = np.empty((0, kept), kind)
        self._logs = np.empty((0, kept), np.float16)  # log-probabilities
        self._scales = np.empty(0, np.float32)  # what to add to get logits

    def __len__(self) -> int:
        """Of how many tokens it is known what follows."""
        return self._count

    @staticmethod
    def bytes_for(tokens: int, vocab_size: int, kept: int) -> int:
        """What those of so many tokens take: ``6 * kept + 4`` bytes each, ``4 * kept + 4`` with up to 65,536 ids."""
        kept, kind = _kept_as(vocab_size, kept)
        return tokens * (kept * (np.dtype(kind).itemsize + 2) + 4)

    def think(self, logits: Tensor) -> None:
        """Append positions whose logits ``[n, V]`` are known."""
        for part in logits.split(_ROWS):
            rows = self._room(len(part))
            part = part.float().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)  # of a broken position
            if len(self._banned):
                part = part.index_fill(-1, self._banned.to(part.device, non_blocking=True), -torch.inf)
            scales = part.logsumexp(-1)
            best = part.topk(self._ids.shape[1])
            told = torch.cat([best.values - scales[:, None], scales[:, None], best.indices.float()], -1).cpu().numpy()
            kept = self._ids.shape[1]
            self._logs[rows], self._scales[rows], self._ids[rows] = told[:, :kept], told[:, kept], told[:, kept + 1 :]

    def _room(self, more: int) -> slice:
        """The next places, with the arrays grown as needed; untouched memory is not taken yet."""
        start, self._count = self._count, self._count + more
        if self._count > len(self._scales):
            size = max(2 * start, self._count, 1024)
            self._ids, self._logs = _grown(self._ids, size), _grown(self._logs, size)
            self._scales = _grown(self._scales, size)
        return slice(start, self._count)

    def average(self, places: NDArray[np.int64], shares: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        """Weighted means of some distributions.

        Args:
            places: ``[n, k]`` positions, each below ``len``.
            shares: ``[n, k]``, of which those of a row add up to one.

        Returns:
            Token ids ``[n, m]``, and their logits ``[n, m]`` (float64): logarithms of the mean, moved by the mean of
            what the distributions' own logits were moved by, as a penalty looks at the sign. Rows are filled up with
            the id 0 and ``-inf``.
        """
        count = len(places)
        scale = (self._scales[places] * shares).sum(-1)
        rows = np.arange(count)[:, None, None]
        keys = (self._ids[places] + (rows << 32)).ravel()  # one number for a token of a row
        sums = (np.exp(self._logs[places], dtype=np.float32) * shares[:, :, None]).ravel()
        order = keys.argsort(kind="stable")
        keys, sums = keys[order], sums[order]
        fresh = np.empty(len(keys), bool)
        fresh[0] = True
        np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
        starts = fresh.nonzero()[0]
        keys, sums = keys[starts], np.add.reduceat(sums, starts)
        row = keys >> 32
        begins = row.searchsorted(np.arange(count + 1))
        column, width = np.arange(len(keys)) - begins[row], int((begins[1:] - begins[:-1]).max())
        ids, logits = np.zeros((count, width), np.int64), np.full((count, width), -np.inf)
        ids[row, column] = keys & 0xFFFFFFFF
        with np.errstate(divide="ignore"):
            logits[row, column] = np.log(sums) + scale[row]
        return torch.from_numpy(ids), torch.from_numpy(logits)


def _kept_as(vocab_size: int, kept: int) -> tuple[int, type[np.uint16] | type[np.int32]]:
    """How many tokens are kept of a distribution, and as what."""
    return min(kept, vocab_size), np.uint16 if vocab_size <= 1 << 16 else np.int32


def _grown(rows: NDArray[Any], size: int) -> NDArray[Any]:
    larger = np.empty((size, *rows.shape[1:]), rows.dtype)
    larger[: len(rows)] = rows
    return larger
