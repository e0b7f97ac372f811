"""Errors that are told in one line: what the user can mend (exit code 2), and what broke on the way (exit code 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class InputError(ValueError):
    """Something the user gave cannot be used.

    Args:
        message: what is wrong, in one line; other parameters that it names stand in backticks.
        field: the parameter that caused it, such as ``min_p``. The command line says the option: ``--min-p``.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__((f"{field}: {message}" if field else message).replace("`", ""))
        self.message, self.field = message, field


class Fault(RuntimeError):
    """Something broke while a command worked: numbers that are none, memory or disk that ran out, a folder that went.

    Args:
        message: what broke and where, in one line, and what can be done about it.
    """


def renamed(error: InputError, fields: Mapping[str, str]) -> InputError:
    """The same error, about the parameter that the caller has in the place of the one that it names."""
    return InputError(error.message, fields.get(error.field or "", error.field))


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``; did you mean X?`` for the choice that is closest to a name, or nothing if none is close."""
    close = get_close_matches(str(name), list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
