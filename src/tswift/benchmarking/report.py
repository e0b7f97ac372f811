"""Reports of ``tswift bench`` and its suites: tables, CSV and Markdown, and the files that hold them.

The tables of bench have the layouts of the paper's tables 3 and 4; those of a suite have the published row beside each
measured one.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from tswift.benchmarking import gate, plots, suites, summary
from tswift.benchmarking.config import ASSISTED, BASELINE, DRAFTLESS, LOOKUP, PEERS, SAMPLED
from tswift.benchmarking.suites import SUITES, Suite, counterparts, published_rows
from tswift.benchmarking.summary import (
    METRICS,
    NOTHING,
    Cell,
    Figure,
    Row,
    Table,
    drafted_only,
    method_name,
    quantity,
    source,
    summarise,
)
from tswift.errors import InputError
from tswift.jobs.folder import FINISHED, write_whole

_MAX_DIFFERENCES = 5
_PAPER_DEPTH = 4  # tokens it drafts along a path
_TABLE_3 = ("alpha", "speedup")
_TABLE_4 = ("alpha", "speedup", "ar_seconds", "seconds", "delta")
_OF_WORKLOADS = ("tokens_per_step", "alpha", "speedup", "tokens_per_second", "seconds")
_FLOORS = ("ar_of_floor", "of_floor")

Record = Mapping[str, Any]  # as in bench.json or suite.json


def write_report(
    record: dict[str, Any], folder: Path, paper: bool = False, draw: bool = False, whole: bool = True
) -> list[Path]:
    """Write ``bench.json`` or ``suite.json``, and CSV, Markdown, texts and plots, each whole or not at all.

    Args:
        folder: is made if need be; files of the same names are replaced.
        paper: put the paper's rows beside ours in ``bench.md``.
        draw: draw plots; needs matplotlib.
        whole: write more than the JSON.
    """
    if record["kind"] == "suite":
        suites.summarise_suite(record)
    stem = f"{record['kind']}-simulated" if record.get("simulated") else record["kind"]
    contents: dict[str, str | bytes] = {f"{stem}.json": encode(record)}
    if whole:
        contents |= {f"{stem}.csv": csv_text(record), f"{stem}.md": markdown(record, paper)}
        if record.get("texts"):
            from tswift.benchmarking.suite_run import texts_html

            contents["suite.html"] = texts_html(record, source(record["groups"][0]["measurement"]))
        contents |= plots.files(record) if draw else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            # a file name quoted in a report may hold incomplete UTF-8
            data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
            write_whole(folder / name, data)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror})", "out") from None
    return [folder / name for name in contents]


def encode(record: Record, indent: str = "") -> str:
    """Indented JSON with one list item per line, so that a diff is short."""
    inner = f"{indent}  "
    lines = []
    for name, value in record.items():
        text = json.dumps(value)
        if isinstance(value, dict) and value:
            text = encode(value, inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            items = [encode(item, inner) if name == "groups" else json.dumps(item) for item in value]
            text = "[\n" + ",\n".join(f"{inner}  {item}" for item in items) + f"\n{inner}]"
        lines.append(f"{inner}{json.dumps(str(name))}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + "\n" * (not indent)


def csv_text(record: Record) -> str:
    """A line per method, prefill and length of a bench, or per row of a suite, measured ones first.

    Of each figure n, mean and standard deviation; empty where unknown.
    """
    lines: list[tuple[list[Any], Mapping[str, Figure]]] = []
    if record["kind"] == "suite":
        columns = ["suite", "axis", "source", "prefill", "length"]
        for row in (*record["rows"], *record["published"]):
            lead = [record["suite"], *(row[name] for name in columns[1:])]
            lines.append((lead, {name: Figure(**figure) for name, figure in row["figures"].items()}))
        names = list(dict.fromkeys(name for _, figures in lines for name in figures))
    else:
        columns = ["model", "method", "prefill", "length", "simulated", "estimated", "runs", "varies"]
        model, simulated = record["workload"]["model"], record["simulated"]
        kinds = summary.by_kind(record)
        columns += ["workload"] * ("" not in kinds)
        for kind, cell in ((kind, cell) for kind, part in kinds.items() for cell in summarise(part)):
            method = f"{cell.axis} (simulated)" if simulated else cell.axis
            flags = [str(flag).lower() for flag in (simulated, cell.estimated)]
            lead = [model, method, cell.prefill, cell.length, *flags, cell.runs, " ".join(cell.varies)]
            lines.append(([*lead, *[kind] * bool(kind)], cell.figures))
        names = summary.from_source(summary.STATS, summary.TIMES)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *(f"{name}_{part}" for name in names for part in ("n", "mean", "std"))])
    for lead, figures in lines:
        values = [value for name in names for value in asdict(figures.get(name, Figure(0, None, None))).values()]
        writer.writerow([*lead, *("" if value is None else f"{value:.9g}" for value in values)])
    return text.getvalue()


def markdown(record: Record, paper: bool = False) -> str:
    """The tables, then what each measurement was run on, when and with which command."""
    if record["kind"] == "suite":
        title = f"tswift bench --suite {record['suite']}"
        runs = {f"Run: {group['label']}".removesuffix(": "): group["measurement"] for group in record["groups"]}
    else:
        title = f"tswift bench: {record['workload']['model']}{' (simulated)' if record['simulated'] else ''}"
        runs = {"Run": record}
    environment = next(iter(runs.values()))["environment"]
    rows = [(name, "none" if value is None else str(value)) for name, value in environment.items()]
    parts = [table.markdown() for table in tables(record, paper)]
    parts += [Table(name, ["what", "value"], _settings(one), left=2).markdown() for name, one in runs.items()]
    parts += [f"```sh\n{shlex.join(record['command'])}\n```\n"]
    parts += [Table("Environment", ["what", "value"], rows, left=2).markdown()]
    return "\n".join([f"# {title}\n", *parts])


def _settings(measurement: Record) -> list[tuple[str, str]]:
    workload, machine = measurement["workload"], measurement.get("machine")

    def listed(options: Record) -> str:
        return ", ".join(f"{name} {value}" for name, value in options.items()) or "none"

    settings = {
        "measured on": source(measurement),
        "started": measurement["started"],
        "ended": measurement["ended"],
        "runs": str(len(measurement["samples"])),
        "seeds": ", ".join(map(str, workload["seeds"])),
        "prompts": ", ".join(prompt["name"] for prompt in workload["prompts"]),
        "dtype": workload["dtype"],
        "attention": workload["attention"],
        "layers": measurement.get("layers"),
        "heads": workload["heads"] or "none",
        "sampling": listed(workload["sampling"]),
        **{f"drafting, {method}": listed(options) for method, options in workload["drafting"].items()},
        "AR's time": "estimated from sampled steps" if workload["ar"] == SAMPLED else "measured",
        "simulated": summary.simulation(measurement) if measurement["simulated"] else None,
        "machine's rates": machine
        and f"{quantity(machine['bandwidth'], 'B/s')}, {quantity(machine['flops'], 'FLOP/s')} in {workload['dtype']}",
        "workload hash": workload["hash"],
    }
    return [(name, value) for name, value in settings.items() if value is not None]


def tables(record: Record, paper: bool = False) -> list[Table]:
    """Of a bench, acceptance and speedup, then decoding times; of a suite, its table, then the measured order.

    Behind them, what ran where if that was on several machines.

    Args:
        record: as in ``bench.json`` or ``suite.json``.
        paper: put the published rows of the same prefill and generated length beside those of a bench.
    """
    if record["kind"] == "suite":
        found = _suite_tables(record)
    else:
        found = _bench_tables(record, paper) if "" in summary.by_kind(record) else [_workload_table(record)]
    return [*found, *filter(None, [gate.machines(dict(record))])]


def _bench_tables(measurement: Record, paper: bool) -> list[Table]:
    cells, simulated, workload = summarise(measurement), measurement["simulated"], measurement["workload"]
    # plain decoding, which the others are compared with, is shown if it is alone
    methods = list(dict.fromkeys(cell.axis for cell in cells if cell.axis != BASELINE)) or [BASELINE]
    here = f"{workload['model']}, this machine{' (simulated)' if simulated else ''}"
    published = [row for row in _paper_rows() if row.axis in methods] if paper else []
    floors = {cell.place: {"ar_of_floor": cell.figures["of_floor"]} for cell in cells if cell.axis == BASELINE}
    measured: list[Row] = []
    for cell in (cell for method in methods for cell in cells if cell.axis == method):
        figures = drafted_only({**cell.figures, **floors.get(cell.place, {})}, cell.axis)
        measured.append(replace(cell, source=here, figures=figures))

    def label(method: str) -> str:
        return method_name(method, simulated and method != "TokenSwift")

    def text(row: Row | None, name: str) -> str:
        if row is None or row.source != here:
            return _text(row, name, digits=2)
        sampled = name == "ar_seconds" and workload["ar"] == SAMPLED
        return _text(row, name) + " est." * (sampled and row.figures[name].mean is not None)

    places = [[row for row in measured if row.place == place] for place in sorted({row.place for row in measured})]
    groups = [[*rows, *(row for row in published if row.place == rows[0].place)] for rows in places]
    across = [(method, name) for method in methods for name in _TABLE_3]
    undrafted = (*DRAFTLESS, *PEERS)
    across = [(method, name) for method, name in across if method not in undrafted or not METRICS[name].drafted]
    down = []
    for row in measured:
        same = [other for other in published if (other.axis, other.place) == (row.axis, row.place)]
        down += [row, *(replace(other, axis="TokenSwift") for other in same if "seconds" in other.figures)]
    names = [*_TABLE_4, *(_FLOORS if any(cell.figures["of_floor"].n for cell in cells) else ())]
    names = ["tokens_per_step", *names] if "peers" in workload else names
    names += [name for name, metric in METRICS.items() if metric.column]
    notes = _notes(cells, measurement, "measurement", measurement["state"])
    if "of_floor" in names:
        notes.append(
            "floor: the least time in which this machine, at the rates measured, reads the weights and the KV cache of "
            "every pass made, and computes on its nodes."
        )
    if not cells:
        notes = ["Nothing was measured: no length was reached."]
    if paper and cells:
        matched = any((row.axis, row.place) == (own.axis, own.place) for row in published for own in measured)
        notes.append(suites.CAUTION if matched else "The paper has no row of these methods, prefills and lengths.")
    sourced, title = bool(paper or simulated), source(measurement)
    acceptance = _wide(f"Acceptance rate and speedup: {title}", groups, across, label, text, sourced)
    times = _long(f"Decoding time: {title}", "method", down, names, label, text, sourced, notes)
    heading = METRICS["seconds"].heading
    return [
        replace(acceptance, notes=_alpha_notes(measurement, methods, paper)),
        replace(times, columns=["T_method" if head == heading else head for head in times.columns]),
    ]


def _workload_table(measurement: Record) -> Table:
    """A line for each kind of prompts, prefill, length and method."""
    rows, kinds = [], summary.by_kind(measurement)
    for kind, part in kinds.items():
        sizes = [prompt["tokens"] for prompt in measurement["workload"]["prompts"] if prompt["kind"] == kind]
        for cell in summarise(part):
            figures = drafted_only(cell.figures, cell.axis)
            prompts = len({prompt for prompt, _ in cell.draws})
            tokens = " to ".join(f"{min(size, cell.prefill or size):,}" for size in sorted({min(sizes), max(sizes)}))
            lead = [method_name(cell.axis, measurement["simulated"]), kind, str(prompts), tokens, f"{cell.length:,}"]
            rows.append([*lead, *(METRICS[name].text(figures[name]) for name in _OF_WORKLOADS)])
    cells = [cell for part in kinds.values() for cell in summarise(part)]
    notes = _notes(cells, measurement, "measurement", measurement["state"])
    notes.insert(0, "tokens/step: tokens / passes of the model. x: AR's time / the method's, prefill apart.")
    heads = ["method", "workload", "prompts", "prompt tokens", "length"]
    columns = [*heads, *(METRICS[name].heading for name in _OF_WORKLOADS)]
    return Table(f"Workloads: {source(measurement)}", columns, rows, left=2, notes=notes)


def _paper_rows() -> list[Row]:
    """Rows of the paper's tables 3 and 4, their axis the method."""
    rows = [replace(row, source=f"{row.source}, {suites.PAPER_MACHINE}") for row in published_rows(SUITES["table3"])]
    for row in published_rows(SUITES["table4"]):
        rows.append(replace(row, axis="tokenswift", source=f"paper: {row.axis}, {suites.PAPER_MACHINE}"))
    return rows


