"""What a command gives out: tables, framed on a terminal and aligned text in a pipe; and JSON, to a file or stdout."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EACCES, ELOOP
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tswift.cli.streams import visible, write_stdout
from tswift.errors import InputError
from tswift.jobs.folder import write_whole

if TYPE_CHECKING:
    from tswift.benchmarking.table import Table

SCHEMA = 1
_STDOUT = Path("-")


def show(table: Table, stderr: bool = False) -> None:
    """Print a table."""
    # nothing that a terminal would obey
    table = dataclasses.replace(
        table,
        title=visible(table.title),
        columns=[visible(column) for column in table.columns],
        rows=[[visible(cell) for cell in row] for row in table.rows],
        notes=[visible(note) for note in table.notes],
    )
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        Console(highlight=False, stderr=stderr).print(table)
    elif stderr:
        print(table.plain(), end="", file=stream)
    else:
        write_stdout(table.plain())


@dataclass(frozen=True)
class Output:
    """Where a command's result goes: tables to stdout, and JSON to a file, or to stdout in their place."""

    json: Path | None = None

    def show(self, *tables: Table) -> None:
        """Print tables, unless JSON takes their place."""
        for table in tables if self.json != _STDOUT else ():
            show(table)

    def write(self, kind: str, command: Sequence[str], content: Mapping[str, Any]) -> None:
        """Write the JSON that was asked for, whole or not at all."""
        ascii_only = self.json == _STDOUT and codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
        record = {"schema": SCHEMA, "kind": kind, "command": command, **content}
        text = json.dumps(record, indent=2, ensure_ascii=ascii_only, default=_plain) + "\n"
        if self.json == _STDOUT:
            write_stdout(text)
        elif self.json:
            write_whole(self.json, text.encode(errors="backslashreplace"))  # incomplete UTF-8, as JSON writes it


def writable(path: Path | None) -> Output:
    """The output with JSON to this file, an error if it could not be written later. ``-`` is stdout."""
    if path is None or path == _STDOUT:
        return Output(path)
    try:
        real = path.resolve()  # what a link points at is written, and the link stays
        if real.is_symlink():  # a loop
            raise OSError(ELOOP, os.strerror(ELOOP))
        if real.exists() and not real.is_file():
            raise InputError(f"{path} is no file; - is stdout", "json")
        _try(real)
    except InputError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop, up to Python 3.12
        reason = getattr(error, "strerror", None) or os.strerror(ELOOP)
        raise InputError(f"{path} cannot be written ({reason})", "json") from None
    except ValueError:  # a NUL in the name, or incomplete UTF-8
        raise InputError(f"invalid file name {path}", "json") from None
    return Output(real)


def _try(path: Path) -> None:
    """See that a file of this name, and one beside it, can be made; what is there is left as it is.

    Raises:
        OSError: one cannot.
    """
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(EACCES, os.strerror(EACCES))
    with TemporaryFile(dir=path.parent):
        pass
    with suppress(FileNotFoundError):
        path.with_name(f"{path.name}.new").stat()  # a name that is too long


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
