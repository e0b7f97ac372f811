"""Errors that are told in one line: what the user can mend (exit code 2), and what broke on the way (exit code 1)."""

from __future__ import annotations

from collections.abc import Mapping


class InputError(ValueError):
    """Something the user gave cannot be used.

    Args:
        message: what is wrong, in one line.
        option: the option that caused it, as typed on the command line, such as ``--min-p``.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(f"{option}: {message}" if option else message)
        self.option = option


class Fault(RuntimeError):
    """Something broke while a command worked: numbers that are none, memory or disk that ran out, a folder that went.

    Args:
        message: what broke and where, in one line, and what can be done about it.
    """


def renamed(error: InputError, options: Mapping[str, str]) -> InputError:
    """The same error, its option called as the command at hand calls it."""
    name = options.get(error.option or "")
    return InputError(str(error).removeprefix(f"{error.option}: "), name) if name else error
