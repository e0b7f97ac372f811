"""Tables of quick checks as one test each, which names every row that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every_row(
    names: str | tuple[str, ...], rows: Iterable[Any]
) -> Callable[..., Callable[..., None]]:
    """As ``pytest.mark.parametrize``, in one test:
    for rows that take no time and share fixtures without harm.
    """
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [row if len(given) > 1 else (row,) for row in rows]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures):
            failed = []
            for number, row in enumerate(table):
                try:
                    test(**dict(zip(given, row, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"row {number} {row!r:.200}: {type(error).__name__}: {error}")
            assert not failed, "\n".join(failed)

        left = [
            each for name, each in inspect.signature(test).parameters.items() if name not in given
        ]
        run.__signature__ = inspect.Signature(left)
        return run

    return decorate