def _text(row: Row | None, name: str, digits: int | None = None) -> str:
    return METRICS[name].text(row.figures.get(name) if row else None, digits)


def _place(row: Row) -> list[str]:
    return [NOTHING if count is None else f"{count:,}" for count in row.place]


Label = Callable[[str], str]  # name of a place on the axis
Text = Callable[["Row | None", str], str]  # of a row's figure


def _wide(
    title: str,
    groups: Sequence[Sequence[Row]],
    columns: Sequence[tuple[str, str]],
    label: Label,
    text: Text,
    sourced: bool,
) -> Table:
    """A line for each source in each group of rows; the axis runs across."""
    lines = []
    for rows in groups:
        for name in dict.fromkeys(row.source for row in rows):
            across = {row.axis: row for row in rows if row.source == name}
            lead = [*[name] * sourced, *_place(next(iter(across.values())))]
            lines.append([*lead, *(text(across.get(axis), metric) for axis, metric in columns)])
    heads = [f"{label(axis)} {METRICS[name].heading}" for axis, name in columns]
    return Table(title, [*["source"] * sourced, "prefill", "length", *heads], lines, left=int(sourced))


def _long(
    title: str,
    axis: str,
    rows: Sequence[Row],
    names: Sequence[str],
    label: Label,
    text: Text,
    sourced: bool,
    notes: Sequence[str],
) -> Table:
    """A line for each row."""
    lead = [[label(row.axis), *[row.source] * sourced, *_place(row)] for row in rows]
    lines = [[*first, *(text(row, name) for name in names)] for first, row in zip(lead, rows, strict=True)]
    columns = [axis, *["source"] * sourced, "prefill", "length", *(METRICS[name].heading for name in names)]
    return Table(title, columns, lines, left=1 + sourced, notes=notes)


