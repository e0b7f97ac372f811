"""The audit: is this text what the sampling rule draws?

One chunked prefill, the rule applied at every position.

It costs about a prefill, however the text was made. Every token is judged after the text that
stands before it, so the audit goes on behind a place where rounding has swapped two candidates.

Two passes over the same tokens round differently. That can do more than swap two close scores: a
token at the edge of min-p is kept by one pass and dropped by the other. So a token's margin is
found by applying the whole rule to changed logits (:class:`RoundingMargin`). The bound is twice the
largest difference measured; most differences are far smaller, and a text drawn by slightly other
parameters may hide below it, token by token. Nothing hides from exact passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tswift.caches import FullKV, Mark
from tswift.decoding.loop import broken, not_finite, refuse_broken
from tswift.forward.target import Target
from tswift.forward.text import OnProgress, chunks
from tswift.sampling.parameters import SamplingParams, warp
from tswift.sampling.rule import Sampler

WITHIN, VIOLATION = "within rounding", "violation"
SEARCHED = 1000  # tokens beyond the bound whose margin is looked for
_FORWARDED_TOGETHER = 256  # tokens forwarded at a time
_ELEMENTS = 1 << 21  # scores held at a time, in float64
# probe windows, their tokens, and the widths of their passes
_PROBES = 8
_PROBE = 32
_WIDTHS = (1, 8)
# most rounding there can be, in units of the largest logit's last place
_WIDE_MARGIN = 256.0
_NARROW_MARGIN = 16.0
_SAFETY = 2.0
_SMALLEST = 1e-12  # where the search starts if no rounding was measured
_UP, _DOWN = 40, 6  # most steps of the search, each by a factor of four
_HALVINGS = 20


@dataclass(frozen=True)
class Finding:
    """A token that is not the one the rule draws in the audit's pass.

    Attributes:
        index: among the generated tokens, from 0.
        position: in prompt and text.
        token: in the text.
        drawn: by the rule.
        margin: the smallest change found of the logits under which the rule draws the text's token.
            Infinite for a banned token, None where it was not looked for.
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
        exact: number of them that the rule draws exactly.
        findings: all others, in order.
        measured: largest difference between logits of passes of different widths over the same
            tokens.
        limit: the largest difference that rounding can make. If more was measured, passes of
            different widths compute different things: the bound means nothing, and the audit has
            failed.
        bound: the margin up to which a token is within rounding: twice what was measured, as the
            largest of a sample lies below the largest of all.
        least_lead, greatest_lead: score difference to the runner-up over tokens drawn exactly; None
            if never more than one token was left to choose from.
        seconds: wall time.
        width: rows of every pass, where logits are those that decoding had, bit for bit: no token
            is within rounding then, and nothing was measured. None where they are not.
        near_ties: tokens with a competitor within rounding: an error that swaps only a few of those
            is not seen.
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
    near_ties: int = 0

    @property
    def within(self) -> list[Finding]:
        """The tokens within rounding."""
        return [finding for finding in self.findings if finding.kind == WITHIN]

    @property
    def violations(self) -> list[Finding]:
        """The tokens that rounding does not explain."""
        return [finding for finding in self.findings if finding.kind == VIOLATION]

    @property
    def ok(self) -> bool:
        """Whether there is no violation, and passes differ by no more than rounding makes."""
        return not self.violations and self.measured <= self.limit

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON: an infinite margin is None there,
        as is one not looked for.
        """
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
    on_progress: OnProgress | None = None,
) -> Audit:
    """Judge every token of a text.

    A target whose passes have a fixed width gives the logits that decoding had, so each token is
    drawn exactly or is a violation. Elsewhere a token may also be within rounding, which is
    measured: in up to eight probe windows of 32 tokens, from the text's start to its end, the
    tokens are also forwarded one and eight at a time, and the logits compared with those of the
    chunk.

    Args:
        target: the model.
        prompt: at least one token id.
        tokens: the generated token ids, at least one.
        params, seed: what they were drawn with, banned ids included.
        on_progress: called with tokens forwarded so far and in all, prompt included.

    Returns:
        What was found. The margin is looked for in the first ``SEARCHED`` tokens beyond the bound
        measured so far.

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
    # the node that draws the first generated token; nodes in all
    first = len(prompt) - 1
    nodes = len(text) - 1
    starts = probe_starts(first, nodes) if target.fixed_rows is None else []
    cuts = [min([first, *starts])]
    while cuts[-1] < nodes:
        cuts.append(
            min(
                [
                    cuts[-1] + _FORWARDED_TOGETHER,
                    nodes,
                    *(start for start in starts if start > cuts[-1]),
                ]
            )
        )
    on_progress = on_progress or (lambda done, total: None)
    kv = FullKV(target.kv_shape, nodes + max(*_WIDTHS, target.fixed_rows or 0))
    # passes as narrow as those that decode are to be the same
    target.prepare(kv, target.fixed_rows or max(_WIDTHS))
    sampler = Sampler(params, seed, target.vocab_size, target.device, prompt=first + 1)
    judge = _Judge(sampler, text, first, target)
    for _ in chunks(target, text[: cuts[0]], kv, first):
        on_progress(kv.length, nodes)
    refuse_broken(target, kv, text, params)
    for start, stop in pairwise(cuts):
        before = kv.mark() if start in starts else None
        logits = _logits(target, text[start:stop], kv, _FORWARDED_TOGETHER, first)
        # where a text is short, far into its only chunk: the first rows of one round as narrow
        # passes do
        at = max(start, min(first, stop - _PROBE))
        others = []
        if before is not None:
            after = kv.mark()
            others = _narrow(
                target, text[start : min(at + _PROBE, stop)], kv, before, at - start, first
            )
            kv.rewind(after)
        for rows in (logits, *others):
            wrong = broken(rows).nonzero().flatten().tolist()
            if wrong:
                # behind the cause: NaN spreads to tokens before it in the same pass
                kv.length = (start if rows is logits else at) + wrong[-1]
                raise not_finite(target, kv, text, rows[wrong[-1]], params)
        for other in others:
            difference = other.double() - logits[at - start :][: len(other)].double()
            judge.measured = max(judge.measured, float(difference.abs().max()))
        judge.largest = max(judge.largest, float(logits.abs().max()))
        judge.rows(max(first, start), logits[max(0, first - start) :])
        on_progress(stop, nodes)
    return judge.audit(time.perf_counter() - started)


