"""A picture of a command's output, as a terminal shows it: ``python -m benchmarks.picture OUT.svg
COMMAND ...`` runs the command in a terminal of 100 columns.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import sys

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def shown(command: list[str]) -> str:
    """What a command writes to a terminal: of lines that are written again, the last."""
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    read = bytearray()

    def keep(handle: int) -> bytes:
        read.extend(data := os.read(handle, 1 << 16))
        return data

    if status := pty.spawn(command, keep):
        sys.exit(os.waitstatus_to_exitcode(status))
    lines = [""]
    for part in re.split(r"(\n|\r|\x1b\[[0-9;?]*[A-Za-z])", read.decode(errors="replace")):
        if part == "\n":
            lines.append("")
        elif part in ("\r", "\x1b[2K"):
            lines[-1] = "" if part != "\r" else lines[-1]
        elif part == "\x1b[1A":  # what is written again
            lines.pop()
        elif not part.startswith("\x1b[") or part.endswith("m"):
            lines[-1] += part
    return "\n".join(line for line in lines if not line.startswith("tswift: ")).strip("\n")


def main() -> None:
    """Write the picture."""
    out, *command = sys.argv[1:]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"$ {shlex.join(command)}", style="bold", highlight=False)
    program = f"{os.path.dirname(sys.executable)}/{command[0]}"
    console.print(Text.from_ansi(shown([program, *command[1:]])))
    console.save_svg(out, title="tswift")


if __name__ == "__main__":
    main()
