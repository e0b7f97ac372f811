"""Reports of ``tswift bench`` and its suites: tables, CSV and Markdown, and the files that hold them.

The tables of bench have the layouts of the paper's tables 3 and 4; those of a suite have the published row beside each
measured one.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tswift.benchmarking import plots
from tswift.benchmarking.grid import NOTHING, Grid, duration, marks, method_name, quantity, with_spread
from tswift.benchmarking.options import BASELINE, DRAFTLESS, SAMPLED
from tswift.benchmarking.quality import texts_html
from tswift.benchmarking.suite_run import Pair, compared, measured_rows
from tswift.benchmarking.suites import (
    CAUTION,
    PAPER_MACHINE,
    SHOWN,
    SUITES,
    Row,
    Suite,
    counterparts,
    find_suite,
    place_name,
    published_rows,
)
from tswift.benchmarking.summary import FIGURES, FINISHED, Cell, Figure, simulated_alpha, simulation, source, summarise
from tswift.errors import InputError
from tswift.jobs.folder import write_whole

_MOST_DIFFERENCES = 5
_PAPER_DEPTH = 4  # tokens it drafts along a path

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
    makers: dict[str, Callable[[], str]] = {"json": lambda: encode_bench(measurement)}
    if whole:
        makers |= {"csv": lambda: csv_report(measurement), "md": lambda: markdown_report(measurement, paper)}
    stem = "bench-simulated" if measurement["simulated"] else "bench"
    paths = [path for kind, make in makers.items() for path in _write(folder, {f"{stem}.{kind}": make()})]
    return paths + _write(folder, plots.bench_files(measurement) if draw and whole else {})


def write_suite(record: Record, folder: Path, draw: bool = False, whole: bool = True) -> list[Path]:
    """Write ``suite.json``, ``suite.csv``, ``suite.md``, its texts and its plot; see :func:`write_bench`."""
    files: dict[str, str | bytes] = {"suite.json": encode_suite(record)}
    if whole:
        files |= {"suite.csv": suite_csv(record), "suite.md": suite_markdown(record)}
    if whole and record["texts"]:
        files["suite.html"] = texts_html(record, source(record["groups"][0]["measurement"]))
    return _write(folder, {**files, **(plots.suite_files(record) if draw and whole else {})})


def _write(folder: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            # the name of a file, quoted in a report, may hold half a character
            data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
            write_whole(folder / name, data)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror})", "--out") from None
    return [folder / name for name in contents]


def encode_bench(measurement: Record) -> str:
    """The text of ``bench.json``: indented, with one sample per line, so that a diff is short."""
    head = json.dumps({name: value for name, value in measurement.items() if name != "samples"}, indent=2)
    samples = ",\n    ".join(json.dumps(sample) for sample in measurement["samples"])
    return f'{head[:-2]},\n  "samples": [\n    {samples}\n  ]\n}}\n'


def encode_suite(record: Record) -> str:
    """The text of ``suite.json``: indented, with one row, pair or sample per line."""
    lists = ("rows", "published", "pairs", "texts")
    head = json.dumps({name: value for name, value in record.items() if name not in (*lists, "groups")}, indent=2)
    parts = [head[:-2]]
    for name in lists:
        lines = ",\n    ".join(json.dumps(value) for value in record[name])
        parts.append(f'  "{name}": ' + (f"[\n    {lines}\n  ]" if lines else "[]"))
    groups = ",\n".join(
        f'{{"label": {json.dumps(group["label"])}, "measurement": {encode_bench(group["measurement"])}}}'
        for group in record["groups"]
    )
    return ",\n".join([*parts, f'  "groups": [{groups}]\n}}\n'])


def csv_report(measurement: Record) -> str:
    """One line per method, prefill and length: of each figure n, mean and standard deviation; empty where unknown."""
    simulated = measurement["simulated"]
    about = ["model", "method", "prefill", "length", "simulated", "estimated", "runs", "varies"]
    lines: list[list[Any]] = [[*about, *_csv_heads(FIGURES)]]
    for cell in summarise(measurement):
        method = cell.method + "".join(f" ({mark})" for mark in marks(simulated))
        flags = [str(flag).lower() for flag in (simulated, cell.estimated)]
        place = [measurement["workload"]["model"], method, cell.prefill, cell.length]
        lines.append([*place, *flags, cell.runs, " ".join(cell.varies), *_csv_figures(cell.figures, FIGURES)])
    return _csv(lines)


def suite_csv(record: Record) -> str:
    """One line per row, measured ones first; figures as in :func:`csv_report`."""
    rows = [*record["rows"], *record["published"]]
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    place = ["axis", "source", "prefill", "length"]
    lines: list[list[Any]] = [["suite", *place, *_csv_heads(names)]]
    for row in rows:
        figures = {name: Figure(**figure) for name, figure in row["figures"].items()}
        where = ["" if row[name] is None else row[name] for name in place]
        lines.append([record["suite"], *where, *_csv_figures(figures, names)])
    return _csv(lines)


def _csv_heads(names: Iterable[str]) -> list[str]:
    return [f"{name}_{part}" for name in names for part in ("n", "mean", "std")]


def _csv_figures(figures: Mapping[str, Figure], names: Iterable[str]) -> list[str]:
    found = [figures.get(name, Figure(0, None, None)) for name in names]
    values = [
        (f"{figure.n}", *("" if x is None else f"{x:.9g}" for x in (figure.mean, figure.std))) for figure in found
    ]
    return [cell for cells in values for cell in cells]


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def markdown_report(measurement: Record, paper: bool = False) -> str:
    """The tables of bench, then what they were measured on, when and with which command."""
    simulated = " (simulated)" if measurement["simulated"] else ""
    parts = [
        f"# tswift bench: {measurement['workload']['model']}{simulated}\n",
        *(grid.markdown() for grid in bench_grids(measurement, paper)),
        _settings_grid("Run", measurement).markdown(),
    ]
    return "\n".join([*parts, *_origin(measurement["command"], measurement["environment"])])


def suite_markdown(record: Record) -> str:
    """The tables of a suite, then what each group was measured on and with."""
    parts = [f"# tswift bench --suite {record['suite']}\n", *(grid.markdown() for grid in suite_grids(record))]
    for group in record["groups"]:
        title = f"Run: {group['label']}" if group["label"] else "Run"
        parts.append(_settings_grid(title, group["measurement"]).markdown())
    return "\n".join([*parts, *_origin(record["command"], record["groups"][0]["measurement"]["environment"])])


def _origin(command: Sequence[str], environment: Record) -> list[str]:
    rows = [(name, "none" if value is None else str(value)) for name, value in environment.items()]
    return [f"```sh\n{shlex.join(command)}\n```\n", Grid("Environment", ["what", "value"], rows, left=2).markdown()]


def _settings_grid(title: str, measurement: Record) -> Grid:
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
        "AR's time": {"full": "measured", "sampled": "estimated from sampled steps"}[workload["ar"]],
        **({"simulated": simulation(measurement)} if measurement["simulated"] else {}),
    }
    if machine:
        rates = f"{quantity(machine['bandwidth'], 'B/s')}, {quantity(machine['flops'], 'FLOP/s')}"
        settings["machine's rates"] = f"{rates} in {workload['dtype']}"
    settings["workload hash"] = workload["hash"]
    return Grid(title, ["what", "value"], list(settings.items()), left=2)


def bench_grids(measurement: Record, paper: bool = False) -> list[Grid]:
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


def _acceptance(measurement: Record, cells: Sequence[Cell], published: Sequence[Row]) -> Grid:
    by_key = {cell.key: cell.figures for cell in cells}
    methods = _methods(cells)
    drafting = [method for method in methods if method not in DRAFTLESS]
    label = _label(measurement, published)
    columns = [*label[:1], "prefill", "length"]
    for method in methods:
        name = method_name(method, *marks(measurement["simulated"]))
        columns += [f"{name} alpha", f"{name} x"] if method in drafting else [f"{name} x"]

    def line(figures: Mapping[str, Mapping[str, Figure]], digits: int) -> list[str]:
        return [
            _spread(figures.get(method, {}), name, digits if name == "alpha" else 2)
            for method in methods
            for name in (("alpha", "speedup") if method in drafting else ("speedup",))
        ]

    rows = []
    for place in dict.fromkeys((cell.prefill, cell.length) for cell in cells):
        mine = {method: by_key[(method, *place)] for method in methods if (method, *place) in by_key}
        rows.append([*label[1:], *_tokens(place), *line(mine, 3)])
        beside = [row for row in published if (row.prefill, row.length) == place and row.axis in methods]
        for name in dict.fromkeys(row.source for row in beside):
            theirs = {row.axis: row.figures for row in beside if row.source == name}
            rows.append([name, *_tokens(place), *line(theirs, 2)])
    notes = ["alpha: accepted draft tokens / most that could be. x: AR's time / the method's, prefill apart."]
    notes += _depths(measurement, drafting, paper=bool(published))
    title = f"Acceptance rate and speedup: {source(measurement)}"
    return Grid(title, columns, rows, left=1 if label else 0, notes=notes)


def _times(measurement: Record, cells: Sequence[Cell], published: Sequence[Row]) -> Grid:
    plain = {cell.key[1:]: cell for cell in cells if cell.method == BASELINE}
    roofline = any(cell.figures["of_floor"].n for cell in cells)
    label = _label(measurement, published)
    rows = []
    for cell in [cell for method in _methods(cells) for cell in cells if cell.method == method]:
        place, drafts = (cell.prefill, cell.length), cell.method not in DRAFTLESS
        base = plain.get(place)
        ar, own = (cell.figures[name].mean for name in ("ar_seconds", "seconds"))
        rows.append(
            [
                method_name(cell.method, *marks(measurement["simulated"])),
                *label[1:],
                *_tokens(place),
                _spread(cell.figures, "alpha", 3) if drafts else NOTHING,
                _spread(cell.figures, "speedup", 2),
                duration(ar) + " est." * (base is not None and base.estimated and ar is not None),
                duration(own) + " est." * cell.estimated,
                NOTHING if ar is None or own is None else duration(own - ar),
                *([_spread(each.figures if each else {}, "of_floor", 2) for each in (base, cell)] if roofline else []),
            ]
        )
        for row in published:
            if (row.axis, row.prefill, row.length) == cell.key and "seconds" in row.figures:
                times = [duration(row.figures[name].mean) for name in ("ar_seconds", "seconds", "delta")]
                figures = [_spread(row.figures, name, 2) for name in ("alpha", "speedup")]
                rest = [NOTHING, NOTHING] if roofline else []
                rows.append(["TokenSwift", row.source, *_tokens(place), *figures, *times, *rest])
    columns = ["method", *label[:1], "prefill", "length", "alpha", "x", "T_AR", "T_method", "delta"]
    columns += ["T_AR / floor", "T_method / floor"] if roofline else []
    title = f"Decoding time: {source(measurement)}"
    return Grid(title, columns, rows, left=2 if label else 1, notes=_notes(measurement, cells, published))


def _depths(measurement: Record, methods: Sequence[str], paper: bool) -> list[str]:
    """What each method's alpha is a share of: beside another depth, the paper's too, it would mislead."""
    depths: dict[str, set[int]] = {method: set() for method in methods}
    for sample in measurement["samples"]:
        for point in sample["points"] if sample["method"] in depths else ():
            depths[sample["method"]].add(point["depth"])
    if not depths:
        return []
    words = [f"{method_name(method)} {' or '.join(map(str, sorted(each)))}" for method, each in depths.items()]
    beside = f"; the paper's is {_PAPER_DEPTH}" if paper else ""
    return [f"alpha divides by the tokens drafted along a path: {', '.join(words)}{beside}."]


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
    number = _runs(low) if low == high else f"{low} to {high} runs"
    varies = [axis for axis in ("prompts", "seeds", "repeats") if any(axis in cell.varies for cell in cells)]
    if not varies:
        return f"n: {number} per cell. No spread is known from one run."
    line = f"n: {number} per cell. Mean ± sample standard deviation over {_listed(varies)}."
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
    for sample in differing[:_MOST_DIFFERENCES]:
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


def _spread(figures: Mapping[str, Figure], name: str, digits: int) -> str:
    return with_spread(figures[name].mean, figures[name].std, digits) if name in figures else NOTHING


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _runs(count: int) -> str:
    return f"{count} {'run' if count == 1 else 'runs'}"


def suite_grids(record: Record) -> list[Grid]:
    """The table of a suite in the paper's layout, then the order of what it compares."""
    suite = find_suite(record["suite"])
    measured, published = measured_rows(suite, record["groups"]), published_rows(suite)
    columns, rows = (_wide if suite.wide else _long)(suite, measured, published)
    left = columns.index("prefill")
    title = f"{suite.name}: {suite.title}: {source(record['groups'][0]['measurement'])}"
    return [
        Grid(title, columns, rows, left, _suite_notes(suite, record, bool(published))),
        order_grid(compared(suite, measured, published)),
    ]


