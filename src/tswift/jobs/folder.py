"""A run's folder: ``prompt.u32``, ``tokens.u32``, ``journal``, ``text.txt``, ``run.json``,
perhaps ``logprobs.bin``.

Tokens are appended while the job runs, with a journal line per checkpoint, and both are on the disk
before the job goes on. So whatever ends it, what was made is there, and it is known how much of it
is sound. One process at a time writes.

A line of the journal is a JSON object, a tab, the CRC-32 of the object's bytes, and a newline. The
object holds ``tokens`` (how many), ``crc32`` (of the prompt's and these tokens' bytes), with
log-probabilities ``logprobs_crc32`` (of these tokens' rows), and the counters of the steps.
Checksums run on from line to line, so each line vouches for everything before it.

A folder holds a run as soon as ``run.json`` is there, which is written after ``prompt.u32`` and
before the first token. Until then it holds nothing that another run could not begin with.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import numpy as np

from tswift.decoding.text import TextRules, text_of
from tswift.errors import (
    MAX_RECORD,
    DecodeError,
    InputError,
    Object,
    parse_json,
    read_file,
)
from tswift.files import (
    LOCK,
    NEW,
    Lock,
    in_use,
    lock_folder,
    open_own,
    status_of_regular_file,
    sync_folder,
    unwritable,
    write_all,
    write_whole,
)
from tswift.jobs.config import RunConfig, fingerprint
from tswift.options import Values, of_json
from tswift.sampling.parameters import SamplingParams, apply_eos_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = 2
TEXT, TOKENS, RECORD, PROMPT, AUDIT = (
    "text.txt",
    "tokens.u32",
    "run.json",
    "prompt.u32",
    "verify.json",
)
LOGPROBS = "logprobs.bin"
JOURNAL, CHECKSUM = "journal", "checksum"
_ROWS = "logprobs_crc32"
_ALWAYS = ("state", "options", "sampling", "drafting", "model", "prompt")  # in a record
REQUEST = "request.json"  # what a client asked of ``tswift serve``; it is there before the run is
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
SKIPPED = "skipped"  # of many texts one that is too long for the model
KILLED, BROKEN = "killed", "broken"  # in a list of runs only
# between two checkpoints, at most
_SECONDS = 2.0
_TOKENS = 512
_MAX_BYTES = 1 << 30  # of a file: tokens take four
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # of what checksums are taken

Counters = Values


class SaveFailed(DecodeError):
    """A run's folder cannot be written any more."""


def bytes_of(tokens: Sequence[int]) -> bytes:
    """Token ids as they are stored: little-endian uint32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def checksum(record: Object) -> str:
    """SHA-256 of a record read from JSON, its own checksum apart."""
    rest = {name: value for name, value in record.items() if name != CHECKSUM}
    return sha256(_CANONICAL.encode(rest).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Record:
    """What ``run.json`` holds, see docs/formats.md; what is None is not in it."""

    state: str = RUNNING  # or finished, interrupted, failed, skipped
    reason: str | None = None  # why it failed
    end: Mapping[str, str] | None = None  # how a finished text ended
    command: Sequence[str] = field(default_factory=list)
    options: Object = field(default_factory=dict)  # of :meth:`RunConfig.recorded`
    sampling: Object = field(default_factory=dict)  # all of SamplingParams
    drafting: Object = field(default_factory=dict)  # what the method uses of DraftOptions, resolved
    model: Object = field(default_factory=dict)  # what was loaded and how
    prompt: Object = field(default_factory=dict)
    started: str = ""
    environment: Object = field(default_factory=dict)
    prefill_seconds: float | None = None  # of the first session
    # a session for each time that the run was resumed
    resumed: Sequence[Object] = field(default_factory=list)
    process: Object = field(default_factory=dict)
    ended: str | None = None
    figures: Object | None = None  # once it does not run
    accepted: Mapping[object, int] = field(default_factory=dict)
    sizes: Mapping[object, int] = field(default_factory=dict)
    choices: Mapping[str, int] | None = None

    @classmethod
    def of(cls, plain: Object) -> Record:
        """A record of what JSON holds; a KeyError if it lacks what all versions have written."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: plain[name] for name in names if name in plain or name in _ALWAYS})

    def content(self) -> bytes:
        """The bytes of ``run.json``, with their checksum."""
        present = {name: value for name, value in vars(self).items() if value is not None}
        plain = json.loads(json.dumps({"schema": SCHEMA, **present}, default=str))  # paths
        plain[CHECKSUM] = sha256(_CANONICAL.encode(plain).encode()).hexdigest()
        text = json.dumps(plain, indent=2, ensure_ascii=False)
        # incomplete UTF-8, as in a file's name
        return f"{text}\n".encode(errors="backslashreplace")


