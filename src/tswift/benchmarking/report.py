"""Reports of ``tswift bench`` and its suites: a table, CSV and Markdown,
and the files that hold them.

A row is a method, or another place on a suite's axis, at one prefill and generated length;
published rows stand behind the measured ones.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tswift.benchmarking import plots, resume, suites, summary
from tswift.benchmarking.config import SAMPLED
from tswift.benchmarking.record import Measurement, Record, SuiteRecord, encode, to_json
from tswift.benchmarking.suites import SUITES, published_rows
from tswift.benchmarking.summary import METRICS, Figure, Row, method_name, source, summarise
from tswift.files import unwritable, write_whole
from tswift.jobs.folder import FINISHED
from tswift.tables import NOTHING, Table, quantity

_MAX_DIFFERENCES = 5
_PAPER_DEPTH = 4  # tokens it drafts along a path
_SHOWN = (
    "tokens_per_step",
    "alpha",
    "speedup",
    "tokens_per_second",
    "ar_seconds",
    "seconds",
    "delta",
)
_WHAT = ("what", "value")
_FLOOR_NOTE = (
    "floor, of plain decoding: the least time in which this machine, at the rates measured, reads "
    "the weights and the KV cache for every token, and computes it."
)


def write_report(
    record: Record, folder: Path, paper: bool = False, draw: bool = False, whole: bool = True
) -> list[Path]:
    """Write ``bench.json`` or ``suite.json``, and CSV, Markdown, texts and plots,
    each whole or not at all.

    Args:
        folder: is made if need be; files of the same names are replaced.
        paper: put the paper's rows beside ours in ``bench.md``.
        draw: draw plots; needs matplotlib.
        whole: write more than the JSON.
    """
    follows = suites.summarise_suite(record) if isinstance(record, SuiteRecord) else {}
    stem = (
        "bench-simulated" if isinstance(record, Measurement) and record.simulated else record.kind
    )
    contents: dict[str, str | bytes] = {f"{stem}.json": encode(to_json(record) | follows)}
    if whole:
        contents |= {f"{stem}.csv": csv_text(record), f"{stem}.md": markdown(record, paper)}
        if isinstance(record, SuiteRecord) and record.texts:
            from tswift.benchmarking.suite_run import texts_html

            contents["suite.html"] = texts_html(record, source(record.groups[0].measurement))
        contents |= plots.files(record) if draw else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            # a file name quoted in a report may hold incomplete UTF-8
            data = (
                content.encode(errors="backslashreplace") if isinstance(content, str) else content
            )
            write_whole(folder / name, data)
    except OSError as error:
        raise unwritable(folder, error) from None
    return [folder / name for name in contents]


def csv_text(record: Record) -> str:
    """A line per method, prefill and length of a bench, or per row of a suite, measured ones first.

    Of each figure n, mean and standard deviation; empty where unknown.
    """
    if isinstance(record, SuiteRecord):
        suite = suites.find_suite(record.suite)
        rows = [*suites.measured_rows(suite, record.groups), *published_rows(suite)]
        columns = ["suite", "axis", "source", "prefill", "length"]
        leads = [[suite.name, row.axis, row.source, row.prefill, row.length] for row in rows]
        names = list(dict.fromkeys(name for row in rows for name in row.figures))
    else:
        rows = summarise(record)
        kinds = any(row.kind for row in rows)
        columns = ["model", "method", "prefill", "length", "simulated", "estimated", "runs"]
        columns += ["varies", *["workload"] * kinds]
        leads = [
            [
                record.workload.model,
                f"{row.axis} (simulated)" if record.simulated else row.axis,
                row.prefill,
                row.length,
                str(record.simulated).lower(),
                str(row.estimated).lower(),
                row.runs,
                " ".join(row.varies),
                *[row.kind] * kinds,
            ]
            for row in rows
        ]
        ends = summary.from_source(summary.ENDS) if record.workload.stop_at_eos else []
        names = [*ends, *summary.from_source(summary.STATS, summary.TIMES)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [*columns, *(f"{name}_{part}" for name in names for part in ("n", "mean", "std"))]
    )
    for lead, row in zip(leads, rows, strict=True):
        values = [
            value
            for name in names
            for value in asdict(row.figures.get(name, Figure(0, None, None))).values()
        ]
        writer.writerow([*lead, *("" if value is None else f"{value:.9g}" for value in values)])
    return text.getvalue()


def markdown(record: Record, paper: bool = False) -> str:
    """The tables, then what each measurement was run on, when and with which command."""
    runs = record.parts
    first = next(iter(runs.values()))
    title = f": {first.workload.model}{' (simulated)' if first.simulated else ''}"
    title = f" --suite {record.suite}" if isinstance(record, SuiteRecord) else title
    environment = [
        (name, "none" if value is None else str(value))
        for name, value in vars(first.environment).items()
    ]
    shown = tables(record, paper)
    shown += [
        Table(f"Run: {label}" if label else "Run", _WHAT, _settings(one), left=2)
        for label, one in runs.items()
    ]
    command = f"```sh\n{shlex.join(record.command)}\n```\n"
    about = Table("Environment", _WHAT, environment, left=2)
    return "\n".join(
        [f"# tswift bench{title}\n", *(one.markdown() for one in shown), command, about.markdown()]
    )


def _settings(measurement: Measurement) -> list[tuple[str, str]]:
    machine = measurement.machine
    about = {
        "measured on": source(measurement),
        "started": measurement.started,
        "ended": measurement.ended,
        "runs": len(measurement.samples),
        "layers": measurement.layers,
        **to_json(measurement.workload),
        "prompts": [prompt.name for prompt in measurement.workload.prompts],
    }
    if machine:
        rates = quantity(machine.bandwidth, "B/s"), quantity(machine.flops, "FLOP/s")
        about["machine's rates"] = f"{', '.join(rates)} in {measurement.workload.dtype}"
    return [
        (name.replace("_", " "), _said(value)) for name, value in about.items() if value is not None
    ]


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def tables(record: Record, paper: bool = False) -> list[Table]:
    """The table of a bench or a suite; behind it, what ran where if that was on several machines.

    ``paper`` puts the published rows of the same methods, prefills and lengths behind those of a
    bench.
    """
    shown = _suite_table(record) if isinstance(record, SuiteRecord) else _bench_table(record, paper)
    return [shown, *filter(None, [resume.machines(record)])]


def _bench_table(measurement: Measurement, paper: bool) -> Table:
    cells = summarise(measurement)
    measured = [
        replace(
            cell,
            axis=method_name(cell.axis, measurement.simulated),
            figures=summary.drafted_only(cell.figures, cell.axis),
        )
        for cell in cells
    ]
    places = {(cell.axis, cell.place) for cell in cells}
    published = sorted(
        (row for row in _paper_rows() if paper and (row.axis, row.place) in places),
        key=lambda row: (row.prefill or 0, row.length or 0),
    )
    names = summary.from_source(summary.ENDS) if measurement.workload.stop_at_eos else []
    names += [*_SHOWN, *["of_floor"] * any(cell.figures["of_floor"].n for cell in cells)]
    names += [name for name, metric in METRICS.items() if metric.column]
    notes = _notes(measurement, cells, names, paper)
    notes += [_FLOOR_NOTE] if "of_floor" in names else []
    if paper:
        notes.append(
            suites.CAUTION
            if published
            else "The paper has no row of these methods, prefills and lengths."
        )
    rows = [*measured, *published]
    return _table(source(measurement), "method", rows, names, notes, measurement)


def _suite_table(record: SuiteRecord) -> Table:
    suite = suites.find_suite(record.suite)
    parts = list(record.parts.values())
    joined = replace(parts[0], samples=[sample for one in parts for sample in one.samples])
    joined.state = record.state
    rows = [*suites.measured_rows(suite, record.groups), *published_rows(suite)]
    cells = [cell for one in parts for cell in summarise(one)]
    notes = _notes(joined, cells, suite.columns, paper=False)
    notes += [f"Left out: {method.label}, since {method.why}." for method in record.missing]
    notes += filter(None, [suite.note])
    notes += [f"{suites.PUBLISHED} {suites.CAUTION}"] * bool(published_rows(suite))
    title = f"{suite.name}: {suite.title}: {source(parts[0])}"
    named = [replace(row, axis=method_name(row.axis)) for row in rows]
    return _table(title, suite.axis, named, suite.columns, notes, joined)


def _table(
    title: str,
    axis: str,
    rows: Sequence[Row],
    names: Sequence[str],  # of metrics
    notes: Sequence[str],
    measurement: Measurement,
) -> Table:
    """A line for each row; where all say the same, kind and source are left out."""
    kinds = any(row.kind for row in rows)
    sources = any(row.source != summary.HERE for row in rows)
    sampled = measurement.workload.ar == SAMPLED
    lines = []
    for row in rows:
        figures = [METRICS[name].text(row.figures.get(name)) for name in names]
        if sampled and row.source == summary.HERE and "ar_seconds" in names:
            figures[names.index("ar_seconds")] += " est."
        place = [NOTHING if count is None else f"{count:,}" for count in row.place]
        lines.append([row.axis, *[row.kind] * kinds, *[row.source] * sources, *place, *figures])
    lead = [axis, *["workload"] * kinds, *["source"] * sources]
    heads = [*lead, "prefill", "length", *(METRICS[name].heading for name in names)]
    return Table(title, heads, lines, left=len(lead), notes=notes)


def _paper_rows() -> list[Row]:
    """Rows of the paper's tables 3 and 4, their axis the method."""
    of_models = [
        replace(row, axis="tokenswift", source=f"paper: {row.axis}")
        for row in published_rows(SUITES["table4"])
    ]
    return [*published_rows(SUITES["table3"]), *of_models]


