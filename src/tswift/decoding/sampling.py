"""The sampling rule: one token from one row of logits, as a pure function of (logits, text so far, seed, position).

``next = argmax over kept tokens of (warped logit + gumbel(seed, position, token))``; no noise at temperature 0. The
Gumbel-max trick makes this an exact draw from the warped distribution. Everything after the model's logits is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_INF = math.inf

NOTHING = -1  # drawn where there is nothing to draw
# of each number: its type, whether a value is fine, and what a fine one is
_RANGES: tuple[tuple[str, type, Callable[[Any], bool], str], ...] = (
    ("temperature", Real, lambda value: 0 <= value < _INF, "a number >= 0"),
    ("top_k", Integral, lambda value: 0 <= value <= 1 << 40, "an integer >= 0"),
    ("top_p", Real, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", Real, lambda value: 0 <= value <= 1, "between 0 and 1"),
    ("eta", Real, lambda value: 0 <= value < 1, "at least 0 and below 1"),
    ("penalty", Real, lambda value: 1 <= value < _INF, "a number >= 1"),
    ("window", Integral, lambda value: 0 <= value <= 1 << 40, "between 0 and 2^40"),
    # beyond these, warped logits overflow, and what is drawn means nothing
    ("temperature", Real, lambda value: value == 0 or 1e-100 <= value <= 1e100, "0, or between 1e-100 and 1e100"),
    ("penalty", Real, lambda value: value <= 1e100, "at most 1e100"),
)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. The defaults are the paper's for LLaMA3.1-8b (table 10).

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 drops none.
        eta: epsilon of eta sampling (Hewitt et al., 2022); 0 drops none.
        penalty: theta of the contextual penalty (paper, section 3.5); 1 penalises nothing.
        window: how many of the last tokens, prompt included, are penalised.
        banned: token ids that are never drawn.

    Raises:
        ValueError: a value outside its range, or of another type; the message begins with the attribute's name.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.1
    eta: float = 0.0
    penalty: float = 1.2
    window: int = 1024
    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, kind, fine, wanted in _RANGES:
            value = getattr(self, name)
            if not isinstance(value, kind) or not fine(value) or (isinstance(value, int) and value >> 62):
                raise ValueError(f"{name} must be {wanted}, got {value!r:.60}")
        ids = self.banned
        if not isinstance(ids, tuple) or not all(isinstance(token, Integral) and token >= 0 for token in ids):
            raise ValueError(f"banned must be a tuple of token ids, got {ids!r:.60}")

    @property
    def penalises(self) -> bool:
        """Whether the contextual penalty does anything."""
        return self.penalty != 1 and self.window > 0


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _splitmix(value: int) -> int:
    """SplitMix64's output function (Steele et al., 2014) on a Python integer."""
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    # a logical shift; int64 shifts are arithmetic
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def noise_bits(seed: int, positions: Sequence[int], tokens: Tensor) -> Tensor:
    """64 random bits for each (position, token id): a pure function of the three integers.

    Args:
        seed: any integer, taken modulo 2^64.
        positions: ``n`` positions in the text.
        tokens: ``[m]`` int64 token ids, or ``[n, m]`` for others at each position.

    Returns:
        ``[n, m]`` int64.
    """
    streams = [_splitmix(_splitmix(seed & _MASK) + _GOLDEN * (position + 1) & _MASK) for position in positions]
    start = torch.tensor([[_signed(stream)] for stream in streams]).to(tokens.device, non_blocking=True)
    value = start + tokens * _signed(_GOLDEN)
    value = (value ^ _shift(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_2)
    return value ^ _shift(value, 31)


def gumbel(seed: int, positions: Sequence[int], tokens: Tensor) -> Tensor:
    """Standard Gumbel noise ``[n, m]`` (float64) for each (position, token id); never infinite."""
    # 52 bits and a half: the largest value is still below 1 in float64
    uniform = (_shift(noise_bits(seed, positions, tokens), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def warp(logits: Tensor, seen: Tensor | None, params: SamplingParams) -> Tensor:
    """Apply the filters and the penalty to rows of logits.

    Order, as in the reference: banned ids, temperature, contextual penalty, min-p, eta, top-k, top-p. At temperature 0
    only what can change the most likely token is applied.

    Args:
        logits: ``[n, V]`` float64; changed in place.
        seen: ``[n, V]`` bool, the tokens in each row's penalty window; None to penalise nothing.
        params: the sampling parameters.

    Returns:
        ``[n, V]`` float64, unnormalised log-probabilities, ``-inf`` where a token is dropped.
    """
    if params.banned:
        logits.index_fill_(-1, torch.tensor(params.banned).to(logits.device, non_blocking=True), -_INF)
    if params.temperature not in (0, 1):
        logits /= params.temperature
    if seen is not None:
        logits = torch.where(seen, torch.where(logits > 0, logits / params.penalty, logits * params.penalty), logits)
    if params.temperature == 0:
        return logits
    if params.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(params.min_p), -_INF)
    if params.eta > 0:
        logits = _keep_eta(logits, params.eta)
    if 0 < params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -_INF)
    if params.top_p < 1:
        logits = _keep_top_p(logits, params.top_p)
    return logits


def _keep_eta(logits: Tensor, epsilon: float) -> Tensor:
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs.masked_fill(probs == 0, 0)).sum(-1, keepdim=True)
    least = (math.sqrt(epsilon) * torch.exp(-entropy)).clamp(max=epsilon)
    drop = (probs < least) & (logits < logits.amax(-1, keepdim=True))
    return logits.masked_fill(drop, -_INF)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    # a token stays if the more likely ones together do not reach top_p yet; only as many are sorted as it takes
    probs = logits.softmax(-1)
    vocab = logits.shape[-1]
    count = min(128, vocab)
    while True:
        best = probs.topk(count).values
        if count == vocab or bool((best.sum(-1) >= top_p).all()):
            break
        count = min(8 * count, vocab)
    kept = (best.cumsum(-1) - best < top_p).sum(-1, keepdim=True).clamp_(min=1)  # of a row with NaN none reaches it
    return logits.masked_fill(probs < best.gather(-1, kept - 1), -_INF)


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
