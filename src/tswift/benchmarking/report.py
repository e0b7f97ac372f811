"""Reports of ``tswift bench`` and its suites: tables, CSV and Markdown,
and the files that hold them.

The tables of bench have the layouts of the paper's tables 3 and 4; those of a suite have the
published row beside each measured one.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

from tswift.benchmarking import plots, resume, suites, summary
from tswift.benchmarking.config import BASELINE, SAMPLED
from tswift.benchmarking.record import Measurement, Record, SuiteRecord, encode, to_json
from tswift.benchmarking.suites import SUITES, Suite, counterparts, published_rows
from tswift.benchmarking.summary import METRICS, Figure, Row, method_name, source, summarise
from tswift.errors import InputError
from tswift.jobs.folder import FINISHED, write_whole
from tswift.tables import NOTHING, Table, quantity

_MAX_DIFFERENCES = 5
_PAPER_DEPTH = 4  # tokens it drafts along a path
_TABLE_3 = ("tokens_per_step", "alpha", "speedup")
_TABLE_4 = ("tokens_per_step", "alpha", "speedup", "ar_seconds", "seconds", "delta")
_WHAT = ("what", "value")
_OF_WORKLOADS = ("tokens_per_step", "alpha", "speedup", "tokens_per_second", "seconds")
_FLOORS = ("ar_of_floor", "of_floor")
_FLOOR_NOTE = (
    "floor: the least time in which this machine, at the rates measured, reads the weights and "
    "the KV cache of every pass made, and computes on its nodes."
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
        raise InputError(f"{folder} cannot be written to ({error.strerror})", "out") from None
    return [folder / name for name in contents]


Lead = list["str | int | None"]  # of a line in a CSV


def csv_text(record: Record) -> str:
    """A line per method, prefill and length of a bench, or per row of a suite, measured ones first.

    Of each figure n, mean and standard deviation; empty where unknown.
    """
    columns, lines = (
        _suite_lines(record) if isinstance(record, SuiteRecord) else _bench_lines(record)
    )
    names = summary.from_source(summary.STATS, summary.TIMES)
    if isinstance(record, SuiteRecord):
        names = list(dict.fromkeys(name for _, figures in lines for name in figures))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [*columns, *(f"{name}_{part}" for name in names for part in ("n", "mean", "std"))]
    )
    for lead, figures in lines:
        values = [
            value
            for name in names
            for value in asdict(figures.get(name, Figure(0, None, None))).values()
        ]
        writer.writerow([*lead, *("" if value is None else f"{value:.9g}" for value in values)])
    return text.getvalue()


def _suite_lines(record: SuiteRecord) -> tuple[list[str], list[tuple[Lead, Mapping[str, Figure]]]]:
    suite = suites.find_suite(record.suite)
    rows = [*suites.measured_rows(suite, record.groups), *published_rows(suite)]
    lines = [
        ([suite.name, row.axis, row.source, row.prefill, row.length], row.figures) for row in rows
    ]
    return ["suite", "axis", "source", "prefill", "length"], lines


def _bench_lines(record: Measurement) -> tuple[list[str], list[tuple[Lead, Mapping[str, Figure]]]]:
    kinds = summary.by_kind(record)
    lines = []
    for kind, part in kinds.items():
        for cell in summarise(part):
            method = f"{cell.axis} (simulated)" if record.simulated else cell.axis
            flags = [str(flag).lower() for flag in (record.simulated, cell.estimated)]
            lead = [
                record.workload.model,
                method,
                cell.prefill,
                cell.length,
                *flags,
                cell.runs,
                " ".join(cell.varies),
            ]
            lines.append(([*lead, *[kind] * bool(kind)], cell.figures))
    columns = ["model", "method", "prefill", "length", "simulated", "estimated", "runs", "varies"]
    return [*columns, *["workload"] * ("" not in kinds)], lines


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
    workload, machine = measurement.workload, measurement.machine

    def listed(options: Mapping[str, object]) -> str:
        return ", ".join(f"{name} {value}" for name, value in options.items()) or "none"

    rates = (
        [quantity(machine.bandwidth, "B/s"), quantity(machine.flops, "FLOP/s")] if machine else []
    )
    settings = {
        "measured on": source(measurement),
        "started": measurement.started,
        "ended": measurement.ended,
        "runs": str(len(measurement.samples)),
        "seeds": ", ".join(map(str, workload.seeds)),
        "prompts": ", ".join(prompt.name for prompt in workload.prompts),
        "dtype": workload.dtype,
        "attention": workload.attention,
        "layers": measurement.layers,
        "heads": workload.heads or "none",
        "sampling": listed(workload.sampling),
        **{f"drafting, {method}": listed(options) for method, options in workload.drafting.items()},
        "AR's time": "estimated from sampled steps" if workload.ar == SAMPLED else "measured",
        "simulated": summary.simulation(measurement) if measurement.simulated else None,
        "machine's rates": f"{', '.join(rates)} in {workload.dtype}" if machine else None,
        "workload hash": workload.hash,
    }
    return [(name, value) for name, value in settings.items() if value is not None]


def tables(record: Record, paper: bool = False) -> list[Table]:
    """Of a bench, acceptance and speedup, then decoding times; of a suite, its table,
    then the measured order.

    Behind them, what ran where if that was on several machines. ``paper`` puts the published rows
    of the same prefill and generated length beside those of a bench.
    """
    if isinstance(record, SuiteRecord):
        found = _suite_tables(record)
    else:
        found = (
            _bench_tables(record, paper)
            if "" in summary.by_kind(record)
            else [_workload_table(record)]
        )
    return [*found, *filter(None, [resume.machines(record)])]


def _bench_tables(measurement: Measurement, paper: bool) -> list[Table]:
    cells = summarise(measurement)
    simulated = measurement.simulated
    workload = measurement.workload
    # plain decoding, which the others are compared with, is shown if it is alone
    methods = list(dict.fromkeys(cell.axis for cell in cells if cell.axis != BASELINE)) or [
        BASELINE
    ]
    here = f"{workload.model}, this machine{' (simulated)' if simulated else ''}"
    published = [row for row in _paper_rows() if row.axis in methods] if paper else []
    measured = _measured(cells, methods, here)

    def label(method: str) -> str:
        return method_name(method, simulated and method != "TokenSwift")

    def text(row: Row | None, name: str) -> str:
        if row is None or row.source != here:
            return _text(row, name, digits=2)
        sampled = name == "ar_seconds" and workload.ar == SAMPLED
        return _text(row, name) + " est." * (sampled and row.figures[name].mean is not None)

    places = sorted({row.place for row in measured})
    groups = [[row for row in (*measured, *published) if row.place == place] for place in places]
    below: list[Row] = []  # each row, and the paper's of the same method and place
    for row in measured:
        same = [one for one in published if (one.axis, one.place) == (row.axis, row.place)]
        below += [
            row,
            *(replace(one, axis="TokenSwift") for one in same if "seconds" in one.figures),
        ]
    across = [
        (method, name)
        for method in methods
        for name in _TABLE_3
        if summary.drafts(method) or not METRICS[name].drafted
    ]
    names = [*_TABLE_4, *(_FLOORS if any(cell.figures["of_floor"].n for cell in cells) else ())]
    names += [name for name, metric in METRICS.items() if metric.column]
    sourced = bool(paper or simulated)
    title = source(measurement)
    acceptance = _table(
        f"Acceptance rate and speedup: {title}", "", groups, across, label, text, sourced
    )
    times = _table(
        f"Decoding time: {title}",
        "method",
        [below],
        [("", name) for name in names],
        label,
        text,
        sourced,
    )
    heads = ["T_method" if head == METRICS["seconds"].heading else head for head in times.columns]
    notes = ["Nothing was measured: no length was reached."]
    if cells:
        notes = _notes(cells, measurement, "measurement", measurement.state)
        notes += [_FLOOR_NOTE] if "of_floor" in names else []
        notes += [_paper_note(measured, published)] if paper else []
    acceptance = replace(acceptance, notes=_alpha_notes(measurement, methods, paper))
    return [acceptance, replace(times, columns=heads, notes=notes)]


def _measured(cells: Sequence[Row], methods: Sequence[str], here: str) -> list[Row]:
    """The cells of these methods, with what plain decoding took of its floor at the same place."""
    floors = {
        cell.place: {"ar_of_floor": cell.figures["of_floor"]}
        for cell in cells
        if cell.axis == BASELINE
    }
    return [
        replace(
            cell,
            source=here,
            figures=summary.drafted_only({**cell.figures, **floors.get(cell.place, {})}, method),
        )
        for method in methods
        for cell in cells
        if cell.axis == method
    ]


def _paper_note(measured: Sequence[Row], published: Sequence[Row]) -> str:
    """How the paper's figures stand to those measured."""
    matched = {(row.axis, row.place) for row in published} & {
        (row.axis, row.place) for row in measured
    }
    return (
        suites.CAUTION
        if matched
        else "The paper has no row of these methods, prefills and lengths."
    )