def _alpha_notes(measurement: Record, methods: Sequence[str], paper: bool) -> list[str]:
    """What alpha is, and of each method what it is a share of: beside another depth it would mislead."""
    notes = ["alpha: accepted draft tokens / most that could be. x: AR's time / the method's, prefill apart."]
    depths: dict[str, set[int]] = {method: set() for method in methods if method not in (*DRAFTLESS, *PEERS)}
    for sample in measurement["samples"]:
        depths.get(sample["method"], set()).update(point["depth"] for point in sample["points"])
    words = [f"{method_name(method)} {' or '.join(map(str, sorted(depth)))}" for method, depth in depths.items()]
    beside = f"; the paper's is {_PAPER_DEPTH}" if paper else ""
    return notes + [f"alpha divides by the tokens drafted along a path: {', '.join(words)}{beside}."] * bool(words)


def _notes(cells: Sequence[Cell], measurement: Record, what: str, state: str) -> list[str]:
    """What all figures rest on."""
    notes = [spread_note(cells), same_text_note(measurement)] if cells else []
    if state != FINISHED:
        notes.append(f"The {what} did not run to its end: these are the cells and lengths that were reached.")
    notes += peer_notes(measurement) if cells else []
    if measurement["workload"]["ar"] == SAMPLED:
        time = "est.: integrated" if what == "measurement" else "AR's time is integrated"
        notes.append(f"{time} from AR steps sampled as the text grew; every x and delta rests on that time.")
    if measurement["simulated"]:
        notes.append(f"Simulated: {summary.simulation(measurement)}. The times are real, the texts are not.")
    return notes