# --- folders


def default_path(method: str, runs: Path = Path("runs")) -> Path:
    """``runs/<UTC time>-<method>``, with a number if that is taken."""
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{method}"
    # a clock may have been set back
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(path for path in map(runs.joinpath, names) if not path.exists())


def _new_folder(path: Path) -> list[Path]:
    """Make a folder, or take one without a run in it; returns the folders that were made,
    the innermost first.
    """
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        empty = _holds_no_run(path)
    except OSError as error:
        raise unwritable(path, error) from None
    if not empty:
        raise InputError(f"{path} is not empty; a run needs a folder of its own", "out")
    return made


@contextmanager
def create_folder(path: Path) -> Iterator[None]:
    """Make a folder, or take an empty one.

    An error removes it again, unless something has been put there meanwhile.
    """
    made = _new_folder(path)
    try:
        yield
    except BaseException:
        _remove(made)
        raise


def _remove(made: Sequence[Path]) -> None:
    with suppress(OSError):  # somebody else has put something there meanwhile
        for folder in made:
            folder.rmdir()


def _holds_no_run(path: Path) -> bool:
    """Whether a folder is empty, or holds no more than a run leaves that was killed before its
    first record.
    """
    left = (PROMPT, REQUEST, *(name + NEW for name in (PROMPT, REQUEST, RECORD)))
    empty = (LOCK, TOKENS, TEXT, JOURNAL, LOGPROBS)
    for file in path.iterdir():
        if file.name not in (*left, *empty):
            return False
        status = status_of_regular_file(file)
        if file.name in empty and status and status.st_size:
            return False
    return True


# --- the journal


@dataclass(frozen=True)
class JournalLine:
    """A line of the journal."""

    tokens: int  # how many there were
    crc32: int  # of the bytes of the prompt and of these tokens
    # see :meth:`tswift.decoding.stats.DecodeStats.counters`
    counters: Counters = field(default_factory=dict)
    # of these tokens' log-probabilities; None without them, or before they had one
    rows_crc32: int | None = None
    end: int = field(default=0, compare=False)  # bytes of the journal up to the end of this line

    def line(self) -> bytes:
        """The journal's line."""
        rows = {} if self.rows_crc32 is None else {_ROWS: self.rows_crc32}
        content = {"tokens": self.tokens, "crc32": self.crc32, **rows, **self.counters}
        text = json.dumps(content, separators=(",", ":")).encode()
        return b"%s\t%08x\n" % (text, crc32(text))


class Journal(NamedTuple):
    """A journal that was read."""

    checkpoints: list[JournalLine]  # of the whole lines before the first broken one
    truncated: bool = False  # the last line is broken or has no end: writing it was cut short
    broken: int | None = None  # number of a line, from 1, that is broken although others follow


def parse_journal(content: bytes) -> Journal:
    """Read a journal; nothing in it is too broken for that."""
    *lines, rest = content.split(b"\n")
    checkpoints: list[JournalLine] = []
    end = 0
    for number, line in enumerate(lines, 1):
        end += len(line) + 1
        text, _, crc = line.rpartition(b"\t")
        try:
            counters = json.loads(text) if crc == b"%08x" % crc32(text) else {}
            sums = (counters.pop("crc32"), counters.pop(_ROWS, None))
            checkpoint = JournalLine(counters.pop("tokens"), sums[0], counters, sums[1], end)
            whole = (
                isinstance(checkpoint.tokens, int)
                and isinstance(sums[0], int)
                and isinstance(sums[1], int | None)
            )
            sound = whole and checkpoint.tokens > (checkpoints[-1].tokens if checkpoints else -1)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            sound = False
        if not sound:
            last = number == len(lines) and not rest
            return Journal(checkpoints, last, None if last else number)
        checkpoints.append(checkpoint)
    return Journal(checkpoints, truncated=bool(rest))