def _workload_table(measurement: Measurement) -> Table:
    """A line for each kind of prompts, prefill, length and method."""
    rows = []
    kinds = summary.by_kind(measurement)
    for kind, part in kinds.items():
        prompts = [prompt for prompt in measurement.workload.prompts if prompt.kind == kind]
        sizes = [prompt.tokens or 0 for prompt in prompts]
        for cell in summarise(part):
            figures = summary.drafted_only(cell.figures, cell.axis)
            count = len({prompt for prompt, _ in cell.draws})
            tokens = " to ".join(
                f"{min(size, cell.prefill or size):,}" for size in sorted({min(sizes), max(sizes)})
            )
            lead = [
                method_name(cell.axis, measurement.simulated),
                kind,
                str(count),
                tokens,
                f"{cell.length:,}",
            ]
            rows.append([*lead, *(METRICS[name].text(figures[name]) for name in _OF_WORKLOADS)])
    cells = [cell for part in kinds.values() for cell in summarise(part)]
    notes = _notes(cells, measurement, "measurement", measurement.state)
    notes.insert(
        0, "tokens/step: tokens / passes of the model. x: AR's time / the method's, prefill apart."
    )
    heads = ["method", "workload", "prompts", "prompt tokens", "length"]
    columns = [*heads, *(METRICS[name].heading for name in _OF_WORKLOADS)]
    return Table(f"Workloads: {source(measurement)}", columns, rows, left=2, notes=notes)


