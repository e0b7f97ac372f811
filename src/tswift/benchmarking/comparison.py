"""Methods side by side on one prompt: the same text or not, and what each one cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tswift.benchmarking.lanes import Lane, interleave, slice_goals
from tswift.benchmarking.lineup import Lineup
from tswift.benchmarking.measurement import BASELINE, REFERENCE
from tswift.decoding.audit import Audit


@dataclass(frozen=True)
class Outcome:
    """What became of one method.

    Attributes:
        method: its name.
        first_difference: index of the first generated token that is not plain decoding's; None if the texts are equal.
        margin: of the token there, or of plain decoding's: how much the logits would have to change to explain it. None
            if there is no difference, or if no change was found.
        explained: whether every token of the text is drawn exactly or within rounding; None if all texts are equal.
        speedup: plain decoding's time / this one's; prefill apart.
        speedup_over_reference: the same against plain decoding with the attention of reference implementations; None
            if that was not run.
        slices: raw samples: (tokens, seconds) so far at the end of every slice.
    """

    method: str
    first_difference: int | None
    margin: float | None
    explained: bool | None
    tokens: int
    alpha: float
    beta: float
    tokens_per_step: float
    passes: int
    tokens_per_second: float
    prefill_seconds: float
    seconds: float
    speedup: float
    speedup_over_reference: float | None
    slices: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Comparison:
    """The outcomes, plain decoding's first, and the audits of texts that differ from plain decoding's.

    Attributes:
        interrupted: whether Ctrl-C was pressed before the end; the outcomes are of what was there.
        ok: whether rounding explains every difference.
    """

    outcomes: tuple[Outcome, ...]
    audits: dict[str, Audit]
    interrupted: bool

    @property
    def ok(self) -> bool:
        """Whether no text differs beyond rounding."""
        return all(each.ok for each in self.audits.values())

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "ok": self.ok,
            "interrupted": self.interrupted,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "audits": {name: each.as_dict() for name, each in self.audits.items()},
        }


def compare(
    lineup: Lineup,
    prompt: Sequence[int],
    length: int,
    seed: int,
    tick: Callable[[Lane], None],
    audited: Callable[[str, int, int], None],
) -> Comparison:
    """Run all methods in interleaved slices and compare their texts, as far as they got if Ctrl-C is pressed.

    Where a text differs from plain decoding's, it is audited as a whole, and so is plain decoding's: after a near-tie
    the two are different draws, and comparing them further would say nothing.

    Args:
        lineup: the model and its methods.
        prompt: token ids.
        length: tokens to generate.
        seed: any integer.
        tick: called when a lane has been prefilled or has advanced by a slice.
        audited: called with a method's name and the tokens audited so far and in all.

    Raises:
        InputError: more positions or memory than there are.
    """
    interrupted = False
    lanes = lineup.lanes(prompt, length, seed)
    for lane in lanes:
        lane.prefill()
        tick(lane)
    try:
        interleave(lanes, slice_goals(length), tick)
    except KeyboardInterrupt:  # a second one ends the audit too
        interrupted = True
        if not all(lane.tokens for lane in lanes):
            raise
    for lane in lanes:
        lane.close()  # an audit needs a cache of its own
    plain = next(lane for lane in lanes if lane.name == BASELINE)
    different = {lane.name: first_difference(lane.tokens, plain.tokens) for lane in lanes}
    audits: dict[str, Audit] = {}
    for lane in lanes:
        if different[lane.name] is not None or (lane is plain and any(at is not None for at in different.values())):
            audits[lane.name] = lineup.audit(
                prompt,
                lane.tokens,
                seed,
                lambda done, whole, name=lane.name: audited(name, done, whole),  # type: ignore[misc]
            )
    reference = next((lane for lane in lanes if lane.name == REFERENCE), None)
    outcomes = tuple(_outcome(lane, plain, reference, different[lane.name], audits) for lane in lanes)
    return Comparison(outcomes, audits, interrupted)


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, as far as both go; None if in none."""
    pairs = zip(tokens, others, strict=False)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def _outcome(
    lane: Lane, plain: Lane, reference: Lane | None, different: int | None, audits: dict[str, Audit]
) -> Outcome:
    stats = lane.stats
    speed = stats.tokens_per_second
    margins = [
        finding.margin
        for name in (lane.name, plain.name)
        if different is not None
        for finding in audits[name].findings
        if finding.index == different and finding.margin is not None
    ]
    return Outcome(
        method=lane.name,
        first_difference=different,
        margin=max((margin for margin in margins if margin < math.inf), default=None),
        explained=audits[lane.name].ok if lane.name in audits else None,
        tokens=stats.tokens,
        alpha=stats.alpha,
        beta=stats.beta,
        tokens_per_step=stats.tokens_per_step,
        passes=stats.passes,
        tokens_per_second=speed,
        prefill_seconds=lane.prefill_seconds,
        seconds=stats.seconds,
        speedup=speed / plain.stats.tokens_per_second,
        speedup_over_reference=speed / reference.stats.tokens_per_second if reference else None,
        slices=tuple(lane.slices),
    )
