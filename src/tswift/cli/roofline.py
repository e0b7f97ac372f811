"""``tswift roofline``: what to expect of a model on a machine before anything is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.cli import options
from tswift.errors import InputError

if TYPE_CHECKING:
    from tswift.benchmarking.roofline import Machine

_MACHINE, _DECODE = "Machine", "Prediction"
_HERE = "here"
_MEASURED = ("cpu", "cuda")
_SLOWEST, _FASTEST = 1e-9, 1e9  # of any machine, in GB/s or TFLOP/s


def roofline(
    context: typer.Context,
    model: options.ModelOrShape = "demo",
    dtype: Annotated[
        str,
        typer.Option(
            help="auto (as bench takes it: float32 on this CPU, else the model's own), float32, float64, bfloat16 or "
            "float16.",
            rich_help_panel="Model",
        ),
    ] = "auto",
    device: Annotated[
        str | None,
        options.option(
            _MACHINE, "a100-80g, h100-sxm, h200; or here, cpu, cuda, cuda:1 ...: measured. (default: here)", "--device"
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, options.option(_MACHINE, "Instead of --device: memory bandwidth in GB/s.", "--bandwidth")
    ] = None,
    flops: Annotated[
        float | None, options.option(_MACHINE, "Instead of --device: matrix products in TFLOP/s.", "--flops")
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Tokens in the KV cache. (default: 4096 to 131072, as far as the model goes)",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[str, typer.Option(help="Nodes of a pass; the most of them are the draft tree's.")] = "1,41",
    prefill: Annotated[int, typer.Option(help="Prompt tokens.", rich_help_panel=_DECODE)] = 4096,
    length: Annotated[int, typer.Option("--len", help="Generated tokens.", rich_help_panel=_DECODE)] = 100_000,
    alpha: Annotated[
        float | None, options.option(_DECODE, "Predict tokenswift at this acceptance rate.", "--alpha")
    ] = None,
    depth: Annotated[
        int | None, options.option(_DECODE, "Tokens drafted along a path, with --alpha. (default: 4)", "--depth")
    ] = None,
    budget: Annotated[
        int | None,
        options.option(_DECODE, "Tokens of the partial KV cache, with --alpha. (default: 4096)", "--budget"),
    ] = None,
    draft_weights: Annotated[
        str | None,
        options.option(
            _DECODE,
            "Also with drafting passes in int8, fp8 or int4, as generate takes it, with --alpha.",
            "--draft-weights",
        ),
    ] = None,
    json: options.Json = None,
) -> None:
    """Print the least time that a model can take: bytes, floors of passes, and of plain and TokenSwift decoding.

    Nothing is downloaded or built but the model's configuration.
    """
    of_drafts: dict[str, Any] = {"depth": depth, "budget": budget, "draft_weights": draft_weights}
    given = {name: value for name, value in of_drafts.items() if value is not None}
    if given and alpha is None:
        raise InputError("goes with --alpha", f"--{next(iter(given)).replace('_', '-')}")
    _check_machine(device, bandwidth, flops)

    import torch

    from tswift.benchmarking.roofline import RooflineQuery, predict
    from tswift.cli import records, tables
    from tswift.models.devices import find_device, find_dtype, own_dtype
    from tswift.models.hf import max_positions
    from tswift.models.shapes import PREFIX, refuse_routed, shape_of, skeleton
    from tswift.models.source import in_one_line, read_config, silence

    query = RooflineQuery(
        contexts=None if contexts is None else options.numbers(contexts, "--context"),
        nodes=options.numbers(nodes, "--nodes"),
        prefill=prefill,
        length=length,
        alpha=alpha,
        **given,
    )
    record = records.writable(json)
    config = read_config(model)
    refuse_routed(config, model)
    place = find_device("auto" if device in (None, _HERE) else str(device)) if _is_here(device, bandwidth) else None
    if dtype != "auto":
        kind = find_dtype(dtype)
    else:  # as `generate` and `bench` take it
        kind = torch.float32 if place and place.type == "cpu" and not model.startswith(PREFIX) else own_dtype(config)
    machine, where = _machine(place, device, bandwidth, flops, kind)
    with silence(), in_one_line(model):
        shape = shape_of(skeleton(config), kind.itemsize)
    found = predict(shape, machine, query, max_positions(config))
    words = str(kind).removeprefix("torch.")
    if record is None or record.path:
        for grid in found.grids(f"{model}, {words}, {where}"):
            tables.show(grid)
    if record:
        about = {"kind": "roofline", "command": context.obj, "model": model, "dtype": words, "device": where}
        record.write({**about, **found.as_dict()})


def _check_machine(device: str | None, bandwidth: float | None, flops: float | None) -> None:
    for option, value in (("--bandwidth", bandwidth), ("--flops", flops)):
        if value is not None and not value > 0:
            raise InputError(f"must be above 0, got {value}", option)
        if value is not None and not _SLOWEST <= value <= _FASTEST:
            raise InputError(f"must be between {_SLOWEST:g} and {_FASTEST:g}, got {value}", option)
        if value is not None and device is not None:
            raise InputError("is given instead of --device, not with it", option)
    if (bandwidth is None) != (flops is None):
        raise InputError("wants both", "--bandwidth and --flops")


def _is_here(device: str | None, bandwidth: float | None) -> bool:
    """Whether the machine is to be measured."""
    return bandwidth is None and (device in (None, _HERE) or str(device).split(":")[0] in _MEASURED)


def _machine(
    place: Any, device: str | None, bandwidth: float | None, flops: float | None, dtype: Any
) -> tuple[Machine, str]:
    """The machine, and what to call it."""
    from tswift.benchmarking.roofline import Machine, find_machine, measure_machine
    from tswift.benchmarking.summary import machine_name
    from tswift.jobs.environment import environment

    if bandwidth is not None and flops is not None:
        return Machine(bandwidth * 1e9, flops * 1e12), "as given"
    if place is None:
        return find_machine(str(device), str(dtype).removeprefix("torch.")), str(device)
    return measure_machine(place, dtype), f"{machine_name(environment(place))}, measured"
