"""JSON that a command was asked for: to a file, or to stdout."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tswift.cli.streams import write_stdout
from tswift.errors import InputError
from tswift.jobs.files import write_whole

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """Where it goes; None for stdout."""

    path: Path | None

    def write(self, content: Mapping[str, Any]) -> None:
        """Write it, whole or not at all."""
        text = json.dumps({"schema": SCHEMA, **content}, indent=2, ensure_ascii=False, default=_plain) + "\n"
        if self.path is None:
            write_stdout(text)
            return
        write_whole(self.path, text.encode())


def writable(path: Path | None) -> Record | None:
    """A record to be written later; None if none was asked for. ``-`` is stdout.

    Raises:
        InputError: the file could not be written. Better now than after the work.
    """
    if path is None:
        return None
    if str(path) == "-":
        return Record(None)
    if path.is_dir() or not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"{path} cannot be written", "--json")
    return Record(path)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
