"""Long texts, end to end: the bundled model's, and a published shape's with simulated acceptance."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.gpu.loop import published_alpha
from benchmarks.gpu.session import Session
from tswift.benchmarking import look, report
from tswift.benchmarking.lanes import Lane
from tswift.benchmarking.lineup import Entry, line_up
from tswift.benchmarking.measure import SAMPLED, Plan, header, measure
from tswift.benchmarking.measurement import BASELINE, FINISHED
from tswift.benchmarking.prompts import encode, read_texts
from tswift.benchmarking.round import Place
from tswift.models.shapes import PREFIX

METHOD = "tokenswift"
_AUDIT = 20.0  # seconds kept for the audit of a real text


def bundled(session: Session) -> str | None:
    """The bundled model's text, in at most half of the time left."""
    return _text(session, "demo-100k", Entry(methods=(BASELINE, METHOD), device=str(session.device)), session.left / 2)


def simulated(session: Session) -> str | None:
    """The main shape at the published alpha, in all of the time left."""
    main = session.scale.main
    entry = Entry(
        methods=(BASELINE, METHOD),
        model=PREFIX + main,
        device=str(session.device),
        simulate_alpha=published_alpha(),
    )
    return _text(session, f"{main}-simulated", entry, session.left)


def _text(session: Session, name: str, entry: Entry, seconds: float) -> str | None:
    """A benchmark as ``tswift bench --ar sampled`` makes it, in a folder of its own; cut when the time is up."""
    scale = session.scale
    until = session.left - seconds + _AUDIT
    lineup = line_up(entry)
    plan = Plan(prefills=(scale.prefill,), lens=scale.lens, ar=SAMPLED)
    prompts = encode(read_texts(()), lineup.model, scale.prefill)
    measurement = header(lineup, prompts, plan, [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]])
    folder = session.folder / name
    folder.mkdir(exist_ok=True)
    longest = 0

    def tick(number: int, rounds: int, place: Place, lane: Lane) -> None:
        nonlocal longest
        longest = max(longest, lane.stats.tokens)
        if scale.patient and session.left < until:
            raise KeyboardInterrupt  # as if Ctrl-C were pressed: every length reached is kept

    def keep() -> None:
        report.write_measurement(measurement, folder)
        session.content["texts"][name] = _summary(measurement, longest)
        session.keep()

    measure(measurement, lineup, prompts, plan, tick, keep)
    report.write_reports(measurement, folder, paper=True, plots=scale.patient and look.available())
    if measurement["state"] == FINISHED:
        return None
    return f"the time was up at {longest:,} of {max(scale.lens):,} tokens"


def _summary(measurement: dict[str, Any], longest: int) -> dict[str, Any]:
    """What the report of the whole run says of a text."""
    samples = [sample for sample in measurement["samples"] if sample["method"] == METHOD]
    return {
        "model": measurement["workload"]["model"],
        "simulated": measurement["simulated"],
        "alpha": (measurement["workload"].get("simulated") or {}).get("alpha"),
        "dtype": measurement["workload"]["dtype"],
        "state": measurement["state"],
        "tokens": longest,
        "prefill": measurement["workload"]["prefills"][0],
        "explained": samples[0]["explained"] if samples else None,
        "prefill_seconds": samples[0]["prefill_seconds"] if samples else None,
        "points": samples[0]["points"] if samples else [],
    }
