"""Files that come from outside, read whole: if they are files, and no larger than such a file can be."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from tswift.errors import InputError

MOST_RECORD = 64_000_000  # bytes of JSON that tswift itself has written

_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # what a shell puts for <(command)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def read_file(path: Path, most: int, option: str | None = None, missing: str | None = None) -> bytes:
    """All bytes of a file.

    A device or a named pipe is not opened: it might never end, or never begin. A pipe that a shell has opened already,
    as for ``<(command)``, is read.

    Args:
        path: the file.
        most: maximum size in bytes.
        option: what the user named it with, for the error.
        missing: the error's message if there is no such file.

    Raises:
        InputError: there is no such file, it is none, it cannot be read, or it has more bytes.
    """
    try:
        status = os.stat(path)
        piped = stat.S_ISFIFO(status.st_mode) and str(path).startswith(_PIPES)
        if not (stat.S_ISREG(status.st_mode) or piped):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
            raise InputError(f"{path} cannot be read (it is {kind})", option)
        with path.open("rb") as file:
            return read_stream(file, most, str(path), option, status.st_size)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(missing or f"there is no file {path}", option) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})", option) from None
    except ValueError:  # a NUL in the name, or incomplete UTF-8
        raise InputError(f"no file can be called {path}", option) from None


def read_stream(file: BinaryIO, most: int, name: str, option: str | None = None, size: int = 0) -> bytes:
    """All bytes of an open file that is called ``name``, of at least ``size`` and at most ``most`` bytes.

    Raises:
        InputError: it has more bytes.
        OSError: it cannot be read.
    """
    data = b"" if size > most else file.read(most + 1)
    if max(size, len(data)) > most:
        raise InputError(f"{name} is too large, more than {most:,} bytes are not read", option)
    return data


def parse_json(data: bytes, name: object, option: str | None = None) -> Any:
    """The value of JSON in UTF-8, from a file that is called ``name``.

    Raises:
        InputError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # no UTF-8 is a ValueError too, and so is a number of too many digits
        raise InputError(f"{name} is not JSON", option) from None
