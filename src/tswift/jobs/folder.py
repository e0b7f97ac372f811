"""A run's folder: ``prompt.u32``, ``tokens.u32``, ``journal``, ``text.txt`` and ``run.json``.

Tokens are appended while the job runs, with a line of the journal for every checkpoint, and both are on the disk before
the job goes on. So whatever ends it, what was made is there, and it is known how much of it is sound. One process at a
time writes the folder.

A line of the journal is a JSON object, a tab, the CRC-32 of the object's bytes, and a newline. The object holds
``tokens`` (how many), ``crc32`` (of the prompt's and these tokens' bytes) and the counters of the steps. Checksums of
tokens run on from line to line, so each line vouches for everything before it.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from filelock import FileLock, Timeout

from tswift.decoding.params import SamplingParams
from tswift.errors import Fault, InputError
from tswift.jobs.config import RunConfig
from tswift.jobs.prompt import fingerprint
from tswift.reading import MOST_RECORD, read_file

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


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a run at one place of its text.

    Attributes:
        tokens: how many there were.
        crc32: of the bytes of the prompt and of these tokens.
        counters: of the steps that made them; see :meth:`tswift.decoding.stats.DecodeStats.counters`.
    """

    tokens: int
    crc32: int
    counters: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> bytes:
        """The journal's line."""
        about = {"tokens": self.tokens, "crc32": self.crc32, **self.counters}
        text = json.dumps(about, separators=(",", ":")).encode()
        return b"%s\t%08x\n" % (text, crc32(text))


@dataclass(frozen=True)
class Journal:
    """A journal that was read.

    Attributes:
        checkpoints: of the whole lines before the first broken one.
        size: bytes of those lines.
        torn: the last line is broken or has no end: writing it was cut short.
        broken: number of a line, from 1, that is broken although others follow; None if there is none.
    """

    checkpoints: list[Checkpoint]
    size: int
    torn: bool
    broken: int | None


def parse_journal(content: bytes) -> Journal:
    """Read a journal; nothing in it is too broken for that."""
    lines = content.split(b"\n")
    unended = lines.pop()
    found: list[Checkpoint] = []
    size = 0
    for number, line in enumerate(lines, 1):
        checkpoint = _parse(line)
        if checkpoint is None or (found and checkpoint.tokens <= found[-1].tokens):
            last = number == len(lines) and not unended
            return Journal(found, size, torn=last, broken=None if last else number)
        found.append(checkpoint)
        size += len(line) + 1
    return Journal(found, size, torn=bool(unended), broken=None)


def _parse(line: bytes) -> Checkpoint | None:
    text, _, checksum = line.rpartition(b"\t")
    if checksum != b"%08x" % crc32(text):
        return None
    try:
        about = json.loads(text)
        tokens, crc = about.pop("tokens"), about.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    counted = isinstance(tokens, int) and isinstance(crc, int) and tokens >= 0
    return Checkpoint(tokens, crc, about) if counted else None


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


SCHEMA = 2
TEXT, TOKENS, RECORD, PROMPT, AUDIT = "text.txt", "tokens.u32", "run.json", "prompt.u32", "verify.json"
JOURNAL, CHECKSUM = "journal", "checksum"
_SECONDS, _TOKENS = 2.0, 512  # between two checkpoints, at most

Counters = Mapping[str, Any]


class SaveFailed(Fault):
    """A run's folder cannot be written any more."""


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
            raise InputError(f"{path} is not empty; a run needs a folder of its own", "out")
    except OSError as error:
        raise InputError(f"{path} cannot be written to ({error.strerror})", "out") from None
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
            raise InputError(f"{path} is in use by another run", "out") from None
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
                raise SaveFailed(f"{self.path} was removed or moved")
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
            raise SaveFailed(f"{self.path} was removed or moved") from None
        except OSError as error:
            raise SaveFailed(f"{self.path} cannot be written to ({error.strerror})") from None


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be written to ({error.strerror})", "out")