def spread_note(cells: Sequence[Cell]) -> str:
    """How many runs a cell has and what its spread is over, in one line."""
    low, high = min(cell.runs for cell in cells), max(cell.runs for cell in cells)
    line = f"n: {_runs(low) if low == high else f'{low} to {high} runs'} per cell."
    varies = [axis for axis in ("prompts", "seeds", "repeats") if any(axis in cell.varies for cell in cells)]
    if not varies:
        return f"{line} No spread is known from one run."
    line += f" Mean ± sample standard deviation over {' and '.join(varies)}."
    if "repeats" not in varies:
        return line
    if not all(cell.exact for cell in cells):
        return f"{line} Repeats did not all count the same."
    rest = f"vary over {' and '.join(varies[:-1])} alone" if len(varies) > 1 else "are exact"
    return f"{line} Every repeat counted the same: alpha and the other counters {rest}."


def same_text_note(measurement: Record) -> str:
    """How many runs yielded plain decoding's tokens, and where the others left them, in one line."""
    peers = measurement["workload"].get("peers", ())
    known = [one for one in measurement["samples"] if one["same_as_ar"] is not None and one["method"] not in peers]
    differing = [sample for sample in known if not sample["same_as_ar"] or sample["explained"] is False]
    what = "Same tokens as AR"
    what += ", simulated acceptance apart" if summary.simulated_alpha(measurement) is not None else ""
    if not known:
        return f"{what}: not compared."
    if measurement["workload"]["ar"] == SAMPLED:
        tokens = sum(sample["compared_tokens"] for sample in known)
        what += f" in the {tokens:,} tokens where AR was sampled, every text audited"
    if not differing:
        return f"{what}: {'all' if len(known) > 1 else 'the'} {_runs(len(known))}."
    places = []
    for sample in differing[:_MAX_DIFFERENCES]:
        first, why = sample["first_difference"], "rounding" if sample["explained"] else "NOT rounding"
        how = "its audit finds violations" if first is None else f"from token {first}, {why}"
        place = f"prompt {sample['prompt']}, prefill {sample['prefill']:,}, seed {sample['seed']}, {how}"
        places.append(f"{method_name(sample['method'])} ({place})")
    if len(differing) > len(places):
        places.append(f"and {len(differing) - len(places)} more")
    return f"{what}: {len(known) - len(differing)} of {_runs(len(known))}. Not: {'; '.join(places)}."


