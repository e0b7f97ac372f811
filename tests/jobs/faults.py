"""What can happen to a process that writes files: an operating system that fails, or ends it,
when it is told to.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any


class Killed(BaseException):
    """The process is no more: whatever it still tries does nothing."""


class FaultyOs:
    """The ``os`` of :mod:`tswift.jobs.folder`, where call ``at`` (from 1) of those that change
    files goes wrong.

    Args:
        at: which call; 0 for none.
        fault: what happens: ``kill`` (nothing is written from there on), ``full`` (a part is
            written, and from there on there is no room), ``broken`` (an input/output error, once).
    """

    CHANGING = ("open", "write", "fsync", "ftruncate", "replace", "unlink")

    def __init__(self, at: int, fault: str = "kill"):
        self.at = at
        self.fault = fault
        self.calls = 0
        self.dead = False
        self.written: dict[int, int] = {}  # by inode: bytes that are on the disk for certain

    def __getattr__(self, name: str):
        real = getattr(os, name)
        return self._faulty(name, real) if name in (*self.CHANGING, "close") else real

    def _faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments):
            if self.dead and self.fault == "kill":
                raise Killed
            if name == "close":
                return real(*arguments)
            self.calls += 1
            hit = self.calls == self.at
            if hit and self.fault == "kill":
                self.dead = True
                if name == "write":  # a part of it
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise Killed
            if hit and self.fault == "broken":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.fault == "full" and name == "write" and self.at and self.calls >= self.at:
                first = not self.dead
                self.dead = True
                if first and len(arguments[1]) > 1:
                    return real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            found = real(*arguments)
            if name == "fsync":
                synced = os.fstat(arguments[0])
                self.written[synced.st_ino] = synced.st_size
            return found

        return call


def power_cut(folder: Path, written: dict[int, int], random: Random):
    """What a power cut may leave of files that were appended to: what was synced,
    and anything or nothing after it.
    """
    for name in ("tokens.u32", "journal", "text.txt"):
        path = folder / name
        if not path.exists():
            continue
        about = path.stat()
        size = about.st_size
        sure = written.get(about.st_ino, 0)
        kept = random.randint(min(sure, size), size)
        with path.open("r+b") as file:
            file.truncate(kept)
            if kept > sure and random.random() < 0.5:  # blocks that were allotted and never written
                file.seek(random.randint(sure, kept))
                file.write(bytes(kept - file.tell()))
