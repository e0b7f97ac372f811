"""What a command gives out: tables, framed on a terminal and aligned text in a pipe; and JSON, to a file or stdout."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
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
class Record:
    """Where it goes; None for stdout."""

    path: Path | None

    def write(self, content: Mapping[str, Any]) -> None:
        """Write it, whole or not at all."""
        ascii_only = self.path is None and codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
        text = json.dumps({"schema": SCHEMA, **content}, indent=2, ensure_ascii=ascii_only, default=_plain) + "\n"
        if self.path is None:
            write_stdout(text)
            return
        write_whole(self.path, text.encode(errors="backslashreplace"))  # incomplete UTF-8, as JSON writes it


def writable(path: Path | None) -> Record | None:
    """A record to be written later; None if none was asked for, an error if it could not be. ``-`` is stdout."""
    if path is None:
        return None
    if str(path) == "-":
        return Record(None)
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
    return Record(real)


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
