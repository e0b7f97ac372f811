"""Errors that are the user's to mend: one line, the option named, exit code 2."""

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


def renamed(error: InputError, options: Mapping[str, str]) -> InputError:
    """The same error, its option called as the command at hand calls it."""
    name = options.get(error.option or "")
    return InputError(str(error).removeprefix(f"{error.option}: "), name) if name else error
