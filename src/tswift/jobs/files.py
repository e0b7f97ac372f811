"""Files that survive what happens to a process and its machine: appended to and synced, or replaced whole."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_FOLLOW_NOT = getattr(os, "O_NOFOLLOW", 0)  # a link in a run's folder could point at anything
_BINARY = getattr(os, "O_BINARY", 0)  # Windows
_MODE = 0o644


def sync_folder(path: Path) -> None:
    """Make a folder's list of files durable, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whatever happens meanwhile.

    Raises:
        OSError: it cannot be written, and named; what was there before still is.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FOLLOW_NOT | _BINARY, _MODE)
        try:
            _write(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(new, path)
    except OSError as error:
        _remove(new)
        error.filename = str(path)  # a write's error names no file
        raise
    sync_folder(path.parent)


class AppendedFile:
    """A file that only grows. What is added reaches it with the next :meth:`sync`.

    Args:
        path: the file.
        keep: bytes of it that stay, the rest being cut off; None for a file that must not be there yet.

    Raises:
        OSError: it cannot be opened or cut; or it is a link, or no regular file.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self.path = path
        new = os.O_CREAT | os.O_EXCL if keep is None else 0
        self._handle = os.open(path, os.O_WRONLY | new | _FOLLOW_NOT | _BINARY, _MODE)
        try:
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                raise OSError(0, "it is no regular file", str(path))
            if keep is not None:
                os.ftruncate(self._handle, keep)
            os.lseek(self._handle, 0, os.SEEK_END)
        except OSError:
            os.close(self._handle)
            raise
        self._waiting = bytearray()
        self._open = True

    def add(self, content: bytes) -> None:
        """Add to what the next sync writes."""
        self._waiting += content

    def sync(self, durable: bool = True) -> None:
        """Write what was added; if ``durable``, so that even a power cut leaves it there.

        Raises:
            OSError: it cannot be written. A part of it may have been.
        """
        while self._waiting:
            del self._waiting[: os.write(self._handle, self._waiting)]
        if durable:
            os.fsync(self._handle)

    def is_at(self, path: Path) -> bool:
        """Whether the file of that name is still this one."""
        try:
            return os.path.samestat(os.fstat(self._handle), os.lstat(path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file; what no sync has written is dropped."""
        if self._open:
            self._open = False
            os.close(self._handle)


def refuse_other(path: Path) -> None:
    """Refuse to read what is no regular file, but a link to one, say; that it may be missing is no matter.

    Args:
        path: the file.

    Raises:
        OSError: it is something else.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(0, "it is a link" if stat.S_ISLNK(mode) else "it is no regular file", str(path))


def _write(handle: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left) :]


def _remove(path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