def _paper_rows() -> list[Row]:
    """Rows of the paper's tables 3 and 4, their axis the method."""
    rows = [
        replace(row, source=f"{row.source}, {suites.PAPER_MACHINE}")
        for row in published_rows(SUITES["table3"])
    ]
    for row in published_rows(SUITES["table4"]):
        rows.append(
            replace(row, axis="tokenswift", source=f"paper: {row.axis}, {suites.PAPER_MACHINE}")
        )
    return rows


def _text(row: Row | None, name: str, digits: int | None = None) -> str:
    return METRICS[name].text(row.figures.get(name) if row else None, digits)


def _table(
    title: str,
    axis: str,
    groups: Sequence[Sequence[Row]],
    columns: Sequence[tuple[str, str]],  # a place on the axis, and a metric
    label: Callable[[str], str],  # name of a place on the axis
    text: Callable[[Row | None, str], str],  # of a row's figure
    sourced: bool,
) -> Table:
    """A line for each row, its place on the axis in front; or, if the axis runs across,
    for each source in a group.
    """
    across = bool(columns and columns[0][0])
    lines = []
    for rows in groups:
        merged: dict[object, dict[str, Row]] = {}
        for row in rows:
            merged.setdefault(row.source if across else id(row), {})[row.axis if across else ""] = (
                row
            )
        for found in merged.values():
            row = next(iter(found.values()))
            place = [NOTHING if count is None else f"{count:,}" for count in row.place]
            lead = [*[label(row.axis)] * (not across), *[row.source] * sourced, *place]
            lines.append([*lead, *(text(found.get(place), name) for place, name in columns)])
    heads = [
        f"{label(place)} {METRICS[name].heading}" if place else METRICS[name].heading
        for place, name in columns
    ]
    heads = [*[axis] * (not across), *["source"] * sourced, "prefill", "length", *heads]
    return Table(title, heads, lines, left=(not across) + sourced)