# --- writing


class RunFolder:
    """A run's folder, open for appending and locked against other processes.

    Made by :meth:`create` or :meth:`reopen`.

    What writes raises :class:`SaveFailed` where that cannot be done.
    """

    def __init__(self, path: Path, lock: Lock, made: Sequence[Path] = ()) -> None:
        self.path = path
        self._lock = lock
        self._made = made
        # handles, and what waits for the next checkpoint
        self._files: dict[str, tuple[int, bytearray]] = {}
        self.saved = self._appended = self._crc = 0  # ``saved`` tokens are on the disk for certain
        self._rows_crc: int | None = None  # of log-probabilities, if there are any
        self._checked = time.monotonic()

    @classmethod
    def create(cls, path: Path, logprobs: bool = False) -> RunFolder:
        """The folder of a new run, not there yet or empty;
        with a file of log-probabilities if asked for.
        """
        made = _new_folder(path)
        lock = lock_folder(path, "out", f"{path} is in use by another run")
        try:
            _new_folder(path)  # asked anew, now that nobody else writes to it
        except InputError:
            lock.release()
            raise
        folder = cls(path, lock, made)
        try:
            for name in (TOKENS, TEXT, JOURNAL, *([LOGPROBS] if logprobs else [])):
                folder._open(name)
            folder._rows_crc = 0 if logprobs else None
            for parent in (path, *(below.parent for below in made)):
                sync_folder(parent)
        except OSError as error:
            folder.discard()
            raise unwritable(path, error) from None
        return folder

    @classmethod
    def reopen(
        cls,
        path: Path,
        lock: Lock,
        record: Record,
        checkpoint: JournalLine,
        text: str,
        row_bytes: int = 0,
    ) -> RunFolder:
        """The folder of a run that goes on from a checkpoint; what lies behind it is cut off.

        Before that its ``record`` says that it is running: a run that was finished, and is killed
        while it is made longer, is finished no more. ``text`` is the text up to the checkpoint,
        ``row_bytes`` what a token's log-probabilities take, if there are any.
        """
        folder = cls(path, lock)
        folder.record(replace(record, state=RUNNING))
        with folder._saving():
            folder._open(JOURNAL, checkpoint.end)
            folder._open(TOKENS, 4 * checkpoint.tokens)
            if row_bytes:
                folder._open(LOGPROBS, row_bytes * checkpoint.tokens)
            folder._open(TEXT)  # it is written anew
        folder._add(TEXT, text.encode())
        folder.saved = folder._appended = checkpoint.tokens
        folder._crc = checkpoint.crc32
        folder._rows_crc = checkpoint.rows_crc32
        return folder

    def _open(self, name: str, keep: int | None = None) -> None:
        """Open a file to append to it: after its first ``keep`` bytes,
        or an empty one that need not be there yet.
        """
        handle = open_own(self.path / name, os.O_WRONLY | (os.O_CREAT if keep is None else 0))
        self._files[name] = handle, bytearray()
        os.ftruncate(handle, keep or 0)
        os.lseek(handle, 0, os.SEEK_END)

    def _add(self, name: str, content: bytes) -> None:
        self._files[name][1].extend(content)

    def _sync(self, name: str, durable: bool = True) -> None:
        """Write what waits for it; if ``durable``, so that even a power cut leaves it there."""
        handle, waiting = self._files[name]
        write_all(handle, waiting)
        if durable:
            os.fsync(handle)

    def keep_prompt(self, tokens: Sequence[int]) -> None:
        """Write ``prompt.u32``: the prompt need not be there any more when the run is verified or
        resumed.
        """
        self._crc = crc32(bytes_of(tokens))
        try:
            write_whole(self.path / PROMPT, bytes_of(tokens))
        except OSError as error:
            raise unwritable(self.path, error) from None

    def append(
        self,
        tokens: Sequence[int],
        text: str,
        counters: Callable[[], Counters],
        logprobs: bytes = b"",
    ) -> None:
        """Add tokens, the text that they complete, and their log-probabilities;
        a checkpoint is made if one is due.
        """
        data = bytes_of(tokens)
        self._add(TOKENS, data)
        self._add(TEXT, text.encode())
        if self._rows_crc is not None:
            self._add(LOGPROBS, logprobs)
            self._rows_crc = crc32(logprobs, self._rows_crc)
        self._crc = crc32(data, self._crc)
        self._appended += len(tokens)
        if time.monotonic() - self._checked >= _SECONDS or self._appended - self.saved >= _TOKENS:
            self.checkpoint(counters())

    def checkpoint(self, counters: Counters, last: bool = False) -> None:
        """Put what was appended on the disk, tokens first,
        and then say in the journal that it is there.

        With the ``last`` one the text is made durable, too: a finished run is never resumed.
        """
        with self._saving():
            for name, (handle, _) in self._files.items():
                if not os.path.samestat(os.fstat(handle), os.lstat(self.path / name)):
                    raise FileNotFoundError
            for name in (TOKENS, LOGPROBS):
                if name in self._files:
                    self._sync(name)
            self._sync(TEXT, durable=last)  # until then it could be made again from the tokens
            if self._appended > self.saved:
                self._add(
                    JOURNAL, JournalLine(self._appended, self._crc, counters, self._rows_crc).line()
                )
                self._sync(JOURNAL)
        self.saved = self._appended
        self._checked = time.monotonic()

    def record(self, record: Record) -> None:
        """Write ``run.json``, whole or not at all."""
        with self._saving():
            write_whole(self.path / RECORD, record.content())

    def close(self) -> None:
        """Close the files and release the folder. What no checkpoint has written is dropped."""
        while self._files:
            os.close(self._files.popitem()[1][0])
        self._lock.release()

    def discard(self) -> None:
        """Remove a folder in which no run was started."""
        self.close()
        for name in (TOKENS, TEXT, LOGPROBS, PROMPT, JOURNAL, LOCK):
            (self.path / name).unlink(missing_ok=True)
        _remove(self._made)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise SaveFailed(f"{self.path} was removed or moved") from None
        except OSError as error:
            raise SaveFailed(f"{self.path} cannot be written to ({error.strerror})") from None


