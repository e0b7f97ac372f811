"""A measurement in the layouts of the paper's tables 3 and 4, the paper's own rows beside it where asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tswift.benchmarking.grid import NOTHING, Grid, duration, marks, method_name, with_spread
from tswift.benchmarking.measurement import BASELINE, DRAFTLESS, FINISHED, given_alpha, machine, simulation
from tswift.benchmarking.published import CAUTION, PublishedRow, published_rows
from tswift.benchmarking.statistics import Cell, summarise

_MOST_DIFFERENCES = 5
_PAPER_DEPTH = 4  # tokens it drafts along a path


def grids(measurement: Mapping[str, Any], paper: bool = False) -> list[Grid]:
    """The two tables of a report.

    Args:
        measurement: as in ``bench.json``.
        paper: put the published rows of the same prefill and generated length beside ours.

    Returns:
        Acceptance and speedup (the paper's table 3), then decoding times (its table 4).
    """
    cells = summarise(measurement)
    published = published_rows() if paper else []
    return [_acceptance(measurement, cells, published), _times(measurement, cells, published)]


def source(measurement: Mapping[str, Any]) -> str:
    """Model and machine, and whether the figures are simulated, as a label."""
    label = f"{measurement['workload']['model']}, {machine(measurement['environment'])}"
    return f"{label} (simulated)" if measurement["simulated"] else label


def runs(cells: Sequence[Cell]) -> str:
    """How many runs a cell has and what its spread is over, in one line."""
    counts = {cell.runs for cell in cells}
    low, high = min(counts, default=0), max(counts, default=0)
    number = f"{low} {_plural(low, 'run')}" if low == high else f"{low} to {high} runs"
    varies = [axis for axis in ("prompts", "seeds", "repeats") if any(axis in cell.varies for cell in cells)]
    if not varies:
        return f"n: {number} per cell. No spread is known from one run."
    line = f"n: {number} per cell. Mean ± sample standard deviation over {_listed(varies)}."
    if "repeats" not in varies:
        return line
    if not all(cell.exact for cell in cells):
        return f"{line} Repeats did not all count the same."
    if varies == ["repeats"]:
        return f"{line} Every repeat counted the same: alpha and the other counters are exact."
    return f"{line} Every repeat counted the same: alpha and the other counters vary over {_listed(varies[:-1])} alone."


def same_text(measurement: Mapping[str, Any]) -> str:
    """How many runs yielded plain decoding's tokens, and where the others left them, in one line."""
    compared = [sample for sample in measurement["samples"] if sample["same_as_ar"] is not None]
    differing = [sample for sample in compared if not sample["same_as_ar"] or sample["explained"] is False]
    given = given_alpha(measurement) is not None
    what = "Same tokens as AR, simulated acceptance apart" if given else "Same tokens as AR"
    if not compared:
        return f"{what}: not compared."
    checked = ""
    if measurement["workload"]["ar"] == "sampled":
        tokens = sum(sample["compared_tokens"] for sample in compared)
        checked = f" in the {tokens:,} tokens where AR was sampled, every text audited"
    if not differing:
        return f"{what}{checked}: {'all' if len(compared) > 1 else 'the'} {_runs(len(compared))}."
    places = [
        f"{method_name(sample['method'])} (prompt {sample['prompt']}, prefill {sample['prefill']:,}, "
        f"seed {sample['seed']}, {_how(sample)})"
        for sample in differing[:_MOST_DIFFERENCES]
    ]
    more = len(differing) - len(places)
    rest = f"; and {more} more" if more else ""
    same = f"{len(compared) - len(differing)} of {_runs(len(compared))}"
    return f"{what}{checked}: {same}. Not: {'; '.join(places)}{rest}."


def _acceptance(measurement: Mapping[str, Any], cells: Sequence[Cell], published: Sequence[PublishedRow]) -> Grid:
    by_key = {cell.key: cell for cell in cells}
    methods = _methods(cells)
    drafting = {method for method in methods if method not in DRAFTLESS}
    label = _label(measurement, published)
    columns = [*label[:1], "prefill", "length"]
    for method in methods:
        name = method_name(method, *marks(measurement["simulated"]))
        columns += [f"{name} {figure}" for figure in (["alpha", "x"] if method in drafting else ["x"])]
    rows = []
    for place in _places(cells):
        mine = [by_key.get((method, *place)) for method in methods]
        rows.append([*label[1:], *_place(place)])
        for method, cell in zip(methods, mine, strict=True):
            rows[-1] += [_spread(cell, "alpha", 3)] if method in drafting else []
            rows[-1] += [_spread(cell, "speedup", 2)]
        beside = [row for row in published if (row.prefill, row.length) == place and row.method in methods]
        for name in dict.fromkeys(row.source for row in beside):
            theirs = {row.method: row for row in beside if row.source == name}
            rows.append([name, *_place(place)])
            for method in methods:
                both = _published(theirs[method]) if method in theirs else [NOTHING, NOTHING]
                rows[-1] += both if method in drafting else both[1:]
    notes = ["alpha: accepted draft tokens / most that could be. x: AR's time / the method's, prefill apart."]
    notes += _depths(measurement, [method for method in methods if method in drafting], paper=bool(published))
    title = f"Acceptance rate and speedup: {source(measurement)}"
    return Grid(title, columns, rows, left=1 if label else 0, notes=notes)


def _times(measurement: Mapping[str, Any], cells: Sequence[Cell], published: Sequence[PublishedRow]) -> Grid:
    plain = {cell.key[1:]: cell for cell in cells if cell.method == BASELINE}
    roofline = any(cell.figures["of_floor"].n for cell in cells)
    label = _label(measurement, published)
    rows = []
    for method in _methods(cells):
        for cell in (cell for cell in cells if cell.method == method):
            place = cell.prefill, cell.length
            ar, own = (cell.figures[name].mean for name in ("ar_seconds", "seconds"))
            rows.append(
                [
                    method_name(method, *marks(measurement["simulated"])),
                    *label[1:],
                    *_place(place),
                    NOTHING if method in DRAFTLESS else _spread(cell, "alpha", 3),
                    _spread(cell, "speedup", 2),
                    _marked(duration(ar), place in plain and plain[place].estimated and ar is not None),
                    _marked(duration(own), cell.estimated),
                    NOTHING if ar is None or own is None else duration(own - ar),
                    *([_spread(each, "of_floor", 2) for each in (plain.get(place), cell)] if roofline else []),
                ]
            )
            for row in published:
                if row.method == method and (row.prefill, row.length) == place and row.seconds and row.ar_seconds:
                    rows.append(
                        [
                            row.published_method,
                            row.source,
                            *_place(place),
                            *_published(row),
                            duration(row.ar_seconds),
                            duration(row.seconds),
                            duration(row.seconds - row.ar_seconds),
                            *([NOTHING, NOTHING] if roofline else []),
                        ]
                    )
    columns = ["method", *label[:1], "prefill", "length", "alpha", "x", "T_AR", "T_method", "delta"]
    columns += ["T_AR / floor", "T_method / floor"] if roofline else []
    title = f"Decoding time: {source(measurement)}"
    return Grid(title, columns, rows, left=2 if label else 1, notes=_notes(measurement, cells, published))


def _depths(measurement: Mapping[str, Any], methods: Sequence[str], paper: bool) -> list[str]:
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


def _notes(measurement: Mapping[str, Any], cells: Sequence[Cell], published: Sequence[PublishedRow]) -> list[str]:
    """What holds for both tables, below the second."""
    if not cells:
        return ["Nothing was measured: no length was reached."]
    notes = [runs(cells), same_text(measurement)]
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
        matched = any((row.method, row.prefill, row.length) in keys for row in published)
        notes.append(CAUTION if matched else "The paper has no row of these methods, prefills and lengths.")
    return notes


def _methods(cells: Iterable[Cell]) -> list[str]:
    """All but plain decoding, which the others are compared with; alone, it is shown."""
    return [method for method in dict.fromkeys(cell.method for cell in cells) if method != BASELINE] or [BASELINE]


def _places(cells: Iterable[Cell]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((cell.prefill, cell.length) for cell in cells))


def _place(place: tuple[int, int]) -> list[str]:
    return [f"{number:,}" for number in place]


def _label(measurement: Mapping[str, Any], published: Sequence[PublishedRow]) -> list[str]:
    """Head and text of the column that says where a row comes from; nothing where all are from one place."""
    simulated = " (simulated)" if measurement["simulated"] else ""
    label = ["source", f"{measurement['workload']['model']}, this machine{simulated}"]
    return label if published or simulated else []


def _spread(cell: Cell | None, name: str, digits: int) -> str:
    return NOTHING if cell is None else with_spread(cell.figures[name].mean, cell.figures[name].std, digits)


def _published(row: PublishedRow) -> list[str]:
    return [with_spread(row.alpha, row.alpha_std, 2), with_spread(row.speedup, row.speedup_std, 2)]


def _marked(text: str, estimated: bool) -> str:
    return f"{text} est." if estimated else text


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _how(sample: Mapping[str, Any]) -> str:
    if sample["first_difference"] is None:
        return "its audit finds violations"
    return f"from token {sample['first_difference']}, {'rounding' if sample['explained'] else 'NOT rounding'}"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _runs(count: int) -> str:
    return f"{count} {_plural(count, 'run')}"
