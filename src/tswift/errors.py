"""Errors that are told in one line, what the user can mend (exit code 2) and what broke (1);
and files from outside.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ParamSpec, TypeVar

Object = dict[str, Any]  # of JSON
P = ParamSpec("P")
R = TypeVar("R")


class InputError(ValueError):
    """Something the user gave cannot be used.

    Args:
        message: what is wrong, in one line; other parameters that it names stand in backticks.
        field: the parameter that caused it, such as ``min_p``. The command line says the option:
            ``--min-p``.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__((f"{field}: {message}" if field else message).replace("`", ""))
        self.message = message
        self.field = field


class DecodeError(RuntimeError):
    """Something broke while a command worked: numbers that are none, memory or disk that ran out,
    a folder that went. It says what and where, in one line, and what can be done about it.
    """


class Notice(UserWarning):
    """What a command says in a line: something is served, and may not be what was meant.

    Args:
        message: what it is, in one line.
    """


@cache
def notice(message: str) -> None:
    """Warn by a :class:`Notice`, once a process."""
    warnings.warn(message, Notice, stacklevel=3)


class SlowWarning(Notice):
    """What is wanted works here, but slower than it could: something failed or is missing.

    Args:
        message: what it is, and what that costs if that is known, in one line.
    """


class NoFault(str):
    """A reason, in one line, why nothing faster serves here, where nothing faster was written:
    nothing is broken, and nobody is warned.
    """


TRACEBACK = "TSWIFT_TRACEBACK"  # the environment's variable that asks for tracebacks
_LONGEST_REASON = 200