# --- reading


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder describes it, finished or not."""

    path: Path
    record: Record  # all of ``run.json``
    config: RunConfig  # what made the run
    params: SamplingParams  # banned end-of-text tokens included
    prompt: list[int]  # token ids
    # hash of the arithmetic of all its sessions; None if it was not exact, or they differ
    bits: str | None
    eos_ids: tuple[int, ...]  # the model's end-of-text tokens

    @property
    def rules(self) -> TextRules:
        """What ends its text, and what is shown of it."""
        config = self.config
        _, ends = apply_eos_policy(self.params, self.eos_ids, config.ends_at_eos, config.ignore_eos)
        return replace(config.text_rules, ends=frozenset(ends), least=self.params.min_tokens)

    def text_fault(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """What is wrong with its ``text.txt``, which is to be the text of its tokens;
        empty if nothing is.

        Of a run that did not come to save its end it may be a part.
        """
        file = self.path / TEXT
        whole = self.record.state in (FINISHED, INTERRUPTED)
        # the text before the tokens: a process that is writing them writes the tokens first
        found = read_own(file) if whole or file.exists() else b""
        text = text_of(tokenizer, _ids(read_own(self.path / TOKENS)), self.rules).encode()
        if text == found if whole else text.startswith(found):
            return ""
        pairs = enumerate(zip(text, found, strict=False))
        same = next((at for at, (own, other) in pairs if own != other), min(len(text), len(found)))
        return f"{file} is not the text of {TOKENS}: they differ from byte {same:,} on"


class Saved(NamedTuple):
    """How far a run came, as its journal vouches for it."""

    tokens: list[int]  # the generated token ids that are vouched for
    checkpoints: list[JournalLine]  # those that hold; the first is the beginning
    # the journal's last line was cut short, so that a checkpoint before it is the last
    truncated: bool
    # tokens in the file behind the last checkpoint: they may be right, and are drawn again
    unsure: int
    damage: str  # what is broken; empty if nothing is. A truncated end is no damage


def read_run(path: Path) -> RunRecord:
    """Read a run's folder, its tokens apart.

    InputError if it is none, or broken, or does not fit together.
    """
    record = read_record(path)
    prompt = read_tokens(path / PROMPT)
    for name in (TEXT, LOGPROBS, RECORD + NEW):  # what is to be written, if it goes on
        status_of_regular_file(path / name)
    with reading(path / RECORD):
        exact = [each.get("exact") for each in (record.model, *record.resumed)]
        bits = {None if how is None else how["bits"] for how in exact}
        seconds = (part.get("prefill_seconds", 0.0) for part in record.resumed)
        sum(seconds, record.prefill_seconds or 0.0)  # as figures will
        run = RunRecord(
            path,
            record,
            RunConfig.from_record(record.options, record.model, record.drafting),
            SamplingParams(**of_json(record.sampling)),
            prompt,
            bits.pop() if len(bits) == 1 else None,
            tuple(record.model["eos_ids"]),
        )
        recorded_prompt = record.prompt["sha256"]
    if recorded_prompt != fingerprint(prompt):
        raise InputError(f"{path / PROMPT} is not the prompt of {RECORD}: their SHA-256 differ")
    return run


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Say in one line what is wrong with a file of ours while its content is made use of."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{file} is broken: {reason:.200}") from None


def read_record(path: Path) -> Record:
    """``run.json`` of a run's folder, with its checksum checked; InputError if there is none,
    or it is broken.
    """
    _refuse_no_folder(path)
    missing = f"there is no {RECORD} in it"
    if (path / TOKENS).exists() and not (path / RECORD).exists() and _holds_no_run(path):
        missing = "it was stopped while the model was loading; --out begins it anew"
    elif held := sorted(path.glob(f"*/{RECORD}")):
        missing = f"folders in it do, such as {held[0].parent}"
    record = read_json(path / RECORD, f"{path} holds no run: {missing}")
    if record.get("schema") != SCHEMA:
        raise InputError(
            f"{path / RECORD} is not of schema {SCHEMA}, which is all this version reads"
        )
    if record.get(CHECKSUM) != checksum(record):
        raise InputError(f"{path / RECORD} is not as it was written: its checksum differs")
    with reading(path / RECORD):
        return Record.of(record)


def read_saved(path: Path, prompt: Sequence[int], row_bytes: int = 0) -> Saved:
    """How far a run came, by its journal.

    Where a token's log-probabilities take ``row_bytes``, tokens without them are not sound.
    """
    journal = parse_journal(read_own(path / JOURNAL))
    data = read_own(path / TOKENS)
    damage = (
        f"line {journal.broken:,} of {path / JOURNAL} does not match its checksum"
        if journal.broken
        else ""
    )
    rows = read_own(path / LOGPROBS) if row_bytes else b""
    sound = [JournalLine(0, crc32(bytes_of(prompt)), rows_crc32=0 if row_bytes else None)]
    rows_crc = 0
    for checkpoint in journal.checkpoints:
        before = sound[-1]
        made = checkpoint.tokens
        end = 4 * checkpoint.tokens
        rows_crc = crc32(rows[row_bytes * before.tokens : row_bytes * made], rows_crc)
        if end > len(data):
            wrong = f"{path / TOKENS} has {len(data):,} bytes, its journal speaks of {end:,}"
        elif row_bytes * made > len(rows):
            wrong = f"{path / LOGPROBS} has {len(rows):,} bytes, {made:,} tokens take more"
        elif row_bytes and checkpoint.rows_crc32 not in (None, rows_crc):
            wrong = (
                f"{path / LOGPROBS} does not match its checksum between tokens {before.tokens:,} "
                f"and {made:,}"
            )
        elif crc32(data[4 * before.tokens : end], before.crc32) != checkpoint.crc32:
            wrong = (
                f"{path / TOKENS} does not match its checksum between tokens {before.tokens:,} "
                f"and {made:,}"
            )
        else:
            sound.append(replace(checkpoint, rows_crc32=rows_crc if row_bytes else None))
            continue
        damage = damage or wrong
        break
    length = sound[-1].tokens
    return Saved(
        _ids(data[: 4 * length]), sound, journal.truncated, len(data) // 4 - length, damage
    )


def read_tokens(path: Path, option: str | None = None, whole: bool = True) -> list[int]:
    """The token ids in a file of little-endian uint32, at least one;
    it is a run's if no ``option`` names it.

    Where it need not be ``whole``, a part of a token at its end, as a run that was killed may leave
    it, is left out.
    """
    # a file that the user names may be reached by a link; one in a run's folder must not
    data = read_own(path) if option is None else read_file(path, _MAX_BYTES, option)
    if whole and len(data) % 4:
        raise InputError(f"{path} is not a file of uint32: it has {len(data):,} bytes", option)
    if len(data) < 4:
        raise InputError(f"{path} holds no tokens", option)
    return _ids(data)


def _ids(data: bytes) -> list[int]:
    return np.frombuffer(data[: len(data) // 4 * 4], "<u4").tolist()


def read_own(
    path: Path, most: int = _MAX_BYTES, missing: str | None = None, option: str | None = None
) -> bytes:
    """All bytes of a file in a folder of tswift's; see :func:`open_own`,
    and :func:`tswift.errors.read_file`.
    """
    return read_file(path, most, option, missing, lambda path: open_own(path, option=option))


def read_json(path: Path, missing: str | None = None, option: str | None = None) -> Object:
    """The object of JSON in a file in a folder of tswift's; see :func:`read_own`."""
    content = read_own(path, MAX_RECORD, missing, option)
    found = parse_json(content, f"{path} is broken: it", option)
    if not isinstance(found, dict):
        raise InputError(f"{path} is broken: it is no object", option)
    return found


