"""What takes seconds before a model decodes, told to those who listen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]
_listeners: list[Listener] = []


def tell(stage: str) -> None:
    """Say what begins now: ``compiling program.c``."""
    for listener in _listeners:
        listener(stage)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have it called with each stage while entered."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
