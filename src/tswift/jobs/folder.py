"""A run's folder: ``prompt.u32``, ``tokens.u32``, ``journal``, ``text.txt`` and ``run.json``.

Tokens are appended while the job runs, with a line of the journal for every checkpoint, and both are on the disk before
the job goes on. So whatever ends it, what was made is there, and it is known how much of it is sound.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tswift.errors import Fault, InputError
from tswift.jobs.files import AppendedFile, sync_folder, write_whole
from tswift.jobs.journal import Checkpoint
from tswift.jobs.lock import LOCK, InUse, Lock

SCHEMA = 2
TEXT, TOKENS, RECORD, PROMPT, AUDIT = "text.txt", "tokens.u32", "run.json", "prompt.u32", "verify.json"
JOURNAL, CHECKSUM = "journal", "checksum"
_SECONDS, _TOKENS = 2.0, 512  # between two checkpoints, at most

Counters = Mapping[str, Any]


class SaveFailed(Fault):
    """A run's folder cannot be written any more."""


class FolderGone(SaveFailed):
    """A run's folder is no longer where it was."""


def default_path(method: str) -> Path:
    """``runs/<UTC time>-<method>`` in the working directory, with a number if that is taken."""
    name = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}-{method}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))  # a clock may have been set back
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())


def new_folder(path: Path) -> list[Path]:
    """Make a folder, or take one that is empty.

    Returns:
        The folders that were made, the innermost first.

    Raises:
        InputError: it holds something, or cannot be made.
    """
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise InputError(f"{path} is not empty; a run needs a folder of its own", "--out")
    except OSError as error:
        raise InputError(f"{path} cannot be written to ({error.strerror})", "--out") from None
    return made


def bytes_of(tokens: Sequence[int]) -> bytes:
    """Token ids as they are stored: little-endian uint32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def checksum(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record read from JSON, its own checksum apart."""
    rest = {name: value for name, value in record.items() if name != CHECKSUM}
    return sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class RunFolder:
    """A run's folder, open for appending and locked against other processes. Made by :meth:`create` or :meth:`reopen`.

    Attributes:
        path: the folder.
        saved: tokens that are on the disk for certain.
    """

    def __init__(self, path: Path, lock: Lock, made: Sequence[Path], prompt: bytes) -> None:
        self.path, self._lock, self._made, self._prompt = path, lock, made, prompt
        self._files: dict[str, AppendedFile] = {}
        self.saved = 0
        self._appended = 0
        self._crc = crc32(prompt)
        self._checked = time.monotonic()

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """A new run's folder: one that does not exist yet, or is empty.

        Raises:
            InputError: it holds something, or cannot be made or written to.
        """
        made = new_folder(path)
        try:
            folder = cls(path, Lock(path), made, b"")
        except InUse:
            raise InputError(f"{path} is in use by another run", "--out") from None
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            for name in (TOKENS, TEXT, JOURNAL):
                folder._files[name] = AppendedFile(path / name)
            for place in (path, *(below.parent for below in made)):
                sync_folder(place)
        except OSError as error:
            folder.discard()
            raise _unwritable(path, error) from None
        return folder

    @classmethod
    def reopen(
        cls, path: Path, lock: Lock, prompt: Sequence[int], checkpoint: Checkpoint, journal: int, text: str
    ) -> RunFolder:
        """The folder of a run that goes on from a checkpoint; what lies behind it is cut off.

        Args:
            path: the folder.
            lock: its lock, held.
            prompt: the prompt's token ids.
            checkpoint: where to go on.
            journal: bytes of the journal up to that checkpoint.
            text: the text up to there.

        Raises:
            SaveFailed: it cannot be written to.
        """
        folder = cls(path, lock, (), bytes_of(prompt))
        with folder._saving():
            folder._files[JOURNAL] = AppendedFile(path / JOURNAL, journal)
            folder._files[TOKENS] = AppendedFile(path / TOKENS, 4 * checkpoint.tokens)
            (path / TEXT).unlink(missing_ok=True)
            folder._files[TEXT] = AppendedFile(path / TEXT)
            folder._files[TEXT].add(text.encode())
        folder.saved = folder._appended = checkpoint.tokens
        folder._crc = checkpoint.crc32
        return folder

    def keep_prompt(self, tokens: Sequence[int]) -> None:
        """Write ``prompt.u32``: the prompt need not be there any more when the run is verified or resumed.

        Raises:
            InputError: it cannot be written.
        """
        self._prompt = bytes_of(tokens)
        self._crc = crc32(self._prompt)
        try:
            write_whole(self.path / PROMPT, self._prompt)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def append(self, tokens: Sequence[int], text: str, counters: Callable[[], Counters]) -> None:
        """Add generated tokens and the text that they complete; a checkpoint if one is due.

        Args:
            tokens: token ids.
            text: what they complete.
            counters: gives the counters of the steps so far.

        Raises:
            SaveFailed: a checkpoint was due and cannot be written.
        """
        data = bytes_of(tokens)
        self._files[TOKENS].add(data)
        self._files[TEXT].add(text.encode())
        self._crc = crc32(data, self._crc)
        self._appended += len(tokens)
        late = time.monotonic() - self._checked >= _SECONDS
        if late or self._appended - self.saved >= _TOKENS:
            self.checkpoint(counters())

    def checkpoint(self, counters: Counters, last: bool = False) -> None:
        """Put what was appended on the disk, tokens first, and then say in the journal that it is there.

        Args:
            counters: of the steps so far.
            last: the run ends here; the text is made durable, too, as a finished run is never gone on with.

        Raises:
            SaveFailed: it cannot be written.
        """
        with self._saving():
            if not all(file.is_at(self.path / name) for name, file in self._files.items()):
                raise FolderGone(f"{self.path} was removed or moved")
            self._files[TOKENS].sync()
            self._files[TEXT].sync(durable=last)  # until then it could be made again from the tokens
            if self._appended > self.saved:
                self._files[JOURNAL].add(Checkpoint(self._appended, self._crc, counters).line())
                self._files[JOURNAL].sync()
        self.saved = self._appended
        self._checked = time.monotonic()

    def record(self, record: Mapping[str, Any]) -> None:
        """Write ``run.json``, whole or not at all.

        Raises:
            SaveFailed: it cannot be written.
        """
        plain = json.loads(json.dumps({"schema": SCHEMA, **record}, default=str))  # paths
        content = json.dumps({**plain, CHECKSUM: checksum(plain)}, indent=2, ensure_ascii=False)
        with self._saving():
            # half a character, as in a file's name that is no UTF-8, as JSON writes it
            write_whole(self.path / RECORD, f"{content}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the files, and let other processes have the folder. What no checkpoint has written is dropped."""
        for file in self._files.values():
            file.close()
        self._lock.release()

    def discard(self) -> None:
        """Take back a folder in which no run was started."""
        self.close()
        for name in (TOKENS, TEXT, PROMPT, JOURNAL, LOCK):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else has put something there meanwhile
            for folder in self._made:
                folder.rmdir()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FolderGone(f"{self.path} was removed or moved") from None
        except OSError as error:
            raise SaveFailed(f"{self.path} cannot be written to ({error.strerror})") from None


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be written to ({error.strerror})", "--out")