def reason_of(error: BaseException) -> str:
    """The first line of what an error says; its type where that is nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]


def cause_of(error: BaseException) -> str:
    """Why something failed that can be done without, in one line: the error's first,
    and where in the package it was.

    With ``TSWIFT_TRACEBACK`` set the traceback is printed, too.
    """
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    line = reason_of(error)
    package = Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if package in Path(frame.filename).parents
    ]
    if not frames:
        return line
    return f"{line} ({Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno})"


@contextmanager
def renaming(otherwise: str | None = None, **fields: str) -> Iterator[None]:
    """Have errors be about the parameters that the caller has in the place of those that they name;
    ``otherwise`` is that of an error that names none.
    """
    try:
        yield
    except InputError as error:
        field = fields.get(error.field or "", error.field or otherwise)
        raise InputError(error.message, field) from None


def no_such(what: str, name: str, choices: Iterable[str], field: str) -> InputError:
    """The error of a name that is none of some choices."""
    known = [*choices]
    close = did_you_mean(name, known)
    return InputError(f"no {what} {name!r:.60}; there are {', '.join(known)}{close}", field)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``; did you mean X?`` for the choice that is closest to a name, or nothing if none is close;
    those that begin with it come first.
    """
    known = list(choices)
    begun = [choice for choice in known if choice.startswith(str(name))]
    close = get_close_matches(str(name), begun or known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def suggesting_names(
    function: Callable[P, R], parts: Mapping[str, type] = MappingProxyType({})
) -> Callable[P, R]:
    """The same function, whose TypeError for a keyword that it does not have says which one is
    meant, or which of its parameters is made with it: ``parts`` are the dataclasses of these.
    """
    names = [*signature(function).parameters]

    @wraps(function)
    def called(*values: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name not in names:
                message = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                for part, kind in parts.items():
                    if name in signature(kind).parameters:
                        raise TypeError(f"{message}; give {part}={kind.__name__}({name}=...)")
                raise TypeError(message + did_you_mean(name, names))
        return function(*values, **named)

    return called


def close_name(path: Path, pattern: str, names: Iterable[str]) -> str:
    """A suggestion for a path that does not exist: what lies beside it,
    or one of some names if it is a name alone.
    """
    beside: list[str] = []
    with suppress(OSError):
        beside = [match.relative_to(path.parent).parts[0] for match in path.parent.glob(pattern)]
    return did_you_mean(path.name, [*beside, *names] if path.name == str(path) else beside)


def find_path(name: str | os.PathLike[str], option: str | None = None) -> Path:
    """The path of a file or folder that the user named, whether it exists or not;
    a leading ``~`` is expanded.

    Raises:
        InputError: no file can have this name: there is no such home folder, or it is too long. It
            names ``option``.
    """
    short = str(name) if len(str(name)) <= _LONG_NAME else f"{str(name)[:_LONG_NAME]}..."
    try:
        path = Path(name).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except RuntimeError:
        raise InputError(f"{short} lies in a home folder that does not exist", option) from None
    except ValueError:  # a NUL in the name, or incomplete UTF-8
        raise InputError(f"invalid file name {short}", option) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise InputError(f"{short} cannot be accessed ({error.strerror})", option) from None
        raise InputError(f"{short} is too long ({len(str(name)):,} characters)", option) from None
    return path


MAX_RECORD = 64_000_000  # bytes of JSON that tswift itself has written

_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # what a shell puts for <(command)
_LONG_NAME = 80  # characters of a name that an error shows
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def kind_of(mode: int) -> str | None:
    """What something with this mode is, in words; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def _open_named(path: Path) -> int:
    mode = os.stat(path).st_mode
    kind = kind_of(mode)
    if kind and not (stat.S_ISFIFO(mode) and str(path).startswith(_PIPES)):
        raise OSError(0, f"it is {kind}")
    return os.open(path, os.O_RDONLY)


def read_file(
    path: Path,
    most: int,
    option: str | None = None,
    missing: str | None = None,
    opened: Callable[[Path], int] = _open_named,
) -> bytes:
    """All bytes of a file; InputError, naming ``option``, if it cannot be read,
    or has more than ``most`` bytes.

    A device or a named pipe is not opened: it might never end, or never begin. A pipe that a shell
    has opened already, as for ``<(command)``, is read. ``missing`` is the error's message if there
    is no such file. ``opened`` gives the descriptor of one in a folder of ours.
    """
    try:
        with open(opened(path), "rb") as file:
            return read_stream(file, most, str(path), option, os.fstat(file.fileno()).st_size)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(missing or f"there is no file {path}", option) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})", option) from None
    except ValueError:  # a NUL in the name, or incomplete UTF-8
        raise InputError(f"invalid file name {path}", option) from None


def read_stream(
    file: BinaryIO, most: int, name: str, option: str | None = None, size: int = 0
) -> bytes:
    """All bytes of an open file called ``name``, of at least ``size``;
    InputError if there are more than ``most``.
    """
    data = b"" if size > most else file.read(most + 1)
    if max(size, len(data)) > most:
        raise InputError(f"{name} is too large, more than {most:,} bytes are not read", option)
    return data


_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def check_text(text: str, option: str | None, name: str = "the text") -> str:
    """A text, checked to be one; ``name`` is what an error calls it."""
    if wrong := _NO_TEXT.search(text):
        what = "has NUL bytes" if wrong[0] == "\0" else "is not UTF-8"
        raise InputError(f"{name} is not text: it {what}", option)
    return text


def parse_object(data: bytes) -> Object:
    """An object of JSON from outside, in which no name stands twice, and texts are Unicode;
    ValueError, which says what is wrong with the data, if it is none.
    """

    def once(pairs: list[tuple[str, object]]) -> Object:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no number")

    try:
        text = data.decode("utf-8-sig")
        found = json.loads(text, object_pairs_hook=once, parse_constant=no_number)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError:
        raise ValueError("is not UTF-8 text, or has incomplete characters") from None
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200] or "nested too deeply"
        raise ValueError(f"is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError("is no object")
    return found


def parse_json(data: bytes, name: object, option: str | None = None) -> Any:
    """The value of JSON in UTF-8, from a file called ``name``; InputError if it is none,
    or nested too deeply.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        # no UTF-8 is a ValueError too, and so is a number of too many digits
        raise InputError(f"{name} is not JSON", option) from None
