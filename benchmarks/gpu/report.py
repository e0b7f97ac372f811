"""``gpu.md`` and the plot of a run."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.passes import COMPILED
from benchmarks.gpu.targets import STEP, verdicts
from tswift.benchmarking.grid import NOTHING, Grid, duration, quantity
from tswift.benchmarking.measurement import machine

TESTS = "gpu-tests.xml"  # what make gpu has pytest write
PLOT = "floor.png"
_DRY = "**A dry run: tiny shapes, which say nothing about any machine.**\n"


def markdown(content: Mapping[str, Any]) -> str:
    """Everything in tables, the targets first."""
    dry = " (dry run)" if content["dry"] else ""
    grids = [
        _targets(content),
        *(_passes(content, name, mode) for name in content["passes"] for mode in _modes(content, name)),
        _preparing(content),
        _loop(content),
        _peer(content),
        *(_text(content, name) for name in content["texts"]),
        _tests(content),
        _sections(content),
        Grid(
            "Left out",
            ["what", "why"],
            [[each["what"], each["why"]] for each in content["left_out"]] or [["nothing", ""]],
            left=2,
        ),
        _about(content),
    ]
    command = f"```sh\n{shlex.join(content['command'])}\n```\n"
    title = f"# tswift on {machine(content['environment'])}{dry}\n"
    return "\n".join([title, *([_DRY] if dry else []), *(grid.markdown() for grid in grids if grid), command])


def _targets(content: Mapping[str, Any]) -> Grid:
    return Grid(
        "Targets",
        ["target", "where", "limit", "measured", "verdict"],
        [verdict.cells for verdict in verdicts(content)],
        left=5,
        notes=[
            "Of 7B to 14B parameters on one H200. Floors are told for the bandwidth measured in this run. The host's "
            "share is a step's wall time less the time in which the device had something to do."
        ],
    )


def _modes(content: Mapping[str, Any], name: str) -> list[str]:
    return list(dict.fromkeys(cell["mode"] for cell in content["passes"][name]["cells"]))


def _passes(content: Mapping[str, Any], name: str, mode: str) -> Grid:
    """Contexts against nodes: milliseconds, the floor and the ratio; the draft pass last."""
    cells = [cell for cell in content["passes"][name]["cells"] if cell["mode"] == mode]
    known = list(cells[0]["floors"])
    rows = [
        [
            f"{cell['context']:,}" if cell["pass"] == "verify" else f"{cell['context']:,}, draft pass",
            str(cell["nodes"]),
            _ms(cell["median"]),
            *(text for by in known for text in (_ms(cell["floors"][by]), f"{cell['median'] / cell['floors'][by]:.2f}")),
        ]
        for cell in cells
    ]
    about = content["passes"][name]
    layers = COMPILED if mode == COMPILED else about["layers"]
    published = f" Published: {content['published']['name']}." if content["published"] else ""
    columns = ["context", "nodes", "ms", *(text for by in known for text in (f"floor, {by}, ms", "x"))]
    note = (
        f"{about['dtype']}, {about['attention']} attention, layers {layers}, random weights; a pass and its "
        f"logits, device time, median of {len(cells[0]['seconds'])}.{published}"
    )
    return Grid(f"Passes: {name}, {mode}", columns, rows, left=1, notes=[note])


def _preparing(content: Mapping[str, Any]) -> Grid | None:
    rows = [
        [
            name,
            f"{found['load_seconds']:.1f}",
            ", ".join(f"{seconds:.1f} ({mode})" for mode, seconds in found["prepare_seconds"].items()),
            found["compile_refused"] or _one_digit(found["compile_seconds"]),
        ]
        for name, found in content["passes"].items()
    ]
    columns = ["shape", "loading, s", "preparing passes, s", "compiling layers, s"]
    notes = ["Loading: random weights and caches. Preparing: kernels compiled and graphs captured."]
    return Grid("Before the first token", columns, rows, left=1, notes=notes) if rows else None


def _loop(content: Mapping[str, Any]) -> Grid | None:
    found = content["loop"]
    if not found:
        return None
    rows = [
        [
            f"{method} (simulated, alpha {each['simulated_alpha']:g})" if each["simulated_alpha"] else method,
            _ms(each["median"]),
            ", ".join(f"{name} {_ms(seconds)}" for name, seconds in each["passes"].items()),
            _ms(each["beyond_passes"]),
            _ms(each["busy"]),
            _ms(each["beyond_device"]),
            f"{each['nodes']:.0f}",
            f"{each['tokens_per_step']:.2f}",
        ]
        for method, each in found["methods"].items()
    ]
    columns = ["method", "step, ms", "passes, ms", "beyond them", "device busy", "beyond it", "nodes", "tokens/step"]
    title = f"Steps of the loop: {found['shape']} at {found['context']:,} tokens"
    notes = ["Beyond the passes: drafting heads, sampling, caches and the host. Beyond the device: the host alone."]
    return Grid(title, columns, rows, left=1, notes=notes)


def _peer(content: Mapping[str, Any]) -> Grid | None:
    found = content["peer"]
    if not found:
        return None
    theirs = found["theirs"]
    rows = [["tswift AR", _ms(found["ours"]), "1.00"]]
    notes = ["Greedy, batch 1; x: seconds per token over ours. generate reads its prompt, ours stands there by hand."]
    if theirs:
        compiled = "compiled" if theirs["compiled"] else "not compiled"
        rows.append(
            [
                f"transformers generate, static cache, {theirs['attention']}, {compiled}",
                _ms(theirs["per_token"]),
                NOTHING if found["x"] is None else f"{found['x']:.2f}",
            ]
        )
        notes.append(
            f"generate's first token came after {theirs['first_token_seconds']:.1f} s, the second "
            f"{theirs['second_token_seconds']:.1f} s later."
        )
    title = f"Peer: {found['shape']} at {found['context']:,} tokens"
    return Grid(title, ["what", "ms per token", "x"], rows, left=1, notes=notes)


def _text(content: Mapping[str, Any], name: str) -> Grid:
    found = content["texts"][name]
    simulated = f" (simulated, alpha {found['alpha']:g})" if found["simulated"] else ""
    rows = [
        [
            f"{point['len']:,}",
            duration(point["ar_seconds"]),
            duration(point["seconds"]),
            f"{point['speedup']:.2f}",
            f"{point['alpha']:.3f}",
            f"{point['tokens_per_step']:.2f}",
            f"{point['tokens_per_second']:,.1f}",
            NOTHING if point["of_floor"] is None else f"{point['of_floor']:.2f}",
        ]
        for point in found["points"]
    ]
    columns = ["generated", "AR, est.", "tokenswift", "x", "alpha", "tokens/step", "tokens/s", "of floor"]
    audit = {True: "its audit finds nothing but rounding", False: "its AUDIT FAILS", None: "not audited"}
    notes = [
        f"{found['dtype']}, prompt of {found['prefill']:,} tokens, {found['state']} at {found['tokens']:,} tokens, "
        f"{audit[found['explained']]}. AR estimated from sampled steps. All of it in {name}/."
    ]
    return Grid(f"To {max(content['scale']['lens']):,} tokens: {found['model']}{simulated}", columns, rows, notes=notes)


def _tests(content: Mapping[str, Any]) -> Grid | None:
    found = content["tests"]
    if not found:
        return None
    rows = [[name, str(value)] for name, value in found.items() if name != "failed"]
    return Grid("GPU tests", ["what", "value"], rows, left=1, notes=[f"failed: {name}" for name in found["failed"]])


def _sections(content: Mapping[str, Any]) -> Grid:
    rows = [[each["name"], each["state"], f"{each['seconds']:.1f}"] for each in content["sections"]]
    return Grid("Sections", ["section", "state", "seconds"], rows, left=2)


def _about(content: Mapping[str, Any]) -> Grid:
    rates = {
        name: f"{quantity(each['bandwidth'], 'B/s')}, {quantity(each['flops'], 'FLOP/s')}"
        for name, each in (("rates, measured", content["machine"]), ("rates, published", content["published"]))
        if each
    }
    rows = {"started": content["started"], "ended": content["ended"], **rates, **content["environment"]}
    shown = [[name, "none" if value is None else str(value)] for name, value in rows.items()]
    return Grid("Environment", ["what", "value"], shown, left=2)


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.3f}"


def _one_digit(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def test_results(folder: Path) -> dict[str, Any] | None:
    """What pytest has left in the folder; None if nothing."""
    try:
        root = ElementTree.parse(folder / TESTS).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    suites = list(root.iter("testsuite"))
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    bad = [case for case in root.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    return {**counts, "seconds": round(seconds, 1), "failed": [str(case.get("name")) for case in bad]}


def floor_plot(content: Mapping[str, Any]) -> bytes | None:
    """Time over floor against context, a panel per shape, a line per number of nodes; None without any figure."""
    shapes = [(name, mode) for name in content["passes"] for mode in _modes(content, name)]
    if not shapes:
        return None
    from matplotlib.figure import Figure

    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows + 0.8), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes, (name, mode) in zip(panels, shapes, strict=False):
        _panel(axes, [cell for cell in content["passes"][name]["cells"] if cell["mode"] == mode], content)
        axes.set_title(f"{name}, {mode}", fontsize=10)
    for axes in panels[len(shapes) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False)
    dry = ", dry run" if content["dry"] else ""
    figure.suptitle(f"A pass over its floor: {machine(content['environment'])}{dry}, {content['started'][:10]}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _panel(axes: Any, cells: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> None:
    styles = (("#000000", "o"), ("#0072B2", "s"), ("#D55E00", "^"))
    for nodes, (color, marker) in zip(content["scale"]["nodes"], styles, strict=False):
        mine = [cell for cell in cells if cell["pass"] == "verify" and cell["nodes"] == nodes]
        ratios = [cell["median"] / cell["floors"]["measured"] for cell in mine]
        axes.plot(
            [cell["context"] for cell in mine],
            ratios,
            color=color,
            marker=marker,
            label=f"{nodes} node{'s' * (nodes > 1)}",
        )
    axes.axhline(1, color="#999999", linewidth=1)
    axes.axhline(STEP, color="#999999", linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("time / floor")
