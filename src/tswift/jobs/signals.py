"""Signals that ask a process to stop: Ctrl-C, ``kill``, a terminal that is closed."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(KeyboardInterrupt):
    """A signal asked this process to stop.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def code(self) -> int:
        """The exit code that shells know for it."""
        return 128 + self.number


class Signals:
    """While entered, signals to stop raise :class:`Stopped`; or are noted, where work must not be torn apart.

    A signal that the process was told to ignore (``nohup``) stays ignored. Outside the main thread nothing is done.

    Attributes:
        patience: how many signals are noted before one raises.
    """

    def __init__(self) -> None:
        self.patience = 0
        self._caught: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def number(self) -> int:
        """Of the first signal that was noted; 0 if there was none."""
        return self._caught[0] if self._caught else 0

    @property
    def stopped(self) -> Stopped | None:
        """The first signal that was noted; None if there was none."""
        return Stopped(self.number) if self._caught else None

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)
        if len(self._caught) > self.patience:
            raise Stopped(number)
