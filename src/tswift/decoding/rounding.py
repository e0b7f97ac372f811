"""What rounding may do to a whole text: how many tokens it turns, and by how much, as measured differences tell.

The bound on each token is the largest difference that was measured, and most are far smaller: a text drawn by slightly
other parameters hides below it, token by token. So measured differences are added to the logits of the audit's pass and
the rule is applied again, which gives so many texts as honest passes could have drawn. The text in question may not
have more tokens turned than those, nor more of them by much.

Assumed: the passes that made the text differ from the audit's as passes of the stretches do where those differ at all,
up to the factor ``_MORE``: they read keys that differ, which those of a stretch do only from the first difference on.
And a difference is as likely with either sign, and at any token whose logit has the same rank in its row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tswift.decoding.margin import RoundingMargin, contested
from tswift.decoding.sampling import Sampler

FALSE_ALARMS = 1e-3  # at most this share of honest texts is refused
_SAFETY = 2.0
_MORE = 1.25
_DRAWS = 32  # texts that honest passes could have drawn
_LEVELS = (0.0, 1.0, 2.0, 4.0)  # margins beyond which tokens are counted, in units of the usual difference
_KEPT, _TOP = 8, 32  # rows kept of each comparison; largest logits of a row, which are those that matter


@dataclass(frozen=True)
class Level:
    """The tokens within rounding whose margin is above some size, against what rounding explains.

    Attributes:
        margin: this size, a change of the logits.
        observed: how many there are.
        expected: how many rounding makes, by the measured differences.
        most: an honest text has more than this, at any level, with a probability of at most ``FALSE_ALARMS``.
    """

    margin: float
    observed: int
    expected: float
    most: int


class Rounding:
    """Differences between passes over the same tokens, and what they make of a text's draws.

    Attributes:
        measured: the largest difference of two logits so far.
        contested: rows so far whose draw some change of the logits within the bound turns.
    """

    def __init__(self) -> None:
        self.measured, self.contested = 0.0, 0
        self._sample: list[Tensor] = []  # rows of differences, each in the order of its row's logits
        self._random = torch.Generator().manual_seed(0)
        self._observed, self._made = [0] * len(_LEVELS), [0] * len(_LEVELS)

    @property
    def bound(self) -> float:
        """The margin up to which a token is within rounding."""
        return _SAFETY * self.measured

    @property
    def usual(self) -> float:
        """Root mean square of the differences of the largest logits."""
        return float(self._best().square().mean().sqrt()) if self._sample else 0.0

    def _best(self) -> Tensor:
        return torch.cat([rows[:, :_TOP].double() for rows in self._sample])

    def measure(self, logits: Tensor, other: Tensor) -> None:
        """Compare the logits ``[n, V]`` of two passes over the same tokens."""
        differences = other.double() - logits.double()
        self.measured = max(self.measured, float(differences.abs().max()))
        rows = differences.any(-1).nonzero().squeeze(1)
        if not len(rows):
            return
        rows = rows[:: math.ceil(len(rows) / _KEPT)]
        order = logits[rows].argsort(-1, descending=True)
        self._sample.append(differences[rows].gather(-1, order).to(torch.promote_types(logits.dtype, torch.float32)))

    def judge(
        self, sampler: Sampler, logits: Tensor, seen: Tensor | None, noise: Tensor, drawn: Tensor, tokens: Tensor
    ) -> None:
        """Count the tokens within rounding among a text's, and those among texts drawn with differences added.

        Args:
            sampler: the sampling rule.
            logits: ``[n, V]``.
            seen: ``[n, V]`` bool, the tokens in each row's penalty window; None to penalise nothing.
            noise: ``[n, V]``, of the places of the rows' tokens.
            drawn: ``[n]`` int64, what the rule draws from these logits.
            tokens: ``[n]`` int64, the text's; where rounding does not explain the text's, what is drawn.
        """
        if not self._sample:
            return  # nothing is within a bound of 0
        close = contested(sampler, logits, seen, noise, drawn, self.bound) | (tokens != drawn)
        self.contested += int(close.sum())
        rows = close.nonzero().squeeze(1)
        about = sampler, logits[rows], None if seen is None else seen[rows], noise[rows], drawn[rows]
        # most are out of the reach of what is added below
        rows = rows[contested(*about, _MORE * float(self._best().abs().max())) | (tokens != drawn)[rows]]
        if not len(rows):
            return
        logits, noise, drawn, tokens = logits[rows].double(), noise[rows], drawn[rows], tokens[rows]
        seen = None if seen is None else seen[rows]
        ranks = logits.argsort(-1, descending=True).argsort(-1)
        sample = torch.cat(self._sample)
        turned = [(tokens != drawn).nonzero().squeeze(1)]
        others = [tokens[turned[0]]]
        for _ in range(_DRAWS):
            chosen = torch.randint(len(sample), (len(rows),), generator=self._random).to(rows.device)
            signs = torch.randint(2, (len(rows), 1), generator=self._random).to(rows.device) * 2 - 1
            changes = sample[chosen].gather(1, ranks).double() * signs * _MORE
            again = (sampler.warp(logits + changes, seen) + noise).argmax(-1)
            turned.append((again != drawn).nonzero().squeeze(1))
            others.append(again[turned[-1]])
        made = torch.arange(_DRAWS + 1, device=rows.device).repeat_interleave(
            torch.tensor([len(each) for each in turned], device=rows.device)
        )
        kinds, places = torch.stack([torch.cat(turned), torch.cat(others)]).unique(dim=1, return_inverse=True)
        doubt = RoundingMargin(
            sampler, logits[kinds[0]], None if seen is None else seen[kinds[0]], noise[kinds[0]], kinds[1]
        )
        for at, level in enumerate(_LEVELS):
            beyond = (~doubt.explained(level * self.usual))[places]
            self._observed[at] += int((beyond & (made == 0)).sum())
            self._made[at] += int((beyond & (made > 0)).sum())

    def levels(self) -> tuple[Level, ...]:
        """What was counted, and what an honest text may have."""
        rate = FALSE_ALARMS / len(_LEVELS)
        return tuple(
            Level(level * self.usual, observed, made / _DRAWS, most(made, _DRAWS, rate))
            for level, observed, made in zip(_LEVELS, self._observed, self._made, strict=True)
        )


def most(made: int, draws: int, rate: float) -> int:
    """The largest count in one text that ``made`` in ``draws`` others like it do not refute.

    Counts of rare events are Poisson's. Of all events, these and the others', each is then this text's with a
    probability of ``1 / (draws + 1)``: one with a larger count has a probability of less than ``rate``.
    """
    count = made // draws
    while _tail(count + 1, made, 1 / (draws + 1)) >= rate:
        count += 1
    return count


def _tail(count: int, others: int, share: float) -> float:
    """Probability that of ``count + others`` events, each with a probability of ``share``, at least ``count`` occur."""
    total, sum_ = count + others, 0.0
    for hits in range(count, total + 1):
        ways = math.lgamma(total + 1) - math.lgamma(hits + 1) - math.lgamma(total - hits + 1)
        term = math.exp(ways + hits * math.log(share) + (total - hits) * math.log1p(-share))
        sum_ += term
        if term < 1e-12 * sum_:
            break
    return sum_
