"""The smaller commands: ``env``, ``export-generate``, ``heads``, ``roofline`` and ``runs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

import tswift
from tswift.benchmarking.config import RooflineQuery
from tswift.cli import options
from tswift.cli.output import loading_notice
from tswift.errors import InputError
from tswift.models.config import ModelConfig
from tswift.sampling.parameters import SamplingParams

_KEYS = (100, 4_096, 25_000, 100_000)


@options.takes(ModelConfig, without=("draft_model", "drafter"))
def env(
    typed: options.Typed,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure anew what steps cost.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Make all checks of models and kernels anew.")
    ] = False,
    json_file: options.Json = None,
) -> None:
    """Print the machine, the software, and what steps of decoding cost here,
    by which --tree auto chooses.

    Measured once for a model, and remembered.
    """
    config = typed.make(ModelConfig)
    from tswift.checking import KERNELS
    from tswift.cli import output
    from tswift.decoding.device_step_check import try_steps
    from tswift.drafting.costs import costs_of, folder
    from tswift.loading.model import load_model
    from tswift.machine import environment
    from tswift.remembered import forget
    from tswift.tables import NOTHING, Table

    result = output.writable(json_file)
    if check:
        forget()
    with loading_notice(config.model, quiet=False):
        loaded = load_model(config)
    try_steps(loaded.target, SamplingParams())  # what is said of it is what was seen
    found = environment(loaded.target.device)
    costs = costs_of(loaded.target, loaded.heads, again=measure)
    rows = [
        [name.replace("_", " "), NOTHING if value is None else str(value)]
        for name, value in found.items()
    ]
    kernels = dict.fromkeys((name, said) for (name, *_), said in KERNELS.items())
    rows += [[f"kernels, {name}", said] for name, said in kernels]
    about = loaded.about()
    kv = f", KV in {about['kv_dtype']}" if "kv_dtype" in about else ""
    model = (
        f"{{name}}, {{device}}, {{dtype}}{kv}, attention {{attention}}, layers {{layers}}".format(
            **about
        )
    )
    ms = [
        [str(nodes), *(f"{1e3 * costs.seconds(nodes, keys):.2f}" for keys in _KEYS)]
        for nodes in costs.nodes
    ]
    notes = [f"a level of heads takes {1e3 * costs.level:.2f} ms"] if costs.level else []
    shares = sorted(costs.must_come_true(keys) for keys in _KEYS)
    share = f"{shares[0]:.0%} to {shares[-1]:.0%}"
    notes.append(f"a draft of one token pays where it comes true more often than {share}, by keys")
    if costs.busy:
        spread = f"repeats usually took {costs.spread:.2f} times the least"
        notes.append(
            f"measured beside other work ({spread}), so not remembered: the next run measures anew"
        )
    else:
        notes.append(f"remembered in {folder()}; --measure measures anew")
    columns = ["nodes", *(f"{keys:,}" for keys in _KEYS)]
    passes = Table(f"{model}: ms of a step, by keys that it attends to", columns, ms, notes=notes)
    result.show(Table("environment", ["what", ""], rows, left=2), passes)
    result.write("env", typed.command, {"environment": found, "model": about, "costs": costs})


heads = typer.Typer()


@heads.callback(invoke_without_command=True)
def _heads(context: typer.Context) -> None:
    """Heads that draft for a model."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit()


@heads.command()
@options.finding_paths
def inspect(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="A heads file, or a folder: of heads, of a model that has some, or of a drafter."
        ),
    ],
    json: options.Json = None,
) -> None:
    """Tell what a file or a folder of heads, or of a drafter, holds.

    Its weights are not read, and nothing is run.
    """
    from tswift.cli import output
    from tswift.speculators.heads_files import describe
    from tswift.tables import Table

    result = output.writable(json)
    found = describe(file)
    rows = [
        [_NAMES.get(name, name.replace("_", " ")), _text(value)] for name, value in found.items()
    ]
    result.show(Table(found["path"], ["what", ""], rows, left=2))
    result.write("heads", context.obj, {"heads": found})


# what a field is called where its name does not say it
_NAMES = {
    "path": "file",
    "count": "tokens drafted",
    "raw": "read the state before the final norm",
    "draft_vocab": "tokens it can guess",
    "taps": "reads states after layers",
    "mask": "filled with token",
    "markov": "biased by the token before",
    "unused": "not read",
    "base": "base model",
}


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


@options.takes(RooflineQuery)
def roofline(typed: options.Typed, json: options.Json = None) -> None:
    """Print the least time that a model can take: bytes, floors of passes, and of plain decoding.

    Nothing is downloaded or built but the model's configuration.
    """
    query = typed.make(RooflineQuery)
    from tswift.benchmarking.roofline import roofline_tables
    from tswift.cli import output

    result = output.writable(json)
    tables, content = roofline_tables(query)
    result.show(*tables)
    result.write("roofline", typed.command, content)


@options.finding_paths
def runs(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder that holds runs, or one run's. (default: ./runs)", show_default=False
        ),
    ] = None,
    json_file: options.Json = None,
) -> None:
    """List runs: state, tokens, method, model, speed.

    A killed or interrupted one goes on with generate --resume.
    """
    from tswift.cli import output
    from tswift.jobs.folder import list_runs
    from tswift.tables import NOTHING, Table

    result = output.writable(json_file)
    if folder is None:
        folder = Path("runs")
        if not folder.is_dir():
            raise InputError(
                f"there are no runs here: looked in {folder.resolve()}; name the folder that "
                "holds them"
            )
    entries = list_runs(folder)
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
    columns = ["run", "state", "method", "model", "started", "tokens", "of", "tokens/s"]
    reasons = [f"{entry.path.name}: {entry.reason}" for entry in entries if entry.reason]
    title = f"{len(entries):,} run{'' if len(entries) == 1 else 's'} in {folder}"
    result.show(Table(title, columns, rows, left=5, notes=reasons))
    result.write("runs", context.obj, {"runs": entries})


_GENERATE = '''"""Decode by tswift.

``model.generate(..., custom_generate=FOLDER, trust_remote_code=True)``
"""

from tswift.custom_generate import generate

__all__ = ["generate"]
'''


@options.finding_paths
def export_generate(
    folder: Annotated[
        Path,
        typer.Argument(
            help="custom_generate/ is written there; a model's own folder has it used by default."
        ),
    ],
) -> None:
    """Write the folder by which generate of a transformers model decodes with tswift."""
    from tswift.cli.output import write_stdout
    from tswift.files import write_whole

    files = {"generate.py": _GENERATE, "requirements.txt": f"tswift>={tswift.__version__}\n"}
    # of any version of tswift
    own = {"generate.py": re.escape(_GENERATE), "requirements.txt": r"tswift>=[\w.+]+\n"}
    inside = folder / "custom_generate"
    for name in files:
        path = inside / name
        if path.exists() and not re.fullmatch(
            own[name], path.read_text(encoding="utf-8", errors="replace")
        ):
            raise InputError(
                f"{path} is there already, and not as tswift writes it; name another folder"
            )
    try:
        inside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{inside} cannot be made ({error.strerror})") from None
    for name, text in files.items():
        write_whole(inside / name, text.encode())
    write_stdout(
        f"model.generate(..., custom_generate={str(folder)!r}, trust_remote_code=True) decodes "
        "with tswift\n"
    )
