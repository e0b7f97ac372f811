"""The smaller commands: ``env``, ``export-generate``, ``heads``, ``roofline`` and ``runs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tswift
from tswift.cli import options
from tswift.errors import InputError
from tswift.models.config import ModelConfig
from tswift.options import parse_numbers

if TYPE_CHECKING:
    from tswift.benchmarking.roofline import Machine
    from tswift.benchmarking.table import Table
    from tswift.jobs.folder import Entry
    from tswift.models.passes import PassCosts


_KEYS = (100, 4_096, 25_000, 100_000)


@options.takes(ModelConfig, without=("draft_model", "drafter", "draft_weights"))
def env(
    typed: options.Typed,
    measure: Annotated[bool, typer.Option("--measure", help="Measure anew what passes cost.")] = False,
    json_file: options.Json = None,
) -> None:
    """Print the machine, the software, and what passes over a model cost here, by which --tree auto chooses.

    Measured once for a model, and remembered.
    """
    typed.make(ModelConfig)
    from tswift.benchmarking.table import NOTHING, Table
    from tswift.cli import output
    from tswift.decoding.costs import costs_of, folder
    from tswift.decoding.device_step import try_steps
    from tswift.decoding.params import SamplingParams
    from tswift.jobs.environment import environment
    from tswift.models.load import load

    record = output.writable(json_file)
    loaded = load(**typed.of(ModelConfig))
    if loaded.target.device.type == "cuda":  # what is said of it is what was seen
        try_steps(loaded.target, SamplingParams())
    found = environment(loaded.target.device)
    costs = costs_of(loaded.target, loaded.heads, again=measure)
    if record is None or record.path:
        rows = [[name.replace("_", " "), NOTHING if value is None else str(value)] for name, value in found.items()]
        output.show(Table("environment", ["what", ""], rows, left=2))
        output.show(_grid(loaded.about(), costs, str(folder())))
    if record:
        from dataclasses import asdict

        about = {"environment": found, "model": loaded.about(), "costs": asdict(costs)}
        record.write({"kind": "env", "command": typed.command, **about})


def _grid(about: dict[str, Any], costs: PassCosts, folder: str) -> Table:
    from tswift.benchmarking.table import Table

    rows = [[str(nodes), *(f"{1e3 * costs.seconds(nodes, keys):.2f}" for keys in _KEYS)] for nodes in costs.nodes]
    notes = [f"a level of heads takes {1e3 * costs.level:.2f} ms"] if costs.level else []
    kv = f", KV in {about['kv_dtype']}" if "kv_dtype" in about else ""
    model = f"{{name}}, {{device}}, {{dtype}}{kv}, attention {{attention}}, layers {{layers}}".format(**about)
    return Table(
        f"{model}: ms of a pass, by keys that it attends to",
        ["nodes", *(f"{keys:,}" for keys in _KEYS)],
        rows,
        notes=[*notes, f"remembered in {folder}; --measure measures anew"],
    )


heads = typer.Typer()


@heads.callback(invoke_without_command=True)
def _heads(context: typer.Context) -> None:
    """Heads that draft for a model."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit()


@heads.command()
def inspect(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="A heads file, or a folder: of heads, of a model that has some, or of a drafter.")
    ],
    json: options.Json = None,
) -> None:
    """Tell what a file or a folder of heads, or of a drafter, holds. Its weights are not read, and nothing is run."""
    from tswift.cli import output
    from tswift.cli.streams import visible, write_stdout
    from tswift.models.heads_io import describe

    record = output.writable(json)
    found = describe(file.expanduser())
    if record is None or record.path:
        write_stdout("".join(f"{name:<12} {visible(value)}\n" for name, value in _lines(found)))
    if record:
        record.write({"kind": "heads", "command": context.obj, "heads": found})


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    if "taps" in found:
        return _drafter_lines(found)
    own = "the model's" if found["vocab_size"] is None else f"their own, {found['vocab_size']:,} tokens"
    return [
        ("file", found["path"]),
        ("layout", found["layout"]),
        ("kind", found["kind"]),
        ("heads", str(found["count"])),
        ("hidden size", f"{found['hidden_size']:,}"),
        ("LM heads", own),
        ("start from", f"the state {'before' if found['raw'] else 'after'} the model's final norm"),
        ("parameters", f"{found['parameters']:,}"),
        ("dtype", ", ".join(found["dtypes"])),
        ("base model", found["base"] or "not said"),
    ]