def probe_starts(first: int, nodes: int) -> list[int]:
    """Where the probe windows begin, in which rounding is measured.

    Spread evenly from the first node that draws a token to the last one with a whole chunk from
    there on: a pass over few nodes may compute just what the narrow ones do. A text shorter than a
    chunk has one, at its end.
    """
    begin = min(first, max(0, nodes - _FORWARDED_TOGETHER))
    room = max(0, nodes - begin - _FORWARDED_TOGETHER)
    count = min(_PROBES, 1 + room // _FORWARDED_TOGETHER)
    return [begin + index * room // max(1, count - 1) for index in range(count)]


def _narrow(
    target: Target, tokens: Sequence[int], kv: FullKV, before: Mark, skipped: int, prompt: int
) -> list[Tensor]:
    """``[n, V]`` logits of tokens after a place, the first ``skipped`` left out,
    by passes of each narrow width.

    The cache keeps the keys and values that it had.
    """
    slots = slice(before.length, before.length + len(tokens))
    kept = [(buffer, buffer[:, :, slots].clone()) for buffer in kv.buffers]
    found = []
    for width in _WIDTHS:
        kv.rewind(before)
        for _ in chunks(target, tokens[:skipped], kv, prompt):
            pass
        found.append(_logits(target, tokens[skipped:], kv, width, prompt))
    for buffer, rows in kept:
        buffer[:, :, slots] = rows
    return found


def _logits(target: Target, tokens: Sequence[int], kv: FullKV, width: int, prompt: int) -> Tensor:
    """``[n, V]`` after tokens that follow those in the cache,
    forwarded and committed ``width`` at a time.
    """
    parts = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    passes = (forwarded for part in parts for forwarded in chunks(target, part, kv, prompt))
    return torch.cat([target.logits(forwarded.hidden) for forwarded in passes])


class Rows(NamedTuple):
    """Rows of logits, and what else decides which tokens are drawn from them.

    Attributes:
        sampler: the sampling rule.
        logits: ``[n, V]``.
        seen: ``[n, V]`` bool, the tokens in each row's penalty window; None to penalise nothing.
        noise: ``[n, V]``, of the positions of the rows' tokens.
    """

    sampler: Sampler
    logits: Tensor
    seen: Tensor | None
    noise: Tensor

    def of(self, rows: Tensor) -> Rows:
        """Some of the rows."""
        return Rows(
            self.sampler,
            self.logits[rows],
            None if self.seen is None else self.seen[rows],
            self.noise[rows],
        )

    def scores(self, changes: Tensor | float = 0.0, filtered: bool = True) -> Tensor:
        """What the rule takes the argmax of, ``[n, V]`` float64,
        with changes ``[n, V]`` added to the logits.
        """
        params = self.sampler.after_lowering
        params = params if filtered else params.unfiltered()
        # the logits have been lowered: what changes them before that may do so by more
        changes = changes * max(1.0, params.repetition_penalty)
        return warp(self.logits.double() + changes, self.seen, params) + self.noise


class _Judge:
    """Counts and findings so far, and the sampling rule with the text up to the node at hand."""

    def __init__(self, sampler: Sampler, text: list[int], first: int, target: Target) -> None:
        # logit, and difference of two passes over the same tokens
        self.largest = self.measured = 0.0
        # rows so far whose draw some change of the logits within the bound turns
        self._near_ties = 0
        self._sampler = sampler
        self._text = text
        self._first = first
        self._target = target
        self._found: list[tuple[int, int, float | None]] = []  # position, drawn token, margin
        self._beyond = 0
        self._leads = (math.inf, -math.inf)
        sampler.extend(text[:first])

    @property
    def _bound(self) -> float:
        """The margin up to which a token is within rounding."""
        return _SAFETY * self.measured

    def rows(self, start: int, logits: Tensor) -> None:
        """Judge the tokens that follow the nodes at ``start`` and after it,
        whose logits ``[n, V]`` are given.
        """
        size = max(1, _ELEMENTS // logits.shape[1])
        for at in range(start, start + len(logits), size):
            part = logits[at - start : at - start + size]
            text = self._text[at : at + len(part) + 1]
            places = range(at + 1, at + 1 + len(part))
            # the sampler is to know the text up to the first of these nodes, as at the root of a
            # draft tree
            self._sampler.extend(text[:1])
            part, seen = self._sampler.along(part, text[:-1])
            noise = self._sampler.noise(places).expand(part.shape)
            positions, wanted = torch.tensor([[*places], text[1:]], device=logits.device)
            self._judge(Rows(self._sampler, part, seen, noise), positions, wanted)

    def _judge(self, rows: Rows, positions: Tensor, wanted: Tensor) -> None:
        scores = rows.scores()
        best, drawn = scores.max(-1)
        leads = (best - scores.scatter_(1, drawn[:, None], -math.inf).amax(-1))[drawn == wanted]
        leads = leads[leads.isfinite()]
        if len(leads):
            self._leads = (
                min(self._leads[0], float(leads.min())),
                max(self._leads[1], float(leads.max())),
            )
        within = drawn != wanted
        at = within.nonzero().squeeze(1)
        if len(at):
            within[at] = self._differ(rows.of(at), positions[at], wanted[at], drawn[at])
        if self._bound:
            self._near_ties += int((near_ties(rows, drawn, self._bound) | within).sum())

    def _differ(self, rows: Rows, positions: Tensor, wanted: Tensor, drawn: Tensor) -> Tensor:
        """Note tokens that are not the ones drawn, with their margins; ``[n]`` bool:
        those within the bound so far.
        """
        bound = self._bound
        inside = RoundingMargin(rows, wanted).explained(bound)
        searched = inside | ((~inside).cumsum(0) <= SEARCHED - self._beyond)
        self._beyond += int((~inside).sum())
        margins = iter(RoundingMargin(rows.of(searched), wanted[searched]).margins(bound).tolist())
        for place, token, known in zip(
            positions.tolist(), drawn.tolist(), searched.tolist(), strict=True
        ):
            self._found.append((place, token, next(margins) if known else None))
        return inside

    def audit(self, seconds: float) -> Audit:
        """What was found, now that all of the rounding has been measured."""
        shape = self._target.kv_shape
        start = self._first + 1
        bound = self._bound
        findings = []
        for place, drawn, margin in self._found:
            kind = WITHIN if bound and margin is not None and margin <= bound else VIOLATION
            findings.append(Finding(place - start, place, self._text[place], drawn, margin, kind))
        least, greatest = (lead if math.isfinite(lead) else None for lead in self._leads)
        units = _NARROW_MARGIN if shape.dtype.itemsize <= torch.int16.itemsize else _WIDE_MARGIN
        count = len(self._text) - start
        return Audit(
            tokens=count,
            exact=count - len(findings),
            findings=tuple(findings),
            measured=self.measured,
            limit=units * shape.eps * self.largest,
            bound=bound,
            least_lead=least,
            greatest_lead=greatest,
            seconds=seconds,
            width=self._target.fixed_rows,
            near_ties=self._near_ties,
        )


class RoundingMargin:
    """How little logits would have to change for the sampling rule to draw other tokens than it
    does.

    A change of the logits is a sign for every token, times its size. Signs are tried in four
    patterns, in all of which the token in question goes up:

    0. tokens with a higher score go down, the others up: a competitor is pushed over the edge of a
       filter that others set, or the mass above a token that top-p drops shrinks;
    1. all others go down: a close draw, or the token itself at the edge of min-p, eta or top-k;
    2. tokens that would score higher if nothing were dropped go down, the others stay: both at an
       edge;
    3. the same, and the others go up.

    They were found to be enough: of draws turned by a random change of all logits, one in some
    hundreds had a margin larger than that change, none more than twice as large.

    Args:
        rows: ``n`` of them.
        tokens: ``[n]`` int64, the tokens in question.

    Attributes:
        patterns: ``[4, n, V]`` int8, the signs.
    """

    def __init__(self, rows: Rows, tokens: Tensor) -> None:
        self._rows = rows
        self._tokens = tokens
        column = tokens[:, None]
        scores = rows.scores()
        whole = rows.scores(filtered=False)
        self._possible = whole.gather(1, column).squeeze(1) > -math.inf  # a banned token is not
        higher = (scores > scores.gather(1, column)).to(torch.int8)
        would = (whole > whole.gather(1, column)).to(torch.int8)
        self.patterns = torch.stack(
            [1 - 2 * higher, torch.full_like(higher, -1), -would, 1 - 2 * would]
        )
        self.patterns.scatter_(2, column.expand(4, -1, 1), 1)

    def explained(self, size: float | Tensor, at: Tensor | None = None) -> Tensor:
        """Whether a change of this size, one or one for each row,
        makes the rule draw the token in one of the patterns.

        ``[m]`` bool, of the rows ``at`` ``[m]``, or all of them.
        """
        at = torch.arange(len(self._tokens), device=self._tokens.device) if at is None else at
        sizes = torch.as_tensor(size, dtype=torch.float64, device=at.device).view(-1, 1)
        rows = self._rows.of(at)
        tokens = self._tokens[at]
        return torch.stack(
            [rows.scores(sizes * signs[at]).argmax(-1) == tokens for signs in self.patterns]
        ).any(0)

    def margins(self, near: float) -> Tensor:
        """The smallest change found, by search around ``near`` and then by halving.

        It is an upper bound of the least.

        ``[n]`` float64, infinite for a banned token. A change of just this size was tried and does
        it.
        """
        start = near or _SMALLEST
        high = torch.full_like(self._possible, math.inf, dtype=torch.float64)
        low = torch.zeros_like(high)
        # Not all that explains is monotone: a larger change can let another token in. So smaller
        # ones are tried too.
        for power in [0, *range(-1, -_DOWN - 1, -1), *range(1, _UP + 1)]:
            left = (high.isinf() & self._possible).nonzero().squeeze(1)
            if not len(left):
                break
            size = start * 4.0**power
            found = left[self.explained(size, left)]
            high[found] = size
            low[found] = size / 4 if power > 0 else 0.0
        found = high.isfinite().nonzero().squeeze(1)
        for _ in range(_HALVINGS if len(found) else 0):
            middle = (low[found] + high[found]) / 2
            enough = self.explained(middle, found)
            high[found] = torch.where(enough, middle, high[found])
            low[found] = torch.where(enough, low[found], middle)
        return high


def near_ties(rows: Rows, drawn: Tensor, size: float) -> Tensor:
    """Whether a change of the logits of this size makes the rule draw another token than ``drawn``
    ``[n]``.

    Two changes are tried, in both of which the drawn token goes down. All others go up: a close
    draw, or the drawn token at a filter's edge. Or only those go up that would be about as high if
    nothing were dropped, and what sets the filter goes down: a competitor at its edge.
    """
    params = rows.sampler.params
    column = drawn[:, None]
    whole = rows.scores(filtered=False)
    reach = 2 * size * max(1.0, params.penalty) / (params.temperature or 1)
    rivals = (whole >= whole.gather(1, column) - reach).scatter_(1, column, False)
    turned = torch.zeros_like(drawn, dtype=torch.bool)
    for signs in (torch.ones_like(whole), rivals * 2.0 - 1):
        turned |= rows.scores(size * signs.scatter_(1, column, -1)).argmax(-1) != drawn
    return turned
