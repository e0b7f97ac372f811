"""The folder of a recipe's intermediate results: whose it is, and its log."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tswift.errors import InputError


def claim(folder: Path, recipe: Any) -> Callable[[str], None]:
    """Make a folder the one of a recipe, a dataclass; returns what takes a line of its log.

    Raises:
        InputError: the folder holds the results of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.json"
    ours = json.dumps(asdict(recipe), sort_keys=True, indent=1)
    if path.exists() and path.read_text() != ours:
        raise InputError(
            f"{folder} holds the stages of another recipe; give a new folder", "--work"
        )
    path.write_text(ours)

    def log(line: str) -> None:
        print(line, flush=True)
        with (folder / "log.txt").open("a") as file:
            file.write(line + "\n")

    return log