def _drafter_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    taps = "1, N/2 - 1 and N - 4" if found["taps"] is None else ", ".join(map(str, found["taps"]))
    guessed = "all" if found["draft_vocab"] == found["vocab_size"] else f"{found['draft_vocab']:,}"
    before = f"biases the next ({found['markov']})" if found["markov"] else "is not known to the next"
    block = [("block", f"{found['block']} tokens, filled with token {found['mask']}"), ("token before", before)]
    return [
        ("file", found["path"]),
        ("layout", found["layout"]),
        ("kind", found["kind"]),
        ("drafts", f"{found['count']} tokens"),
        ("layers", str(found["layers"])),
        ("hidden size", f"{found['hidden_size']:,}"),
        ("vocabulary", f"{found['vocab_size']:,}, {guessed} of which it can guess"),
        ("reads", f"states after the model's layers {taps} (from 0)"),
        *(block if found["block"] else ()),
        ("parameters", f"{found['parameters']:,}"),
        ("dtype", ", ".join(found["dtypes"])),
        *([("not read", ", ".join(found["unused"]))] if found["unused"] else ()),
    ]


_MACHINE, _DECODE = "Machine", "Prediction"
_HERE = "here"
_MEASURED = ("cpu", "cuda")
_SLOWEST, _FASTEST = 1e-9, 1e9  # of any machine, in GB/s or TFLOP/s


def roofline(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="demo, a folder, a hub id, or shape:NAME: a published model's shape (llama3.1-8b, "
            "yarn-llama2-7b-128k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-14b, qwen3-4b, qwen3-8b, qwen3-14b).",
            rich_help_panel="Model",
        ),
    ] = "demo",
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
    drafter: Annotated[
        str | None,
        options.option(
            _DECODE,
            "Also with a published drafter: a folder or a hub id, for a shape dspark, dflash or eagle3; with --alpha.",
            "--drafter",
        ),
    ] = None,
    json: options.Json = None,
) -> None:
    """Print the least time that a model can take: bytes, floors of passes, and of plain and TokenSwift decoding.

    Nothing is downloaded or built but the model's configuration.
    """
    of_drafts: dict[str, Any] = {"depth": depth, "budget": budget, "draft_weights": draft_weights}
    given = {name: value for name, value in of_drafts.items() if value is not None}
    if (given or drafter) and alpha is None:
        raise InputError("goes with --alpha", next(iter(given), "drafter"))
    _check_machine(device, bandwidth, flops)

    import torch

    from tswift.benchmarking.roofline import RooflineQuery, predict, tables
    from tswift.cli import output
    from tswift.models.checkpoint import in_one_line, read_config, silence
    from tswift.models.devices import find_device, find_dtype, kv_dtype_for, own_dtype
    from tswift.models.drafters_io import drafter_of
    from tswift.models.hf import max_positions
    from tswift.models.shapes import PREFIX, refuse_routed, shape_of, skeleton

    query = RooflineQuery(
        contexts=None if contexts is None else _numbers(contexts, "context"),
        nodes=_numbers(nodes, "nodes"),
        prefill=prefill,
        length=length,
        alpha=alpha,
        **given,
    )
    record = output.writable(json)
    config = read_config(model)
    refuse_routed(config, model)
    place = find_device("auto" if device in (None, _HERE) else str(device)) if _is_here(device, bandwidth) else None
    if dtype != "auto":
        kind = find_dtype(dtype)
    else:  # as `generate` and `bench` take it
        kind = torch.float32 if place and place.type == "cpu" and not model.startswith(PREFIX) else own_dtype(config)
    machine, where = _machine(place, device, bandwidth, flops, kind)
    with silence(), in_one_line(model):
        own = kv_dtype_for("auto", kind, place or torch.device("cuda"), model)
        shape = shape_of(skeleton(config), kind.itemsize, own.itemsize)
    network = None if drafter is None else drafter_of(drafter, config, model.startswith(PREFIX)).spec
    found = predict(shape, machine, query, max_positions(config), network)
    words = str(kind).removeprefix("torch.")
    if record is None or record.path:
        for table in tables(shape, machine, found, f"{model}, {words}, {where}"):
            output.show(table)
    if record:
        about = {"kind": "roofline", "command": context.obj, "model": model, "dtype": words, "device": where}
        record.write({**about, **found})