def peer_notes(measurement: Record) -> list[str]:
    """What transformers' figures mean, and whether its greedy texts are ours."""
    workload, notes = measurement["workload"], []
    for name, settings in workload.get("peers", {}).items():
        known = [one for one in measurement["samples"] if one["method"] == name and one["same_as_ar"] is not None]
        places = [one["first_difference"] for one in known if not one["same_as_ar"]]
        how = f", {settings['prompt_lookup_num_tokens']} tokens looked up" if name == LOOKUP else ""
        how += f", drafted by {settings['assistant_model']}" if name == ASSISTED else ""
        if known:
            text = f"the text of AR in {len(known) - len(places)} of {_runs(len(known))}"
            text += f", others leave it, at token {min(places):,} or later" if places else ""
        elif settings["do_sample"]:
            text = "samples with torch's random numbers, so a text of its own"
        else:
            text = "a text of its own, since its penalty is over more than the window"
        notes.append(f"{name}: transformers {measurement['environment']['transformers']}{how}: {text}.")
    return notes


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"


def _suite_tables(record: Record) -> list[Table]:
    """The table of a suite in the paper's layout, then the order of what it compares."""
    suite = suites.find_suite(record["suite"])
    measured, published = suites.measured_rows(suite, record["groups"]), published_rows(suite)
    title = f"{suite.name}: {suite.title}: {source(record['groups'][0]['measurement'])}"
    known = [row.axis for row in (*measured, *published)]
    axis = [label for label in dict.fromkeys([*suite.labels, *known]) if label in known]
    notes = _suite_notes(suite, record, bool(published))
    if suite.wide:
        places = sorted({row.place for row in measured})
        groups = [(axis, [row for row in measured if row.place == place]) for place in places]
        columns = [(label, name) for label in axis for name in suite.columns]
        rows = _with_published(suite, groups, published)
        table = _wide(title, rows, columns, lambda label: suites.place_name(suite, label), _text, True)
        table = replace(table, notes=notes)
    else:
        rows = _with_published(suite, [([row.axis], [row]) for row in measured], published)
        flat = [row for group in rows for row in group]
        table = _long(title, suite.axis, flat, suite.columns, method_name, _text, bool(published), notes)
    return [table, order_table(suites.compared(suite, measured, published))]