def _notes(
    measurement: Measurement, cells: Sequence[Row], names: Sequence[str], paper: bool
) -> list[str]:
    """What the columns mean, and what all figures rest on."""
    if not cells:
        return ["Nothing was measured: no length was reached."]
    shown = [METRICS[name] for name in names]
    notes = [f"{'. '.join(f'{metric.heading}: {metric.meaning}' for metric in shown)}."]
    if "alpha" in names:
        notes += _depth_note(measurement, paper)
    notes += [spread_note(cells), same_text_note(measurement)]
    if measurement.state != FINISHED:
        notes.append(
            "The measurement did not run to its end: these are the cells and lengths that were "
            "reached."
        )
    if measurement.workload.stop_at_eos:
        ended = sum(sample.ended is True for sample in measurement.samples)
        notes.append(
            f"Texts end at an end-of-text token, else at the length: {ended} of "
            f"{len(measurement.samples)} did."
        )
    if measurement.workload.ar == SAMPLED:
        notes.append(
            "AR's time is integrated from AR steps sampled as the text grew; every x and delta "
            "rests on that time."
        )
    if measurement.simulated:
        notes.append(
            f"Simulated: {summary.simulation(measurement)}. The times are real, the texts are not."
        )
    return notes


def _depth_note(measurement: Measurement, paper: bool) -> list[str]:
    """Of each method, what alpha is a share of: beside another depth it would mislead."""
    depths: dict[str, set[int]] = {}
    for sample in measurement.samples:
        if summary.drafts(sample.method):
            depths.setdefault(sample.method, set()).update(point.depth for point in sample.points)
    words = [f"{method} {' or '.join(map(str, sorted(each)))}" for method, each in depths.items()]
    beside = f"; the paper's have {_PAPER_DEPTH}" if paper else ""
    return [f"Paths have at most: {', '.join(words)} tokens{beside}."] * bool(words)


