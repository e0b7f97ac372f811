"""The audit: is this text what the sampling rule draws? One chunked prefill, the rule applied at every position.

It costs about a prefill, whatever made the text and however long that took, and it does not lose the thread where
rounding has swapped two candidates: every token is judged after the text that stands before it.

Two passes over the same tokens round differently. That can do more than swap two close scores: a token at the edge of
min-p is kept by one pass and dropped by the other. So the whole rule is applied again with changed logits, instead of
a gap being read off its scores (:class:`RoundingMargin`). The bound on each token is the largest difference that was
measured, and most are far smaller: a text drawn by slightly other parameters hides below it, token by token. So
measured differences are added to the logits of the audit's pass and the rule is applied again, which gives as many
texts as honest passes could have drawn (:class:`Rounding`). The text in question may not have more tokens turned than
those, nor more of them by much. Assumed: the passes that made the text differ from the audit's as passes of the
stretches do where those differ at all, up to the factor ``_MORE``: they read keys that differ, which those of a stretch
do only from the first difference on. And a difference is as likely with either sign, and at any token whose logit has
the same rank in its row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tswift.decoding.loop import broken, not_finite
from tswift.decoding.params import SamplingParams, warp
from tswift.decoding.sampling import Sampler
from tswift.kv.cache import FullKV
from tswift.models.target import Show, Target

WITHIN, VIOLATION = "within rounding", "violation"
SEARCHED = 1000  # tokens beyond the bound whose margin is looked for
_CHUNK = 256  # tokens forwarded at a time
_ELEMENTS = 1 << 21  # scores held at a time, in float64
_STRETCHES, _STRETCH, _WIDTHS = 8, 32, (1, 8)
_WIDE, _NARROW = 256.0, 16.0  # most rounding there can be, in units of the largest logit's last place
FALSE_ALARMS = 1e-3  # at most this share of honest texts is refused
_SAFETY = 2.0
_MORE = 1.25
_DRAWS = 32  # texts that honest passes could have drawn
_LEVELS = (0.0, 1.0, 2.0, 4.0)  # margins beyond which tokens are counted, in units of the usual difference
_KEPT, _TOP = 8, 32  # rows kept of each comparison; largest logits of a row, which are those that matter
_SMALLEST = 1e-12  # where the search starts if no rounding was measured
_UP, _DOWN = 40, 6  # most steps of the search, each by a factor of four
_HALVINGS = 20


@dataclass(frozen=True)
class Finding:
    """A token that is not the one the rule draws in the audit's pass.

    Attributes:
        index: its place among the generated tokens, from 0.
        position: its place in prompt and text.
        token: the token in the text.
        drawn: the token the rule draws.
        margin: a change of the logits under which the rule draws the text's token; the smallest found. Infinite for a
            banned token, None where it was not looked for.
        kind: ``within rounding`` or ``violation``.
    """

    index: int
    position: int
    token: int
    drawn: int
    margin: float | None
    kind: str


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        tokens: generated tokens judged.
        exact: how many of them the rule draws exactly.
        findings: all others, in order.
        measured: largest difference between logits of passes of different widths over the same tokens.
        limit: the largest difference that rounding can make. Where more was measured, passes of different widths do not
            compute the same, so the bound means nothing and the audit has failed.
        bound: the margin up to which a token is within rounding. Twice what was measured: the largest of a sample lies
            below the largest of all, and of the text's own passes every one rounded differently.
        least_lead, greatest_lead: of tokens drawn exactly, how far in score they are ahead of the next one; None if
            never more than one token was left to choose from.
        seconds: wall time.
        width: rows of every pass, where the logits are those that decoding had, bit for bit: no token is within
            rounding then, and nothing was measured. None where they are not.
        levels: the tokens within rounding by margin, against what rounding explains of the whole text.
        contested: tokens with a competitor within rounding: an error that swaps only a few of those is not seen.
    """

    tokens: int
    exact: int
    findings: tuple[Finding, ...]
    measured: float
    limit: float
    bound: float
    least_lead: float | None
    greatest_lead: float | None
    seconds: float
    width: int | None = None
    levels: tuple[Level, ...] = ()
    contested: int = 0

    @property
    def within(self) -> list[Finding]:
        """The tokens within rounding."""
        return [finding for finding in self.findings if finding.kind == WITHIN]

    @property
    def violations(self) -> list[Finding]:
        """The tokens that rounding does not explain."""
        return [finding for finding in self.findings if finding.kind == VIOLATION]

    @property
    def excess(self) -> list[Level]:
        """Where there are more tokens within rounding than rounding explains."""
        return [level for level in self.levels if level.observed > level.most]

    @property
    def ok(self) -> bool:
        """Whether there is no violation, and rounding explains the rest: each token, all, and how passes differ."""
        return not self.violations and not self.excess and self.measured <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: an infinite margin is None there, as is one not looked for."""
        findings = [
            {**asdict(finding), "margin": finding.margin if finding.margin != math.inf else None}
            for finding in self.findings
        ]
        counts = {"within_rounding": len(self.within), "violations": len(self.violations)}
        return {"ok": self.ok, **asdict(self), **counts, "findings": findings}


@torch.inference_mode()
def audit(
    target: Target,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
    seed: int,
    show: Show | None = None,
) -> Audit:
    """Judge every token of a text.

    A target whose passes have a fixed width gives the logits that decoding had, so each token is drawn exactly or is a
    violation. Elsewhere a token may also be within rounding. How far rounding reaches is measured: at up to eight
    stretches of 32 tokens, from the text's start to its end, the tokens are also forwarded one at a time and eight at a
    time, and the logits compared with those of the chunk. The whole text is held against what such differences make of
    it: see :mod:`tswift.decoding.audit`.

    Args:
        target: the model.
        prompt: at least one token id.
        tokens: the generated token ids, at least one.
        params: what they were drawn with, banned ids included.
        seed: what they were drawn with.
        show: called with tokens forwarded so far and in all, prompt included.

    Returns:
        The finding. Of tokens beyond the bound measured so far, the margin is looked for in the first ``SEARCHED``.

    Raises:
        ValueError: no prompt, no tokens, or ids outside the vocabulary.
        NotFinite: the model gives NaN or infinity somewhere in the text.
    """
    if not prompt or not tokens:
        raise ValueError("prompt and tokens must have at least one token each")
    text = [*prompt, *tokens]
    if not all(0 <= token < target.vocab_size for token in text):
        raise ValueError(f"there are token ids outside the vocabulary of {target.vocab_size}")
    started = time.perf_counter()
    first, nodes = len(prompt) - 1, len(text) - 1  # the node that draws the first generated token; nodes in all
    starts = stretches(first, nodes) if target.width is None else []
    cuts = [min([first, *starts])]
    while cuts[-1] < nodes:
        cuts.append(min([cuts[-1] + _CHUNK, nodes, *(start for start in starts if start > cuts[-1])]))
    show = show or (lambda done, total: None)
    kv = FullKV(target.kv_shape, nodes + max(*_WIDTHS, target.width or 0))
    target.prepare(kv, target.width or max(_WIDTHS))  # passes as narrow as those that decode are to be the same
    judge = _Judge(Sampler(params, seed, target.vocab_size, target.device), text, first, target)
    for _ in target.chunks(text[: cuts[0]], kv):
        show(kv.length, nodes)
    for start, stop in pairwise(cuts):
        logits = _logits(target, text[start:stop], kv, _CHUNK)
        # where a text is short, far into its only chunk: the first rows of one round as narrow passes do
        at = max(start, min(first, stop - _STRETCH))
        others = _narrow(target, text[at : min(at + _STRETCH, stop)], kv, at) if start in starts else []
        kv.length = stop
        for rows in (logits, *others):
            wrong = broken(rows).nonzero().flatten().tolist()
            if wrong:
                # behind the cause: NaN spreads to tokens before it in the same pass
                kv.length = (start if rows is logits else at) + wrong[-1]
                raise not_finite(target, kv, text, rows[wrong[-1]], params)
        for other in others:
            judge.rounding.measure(logits[at - start :][: len(other)], other)
        judge.largest = max(judge.largest, float(logits.abs().max()))
        judge.rows(max(first, start), logits[max(0, first - start) :])
        show(stop, nodes)
    return judge.audit(time.perf_counter() - started)


def stretches(first: int, nodes: int) -> list[int]:
    """Where the stretches begin at which rounding is measured.

    They are spread evenly from the first node that draws a token to the last one with a whole chunk from there on: a
    pass over few nodes may compute just what the narrow ones do. A text shorter than a chunk is one chunk, at whose end
    the stretch lies.
    """
    begin = min(first, max(0, nodes - _CHUNK))
    room = max(0, nodes - begin - _CHUNK)
    count = min(_STRETCHES, 1 + room // _CHUNK)
    return [begin + index * room // max(1, count - 1) for index in range(count)]


def _narrow(target: Target, tokens: Sequence[int], kv: FullKV, start: int) -> list[Tensor]:
    """``[n, V]`` logits of tokens from ``start`` on by passes of each narrow width; the cache holds what it held."""
    slots = slice(start, start + len(tokens))
    kept = [buffer[:, :, slots].clone() for buffer in (kv.keys, kv.values)]
    found = []
    for width in _WIDTHS:
        kv.length = start
        found.append(_logits(target, tokens, kv, width))
    for buffer, rows in zip((kv.keys, kv.values), kept, strict=True):
        buffer[:, :, slots] = rows
    return found


def _logits(target: Target, tokens: Sequence[int], kv: FullKV, width: int) -> Tensor:
    """``[n, V]`` after tokens that follow those in the cache, forwarded and committed ``width`` at a time."""
    parts = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    return torch.cat([target.logits(forwarded.hidden) for part in parts for forwarded in target.chunks(part, kv)])


class _Judge:
    """Counts and findings so far, and the sampling rule with the text up to the node at hand."""

    def __init__(self, sampler: Sampler, text: list[int], first: int, target: Target) -> None:
        self.rounding, self.largest = Rounding(), 0.0
        self._sampler, self._text, self._first, self._target = sampler, text, first, target
        self._found: list[tuple[int, int, float | None]] = []  # position, drawn token, margin
        self._beyond = 0
        self._leads = (math.inf, -math.inf)
        sampler.extend(text[:first])

    def rows(self, start: int, logits: Tensor) -> None:
        """Judge the tokens that follow the nodes at ``start`` and after it, whose logits ``[n, V]`` are given."""
        size = max(1, _ELEMENTS // logits.shape[1])
        for at in range(0, len(logits), size):
            part = logits[at : at + size]
            ids = torch.tensor(self._text[start + at : start + at + len(part) + 1], device=logits.device)
            places = torch.arange(start + at, start + at + len(part), device=logits.device)
            # the sampler is to know the text up to the first of these nodes, as at the root of a draft tree
            self._sampler.extend(self._text[start + at : start + at + 1])
            causal = torch.ones(len(part), len(part), dtype=torch.bool, device=logits.device).tril()
            seen = self._sampler.seen(ids[:-1], places, causal)
            self._sampler.extend(self._text[start + at + 1 : start + at + len(part)])
            self._judge(part, seen, start + at + 1, ids[1:])

    def _judge(self, logits: Tensor, seen: Tensor | None, position: int, wanted: Tensor) -> None:
        noise = self._sampler.noise(range(position, position + len(wanted))).expand(logits.shape)
        scores = self._sampler.warp(logits, seen) + noise
        best, drawn = scores.max(-1)
        exact = drawn == wanted
        leads = (best - scores.scatter_(1, drawn[:, None], -math.inf).amax(-1))[exact]
        leads = leads[leads.isfinite()]
        if len(leads):
            self._leads = (min(self._leads[0], float(leads.min())), max(self._leads[1], float(leads.max())))
        within = self._differ(logits, seen, noise, position, drawn, wanted)
        if self._target.width is None:
            self.rounding.judge(self._sampler, logits, seen, noise, drawn, torch.where(within, wanted, drawn))

    def _differ(
        self, logits: Tensor, seen: Tensor | None, noise: Tensor, position: int, drawn: Tensor, wanted: Tensor
    ) -> Tensor:
        """Look into the tokens that are not the ones drawn; ``[n]`` bool, those within the bound so far."""
        within = drawn != wanted
        rows = within.nonzero().squeeze(1)
        if not len(rows):
            return within
        places = [position + row for row in rows.tolist()]
        doubt = RoundingMargin(
            self._sampler, logits[rows], None if seen is None else seen[rows], noise[rows], wanted[rows]
        )
        bound = self.rounding.bound
        inside = doubt.explained(bound)
        searched = inside | ((~inside).cumsum(0) <= SEARCHED - self._beyond)
        self._beyond += int((~inside).sum())
        margins = iter(doubt.margins(bound, searched.nonzero().squeeze(1)).tolist())
        for place, token, known in zip(places, drawn[rows].tolist(), searched.tolist(), strict=True):
            self._found.append((place, token, next(margins) if known else None))
        within[rows] = inside
        return within

    def audit(self, seconds: float) -> Audit:
        """What was found, now that all of the rounding has been measured."""
        bound, start = self.rounding.bound, self._first + 1
        findings = tuple(
            Finding(
                place - start,
                place,
                self._text[place],
                drawn,
                margin,
                WITHIN if bound and margin is not None and margin <= bound else VIOLATION,
            )
            for place, drawn, margin in self._found
        )
        count = len(self._text) - start
        least, greatest = (lead if math.isfinite(lead) else None for lead in self._leads)
        dtype, rounding = self._target.dtype, self.rounding
        units = _NARROW if dtype in (torch.bfloat16, torch.float16) else _WIDE
        limit = units * torch.finfo(dtype).eps * self.largest
        exact = count - len(findings)
        about = self._target.width, rounding.levels() if self._target.width is None else (), rounding.contested
        return Audit(count, exact, findings, rounding.measured, limit, bound, least, greatest, seconds, *about)


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
