"""Figures of a decode, as the paper defines them: acceptance rates, tokens per step,
distinct n-grams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tswift.decoding.drafter import REUSE, Step

_MOST = 1 << 53  # of what is counted
_LONGEST = 1e12  # seconds of a decode


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r:.40} is no count")
    return value


@dataclass
class DecodeStats:
    """Counters of the steps seen so far.

    Attributes:
        depth: most tokens drafted along a path: the paper's gamma + 1 for tokenswift; one less for
            medusa and reuse; up to 31 for dynamic trees.
        drafted: tokens drafted along the longest paths of all steps; None where they always are
            ``depth``. Alpha is divided by it.
        passes: verification passes over the target.
        tokens: tokens generated.
        nodes: tree nodes verified, roots included.
        seconds: wall time of the steps, without prefill.
        accepted: number of steps that accepted 0, 1, ... drafted tokens.
        sizes: number of steps that verified 1, 2, ... nodes.
        choices: number of steps by drafter; empty where there is only one.
        reused: accepted tokens of steps whose last one came from a retrieved n-gram.
    """

    depth: int
    passes: int = 0
    tokens: int = 0
    nodes: int = 0
    seconds: float = 0.0
    accepted: Counter[int] = field(default_factory=Counter)
    reused: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    drafted: int | None = None

    def add(self, step: Step) -> None:
        """Count one step."""
        if step.drafted is not None:
            self.drafted = self._drafted() + step.drafted
        self.passes += 1
        self.tokens += len(step.tokens)
        self.nodes += step.nodes
        self.seconds += step.seconds
        self.accepted[step.accepted] += 1
        self.sizes[step.nodes] += 1
        if step.choice:
            self.choices[step.choice] += 1
        if step.source == REUSE:
            self.reused += step.accepted

    def copy(self) -> DecodeStats:
        """A snapshot."""
        return deepcopy(self)

    def counters(self) -> dict[str, Any]:
        """All counters but tokens, ready for JSON."""
        return {
            name: {str(key): steps for key, steps in sorted(each.items())}
            if isinstance(each, Counter)
            else each
            for name, each in vars(self).items()
            if name not in ("depth", "tokens") and each is not None
        }

    @classmethod
    def counted(cls, depth: int, tokens: int, counters: Mapping[str, Any]) -> DecodeStats:
        """From what :meth:`counters` gave; zeros if that is empty. ValueError if it is broken."""
        if not counters:
            return cls(depth, tokens=tokens)
        try:
            counted: dict[str, Any] = {
                name: _count(counters[name]) for name in ("passes", "nodes", "reused")
            }
            for name in ("accepted", "sizes"):
                counted[name] = Counter(
                    {_count(int(each)): _count(steps) for each, steps in counters[name].items()}
                )
            counted["choices"] = Counter(
                {str(name): _count(steps) for name, steps in counters["choices"].items()}
            )
            if "drafted" in counters:  # journals of before 2026-11-23 have none
                counted["drafted"] = _count(counters["drafted"])
            seconds = counters["seconds"]
            if not 0 <= seconds < _LONGEST:
                raise ValueError(f"{seconds!r:.40} seconds")
            return cls(depth, tokens=tokens, seconds=float(seconds), **counted)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"its counters are broken ({error!r})") from None

    @property
    def alpha(self) -> float:
        """Acceptance rate: accepted draft tokens / those drafted along the longest paths;
        0 where none were.
        """
        return self._rate(sum(count * steps for count, steps in self.accepted.items()))

    @property
    def beta(self) -> float:
        """The part of alpha from steps whose longest accepted path came from a retrieved n-gram."""
        return self._rate(self.reused)

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per verification pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def _drafted(self) -> int:
        return self.depth * self.passes if self.drafted is None else self.drafted

    def _rate(self, accepted: int) -> float:
        drafted = self._drafted()
        return accepted / drafted if drafted else 0.0


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct-n: unique n-grams / n-grams; 0 for a text shorter than n."""
    ids = np.asarray(tokens)
    if len(ids) < n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, n)
    return len(np.unique(grams, axis=0)) / len(grams)
