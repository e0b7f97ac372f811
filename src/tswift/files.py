"""Files and folders of tswift: replaced whole or not at all, locked, never followed elsewhere."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tswift.errors import InputError, kind_of

LOCK = "lock"
_LOCK_SECONDS = 0.3  # ``tswift runs`` holds a lock for an instant, to see whether anybody does
# of how a file is opened, as what lies there may be another since it was looked at: a link is not
# followed, a pipe not waited for
_NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)
_NOT_AWAITED = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_MODE = 0o644
NEW = ".new"  # what a file is called until all of it is written


def status_of_regular_file(path: Path, option: str | None = None) -> os.stat_result | None:
    """The status of a file in a folder of tswift's; None if there is none.

    Raises:
        InputError: it is a link, which could point at anything, or a pipe or device, which might
            never begin or end. It names ``option``.
    """
    try:
        status = os.lstat(path)
    except OSError:  # opening it will tell
        return None
    if kind := kind_of(status.st_mode):
        raise InputError(f"{path} cannot be used (it is {kind})", option)
    return status


def open_own(path: Path, flags: int = os.O_RDONLY, option: str | None = None) -> int:
    """A descriptor of a file in a folder of tswift's: of a run, a benchmark, a training, a server.

    InputError, without opening it, if it is no regular file, see
    :func:`status_of_regular_file`.
    """
    status_of_regular_file(path, option)
    return os.open(path, flags | _NOT_FOLLOWED | _NOT_AWAITED | _BINARY, _MODE)


def sync_folder(path: Path) -> None:
    """Make a folder's list of files durable, where the system can."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file whole, or not at all, whatever happens meanwhile.

    OSError, with its name, if it cannot be; InputError if something else is in its way.
    """
    new = path.with_name(f"{path.name}{NEW}")
    try:
        handle = open_own(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(handle, bytearray(content))
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(new)
        error.filename = str(path)  # a write's error names no file
        raise
    sync_folder(path.parent)


def write_all(handle: int, content: bytearray) -> None:
    """Write bytes to a descriptor, however many calls that takes."""
    while content:
        del content[: os.write(handle, content)]


class Lock:
    """The lock of a run's folder; the system releases it with the process, however that ends.

    Raises:
        Timeout: another process has it, and still has it after some ``seconds``.
        OSError: there can be none here.
        InputError: something else has its name.
    """

    def __init__(self, folder: Path, seconds: float = _LOCK_SECONDS) -> None:
        status_of_regular_file(folder / LOCK)
        self._lock = FileLock(folder / LOCK)
        try:
            self._lock.acquire(timeout=seconds, poll_interval=0.05)
        except NotImplementedError as error:
            raise OSError(0, f"its file system has no locks: {error}", str(folder)) from None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self, remove: bool = True) -> None:
        """Release it, and remove its file."""
        if remove:
            with suppress(OSError):
                # one that waits for it sees that the file is gone, and makes another
                Path(self._lock.lock_file).unlink()
        self._lock.release(force=True)


def lock_folder(folder: Path, field: str, busy: str = "") -> Lock:
    """The lock of the folder that ``field`` named, taken;
    ``busy`` is what is said where another process has it.

    The folder is made if it is not there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Lock(folder)
    except Timeout:
        raise InputError(busy or f"{folder} is in use by another process", field) from None
    except OSError as error:
        raise unwritable(folder, error, field) from None


def in_use(folder: Path) -> bool:
    """Whether a process is writing a run's folder."""
    try:
        if (folder / LOCK).exists():
            Lock(folder, 0).release(remove=False)
    except (OSError, InputError) as error:
        return isinstance(error, Timeout)
    return False


def unwritable(path: Path, error: OSError, field: str = "out") -> InputError:
    """The error of a folder that ``field`` named and that cannot be written to."""
    return InputError(f"{path} cannot be written to ({error.strerror})", field)


def cache_folder() -> Path | None:
    """A folder of the user's for what can be made anew; None if nothing can be kept.

    It is ``tswift`` in ``XDG_CACHE_HOME``, if that is absolute, else in ``~/.cache``. If others can
    write there, or it cannot be made, it is ``tswift-<user id>`` in the system's folder of
    temporary files.
    """
    with suppress(OSError, RuntimeError):  # the latter if there is no home
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (given if given.is_absolute() else Path.home() / ".cache") / "tswift"
        if _make_private(folder):
            return folder
    with suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"tswift-{os.geteuid()}"
        if _make_private(folder):
            return folder
    return None


def put(file: Path, write: Callable[[Path], object]) -> None:
    """Have a file of the cache written beside its place, and moved there in one step:
    another process may do the same.

    What ``write`` raises is raised, and nothing is left then.
    """
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        write(beside)
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _make_private(folder: Path) -> bool:
    """Whether a folder, which is made if it is missing,
    can be written to by this user and by nobody else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    own = folder.lstat()
    parent = folder.parent.stat()
    user = os.geteuid()
    private = stat.S_ISDIR(own.st_mode) and own.st_uid == user and not own.st_mode & _BY_OTHERS
    # who may rename it could put another folder in its place
    stays = parent.st_uid in (user, 0) and (
        parent.st_mode & stat.S_ISVTX or not parent.st_mode & _BY_OTHERS
    )
    return bool(private and stays) and os.access(folder, os.W_OK)


_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