Lines = tuple[list[str], list[list[str]]]


def _long(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> Lines:
    """A line for each row, the axis down."""
    beside = [counterparts(suite, row.axis, row.prefill or 0, row.length or 0, published) for row in measured]
    last = {id(row): index for index, rows in enumerate(beside) for row in rows}
    lines = []
    for index, (row, theirs) in enumerate(zip(measured, beside, strict=True)):
        for each in (row, *(other for other in theirs if last[id(other)] == index)):
            where = [each.source] if published else []
            lines.append(
                [method_name(each.axis), *where, *_tokens((each.prefill, each.length)), *_across(suite, [each])]
            )
    heads = [SHOWN[name].head for name in suite.columns]
    return [suite.axis, *(["source"] if published else []), "prefill", "length", *heads], lines


def _wide(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> Lines:
    """A line for each prefill and length, the axis across."""
    known = {row.axis: None for row in (*measured, *published)}
    axis = [label for label in {**dict.fromkeys(suite.labels), **known} if label in known]
    places = sorted({(row.prefill or 0, row.length or 0) for row in measured})
    beside = {
        place: [row for label in axis for row in counterparts(suite, label, *place, published)] for place in places
    }
    last = {id(row): place for place, rows in beside.items() for row in rows}
    lines = []
    for place in places:
        mine = [row for row in measured if (row.prefill, row.length) == place]
        theirs = [row for row in beside[place] if last[id(row)] == place]
        for name in dict.fromkeys(row.source for row in (*mine, *theirs)):
            rows = {row.axis: row for row in (*mine, *theirs) if row.source == name}
            first = next(iter(rows.values()))
            across = _across(suite, [rows.get(label) for label in axis])
            lines.append([name, *_tokens((first.prefill, first.length)), *across])
    heads = [f"{place_name(suite, label)} {SHOWN[name].head}" for label in axis for name in suite.columns]
    return ["source", "prefill", "length", *heads], lines


def _across(suite: Suite, rows: Iterable[Row | None]) -> list[str]:
    return [SHOWN[name].text(row.figures.get(name) if row else None) for row in rows for name in suite.columns]


def order_grid(pairs: Sequence[Pair]) -> Grid:
    """Of each figure and place: the measured order, and how many pairs the paper has in the same one."""
    places: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        places.setdefault((pair.figure, pair.place), []).append(pair)
    rows = []
    for (name, place), here in places.items():
        shown = SHOWN[name]
        values = {name: x for pair in here for name, x in zip((pair.first, pair.second), pair.values, strict=True)}
        ranked = sorted(values, key=lambda label: -values[label])
        close = [{pair.first, pair.second} for pair in here if abs(pair.ours) <= pair.within]
        order = f"{ranked[0]} {shown.number(values[ranked[0]])}"
        for before, after in pairwise(ranked):
            order += f" {'~' if {before, after} in close else '>'} {after} {shown.number(values[after])}"
        judged = {
            verdict: [pair for pair in here if pair.verdict == verdict] for verdict in ("same", "differs", "too close")
        }
        held = sum(map(len, judged.values()))
        rows.append(
            [
                shown.head,
                place,
                order,
                f"{len(judged['same'])} of {held}" if held else "not in the paper",
                "; ".join(_above(pair) for pair in judged["differs"]) or NOTHING,
                "; ".join(
                    f"{pair.first} ~ {pair.second} (within {shown.number(pair.within)})" for pair in judged["too close"]
                )
                or NOTHING,
                str(max(pair.n for pair in here)),
            ]
        )
    columns = ["figure", "at", "measured", "same as paper", "other way round", "too close to say", "draws"]
    notes = [
        "Pairs are compared with the paper's row of the nearest prefill and length. too close (~): within the 95% "
        "interval of the paired difference over draws, or a fixed tolerance, which is all there is for a single draw."
    ]
    return Grid("Order", columns, rows, left=6, notes=notes)


def _above(pair: Pair) -> str:
    high, low = (pair.first, pair.second) if pair.ours >= 0 else (pair.second, pair.first)
    return f"{high} > {low}"


def _suite_notes(suite: Suite, record: Record, published: bool) -> list[str]:
    meanings = [
        f"{SHOWN[name].head}: {SHOWN[name].meaning}" for name in suite.columns if not name.startswith("distinct_")
    ]
    if "distinct_1" in suite.columns:
        meanings.insert(0, "D-n: Distinct-n, unique n-grams of generated tokens / n-grams")
    notes = [f"{'. '.join(meanings)}.", *filter(None, [suite.note])]
    notes += [f"Left out: {each['label']}, since {each['why']}." for each in record["missing"]]
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