def spread_note(cells: Sequence[Row]) -> str:
    """How many runs a cell has and what its spread is over, in one line."""
    low = min(cell.runs for cell in cells)
    high = max(cell.runs for cell in cells)
    line = f"n: {_runs(low) if low == high else f'{low} to {high} runs'} per cell."
    varies = [
        axis
        for axis in ("prompts", "seeds", "repeats")
        if any(axis in cell.varies for cell in cells)
    ]
    if not varies:
        return f"{line} No spread is known from one run."
    return f"{line} Mean ± sample standard deviation over {' and '.join(varies)}."


def same_text_note(measurement: Measurement) -> str:
    """How many runs yielded plain decoding's tokens, and where the others left them,
    in one line.
    """
    known = [one for one in measurement.samples if one.same_as_ar is not None]
    differing = [sample for sample in known if not sample.same_as_ar or sample.explained is False]
    what = "Same tokens as AR"
    what += (
        ", simulated acceptance apart" if summary.simulated_alpha(measurement) is not None else ""
    )
    if not known:
        return f"{what}: not compared."
    if measurement.workload.ar == SAMPLED:
        tokens = sum(sample.compared_tokens for sample in known)
        what += f" in the {tokens:,} tokens where AR was sampled, every text audited"
    if not differing:
        return f"{what}: yes ({_runs(len(known))})."
    places = []
    for sample in differing[:_MAX_DIFFERENCES]:
        first = sample.first_difference
        why = "rounding" if sample.explained else "NOT rounding"
        how = "its audit finds violations" if first is None else f"from token {first}, {why}"
        places.append(f"{method_name(sample.method)} (prompt {sample.cell}, {how})")
    if len(differing) > len(places):
        places.append(f"and {len(differing) - len(places)} more")
    return (
        f"{what}: {len(known) - len(differing)} of {_runs(len(known))}. Not: {'; '.join(places)}."
    )


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"