_MOST_BYTES = 1 << 30  # of a file: tokens take four


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it, finished or not.

    Attributes:
        path: the folder.
        record: all of ``run.json``.
        state: ``running``, ``finished``, ``interrupted`` or ``failed``, as it was last written.
        config: what made the run: its model as it was loaded, its drafting options as they were resolved. Attention is
            ``auto`` where that was ``native``, which needs a C compiler and some dtypes: another machine has none,
            perhaps, or the text is checked in another dtype.
        params: the sampling parameters, banned end-of-text tokens included.
        prompt: the prompt's token ids.
        bits: hash of the arithmetic of all its sessions; None if it was not exact, or they differ.
        eos_ids: the model's end-of-text tokens.
    """

    path: Path
    record: Mapping[str, Any]
    state: str
    config: RunConfig
    params: SamplingParams
    prompt: list[int]
    bits: str | None
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class JournalState:
    """How far a run came, as its journal vouches for it.

    Attributes:
        tokens: the generated token ids that are vouched for.
        places: the checkpoints that hold, and the bytes of the journal up to each; the first is the beginning.
        torn: the journal's last line was cut short, so that a checkpoint before it is the last.
        unsure: tokens in the file behind the last checkpoint. They may be right; they are drawn again.
        damage: what is broken; empty if nothing is. A torn end is no damage.
    """

    tokens: list[int]
    places: list[tuple[Checkpoint, int]]
    torn: bool
    unsure: int
    damage: str

    def last(self, below: int) -> tuple[Checkpoint, int]:
        """The last place with fewer tokens than ``below``, which is at least 1."""
        return next(place for place in reversed(self.places) if place[0].tokens < below)


def read_run(path: Path) -> RunRecord:
    """Read a run's folder, its tokens apart.

    Raises:
        InputError: it is no such folder, or what it holds is broken or does not fit together.
    """
    record = read_record(path)
    prompt = read_tokens(path / PROMPT)
    try:
        run = RunRecord(path, record, prompt=prompt, **_fields(record))
        known = record["prompt"]["sha256"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path / RECORD} is broken: {reason}") from None
    if known != fingerprint(prompt):
        raise InputError(f"{path / PROMPT} is not the prompt of {RECORD}: their SHA-256 differ")
    return run


def read_record(path: Path) -> dict[str, Any]:
    """``run.json`` of a run's folder, seen to be as it was written.

    Raises:
        InputError: there is no such folder, no record in it, or a broken one.
    """
    refuse_no_folder(path)
    content = _content(path / RECORD, f"{path} holds no run: there is no {RECORD} in it")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        raise InputError(f"{path / RECORD} is broken: it is not JSON") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InputError(f"{path / RECORD} is not of schema {SCHEMA}, which is all this version reads")
    if record.get(CHECKSUM) != checksum(record):
        raise InputError(f"{path / RECORD} is not as it was written: its checksum differs")
    return record


def read_saved(path: Path, prompt: Sequence[int]) -> JournalState:
    """How far a run came, by its journal.

    Raises:
        InputError: a file cannot be read.
    """
    lines = _content(path / JOURNAL, f"there is no file {path / JOURNAL}")
    data = _content(path / TOKENS, f"there is no file {path / TOKENS}")
    journal = parse_journal(lines)
    damage = ""
    if journal.broken:
        damage = f"line {journal.broken:,} of {path / JOURNAL} does not match its checksum"
    good = Checkpoint(0, crc32(bytes_of(prompt)))
    places, end, size = [(good, 0)], 0, 0
    # checksums run on, so each one that holds vouches for everything before it
    for checkpoint, line in zip(journal.checkpoints, lines.splitlines(keepends=True), strict=False):
        size += len(line)
        reach = 4 * checkpoint.tokens
        if reach > len(data):
            damage = damage or f"{path / TOKENS} has {len(data):,} bytes, its journal speaks of {reach:,}"
            break
        if crc32(data[end:reach], good.crc32) != checkpoint.crc32:
            where = f"between tokens {good.tokens:,} and {checkpoint.tokens:,}"
            damage = damage or f"{path / TOKENS} does not match its checksum {where}"
            break
        good, end = checkpoint, reach
        places.append((good, size))
    tokens: list[int] = np.frombuffer(data[:end], "<u4").tolist()
    return JournalState(tokens, places, journal.torn, (len(data) - end) // 4, damage)


def read_tokens(path: Path, option: str | None = None, whole: bool = True) -> list[int]:
    """The token ids in a file of little-endian uint32, at least one.

    Args:
        path: the file.
        option: what the user gave it with, for the error.
        whole: whether the file must end with a whole token; a run that was killed may have left a part of one.

    Raises:
        InputError: there is no such file, or it is none of token ids.
    """
    data = _content(path, f"there is no file {path}", option=option)
    if whole and len(data) % 4:
        raise InputError(f"{path} is not a file of uint32: it has {len(data):,} bytes", option)
    if len(data) < 4:
        raise InputError(f"{path} holds no tokens", option)
    ids: list[int] = np.frombuffer(data[: len(data) // 4 * 4], "<u4").tolist()
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, name: str, option: str | None = None) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InputError: there is one; the first is named.
    """
    for place, token in enumerate(ids):
        if token >= vocab_size:
            message = f"{name} has token id {token:,} at {place:,}, outside the model's vocabulary of {vocab_size:,}"
            raise InputError(message, option)


