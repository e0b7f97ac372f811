"""``tswift heads``: what is known of heads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options

if TYPE_CHECKING:
    from tswift.models.heads_files import Description

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
    file: Annotated[Path, typer.Argument(help="A heads file, or a folder: of heads, or of a model that has some.")],
    json: options.Json = None,
) -> None:
    """Tell what a file or a folder of heads holds. Its weights are not read, and nothing is run."""
    from tswift.cli import records
    from tswift.cli.streams import visible, write_stdout
    from tswift.models.heads_files import describe

    record = records.writable(json)
    found = describe(file.expanduser())
    if record is None or record.path:
        write_stdout("".join(f"{name:<12} {visible(value)}\n" for name, value in _lines(found)))
    if record:
        record.write({"kind": "heads", "command": context.obj, "heads": asdict(found)})


def _lines(found: Description) -> list[tuple[str, str]]:
    own = "the model's" if found.vocab_size is None else f"their own, {found.vocab_size:,} tokens"
    return [
        ("file", found.path),
        ("layout", found.layout),
        ("kind", found.kind),
        ("heads", str(found.count)),
        ("hidden size", f"{found.hidden_size:,}"),
        ("LM heads", own),
        ("start from", f"the state {'before' if found.raw else 'after'} the model's final norm"),
        ("parameters", f"{found.parameters:,}"),
        ("dtype", ", ".join(found.dtypes)),
        ("base model", found.base or "not said"),
    ]
