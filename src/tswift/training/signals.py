"""Ctrl-C, SIGTERM and a terminal that goes away: noted while a step is under way, raised elsewhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_CAUGHT = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(BaseException):
    """The process was asked to stop. No error: nothing that mends errors should catch it.

    Attributes:
        signum: by which signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Signals:
    """What to do when asked to stop.

    Attributes:
        noted: the signal that came while it was not to interrupt; None if none came.
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        self._gentle = False

    @contextmanager
    def caught(self) -> Iterator[Signals]:
        """Raise :class:`Stopped`, wherever the code is. Only a process's main thread can catch signals."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[signal.Signals, Any] = {}
        try:
            for number in _CAUGHT:
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    before[number] = signal.signal(number, self._take)
            yield self
        finally:
            for caught, handler in before.items():
                signal.signal(caught, handler)

    @contextmanager
    def gentle(self) -> Iterator[None]:
        """Only note the first signal meanwhile; the second one is raised."""
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._gentle and self.noted is None:
            self.noted = number
        else:
            raise Stopped(number)
