"""``tswift env``: the machine, the software, and what passes over a model cost here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.cli import options

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid
    from tswift.models.passes import PassCosts

_KEYS = (100, 4_096, 25_000, 100_000)


def env(
    context: typer.Context,
    measure: Annotated[bool, typer.Option("--measure", help="Measure anew what passes cost.")] = False,
    heads: options.HeadsFile = None,
    model: options.Model = "demo",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    json_file: options.Json = None,
) -> None:
    """Print the machine, the software, and what passes over a model cost here, by which --tree auto chooses.

    Measured once for a model, and remembered.
    """
    from tswift.benchmarking.grid import NOTHING, Grid
    from tswift.cli import records, tables
    from tswift.decoding.costs import costs_of, folder
    from tswift.decoding.params import SamplingParams
    from tswift.decoding.trust import try_steps
    from tswift.jobs.environment import environment
    from tswift.models.loading import load

    record = records.writable(json_file)
    loaded = load(model, device=device, dtype=dtype, attention=attention, heads=heads)
    if loaded.target.device.type == "cuda":  # what is said of it is what was seen
        try_steps(loaded.target, SamplingParams())
    found = environment(loaded.target.device)
    costs = costs_of(loaded.target, loaded.heads, again=measure)
    if record is None or record.path:
        rows = [[name.replace("_", " "), NOTHING if value is None else str(value)] for name, value in found.items()]
        tables.show(Grid("environment", ["what", ""], rows, left=2))
        tables.show(_grid(loaded.about(), costs, str(folder())))
    if record:
        from dataclasses import asdict

        about = {"environment": found, "model": loaded.about(), "costs": asdict(costs)}
        record.write({"kind": "env", "command": context.obj, **about})


def _grid(about: dict[str, Any], costs: PassCosts, folder: str) -> Grid:
    from tswift.benchmarking.grid import Grid

    rows = [[str(nodes), *(f"{1e3 * costs.seconds(nodes, keys):.2f}" for keys in _KEYS)] for nodes in costs.nodes]
    notes = [f"a level of heads takes {1e3 * costs.level:.2f} ms"] if costs.level else []
    model = "{name}, {device}, {dtype}, attention {attention}, layers {layers}".format(**about)
    return Grid(
        f"{model}: ms of a pass, by keys that it attends to",
        ["nodes", *(f"{keys:,}" for keys in _KEYS)],
        rows,
        notes=[*notes, f"remembered in {folder}; --measure measures anew"],
    )
