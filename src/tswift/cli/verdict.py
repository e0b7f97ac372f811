"""How an audit is shown: a table of what it found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid
    from tswift.decoding.audit import Audit

_MOST_SHOWN = 20


def verdict(audit: Audit, note: str | None = None) -> Grid:
    """What was found, as a table: a line per class, how far rounding reaches, and what the audit does not see."""
    from tswift.benchmarking.grid import Grid

    rows = [
        _row("drawn exactly", audit.exact, (audit.least_lead, audit.greatest_lead)),
        _row("within rounding", len(audit.within), (finding.margin for finding in audit.within)),
        _row("violations", len(audit.violations), (finding.margin for finding in audit.violations)),
    ]
    if audit.width is not None:
        del rows[1]
    title = f"{audit.tokens:,} tokens judged in {audit.seconds:,.1f} s"
    return Grid(
        title, ("", "tokens", "smallest", "largest"), rows, left=1, notes=[*([note] if note else []), *_notes(audit)]
    )


def _row(name: str, count: int, margins: Iterable[float | None]) -> tuple[str, ...]:
    known = [margin for margin in margins if margin is not None]
    return name, f"{count:,}", _number(min(known, default=None)), _number(max(known, default=None))


def _notes(audit: Audit) -> Iterator[str]:
    yield "smallest, largest: lead in score over the next token; below, the change of the logits that explains it"
    if audit.width is None:
        yield from _about_rounding(audit)
    else:
        yield f"all logits are those of the run, bit for bit (passes of {audit.width} rows): any changed token is seen"
    if audit.measured > audit.limit:
        yield f"that is more than rounding can make, {_number(audit.limit)}: these passes do not compute the same"
    if audit.violations:
        places = ", ".join(str(finding.index) for finding in audit.violations[:_MOST_SHOWN])
        more = len(audit.violations) - _MOST_SHOWN
        yield f"violations at generated tokens (from 0) {places}" + (f" and {more:,} more" if more > 0 else "")


def _about_rounding(audit: Audit) -> Iterator[str]:
    from tswift.decoding.rounding import FALSE_ALARMS

    yield (
        f"passes of different widths differ by up to {_number(audit.measured)} in a logit; "
        f"within rounding is up to {_number(audit.bound)}"
    )
    for level in audit.excess or audit.levels[:1]:
        how = "more than rounding explains: " if audit.excess else ""
        above = f" with a change above {_number(level.margin)}" if level.margin else ""
        yield (
            f"{how}{level.observed:,} tokens within rounding{above}, "
            f"{level.expected:.1f} expected, at most {level.most:,} at a false-alarm rate of {FALSE_ALARMS:g}"
        )
    yield (
        f"{audit.contested:,} of {audit.tokens:,} tokens have a competitor within rounding: an error that swaps only a "
        "few of those is not seen"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
