"""What is set of how tokens are drawn, each value within its range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

# of each number: its type, whether a value is fine, and what a fine one is
_RANGES: tuple[tuple[str, type, Callable[[Any], bool], str], ...] = (
    ("temperature", Real, lambda value: 0 <= value < math.inf, "a number >= 0"),
    ("top_k", Integral, lambda value: 0 <= value <= 1 << 40, "an integer >= 0"),
    ("top_p", Real, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", Real, lambda value: 0 <= value <= 1, "between 0 and 1"),
    ("eta", Real, lambda value: 0 <= value < 1, "at least 0 and below 1"),
    ("penalty", Real, lambda value: 1 <= value < math.inf, "a number >= 1"),
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