def _numbers(text: str, field: str) -> tuple[int, ...]:
    try:
        return parse_numbers(text)
    except InputError as error:
        raise InputError(error.message, field) from None


def _check_machine(device: str | None, bandwidth: float | None, flops: float | None) -> None:
    for option, value in (("bandwidth", bandwidth), ("flops", flops)):
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


def runs(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder that holds runs, or one run's. (default: ./runs)", show_default=False),
    ] = None,
    json_file: options.Json = None,
) -> None:
    """List runs: state, tokens, method, model, speed. A killed or interrupted one goes on with generate --resume."""
    from tswift.cli import output
    from tswift.jobs.folder import list_runs

    record = output.writable(json_file)
    if folder is None:
        folder = Path("runs")
        if not folder.is_dir():
            raise InputError(f"there are no runs here: looked in {folder.resolve()}; name the folder that holds them")
    entries = list_runs(folder)
    if record is None or record.path:
        output.show(_runs_grid(folder, entries))
    if record:
        record.write({"kind": "runs", "command": context.obj, "runs": entries})


def _runs_grid(folder: Path, entries: list[Entry]) -> Table:
    from tswift.benchmarking.table import NOTHING, Table

    columns = ["run", "state", "method", "model", "started", "tokens", "of", "tokens/s"]
    rows = [
        [
            str(entry.path.name or entry.path),
            entry.state,
            entry.method or NOTHING,
            entry.model or NOTHING,
            (entry.started or NOTHING).replace("+00:00", "Z"),
            f"{entry.tokens:,}",
            NOTHING if entry.length is None else f"{entry.length:,}",
            NOTHING if entry.tokens_per_second is None else f"{entry.tokens_per_second:,.1f}",
        ]
        for entry in entries
    ]
    reasons = [f"{entry.path.name}: {entry.reason}" for entry in entries if entry.reason]
    many = "" if len(entries) == 1 else "s"
    return Table(f"{len(entries):,} run{many} in {folder}", columns, rows, left=5, notes=reasons)


_GENERATE = '''"""Decode by tswift: ``model.generate(..., custom_generate=FOLDER, trust_remote_code=True)``."""

from tswift.custom_generate import generate

__all__ = ["generate"]
'''


def export_generate(
    folder: Annotated[
        Path, typer.Argument(help="custom_generate/ is written there; a model's own folder has it used by default.")
    ],
) -> None:
    """Write the folder by which generate of a transformers model decodes with tswift."""
    from tswift.cli.streams import write_stdout
    from tswift.jobs.folder import write_whole

    files = {"generate.py": _GENERATE, "requirements.txt": f"tswift>={tswift.__version__}\n"}
    own = {"generate.py": re.escape(_GENERATE), "requirements.txt": r"tswift>=[\w.+]+\n"}  # of any version of tswift
    inside = folder.expanduser() / "custom_generate"
    for name in files:
        path = inside / name
        if path.exists() and not re.fullmatch(own[name], path.read_text(encoding="utf-8", errors="replace")):
            raise InputError(f"{path} is there already, and not as tswift writes it; name another folder")
    try:
        inside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{inside} cannot be made ({error.strerror})") from None
    for name, text in files.items():
        write_whole(inside / name, text.encode())
    write_stdout(f"model.generate(..., custom_generate={str(folder)!r}, trust_remote_code=True) decodes with tswift\n")