def _with_published(
    suite: Suite, groups: Sequence[tuple[Sequence[str], list[Row]]], published: Sequence[Row]
) -> list[list[Row]]:
    """Each group of rows, given with its labels, and behind it the paper's nearest rows, which are shown once each."""
    beside = [
        [row for label in labels for row in counterparts(suite, label, rows[0].prefill, rows[0].length, published)]
        for labels, rows in groups
    ]
    last = {id(row): index for index, rows in enumerate(beside) for row in rows}
    return [
        [*rows, *(row for row in beside[index] if last[id(row)] == index)] for index, (_, rows) in enumerate(groups)
    ]


def order_table(pairs: Sequence[suites.Pair]) -> Table:
    """Of each figure and place: the measured order, and how many pairs the paper has in the same one."""
    rows = []
    for (name, place), group in groupby(pairs, key=lambda pair: (pair.figure, pair.place)):
        values, close = dict[str, float](), list[set[str]]()
        found: dict[str, list[str]] = {"same": [], "differs": [], "too close": []}
        for pair in group:
            values |= {pair.first: pair.values[0], pair.second: pair.values[1]}
            high, low = (pair.first, pair.second) if pair.ours >= 0 else (pair.second, pair.first)
            close += [{high, low}] * (pair.verdict == "too close")
            if pair.paper:
                found[pair.verdict].append(f"{high} {'~' if pair.verdict == 'too close' else '>'} {low}")
        ranked = sorted(values, key=lambda label: -values[label])
        order = [f"{'~' if {high, low} in close else '>'} {low}" for high, low in pairwise(ranked)]
        judged = sum(map(len, found.values()))
        as_paper = f"{len(found['same'])} of {judged}" if judged else "not in the paper"
        lists = ["; ".join(found[verdict]) or NOTHING for verdict in ("differs", "too close")]
        rows.append([METRICS[name].heading, place, " ".join([ranked[0], *order]), as_paper, *lists, str(pair.n)])
    columns = ["figure", "at", "measured", "same as paper", "other way round", "too close to say", "draws"]
    notes = [
        "Pairs are compared with the paper's row of the nearest prefill and length. Too close: within the 95% interval "
        "of the paired difference over draws, or a fixed tolerance, which is all there is for a single draw."
    ]
    return Table("Order", columns, rows, left=6, notes=notes)


def _suite_notes(suite: Suite, record: Record, published: bool) -> list[str]:
    shown = [METRICS[name] for name in suite.columns if not name.startswith("distinct_")]
    meanings = [f"{metric.heading}: {metric.meaning}" for metric in shown]
    if "distinct_1" in suite.columns:
        meanings.insert(0, "D-n: Distinct-n, unique n-grams of generated tokens / n-grams")
    notes = [f"{'. '.join(meanings)}.", *filter(None, [suite.note])]
    notes += [f"Left out: {method['label']}, since {method['why']}." for method in record["missing"]]
    measurements = [group["measurement"] for group in record["groups"]]
    cells = [cell for one in measurements for cell in summarise(one)]
    joined = {**measurements[0], "samples": [sample for one in measurements for sample in one["samples"]]}
    notes += _notes(cells, joined, "suite", record["state"])
    if published:
        timed = suite.paper is not None and not {"speedup", "seconds"}.isdisjoint(suite.paper.figures)
        notes.append(f"paper: on an {suites.PAPER_MACHINE}." + (f" {suites.CAUTION}" if timed else ""))
    return notes
