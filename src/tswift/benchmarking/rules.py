"""What a gate holds a metric to: rules such as ``speedup:10%``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tswift.errors import InputError

_FIGURES = {
    "alpha": "alpha",
    "beta": "beta",
    "tokens_per_step": "tokens_per_step",
    "passes": "passes",
    "speedup": "speedup",
    "tokens_per_s": "tokens_per_second",
}
_TIMES = ("speedup", "tokens_per_s")
_MORE_IS_WORSE = ("passes",)
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_SLACK = 1e-12  # a loss of exactly the tolerance passes, whichever way its last bit was rounded


@dataclass(frozen=True)
class Rule:
    """How much worse a metric may get.

    Attributes:
        metric: one of alpha, beta, tokens_per_step, passes, speedup, tokens_per_s.
        tolerance: at least 0; a share of the baseline if relative, else in the metric's own unit.
        relative: see tolerance.
    """

    metric: str
    tolerance: float
    relative: bool

    @property
    def timed(self) -> bool:
        """Whether the metric is a time, which another machine has another of."""
        return self.metric in _TIMES

    @property
    def figure(self) -> str:
        """The metric's name in a measurement."""
        return _FIGURES[self.metric]

    def limit(self, baseline: float) -> float:
        """The worst value that is still fine."""
        loss = self.tolerance * abs(baseline) if self.relative else self.tolerance
        return baseline + loss if self.metric in _MORE_IS_WORSE else baseline - loss

    def allows(self, baseline: float, ours: float) -> bool:
        """Whether ours is no worse than the limit."""
        slack = _SLACK * max(1.0, abs(baseline))
        limit = self.limit(baseline)
        return ours <= limit + slack if self.metric in _MORE_IS_WORSE else ours >= limit - slack

    def refuse_idle(self, baseline: Sequence[float]) -> None:
        """Refuse a tolerance that would let every value of the baseline that is positive fall to nothing.

        Raises:
            InputError: it would.
        """
        positive = [value for value in baseline if value > 0]
        if self.metric in _MORE_IS_WORSE or not positive or not all(self.allows(value, 0.0) for value in positive):
            return
        percent = self.tolerance if 1 <= self.tolerance < 100 else 10
        raise InputError(
            f"{self.metric} can never fall by more than {self.tolerance:g}, the baseline has {max(positive):.4g} at "
            f"most; a share of it is written {self.metric}:{percent:g}%",
            "--fail-on",
        )


def parse_rule(text: str) -> Rule:
    """Read ``metric:tolerance``.

    A tolerance ending in % is a share of the baseline, another one is absolute. A metric alone means no tolerance at
    all, which counters can keep and times cannot.

    Raises:
        InputError: no such metric, a time without a tolerance, or one that is no number from 0 up or can never fail.
    """
    metric, colon, tolerance = text.strip().partition(":")
    if metric not in _FIGURES:
        raise InputError(f"knows {', '.join(_FIGURES)}, got {metric!r}", "--fail-on")
    if not colon:
        if metric in _TIMES:
            raise InputError(f"{metric} varies from run to run: give a tolerance, such as {metric}:10%", "--fail-on")
        return Rule(metric, 0.0, relative=False)
    relative = tolerance.endswith("%")
    digits = tolerance[:-1] if relative else tolerance
    value = float(digits) / (100 if relative else 1) if _NUMBER.fullmatch(digits) else math.inf
    if math.isinf(value):
        raise InputError(
            f"wants a tolerance such as {metric}:0.05 or {metric}:10%, got {tolerance!r}",
            "--fail-on",
        )
    if relative and value >= 1 and metric not in _MORE_IS_WORSE:
        raise InputError(f"{metric} can never fall by more than 100%, got {tolerance!r}", "--fail-on")
    return Rule(metric, value, relative)