def _alpha_notes(measurement: Measurement, methods: Sequence[str], paper: bool) -> list[str]:
    """What alpha is, and of each method what it is a share of:
    beside another depth it would mislead.
    """
    notes = [
        "tokens/step: tokens / passes of the model. x: AR's time / the method's, prefill apart."
    ]
    depths: dict[str, set[int]] = {method: set() for method in methods if summary.drafts(method)}
    for sample in measurement.samples:
        depths.get(sample.method, set()).update(point.depth for point in sample.points)
    words = [
        f"{method_name(method)} {' or '.join(map(str, sorted(depth)))}"
        for method, depth in depths.items()
    ]
    beside = f"; the paper's is {_PAPER_DEPTH}" if paper else ""
    formula = (
        "alpha: accepted tokens / tokens drafted along the longest path of each step, which has"
    )
    return notes + [f"{formula} at most: {', '.join(words)}{beside}."] * bool(words)


def _notes(cells: Sequence[Row], measurement: Measurement, what: str, state: str) -> list[str]:
    """What all figures rest on."""
    notes = [spread_note(cells), same_text_note(measurement)] if cells else []
    if state != FINISHED:
        notes.append(
            f"The {what} did not run to its end: these are the cells and lengths that were reached."
        )
    if measurement.workload.ar == SAMPLED:
        time = "est.: integrated" if what == "measurement" else "AR's time is integrated"
        notes.append(
            f"{time} from AR steps sampled as the text grew; every x and delta rests on that time."
        )
    if measurement.simulated:
        notes.append(
            f"Simulated: {summary.simulation(measurement)}. The times are real, the texts are not."
        )
    return notes


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
    line += f" Mean ± sample standard deviation over {' and '.join(varies)}."
    if "repeats" not in varies:
        return line
    if not all(cell.exact for cell in cells):
        return f"{line} Repeats did not all count the same."
    rest = f"vary over {' and '.join(varies[:-1])} alone" if len(varies) > 1 else "are exact"
    return f"{line} Every repeat counted the same: alpha and the other counters {rest}."


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
        place = f"prompt {sample.prompt}, prefill {sample.prefill:,}, seed {sample.seed}, {how}"
        places.append(f"{method_name(sample.method)} ({place})")
    if len(differing) > len(places):
        places.append(f"and {len(differing) - len(places)} more")
    return (
        f"{what}: {len(known) - len(differing)} of {_runs(len(known))}. Not: {'; '.join(places)}."
    )


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"


