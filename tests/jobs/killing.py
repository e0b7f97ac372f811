"""``tswift`` in processes that are really killed: forked,
so that none has to import everything anew.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.words import words_of
from tswift.cli import main as tswift
from tswift.jobs.folder import CHECKSUM, RECORD, checksum

_CONTEXT = multiprocessing.get_context("fork")
PROCESSES: list[Process] = []  # that tests have started and that may still run


@contextmanager
def signals_heard() -> Iterator[None]:
    """Signals that stop a process do so, in this one and in those that it starts.

    Tests in the background, as under ``nohup``, inherit that some are ignored.
    """
    own = {signal.SIGINT: signal.default_int_handler}
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, own.get(each, signal.SIG_DFL)) for each in stopping}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Process:
    """``tswift`` with these words, in a process of its own.

    Args:
        words: of the command line, see :func:`tests.words.words_of`.
        output: file for its stdout; stderr goes beside it.
        closed: standard streams that are closed from the start, as a shell's ``>&-`` does it.
    """

    def __init__(self, words: Sequence[object], output: Path, closed: Sequence[int] = ()):
        self.output = output
        self.errors = output.with_suffix(".err")
        self._process = _CONTEXT.Process(target=self._run, args=(words, closed), daemon=True)
        self._process.start()
        PROCESSES.append(self)
        self.pid = self._process.pid

    def _run(self, words: Sequence[object], closed: Sequence[int]):
        for number, path in ((1, self.output), (2, self.errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        for number in closed:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        with signals_heard():
            sys.exit(tswift(words_of(words)))

    def begin(self):
        """Wait for its first text."""
        while not (self.output.exists() and self.output.stat().st_size) and self.poll() is None:
            time.sleep(0.005)

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that killed it; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float = 3600.0) -> int | None:
        """Its exit code, or None after so many seconds."""
        self._process.join(seconds)
        return self.poll()

    def send(self, number: int):
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)


def write_record(run: Path, record: dict[str, Any]):
    """A run's record, with the checksum that goes with it."""
    (run / RECORD).write_text(json.dumps({**record, CHECKSUM: checksum(record)}))


def result(folder: Path) -> tuple[bytes, bytes]:
    """The tokens and the text of a run."""
    return (folder / "tokens.u32").read_bytes(), (folder / "text.txt").read_bytes()


# of ``os``
FILE_CALLS = (
    "open",
    "write",
    "fsync",
    "ftruncate",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
)


def killed_before(
    call: int, work: Callable[[], object], owner=os, names: Sequence[str] = FILE_CALLS
) -> bool:
    """Do some work in a fork of this process that SIGKILL ends before its call ``call``, from 1,
    of these functions of a module or class.

    False if it came to its end first. An error in it is one here.
    """
    process = _CONTEXT.Process(target=_work_until, args=(call, work, owner, names), daemon=True)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), (
        f"the work ended with {process.exitcode}, to be killed at {call}"
    )
    return process.exitcode != 0


def _work_until(call: int, work: Callable[[], object], owner, names: Sequence[str]):
    calls = itertools.count(1)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given, **named):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        return made

    for name in names:
        setattr(owner, name, counted(getattr(owner, name)))
    work()