def refuse_no_folder(path: Path) -> None:
    """Refuse what is no folder.

    Raises:
        InputError: it is none.
    """
    try:
        found = path.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)[:80]} cannot be looked at ({reason})") from None
    if not found:
        raise InputError(f"there is no folder {path}")


def _content(path: Path, missing: str, option: str | None = None) -> bytes:
    if option is None:  # a file that the user names may be reached by a link; one in a run's folder must not
        try:
            refuse_other(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})") from None
    return read_file(path, _MOST_BYTES, option, missing)


def _fields(record: dict[str, Any]) -> dict[str, Any]:
    model, asked, sampling, drafting = (dict(record[part]) for part in ("model", "options", "sampling", "drafting"))
    if isinstance(drafting.get("tree"), list):
        drafting["tree"] = tuple(drafting["tree"])
    own: dict[str, Any] = {name: asked[name] for name in ("length", "method", "seed", "stop_at_eos", "heads")}
    own |= {name: asked.get(name) for name in ("quantize", "draft_weights")}
    config = RunConfig(
        **own,
        model=model["name"],
        device=model["device"],
        dtype=model["dtype"],
        attention="auto" if model["attention"] == "native" else model["attention"],
        draft_model=None if model.get("draft") is None else model["draft"]["name"],
        exact=model.get("exact") is not None,
        drafting=drafting,
    )
    if not all(isinstance(session, dict) for session in record.get("resumed", ())):
        raise ValueError("its sessions are no objects")
    return {
        "state": str(record["state"]),
        "config": config,
        "params": SamplingParams(**{**sampling, "banned": tuple(sampling["banned"])}),
        "bits": _bits(record),
        "eos_ids": tuple(model["eos_ids"]),
    }


def _bits(record: dict[str, Any]) -> str | None:
    sessions = [record["model"].get("exact"), *(session.get("exact") for session in record.get("resumed", ()))]
    found = {None if exact is None else exact["bits"] for exact in sessions}
    return found.pop() if len(found) == 1 else None


RUNNING, KILLED, BROKEN = "running", "killed", "broken"


@dataclass(frozen=True)
class Entry:
    """A run, as a list shows it.

    Attributes:
        path: its folder.
        state: ``running``, ``finished``, ``interrupted``, ``failed``; ``killed`` if it is recorded as running and no
            process has its lock; ``broken`` if its record cannot be read.
        reason: why it failed or is broken; empty otherwise.
        tokens: saved so far.
        length: asked for; None where that is not known, like all that follows.
        method: how it drafts.
        model: the model's name.
        tokens_per_second: of decoding; None before the first checkpoint.
        started: UTC time.
    """

    path: Path
    state: str
    reason: str = ""
    tokens: int = 0
    length: int | None = None
    method: str | None = None
    model: str | None = None
    tokens_per_second: float | None = None
    started: str | None = None


def list_runs(folder: Path) -> list[Entry]:
    """The runs in a folder, the oldest first; the folder itself, if it is a run's.

    Raises:
        InputError: there is no such folder.
    """
    refuse_no_folder(folder)
    try:
        paths = [folder] if (folder / RECORD).exists() else [path for path in folder.iterdir() if _is_run(path)]
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror})") from None
    return sorted(map(_entry, paths), key=lambda entry: (entry.started or "", str(entry.path)))


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / RECORD).exists() or (path / JOURNAL).exists())


def _entry(path: Path) -> Entry:
    tokens, seconds = _saved(path)
    try:
        record = read_record(path)
        state, reason = _state(path, str(record["state"])), str(record.get("reason", ""))
        length, started = int(record["options"]["length"]), str(record["started"])
        method, model = str(record["options"]["method"]), str(record["model"]["name"])
    except InputError as error:
        working = not (path / RECORD).exists() and in_use(path)  # its model is being loaded
        return Entry(path, RUNNING if working else BROKEN, "" if working else str(error), tokens)
    except (KeyError, TypeError, ValueError) as error:
        return Entry(path, BROKEN, f"{path / RECORD} is broken: {error!r}", tokens)
    speed = tokens / seconds if seconds else None
    return Entry(path, state, reason, tokens, length, method, model, speed, started)


def _state(path: Path, recorded: str) -> str:
    if in_use(path):
        return RUNNING
    return KILLED if recorded == RUNNING else recorded


def _saved(path: Path) -> tuple[int, float]:
    """Tokens and seconds at the last checkpoint."""
    try:
        checkpoints = parse_journal(read_file(path / JOURNAL, MOST_RECORD)).checkpoints
    except InputError:
        return 0, 0.0
    if not checkpoints:
        return 0, 0.0
    seconds: Any = checkpoints[-1].counters.get("seconds")
    return checkpoints[-1].tokens, seconds if isinstance(seconds, float) else 0.0
