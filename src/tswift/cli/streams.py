"""What happens to stdout when nobody reads it any more."""

from __future__ import annotations

import os
import sys

import typer

from tswift.cli.codes import CLOSED_PIPE


def write_stdout(text: str) -> None:
    """Write to stdout at once.

    Raises:
        Exit: nobody reads it any more. Typer would say 1, which here means a regression or a violation.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout()
        raise typer.Exit(CLOSED_PIPE) from None


def abandon_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere, or Python would raise once more at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