def _suite_tables(record: SuiteRecord) -> list[Table]:
    """The table of a suite in the paper's layout, then the order of what it compares."""
    suite = suites.find_suite(record.suite)
    measured = suites.measured_rows(suite, record.groups)
    published = published_rows(suite)
    title = f"{suite.name}: {suite.title}: {source(record.groups[0].measurement)}"
    known = [row.axis for row in (*measured, *published)]
    axis = [label for label in dict.fromkeys([*suite.labels, *known]) if label in known]
    groups = [([row.axis], [row]) for row in measured]
    columns = [("", name) for name in suite.columns]
    label = method_name
    sourced = bool(published)
    if suite.wide:
        places = sorted({row.place for row in measured})
        groups = [(axis, [row for row in measured if row.place == place]) for place in places]
        columns = [(place, name) for place in axis for name in suite.columns]
        label = partial(suites.place_name, suite)
        sourced = True
    # behind each group of rows the paper's nearest ones, which are shown once each
    beside = [
        [one for axis in labels for one in counterparts(suite, axis, rows[0].place, published)]
        for labels, rows in groups
    ]
    last = {id(row): index for index, rows in enumerate(beside) for row in rows}
    shown = [
        [*rows, *(row for row in beside[index] if last[id(row)] == index)]
        for index, (_, rows) in enumerate(groups)
    ]
    table = _table(title, suite.axis, shown, columns, label, _text, sourced)
    notes = _suite_notes(suite, record, published)
    return [replace(table, notes=notes), order_table(suites.compared(suite, measured, published))]


def order_table(pairs: Sequence[suites.Pair]) -> Table:
    """Of each figure and place: the measured order,
    and how many pairs the paper has in the same one.
    """
    rows = []
    for (name, place), group in groupby(pairs, key=lambda pair: (pair.figure, pair.place)):
        values = dict[str, float]()
        close = list[set[str]]()
        found: dict[str, list[str]] = {"same": [], "differs": [], "too close": []}
        for pair in group:
            values |= {pair.first: pair.values[0], pair.second: pair.values[1]}
            high, low = (pair.first, pair.second) if pair.ours >= 0 else (pair.second, pair.first)
            close += [{high, low}] * (pair.verdict == "too close")
            if pair.paper:
                found[pair.verdict].append(
                    f"{high} {'~' if pair.verdict == 'too close' else '>'} {low}"
                )
        ranked = sorted(values, key=lambda label: -values[label])
        order = [f"{'~' if {high, low} in close else '>'} {low}" for high, low in pairwise(ranked)]
        judged = sum(map(len, found.values()))
        as_paper = f"{len(found['same'])} of {judged}" if judged else "not in the paper"
        lists = ["; ".join(found[verdict]) or NOTHING for verdict in ("differs", "too close")]
        rows.append(
            [
                METRICS[name].heading,
                place,
                " ".join([ranked[0], *order]),
                as_paper,
                *lists,
                str(pair.n),
            ]
        )
    columns = [
        "figure",
        "at",
        "measured",
        "same as paper",
        "other way round",
        "too close to say",
        "draws",
    ]
    notes = [
        "Pairs are compared with the paper's row of the nearest prefill and length. Too close: "
        "within the 95% interval of the paired difference over draws, or a fixed tolerance, which "
        "is all there is for a single draw."
    ]
    return Table("Order", columns, rows, left=6, notes=notes)


def _suite_notes(suite: Suite, record: SuiteRecord, published: Sequence[Row]) -> list[str]:
    shown = [METRICS[name] for name in suite.columns if not name.startswith("distinct_")]
    meanings = [f"{metric.heading}: {metric.meaning}" for metric in shown]
    if "distinct_1" in suite.columns:
        meanings.insert(0, "D-n: Distinct-n, unique n-grams of generated tokens / n-grams")
    notes = [f"{'. '.join(meanings)}.", *filter(None, [suite.note])]
    notes += [f"Left out: {method.label}, since {method.why}." for method in record.missing]
    measurements = list(record.parts.values())
    cells = [cell for one in measurements for cell in summarise(one)]
    joined = replace(
        measurements[0], samples=[sample for one in measurements for sample in one.samples]
    )
    notes += _notes(cells, joined, "suite", record.state)
    if published:
        timed = any({"speedup", "seconds"} & row.figures.keys() for row in published)
        notes.append(
            f"paper: on an {suites.PAPER_MACHINE}." + (f" {suites.CAUTION}" if timed else "")
        )
    return notes
