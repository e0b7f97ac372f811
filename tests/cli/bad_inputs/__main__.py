"""Try all bad inputs and print what was said: ``python -m tests.cli.bad_inputs [WORD ...]``.

With words, only the cases whose names hold one of them. A line has the exit code, the input and the message; what is
wrong with a refusal stands behind it. Exit code 1 if anything is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.cli.bad_inputs import CASES, attempt, make_world


def main(words: list[str]) -> int:
    """Print the table."""
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    codes: Counter[int | None] = Counter()
    tracebacks = wrong = 0
    seconds = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "here").mkdir()
        world = make_world(folder, folder / "here")
        for number, case in enumerate(chosen):
            (folder / f"{number}").mkdir()
            found = attempt(case, replace(world, here=folder / f"{number}"))
            codes[found.code] += 1
            tracebacks += found.traceback
            wrong += bool(found.faults)
            seconds += found.seconds
            said = found.err.strip().replace(f"{folder}/{number}", ".").replace(str(folder), "..")
            told = "".join(f" | WRONG: {fault}" for fault in found.faults)
            print(f"{found.code} | {_shown(case.name)} | {_shown(said)}{told}")
    counts = ", ".join(f"{count} with exit code {code}" for code, count in codes.items())
    print(f"{len(chosen)} cases: {counts}; tracebacks: {tracebacks}; wrong: {wrong}; {seconds:.1f} s")
    return int(bool(wrong))


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
