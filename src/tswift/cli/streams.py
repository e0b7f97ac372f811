"""Exit codes, and output to streams: control characters are escaped; closed pipes and missing streams are handled."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

# exit codes
OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141  # nobody reads stdout any more: what a shell reports for SIGPIPE

_LONGEST_WORD = 240  # characters; a name that is longer loses its middle


def visible(text: str) -> str:
    """A text with escapes such as ``\\x1b`` for every character that is not printed but obeyed, or misleads.

    Names of files and models come from outside: a terminal must not be told by them to move its cursor, change its
    colours or turn its text round.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def one_line(message: str) -> str:
    """A message as one visible line of words, none of them endless."""
    return " ".join(_shortened(visible(word)) for word in message.split())


def complain(message: str) -> None:
    """Say on stderr what went wrong, in one line."""
    print(f"tswift: error: {one_line(message)}", file=sys.stderr)


@contextmanager
def loading(what: str, quiet: bool) -> Iterator[None]:
    """While entered, ``what`` is loaded, which takes seconds: a terminal is told so, and so is who interrupts it."""
    what = one_line(what)
    if sys.stderr is not None and sys.stderr.isatty() and not quiet:
        print(f"tswift: loading {what} ...", file=sys.stderr, flush=True)
    try:
        yield
    except KeyboardInterrupt as stop:
        if not quiet:
            print(f"tswift: {stop or 'interrupted'} while {what} was loaded; nothing was begun", file=sys.stderr)
        raise


def _shortened(word: str) -> str:
    half = _LONGEST_WORD // 2
    return word if len(word) <= _LONGEST_WORD else f"{word[:half]}...{word[-half:]}"


def write_stdout(text: str) -> None:
    """Write to stdout at once.

    Raises:
        Exit: nobody reads it any more. Typer would say 1, which here means a regression or a violation.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))  # what it has no character for
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout()
        raise typer.Exit(CLOSED_PIPE) from None


def open_closed() -> None:
    """Let a standard stream that was closed (``>&-``) lead nowhere.

    Else the next file to be opened would take its number, and libraries write there; and Python's own would be None.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if name != "stdin":  # that there is no prompt is to be said
                setattr(sys, name, open(nowhere, "w", encoding="utf-8"))  # noqa: SIM115


def abandon_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere, or Python would raise once more at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
