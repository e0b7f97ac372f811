"""Methods side by side on one prompt, behind ``tswift compare``: the same text or not, and what each one cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tswift.benchmarking.config import BenchConfig
from tswift.benchmarking.options import BASELINE, REFERENCE
from tswift.benchmarking.run import Run, first_difference, interleave, open_runs, slice_goals
from tswift.decoding.audit import Audit


@dataclass(frozen=True)
class Outcome:
    """What became of one method.

    Attributes:
        first_difference: index of the first generated token that is not plain decoding's; None if the texts are equal.
        margin: how much the logits of that token, in either text, would have to change to explain it; None if there is
            no difference, or if no change was found.
        explained: whether every token of the text is drawn exactly or within rounding; None if all texts are equal.
        speedup: plain decoding's time / this one's; prefill apart.
        speedup_over_reference: the same against ``ar-reference``; None if that was not run.
        slices: (tokens, seconds) so far at the end of every slice.
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
    """Outcomes, plain decoding's first, and audits of texts that differ from plain decoding's.

    Attributes:
        interrupted: whether Ctrl-C was pressed before the end; the outcomes are of what was there.
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
    config: BenchConfig,
    prompt: Sequence[int],
    length: int,
    seed: int,
    on_progress: Callable[[Run], None],
    on_audit: Callable[[str, int, int], None],
) -> Comparison:
    """Run all methods in interleaved slices and compare their texts, as far as they got if Ctrl-C is pressed.

    Where a text differs from plain decoding's, it is audited as a whole, and so is plain decoding's: after a near-tie
    the two are different draws, and comparing them further would say nothing.

    Args:
        prompt: token ids.
        length: tokens to generate.
        seed: any integer.
        on_progress: called when a run has been prefilled or has advanced by a slice.
        on_audit: called with a method's name and the tokens audited so far and in all.

    Raises:
        InputError: more positions or memory than there are.
    """
    interrupted = False
    runs = open_runs(config, prompt, length, seed)
    for run in runs:
        run.prefill()
        on_progress(run)
    try:
        interleave(runs, slice_goals(length), on_progress)
    except KeyboardInterrupt:  # a second one ends the audit too
        interrupted = True
        if not all(run.tokens for run in runs):
            raise
    for run in runs:
        run.close()  # an audit needs a cache of its own
    by_label = {run.label: run for run in runs}
    plain, reference = by_label[BASELINE], by_label.get(REFERENCE)
    different = {run.label: first_difference(run.tokens, plain.tokens) for run in runs}
    wrong = [run for run in runs if different[run.label] is not None]
    audits = {
        run.label: config.audit(prompt, run.tokens, seed, run.method, partial(on_audit, run.label))
        for run in ([plain, *wrong] if wrong else [])
    }
    outcomes = tuple(_outcome(run, plain, reference, different[run.label], audits) for run in runs)
    return Comparison(outcomes, audits, interrupted)


def _outcome(run: Run, plain: Run, reference: Run | None, different: int | None, audits: dict[str, Audit]) -> Outcome:
    stats = run.stats
    speed = stats.tokens_per_second
    margins = [
        finding.margin
        for label in (run.label, plain.label)
        if different is not None
        for finding in audits[label].findings
        if finding.index == different and finding.margin is not None
    ]
    return Outcome(
        method=run.label,
        first_difference=different,
        margin=max((margin for margin in margins if margin < math.inf), default=None),
        explained=audits[run.label].ok if run.label in audits else None,
        tokens=stats.tokens,
        alpha=stats.alpha,
        beta=stats.beta,
        tokens_per_step=stats.tokens_per_step,
        passes=stats.passes,
        tokens_per_second=speed,
        prefill_seconds=run.prefill_seconds,
        seconds=stats.seconds,
        speedup=speed / plain.stats.tokens_per_second,
        speedup_over_reference=speed / reference.stats.tokens_per_second if reference else None,
        slices=tuple(run.slices),
    )
