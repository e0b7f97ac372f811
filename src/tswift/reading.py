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


def read_file(path: Path, most: int, option: str | None = None, missing: str | None = None) -> bytes:
    """All bytes of a file.

    A device or a named pipe is not opened: it might never end, or never begin. A pipe that a shell has opened already,
    as for ``<(command)``, is read.

    Args:
        path: the file.
        most: bytes that it may have.
        option: what the user gave it with, for the error.
        missing: what to say if it is not there, if not just that.

    Raises:
        InputError: there is no such file, it is none, it cannot be read, or it has more bytes.
    """
    try:
        status = os.stat(path)
        piped = stat.S_ISFIFO(status.st_mode) and str(path).startswith(_PIPES)
        if not (stat.S_ISREG(status.st_mode) or piped):
            raise InputError(f"{path} cannot be read (it is {_kind(status.st_mode)})", option)
        if status.st_size > most:
            raise _too_large(path, most, option)
        with path.open("rb") as file:
            return read_stream(file, most, str(path), option)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(missing or f"there is no file {path}", option) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})", option) from None
    except ValueError:  # a NUL in the name, or half a character
        raise InputError(f"no file can be called {path}", option) from None


def read_stream(file: BinaryIO, most: int, name: str, option: str | None = None) -> bytes:
    """All bytes of an open file.

    Args:
        file: read to its end, or until it is too much.
        most: bytes that it may have.
        name: what to call it in the error.
        option: what the user gave it with, for the error.

    Raises:
        InputError: it has more bytes.
        OSError: it cannot be read.
    """
    data = file.read(most + 1)
    if len(data) > most:
        raise _too_large(name, most, option)
    return data


def parse_json(data: bytes, name: object, option: str | None = None) -> Any:
    """What JSON says.

    Args:
        data: UTF-8.
        name: what to call it in the error.
        option: what the user gave it with, for the error.

    Raises:
        InputError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # no UTF-8 is a ValueError too, and so is a number of too many digits
        raise InputError(f"{name} is not JSON", option) from None


def _too_large(name: object, most: int, option: str | None) -> InputError:
    return InputError(f"{name} is too large, more than {most:,} bytes are not read", option)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a named pipe" if stat.S_ISFIFO(mode) else "a device" if stat.S_ISCHR(mode) else "no file"
