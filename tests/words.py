"""Command lines, as tests write them."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def words_of(given: Iterable[object]) -> list[str]:
    """The words of a command line: the first string, and each that begins with ``--``,
    is split as by a shell; others, such as a text or a path, are one word.

    The folders in which paths of tests lie may have blanks in their names.
    """
    folders = {str(Path(tempfile.gettempdir()).resolve()), str(ROOT)}
    words: list[str] = []
    for each in given:
        splits = isinstance(each, str) and (not words or each.startswith("--"))
        line = str(each)
        if splits:
            for folder in folders:
                line = line.replace(folder, shlex.quote(folder))
        words += shlex.split(line) if splits else [line]
    return words