def check_ids(ids: Sequence[int], vocab_size: int, name: str, option: str | None = None) -> None:
    """Refuse token ids that the model does not have, by naming the first."""
    for index, token in enumerate(ids):
        if token >= vocab_size:
            message = (
                f"{name} has token id {token:,} at {index:,}, outside the model's vocabulary of "
                f"{vocab_size:,}"
            )
            raise InputError(message, option)


def _refuse_no_folder(path: Path) -> None:
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)[:80]} cannot be accessed ({reason})") from None
    if not is_folder:
        raise InputError(f"there is no folder {path}")


@dataclass(frozen=True)
class Entry:
    """A run, as a list shows it; None where the record cannot be read."""

    path: Path
    # as recorded; killed if that is running and no process has its lock; broken if it cannot be
    # read
    state: str
    reason: str = ""  # why it failed or is broken
    tokens: int = 0  # saved so far
    length: int | None = None
    method: str | None = None
    model: str | None = None
    tokens_per_second: float | None = None  # of decoding; None before the first checkpoint
    started: str | None = None


def list_runs(folder: Path) -> list[Entry]:
    """The runs in a folder, the oldest first; the folder itself, if it is a run's."""
    _refuse_no_folder(folder)
    try:
        paths = [folder] if (folder / RECORD).exists() else [*folder.iterdir()]
        runs = [
            path
            for path in paths
            if path.is_dir() and ((path / RECORD).exists() or (path / JOURNAL).exists())
        ]
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror})") from None
    return sorted(
        (inspect_run(path)[0] for path in runs),
        key=lambda entry: (entry.started or "", str(entry.path)),
    )


def inspect_run(path: Path) -> tuple[Entry, Record | None, JournalLine]:
    """A run from outside, whoever is writing it: its entry in a list, its record (if sound),
    its last checkpoint.
    """
    working = in_use(path)
    last = JournalLine(0, 0)
    with suppress(InputError):
        last = [last, *parse_journal(read_own(path / JOURNAL, MAX_RECORD)).checkpoints][-1]
    if working and not (path / RECORD).exists():  # its model is being loaded
        return Entry(path, RUNNING, "", last.tokens), None, last
    try:
        record = read_record(path)
        with reading(path / RECORD):
            seconds = last.counters.get("seconds")
            speed = last.tokens / seconds if isinstance(seconds, float) and seconds else None
            killed = KILLED if record.state == RUNNING else str(record.state)
            entry = Entry(
                path,
                RUNNING if working else killed,
                str(record.reason or ""),
                last.tokens,
                int(record.options["length"]),
                str(record.options["method"]),
                str(record.model["name"]),
                speed,
                str(record.started),
            )
    except InputError as error:
        return Entry(path, BROKEN, str(error), last.tokens), None, last
    return entry, record, last
