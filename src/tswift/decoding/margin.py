"""How little the logits would have to change for the sampling rule to draw another token than it does.

Two passes over the same tokens round differently. What that can do to a draw is more than swap two close scores: a
token at the edge of min-p is kept by one pass and dropped by the other, and so is its competitor. So the whole rule is
asked again with changed logits, instead of a gap being read off its scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tswift.decoding.params import warp
from tswift.decoding.sampling import Sampler

_SMALLEST = 1e-12  # where the search starts if no rounding was measured
_UP, _DOWN = 40, 6  # most steps of the search, each by a factor of four
_HALVINGS = 20


class RoundingMargin:
    """Rows of logits from which the rule draws another token than the one in question.

    A change of the logits is a sign for every token, times its size. Signs are tried in four patterns, in all of which
    the token in question goes up:

    0. tokens with a higher score go down, the others up: a competitor is pushed over the edge of a filter that others
       set, or the mass above a token that top-p drops shrinks;
    1. all others go down: a close draw, or the token itself at the edge of min-p, eta or top-k;
    2. tokens that would score higher if nothing were dropped go down, the others stay: the token and a competitor, both
       at an edge;
    3. the same, and the others go up.

    That they are enough was tried: of draws turned by a random change of all logits, one in some hundreds had a margin
    larger than that change, none more than twice as large.

    Args:
        sampler: the sampling rule.
        logits: ``[n, V]``.
        seen: ``[n, V]`` bool, the tokens in each row's penalty window; None to penalise nothing.
        noise: ``[n, V]``, of the place where each row's token is.
        tokens: ``[n]`` int64, the tokens in question.

    Attributes:
        patterns: ``[4, n, V]`` int8, the signs.
    """

    def __init__(self, sampler: Sampler, logits: Tensor, seen: Tensor | None, noise: Tensor, tokens: Tensor) -> None:
        self._params, self._logits, self._seen, self._tokens = sampler.params, logits.double(), seen, tokens
        self._noise = noise
        column = tokens[:, None]
        scores = warp(self._logits.clone(), seen, self._params) + self._noise
        whole = warp(self._logits.clone(), seen, self._params.unfiltered()) + self._noise
        self._possible = whole.gather(1, column).squeeze(1) > -math.inf  # a banned token is not
        higher = (scores > scores.gather(1, column)).to(torch.int8)
        would = (whole > whole.gather(1, column)).to(torch.int8)
        self.patterns = torch.stack([1 - 2 * higher, torch.full_like(higher, -1), -would, 1 - 2 * would])
        self.patterns.scatter_(2, column.expand(4, -1, 1), 1)

    def explained(self, size: float | Tensor, rows: Tensor | None = None) -> Tensor:
        """Whether a change of this size, in one of the patterns, makes the rule draw the token.

        Args:
            size: the change, one for all rows or one each.
            rows: ``[m]`` int64, the rows to look at; None for all.

        Returns:
            ``[m]`` bool.
        """
        rows = torch.arange(len(self._tokens), device=self._tokens.device) if rows is None else rows
        sizes = torch.as_tensor(size, dtype=torch.float64, device=rows.device).expand(len(rows))[:, None]
        logits, noise = self._logits[rows], self._noise[rows]
        seen = None if self._seen is None else self._seen[rows]
        drawn = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for signs in self.patterns:
            scores = warp(logits + sizes * signs[rows], seen, self._params) + noise
            drawn |= scores.argmax(-1) == self._tokens[rows]
        return drawn

    def margins(self, near: float, rows: Tensor | None = None) -> Tensor:
        """The smallest change found, by search around ``near`` and then by halving. It is an upper bound of the least.

        Args:
            near: a change that is likely to matter; tried first.
            rows: ``[m]`` int64, the rows to look at; None for all.

        Returns:
            ``[m]`` float64, infinite for a banned token. A change of just this size was tried and does it.
        """
        rows = torch.arange(len(self._tokens), device=self._tokens.device) if rows is None else rows
        start = near or _SMALLEST
        high = torch.full((len(rows),), math.inf, dtype=torch.float64, device=rows.device)
        low = torch.zeros_like(high)
        # Not all that explains is monotone: a larger change can let another token in. So smaller ones are tried too.
        for power in [0, *range(-1, -_DOWN - 1, -1), *range(1, _UP + 1)]:
            left = (high.isinf() & self._possible[rows]).nonzero().squeeze(1)
            if not len(left):
                break
            size = start * 4.0**power
            found = left[self.explained(size, rows[left])]
            high[found] = size
            low[found] = size / 4 if power > 0 else 0.0
        found = high.isfinite().nonzero().squeeze(1)
        for _ in range(_HALVINGS if len(found) else 0):
            middle = (low[found] + high[found]) / 2
            enough = self.explained(middle, rows[found])
            high[found] = torch.where(enough, middle, high[found])
            low[found] = torch.where(enough, low[found], middle)
        return high


def contested(
    sampler: Sampler, logits: Tensor, seen: Tensor | None, noise: Tensor, drawn: Tensor, size: float
) -> Tensor:
    """Whether a change of the logits of this size makes the rule draw another token than it does.

    Two changes are tried, in both of which the drawn token goes down. All others go up: a close draw, or the drawn
    token at a filter's edge. Or only those go up that would be about as high if nothing were dropped, and what sets
    the filter goes down: a competitor at its edge.

    Args:
        sampler: the sampling rule.
        logits: ``[n, V]``.
        seen: ``[n, V]`` bool, the tokens in each row's penalty window; None to penalise nothing.
        noise: ``[n, V]``, of the place where each row's token is.
        drawn: ``[n]`` int64, what the rule draws.
        size: the change.

    Returns:
        ``[n]`` bool.
    """
    logits, params, column = logits.double(), sampler.params, drawn[:, None]
    whole = warp(logits.clone(), seen, params.unfiltered()) + noise
    reach = 2 * size * max(1.0, params.penalty) / (params.temperature or 1)
    rivals = (whole >= whole.gather(1, column) - reach).scatter_(1, column, False)
    found = torch.zeros(len(drawn), dtype=torch.bool, device=drawn.device)
    for signs in (torch.ones_like(logits), rivals * 2.0 - 1):
        changed = logits + size * signs.scatter_(1, column, -1)
        found |= (warp(changed, seen, params) + noise).argmax(-1) != drawn
    return found
