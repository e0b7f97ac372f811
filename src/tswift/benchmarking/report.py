"""Reports of ``tswift bench`` and its suites: tables, CSV and Markdown, and the files that hold them.

The tables of bench have the layouts of the paper's tables 3 and 4; those of a suite have the published row beside each
measured one.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tswift.benchmarking import plots
from tswift.benchmarking.config import BASELINE, DRAFTLESS, SAMPLED
from tswift.benchmarking.quality import texts_html
from tswift.benchmarking.suite_run import Pair, compared, measured_rows
from tswift.benchmarking.suites import (
    CAUTION,
    PAPER_MACHINE,
    SUITES,
    Row,
    Suite,
    counterparts,
    find_suite,
    place_name,
    published_rows,
)
from tswift.benchmarking.summary import (
    FINISHED,
    METRICS,
    STATS,
    TIMES,
    Cell,
    Figure,
    from_source,
    simulated_alpha,
    simulation,
    source,
    summarise,
)
from tswift.benchmarking.table import NOTHING, Table, method_name, quantity
from tswift.errors import InputError
from tswift.jobs.folder import write_whole

_MAX_DIFFERENCES = 5
_PAPER_DEPTH = 4  # tokens it drafts along a path
_TABLE_4 = {"alpha": "alpha", "speedup": "x", "ar_seconds": "T_AR", "seconds": "T_method", "delta": "delta"}

Record = Mapping[str, Any]  # as in bench.json or suite.json


def write_bench(
    measurement: Record, folder: Path, paper: bool = False, draw: bool = False, whole: bool = True
) -> list[Path]:
    """Write ``bench.json``, ``bench.csv``, ``bench.md`` and plots, each whole or not at all.

    Args:
        folder: is made if need be; files of the same names are replaced.
        paper: put the paper's rows beside ours in ``bench.md``.
        draw: draw plots; needs matplotlib.
        whole: write more than ``bench.json``.

    Raises:
        InputError: the folder cannot be written to.
    """
    stem = "bench-simulated" if measurement["simulated"] else "bench"
    paths = _write(folder, {f"{stem}.json": encode(measurement)})
    if whole:
        paths += _write(
            folder, {f"{stem}.csv": bench_csv(measurement), f"{stem}.md": bench_markdown(measurement, paper)}
        )
        paths += _write(folder, plots.bench_files(measurement) if draw else {})
    return paths


def write_suite(record: Record, folder: Path, draw: bool = False, whole: bool = True) -> list[Path]:
    """Write ``suite.json``, ``suite.csv``, ``suite.md``, its texts and its plot; see :func:`write_bench`."""
    files: dict[str, str | bytes] = {"suite.json": encode(record)}
    if whole:
        files |= {"suite.csv": suite_csv(record), "suite.md": suite_markdown(record)}
        if record["texts"]:
            files["suite.html"] = texts_html(record, source(record["groups"][0]["measurement"]))
        files |= plots.suite_files(record) if draw else {}
    return _write(folder, files)


def _write(folder: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
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
        lines.append(f"{inner}{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + "\n" * (not indent)


def bench_csv(measurement: Record) -> str:
    """One line per method, prefill and length: of each figure n, mean and standard deviation; empty where unknown."""
    simulated, model = measurement["simulated"], measurement["workload"]["model"]
    columns = ["model", "method", "prefill", "length", "simulated", "estimated", "runs", "varies"]
    rows = []
    for cell in summarise(measurement):
        name = f"{cell.method} (simulated)" if simulated else cell.method
        flags = [str(flag).lower() for flag in (simulated, cell.estimated)]
        lead = [model, name, cell.prefill, cell.length, *flags, cell.runs, " ".join(cell.varies)]
        rows.append((lead, cell.figures))
    return _csv(columns, from_source(STATS, TIMES), rows)


def suite_csv(record: Record) -> str:
    """One line per row, measured ones first; figures as in :func:`bench_csv`."""
    place = ["axis", "source", "prefill", "length"]
    rows = []
    for row in (*record["rows"], *record["published"]):
        figures = {name: Figure(**figure) for name, figure in row["figures"].items()}
        rows.append(([record["suite"], *(row[name] for name in place)], figures))
    return _csv(["suite", *place], list(dict.fromkeys(name for _, figures in rows for name in figures)), rows)


def _csv(
    columns: Sequence[str], names: Sequence[str], rows: Iterable[tuple[Sequence[Any], Mapping[str, Figure]]]
) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *(f"{name}_{part}" for name in names for part in ("n", "mean", "std"))])
    for lead, figures in rows:
        values = [asdict(figures.get(name, Figure(0, None, None))).values() for name in names]
        numbers = ["" if value is None else f"{value:.9g}" for figure in values for value in figure]
        writer.writerow([*lead, *numbers])
    return text.getvalue()


def bench_markdown(measurement: Record, paper: bool = False) -> str:
    """The tables of bench, then what they were measured on, when and with which command."""
    simulated = " (simulated)" if measurement["simulated"] else ""
    title = f"tswift bench: {measurement['workload']['model']}{simulated}"
    return _markdown(title, bench_tables(measurement, paper), {"Run": measurement}, measurement["command"])


def suite_markdown(record: Record) -> str:
    """The tables of a suite, then what each group was measured on and with."""
    groups = {f"Run: {group['label']}" if group["label"] else "Run": group["measurement"] for group in record["groups"]}
    return _markdown(f"tswift bench --suite {record['suite']}", suite_tables(record), groups, record["command"])


def _markdown(title: str, tables: Iterable[Table], groups: Mapping[str, Record], command: Sequence[str]) -> str:
    environment = next(iter(groups.values()))["environment"]
    rows = [(name, "none" if value is None else str(value)) for name, value in environment.items()]
    parts: list[Table | str] = [
        *tables,
        *(_settings(name, measurement) for name, measurement in groups.items()),
        f"```sh\n{shlex.join(command)}\n```\n",
        Table("Environment", ["what", "value"], rows, left=2),
    ]
    return "\n".join([f"# {title}\n", *(part if isinstance(part, str) else part.markdown() for part in parts)])


def _settings(title: str, measurement: Record) -> Table:
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
        **({"layers": measurement["layers"]} if "layers" in measurement else {}),
        "heads": workload["heads"] or "none",
        "sampling": listed(workload["sampling"]),
        **{f"drafting, {method}": listed(options) for method, options in workload["drafting"].items()},
        "AR's time": "estimated from sampled steps" if workload["ar"] == SAMPLED else "measured",
        **({"simulated": simulation(measurement)} if measurement["simulated"] else {}),
    }
    if machine:
        rates = f"{quantity(machine['bandwidth'], 'B/s')}, {quantity(machine['flops'], 'FLOP/s')}"
        settings["machine's rates"] = f"{rates} in {workload['dtype']}"
    settings["workload hash"] = workload["hash"]
    return Table(title, ["what", "value"], list(settings.items()), left=2)


def bench_tables(measurement: Record, paper: bool = False) -> list[Table]:
    """Acceptance and speedup (layout of the paper's table 3), then decoding times (its table 4).

    Args:
        paper: put the published rows of the same prefill and generated length beside ours.
    """
    cells = summarise(measurement)
    published = _paper_rows() if paper else []
    return [_acceptance(measurement, cells, published), _times(measurement, cells, published)]


def _paper_rows() -> list[Row]:
    """Rows of the paper's tables 3 and 4, their axis the method."""
    rows = [(row.axis, f"{row.source}, {PAPER_MACHINE}", row) for row in published_rows(SUITES["table3"])]
    rows += [("tokenswift", f"paper: {row.axis}, {PAPER_MACHINE}", row) for row in published_rows(SUITES["table4"])]
    return [Row(method, name, row.prefill, row.length, row.figures) for method, name, row in rows]


def _acceptance(measurement: Record, cells: Sequence[Cell], published: Sequence[Row]) -> Table:
    methods, label = _methods(cells), _label(measurement, published)
    here = "".join(label[1:])
    shown = [(method, name) for method in methods for name in ("alpha", "speedup")]
    shown = [(method, name) for method, name in shown if name == "speedup" or method not in DRAFTLESS]
    heads = [f"{method_name(method, measurement['simulated'])} {METRICS[name].heading}" for method, name in shown]
    rows = [Row(cell.method, here, cell.prefill, cell.length, cell.figures) for cell in cells]
    rows += [row for row in published if row.axis in methods]
    lines = []
    for place in dict.fromkeys(cell.key[1:] for cell in cells):
        beside = [row for row in rows if (row.prefill, row.length) == place]
        for name in dict.fromkeys(row.source for row in beside):
            figures = {row.axis: row.figures for row in beside if row.source == name}
            digits = None if name == here else 2
            texts = [METRICS[metric].text(figures.get(method, {}).get(metric), digits) for method, metric in shown]
            lines.append([*([name] if label else []), *_tokens(place), *texts])
    notes = ["alpha: accepted draft tokens / most that could be. x: AR's time / the method's, prefill apart."]
    notes += _depths(measurement, [method for method in methods if method not in DRAFTLESS], bool(published))
    title = f"Acceptance rate and speedup: {source(measurement)}"
    return Table(title, [*label[:1], "prefill", "length", *heads], lines, left=1 if label else 0, notes=notes)


def _times(measurement: Record, cells: Sequence[Cell], published: Sequence[Row]) -> Table:
    plain = {cell.key[1:]: cell for cell in cells if cell.method == BASELINE}
    floors, label = any(cell.figures["of_floor"].n for cell in cells), _label(measurement, published)
    more = [name for name, metric in METRICS.items() if metric.column]
    columns = ["method", *label[:1], "prefill", "length", *_TABLE_4.values()]
    columns += ["T_AR / floor", "T_method / floor"] * floors + [METRICS[name].heading for name in more]
    rows = []
    for cell in (cell for method in _methods(cells) for cell in cells if cell.method == method):
        base = plain.get(cell.key[1:])
        texts = _texts(cell.figures, _TABLE_4, drafts=cell.method not in DRAFTLESS)
        texts[2] += " est." * (base is not None and base.estimated and texts[2] != NOTHING)
        texts[3] += " est." * cell.estimated
        for one in (base, cell) if floors else ():
            texts += _texts(one.figures if one else {}, ["of_floor"])
        lead = [method_name(cell.method, measurement["simulated"]), *label[1:]]
        rows.append([*lead, *_tokens(cell.key[1:]), *texts, *_texts(cell.figures, more)])
        for row in published:
            if (row.axis, row.prefill, row.length) == cell.key and "seconds" in row.figures:
                texts = _texts(row.figures, _TABLE_4, 2) + [NOTHING] * (2 * floors + len(more))
                rows.append(["TokenSwift", row.source, *_tokens(cell.key[1:]), *texts])
    title = f"Decoding time: {source(measurement)}"
    return Table(title, columns, rows, left=2 if label else 1, notes=_notes(measurement, cells, published))


def _texts(
    figures: Mapping[str, Figure], names: Iterable[str], digits: int | None = None, drafts: bool = True
) -> list[str]:
    return [
        NOTHING if METRICS[name].drafted and not drafts else METRICS[name].text(figures.get(name), digits)
        for name in names
    ]


def _depths(measurement: Record, methods: Sequence[str], paper: bool) -> list[str]:
    """What each method's alpha is a share of: beside another depth, the paper's too, it would mislead."""
    words = []
    for method in methods:
        samples = [sample for sample in measurement["samples"] if sample["method"] == method]
        depths = sorted({point["depth"] for sample in samples for point in sample["points"]})
        words.append(f"{method_name(method)} {' or '.join(map(str, depths))}")
    beside = f"; the paper's is {_PAPER_DEPTH}" if paper else ""
    return [f"alpha divides by the tokens drafted along a path: {', '.join(words)}{beside}."] if words else []


def _notes(measurement: Record, cells: Sequence[Cell], published: Sequence[Row]) -> list[str]:
    if not cells:
        return ["Nothing was measured: no length was reached."]
    notes = [spread_note(cells), same_text_note(measurement)]
    if measurement["state"] != FINISHED:
        notes.append("The measurement did not run to its end: these are the cells and lengths that were reached.")
    if any(cell.estimated for cell in cells):
        notes.append("est.: integrated from AR steps sampled as the text grew; every x and delta rests on that time.")
    if measurement["simulated"]:
        notes.append(f"Simulated: {simulation(measurement)}. The times are real, the texts are not.")
    if any(cell.figures["of_floor"].n for cell in cells):
        notes.append(
            "floor: the least time in which this machine, at the rates measured, reads the weights and the KV cache of "
            "every pass made, and computes on its nodes."
        )
    if published:
        keys = {cell.key for cell in cells}
        matched = any((row.axis, row.prefill, row.length) in keys for row in published)
        notes.append(CAUTION if matched else "The paper has no row of these methods, prefills and lengths.")
    return notes


def spread_note(cells: Sequence[Cell]) -> str:
    """How many runs a cell has and what its spread is over, in one line."""
    low, high = min(cell.runs for cell in cells), max(cell.runs for cell in cells)
    line = f"n: {_runs(low) if low == high else f'{low} to {high} runs'} per cell."
    varies = [axis for axis in ("prompts", "seeds", "repeats") if any(axis in cell.varies for cell in cells)]
    if not varies:
        return f"{line} No spread is known from one run."
    line += f" Mean ± sample standard deviation over {_listed(varies)}."
    if "repeats" not in varies:
        return line
    if not all(cell.exact for cell in cells):
        return f"{line} Repeats did not all count the same."
    rest = f"vary over {_listed(varies[:-1])} alone" if len(varies) > 1 else "are exact"
    return f"{line} Every repeat counted the same: alpha and the other counters {rest}."


def same_text_note(measurement: Record) -> str:
    """How many runs yielded plain decoding's tokens, and where the others left them, in one line."""
    known = [sample for sample in measurement["samples"] if sample["same_as_ar"] is not None]
    differing = [sample for sample in known if not sample["same_as_ar"] or sample["explained"] is False]
    what = "Same tokens as AR"
    what += ", simulated acceptance apart" if simulated_alpha(measurement) is not None else ""
    if not known:
        return f"{what}: not compared."
    if measurement["workload"]["ar"] == SAMPLED:
        tokens = sum(sample["compared_tokens"] for sample in known)
        what += f" in the {tokens:,} tokens where AR was sampled, every text audited"
    if not differing:
        return f"{what}: {'all' if len(known) > 1 else 'the'} {_runs(len(known))}."
    places = []
    for sample in differing[:_MAX_DIFFERENCES]:
        how = f"from token {sample['first_difference']}, {'rounding' if sample['explained'] else 'NOT rounding'}"
        how = "its audit finds violations" if sample["first_difference"] is None else how
        place = f"prompt {sample['prompt']}, prefill {sample['prefill']:,}, seed {sample['seed']}, {how}"
        places.append(f"{method_name(sample['method'])} ({place})")
    if len(differing) > len(places):
        places.append(f"and {len(differing) - len(places)} more")
    return f"{what}: {len(known) - len(differing)} of {_runs(len(known))}. Not: {'; '.join(places)}."


def _methods(cells: Iterable[Cell]) -> list[str]:
    """All but plain decoding, which the others are compared with; alone, it is shown."""
    return [method for method in dict.fromkeys(cell.method for cell in cells) if method != BASELINE] or [BASELINE]


def _label(measurement: Record, published: Sequence[Row]) -> list[str]:
    """Head and text of the column that says where a row comes from; nothing where all are from one place."""
    simulated = " (simulated)" if measurement["simulated"] else ""
    label = ["source", f"{measurement['workload']['model']}, this machine{simulated}"]
    return label if published or simulated else []


def _tokens(counts: Iterable[int | None]) -> list[str]:
    return [NOTHING if count is None else f"{count:,}" for count in counts]


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"


def suite_tables(record: Record) -> list[Table]:
    """The table of a suite in the paper's layout, then the order of what it compares."""
    suite = find_suite(record["suite"])
    measured, published = measured_rows(suite, record["groups"]), published_rows(suite)
    title = f"{suite.name}: {suite.title}: {source(record['groups'][0]['measurement'])}"
    columns, rows = _suite_rows(suite, measured, published)
    notes = _suite_notes(suite, record, bool(published))
    return [
        Table(title, columns, rows, columns.index("prefill"), notes),
        order_table(compared(suite, measured, published)),
    ]


def _suite_rows(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines: the axis runs down, or across if the suite is wide. The paper's rows follow ours."""
    known = [row.axis for row in (*measured, *published)]
    axis = [label for label in dict.fromkeys([*suite.labels, *known]) if label in known]
    if suite.wide:
        places = [(axis, *place) for place in sorted({(row.prefill or 0, row.length or 0) for row in measured})]
    else:
        places = [([row.axis], row.prefill or 0, row.length or 0) for row in measured]
    beside = [
        [row for label in labels for row in counterparts(suite, label, prefill, length, published)]
        for labels, prefill, length in places
    ]
    last = {id(row): index for index, rows in enumerate(beside) for row in rows}  # a row of the paper is shown once
    lines = []
    for index, (labels, *place) in enumerate(places):
        rows = [row for row in measured if row.axis in labels and [row.prefill, row.length] == place]
        groups: dict[tuple[str, str], dict[str, Row]] = {}
        for row in (*rows, *(row for row in beside[index] if last[id(row)] == index)):
            groups.setdefault((row.source, "" if suite.wide else row.axis), {})[row.axis] = row
        for group in groups.values():
            first = next(iter(group.values()))
            lead = [first.source] if suite.wide or published else []
            across = [group.get(label) for label in axis] if suite.wide else [first]
            texts = [text for row in across for text in _texts(row.figures if row else {}, suite.columns)]
            name = [] if suite.wide else [method_name(first.axis)]
            lines.append([*name, *lead, *_tokens((first.prefill, first.length)), *texts])
    heads = [METRICS[name].heading for name in suite.columns]
    if suite.wide:
        heads = [f"{place_name(suite, label)} {head}" for label in axis for head in heads]
    lead = [*([] if suite.wide else [suite.axis]), *(["source"] if suite.wide or published else [])]
    return [*lead, "prefill", "length", *heads], lines


def order_table(pairs: Sequence[Pair]) -> Table:
    """Of each figure and place: the measured order, and how many pairs the paper has in the same one."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.figure, pair.place), []).append(pair)
    rows = []
    for (name, place), group in groups.items():
        values = {label: x for pair in group for label, x in zip((pair.first, pair.second), pair.values, strict=True)}
        ranked = sorted(values, key=lambda label: -values[label])
        close = [{pair.first, pair.second} for pair in group if abs(pair.ours) <= pair.within]
        order = [f"{'~' if {high, low} in close else '>'} {low}" for high, low in pairwise(ranked)]
        verdicts: dict[str, list[str]] = {"same": [], "differs": [], "too close": []}
        for pair in group:
            high, low = (pair.first, pair.second) if pair.ours >= 0 else (pair.second, pair.first)
            text = f"{pair.first} ~ {pair.second}" if pair.verdict == "too close" else f"{high} > {low}"
            verdicts.get(pair.verdict, []).append(text)
        judged = sum(map(len, verdicts.values()))
        same = f"{len(verdicts['same'])} of {judged}" if judged else "not in the paper"
        lists = ["; ".join(verdicts[verdict]) or NOTHING for verdict in ("differs", "too close")]
        draws = str(max(pair.n for pair in group))
        rows.append([METRICS[name].heading, place, " ".join([ranked[0], *order]), same, *lists, draws])
    columns = ["figure", "at", "measured", "same as paper", "other way round", "too close to say", "draws"]
    notes = [
        "Pairs are compared with the paper's row of the nearest prefill and length. too close (~): within the 95% "
        "interval of the paired difference over draws, or a fixed tolerance, which is all there is for a single draw."
    ]
    return Table("Order", columns, rows, left=6, notes=notes)


def _suite_notes(suite: Suite, record: Record, published: bool) -> list[str]:
    meanings = [
        f"{METRICS[name].heading}: {METRICS[name].meaning}"
        for name in suite.columns
        if not name.startswith("distinct_")
    ]
    if "distinct_1" in suite.columns:
        meanings.insert(0, "D-n: Distinct-n, unique n-grams of generated tokens / n-grams")
    notes = [f"{'. '.join(meanings)}.", *filter(None, [suite.note])]
    notes += [f"Left out: {method['label']}, since {method['why']}." for method in record["missing"]]
    measurements = [group["measurement"] for group in record["groups"]]
    samples = [sample for one in measurements for sample in one["samples"]]
    if samples:
        notes.append(spread_note([cell for one in measurements for cell in summarise(one)]))
        notes.append(same_text_note({**measurements[0], "samples": samples}))
    if measurements[0]["workload"]["ar"] == SAMPLED:
        notes.append("AR's time is integrated from AR steps sampled as the text grew; every x rests on that time.")
    if record["state"] != FINISHED:
        notes.append("The suite did not run to its end: these are the cells and lengths that were reached.")
    if published:
        timed = suite.paper is not None and not {"speedup", "seconds"}.isdisjoint(suite.paper.figures)
        notes.append(f"paper: on an {PAPER_MACHINE}." + (f" {CAUTION}" if timed else ""))
    return notes
