"""The sampling rule: one token from one row of logits, as a pure function of (logits, text so far, seed, position).

``next = argmax over kept tokens of (warped logit + gumbel(seed, position, token))``; no noise at temperature 0. The
Gumbel-max trick makes this an exact draw from the warped distribution. Everything after the model's logits is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from tswift.decoding.noise import gumbel
from tswift.decoding.params import SamplingParams
from tswift.decoding.warping import warp

NOTHING = -1  # drawn where there is nothing to draw


class Sampler:
    """The sampling rule bound to its parameters and seed, with the penalty window of a growing text.

    Args:
        params: the sampling parameters.
        seed: any integer; with the parameters and the prompt it decides the text.
        vocab_size: number of token ids ``V``.
        device: where logits will be.

    Raises:
        ValueError: a banned id outside the vocabulary.
    """

    _BLOCK = 16  # noise is computed for this many positions at a time

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, device: torch.device) -> None:
        if any(not 0 <= token < vocab_size for token in params.banned):
            raise ValueError(f"banned ids must be below the vocabulary's size {vocab_size}, got {params.banned}")
        self.params, self.seed = params, seed
        self._tokens = torch.arange(vocab_size, device=device)
        self._newest = torch.full((vocab_size,), -(1 << 62), dtype=torch.int64, device=device)
        self._length = 0
        self._blocks: dict[int, Tensor] = {}

    def copy(self) -> Sampler:
        """A sampler in the same state, whose text grows by itself from here on."""
        twin = copy(self)
        twin._newest = self._newest.clone()
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text whose last ``window`` are penalised."""
        if self.params.penalises and tokens:
            ids = torch.tensor(tokens).to(self._newest.device, non_blocking=True)
            positions = torch.arange(self._length, self._length + len(tokens), device=self._newest.device)
            self._newest.scatter_reduce_(0, ids, positions, "amax")
        self._length += len(tokens)

    def seen(self, tokens: Tensor, positions: Tensor, ancestors: Tensor) -> Tensor | None:
        """Which tokens each draft node penalises: those among the last ``window`` up to and including the node.

        Args:
            tokens: ``[n]`` token of each node, the root (the text's last token) first.
            positions: ``[n]`` position of each node's token in the text.
            ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row itself.

        Returns:
            ``[n, V]`` bool, or None if nothing is penalised.
        """
        if not self.params.penalises:
            return None
        window = self.params.window
        seen = self._newest > (positions - window)[:, None]
        if len(tokens) > 1:
            near = ancestors & (positions[:, None] - positions < window)
            # what is not near is replaced by the node's own token, so that nothing has to be counted
            seen.scatter_(1, torch.where(near, tokens, tokens[:, None]), True)
        return seen

    def noise(self, positions: Sequence[int]) -> Tensor:
        """Gumbel noise ``[n, V]`` (float64) for tokens to be drawn at these positions; zero at temperature 0."""
        if self.params.temperature == 0:
            return torch.zeros((), dtype=torch.float64, device=self._tokens.device)
        rows = [self._block(position // self._BLOCK)[position % self._BLOCK] for position in positions]
        return torch.stack(rows)

    def noise_of(self, positions: Sequence[int], tokens: Tensor) -> Tensor:
        """As :meth:`noise`, for some tokens at each position: ``[n, m]`` on the CPU.

        Args:
            positions: ``n`` of them.
            tokens: ``[n, m]`` int64 on the CPU, as a guess made there does not have to wait for the device.
        """
        if self.params.temperature == 0:
            return torch.zeros((), dtype=torch.float64)
        if self._tokens.device.type != "cpu":
            return gumbel(self.seed, positions, tokens)
        blocks = [self._block(position // self._BLOCK)[position % self._BLOCK] for position in positions]
        return torch.stack([block[row] for block, row in zip(blocks, tokens, strict=True)])

    def _block(self, index: int) -> Tensor:
        block = self._blocks.get(index)
        if block is None:
            first = index * self._BLOCK
            block = gumbel(self.seed, range(first, first + self._BLOCK), self._tokens)
            self._blocks = {near: rows for near, rows in self._blocks.items() if abs(near - index) <= 2}
            self._blocks[index] = block
        return block

    def scores(self, logits: Tensor, seen: Tensor | None, positions: Sequence[int]) -> Tensor:
        """What the rule takes the argmax of: ``[n, V]`` float64 from logits ``[n, V]`` of tokens at ``positions``."""
        return warp(logits.to(torch.float64, copy=True), seen, self.params) + self.noise(positions)

    def draw(self, logits: Tensor, seen: Tensor | None, positions: Sequence[int]) -> list[int]:
        """The tokens at ``positions``, one for each row of ``logits`` ``[n, V]``.

        A row with NaN or infinity, or with no token left, draws ``NOTHING``; a banned token's logit is not looked at.
        It shows in the best score, whatever the filters, and comes along with the tokens.
        """
        scores = self.scores(logits, seen, positions)
        return self._drawn(scores)

    def draw_with_leads(
        self, logits: Tensor, seen: Tensor | None, positions: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, float]]]:
        """As :meth:`draw`, and for each row the runner-up and the lead over it in score."""
        scores = self.scores(logits, seen, positions)
        values, tokens = (each.tolist() for each in scores.topk(2))
        drawn, others = [], []
        for (first, second), (best, next_best) in zip(tokens, values, strict=True):
            drawn.append(first if math.isfinite(best) else NOTHING)
            others.append((second, best - next_best))
        return drawn, others

    @staticmethod
    def _drawn(scores: Tensor) -> list[int]:
        # not scores.max(-1): on a few thousand tokens PyTorch calls all threads together for that, and not for argmax
        drawn = scores.argmax(-1, keepdim=True)
        found = torch.cat([drawn, scores.gather(-1, drawn)], dim=-1).tolist()
        return [int(token) if math.isfinite(best) else NOTHING for token, best in found]
