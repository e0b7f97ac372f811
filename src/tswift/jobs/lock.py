"""One process at a time writes a run's folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = "lock"
_PATIENCE = 0.3  # seconds: ``tswift runs`` holds a lock for an instant, to see whether anybody does


class InUse(Exception):
    """Another process holds the lock."""


class Lock:
    """The lock of a run's folder; the system lets it go with the process, however that ends.

    Args:
        folder: the run's.

    Raises:
        InUse: another process has it.
        OSError: there can be none here.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FileLock(folder / LOCK)
        try:
            self._lock.acquire(timeout=_PATIENCE, poll_interval=0.05)
        except Timeout:
            raise InUse from None
        except NotImplementedError as error:
            raise OSError(0, f"its file system has no locks: {error}", str(folder)) from None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Take its file away, and let it go."""
        with suppress(OSError):  # one that waits for it sees that the file is gone, and makes another
            Path(self._lock.lock_file).unlink()
        self._lock.release(force=True)


def in_use(folder: Path) -> bool:
    """Whether a process is writing a run's folder."""
    path = folder / LOCK
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        return False
    lock.release(force=True)
    return False
