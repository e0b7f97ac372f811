"""Is this text what the sampling rule draws? One chunked prefill over it, the rule applied at every position.

It costs about a prefill, whatever made the text and however long that took, and it does not lose the thread where
rounding has swapped two candidates: every token is judged after the text that stands before it.
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

from tswift.decoding.finite import broken, not_finite
from tswift.decoding.margin import RoundingMargin
from tswift.decoding.params import SamplingParams
from tswift.decoding.rounding import Level, Rounding
from tswift.decoding.sampling import Sampler
from tswift.kv.full import FullKV
from tswift.models.target import Show, Target

WITHIN, VIOLATION = "within rounding", "violation"
SEARCHED = 1000  # tokens beyond the bound whose margin is looked for
_CHUNK = 256  # tokens forwarded at a time
_ELEMENTS = 1 << 21  # scores held at a time, in float64
_STRETCHES, _STRETCH, _WIDTHS = 8, 32, (1, 8)
_WIDE, _NARROW = 256.0, 16.0  # most rounding there can be, in units of the largest logit's last place


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
    it: see :mod:`tswift.decoding.rounding`.

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
