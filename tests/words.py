"""Command lines, as tests write them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def words_of(given: Iterable[object]) -> list[str]:
    """The words of a command line: the first string, and each that begins with ``--``,
    is split as by a shell; others, such as a text or a path, are one word.
    """
    words: list[str] = []
    for each in given:
        splits = isinstance(each, str) and (not words or each.startswith("--"))
        words += shlex.split(each) if splits else [str(each)]  # type: ignore[arg-type]
    return words
