"""A training's folder: ``train.json``, ``metrics.jsonl``, ``checkpoint.safetensors``, and in the end its result.

A checkpoint is one safetensors file, replaced whole: weights, optimizer states, steps done. Rows are a function of seed
and step, so no random generator has to be kept.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tswift.errors import Fault, InputError
from tswift.jobs.folder import InUse, Lock, new_folder, refuse_other, write_whole
from tswift.reading import MOST_RECORD, read_file

RECORD, METRICS, CHECKPOINT = "train.json", "metrics.jsonl", "checkpoint.safetensors"
_SCHEMA = 1
_FIELD = "resume"


class TrainFolder:
    """The files of a kind of training, named by its subcommand.

    What cannot be read raises an ``InputError``. What cannot be written raises a ``Fault``, and leaves what was there.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self._kind = path, kind

    @contextmanager
    def created(self) -> Iterator[None]:
        """Make the folder, or take an empty one; remove it again if what follows fails.

        Raises:
            InputError: it is not empty, cannot be made, or has a name that safetensors cannot read.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise InputError(f"{self.path} is no UTF-8, and safetensors reads no other names", "out") from None
        made = new_folder(self.path)
        try:
            if not os.access(self.path, os.W_OK):
                raise InputError(f"{self.path} cannot be written to", "out")
            yield
        except BaseException:
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()
            raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here."""
        try:
            lock = Lock(self.path)
        except InUse:
            raise InputError(f"another process is training in {self.path}", _FIELD) from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be written to ({error.strerror})", _FIELD) from None
        with lock:
            yield

    def read_record(self) -> dict[str, Any]:
        """The contents of ``train.json``."""
        path = self.path / RECORD
        _refuse_other(path)
        content = read_file(path, MOST_RECORD, _FIELD, f"{self.path} holds no training: there is no {RECORD} in it")
        try:
            record = dict(json.loads(content))
            kind, schema = record["kind"], record["schema"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{path} is damaged", _FIELD) from None
        if (kind, schema) != (self._kind, _SCHEMA):
            raise InputError(f"{path} is of kind {kind}, schema {schema}", _FIELD)
        return record

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write ``train.json``."""
        text = json.dumps({"schema": _SCHEMA, "kind": self._kind, **record}, indent=2, ensure_ascii=False)
        with self._writing(RECORD):  # backslashes for incomplete UTF-8 in a file's name
            write_whole(self.path / RECORD, f"{text}\n".encode(errors="backslashreplace"))

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Have a file written by ``save``, whole or not at all."""
        path = self.path / name
        new = path.with_name(f"{name}.new")
        with self._writing(name):
            try:
                new.unlink(missing_ok=True)  # it could be a link
                save(new)
                shutil.copymode(self.path / RECORD, new)  # safetensors would let nobody else read it
                with new.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(new, path)
            except (OSError, SafetensorError):
                new.unlink(missing_ok=True)
                raise

    def save_checkpoint(self, tensors: Mapping[str, Tensor], step: int, seconds: float) -> None:
        """Write a checkpoint: all tensors that training continues from, steps done, seconds trained."""
        contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
        about = {"tswift": json.dumps({"kind": self._kind, "schema": _SCHEMA, "step": step, "seconds": seconds})}
        self.write(CHECKPOINT, lambda path: save_file(contiguous, path, metadata=about))

    def load_checkpoint(self) -> tuple[dict[str, Tensor], int, float] | None:
        """The last checkpoint: tensors, steps done, seconds trained; None if there is none yet."""
        path = self.path / CHECKPOINT
        _refuse_other(path)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["tswift"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, int(about["step"]), float(about["seconds"])
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise InputError(f"{path} is damaged ({str(error).splitlines()[0]})", _FIELD) from None

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        with self._writing(METRICS), (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def truncate_log(self, step: int) -> None:
        """Drop the lines of ``metrics.jsonl`` after a step: the checkpoint does not know of them."""
        path = self.path / METRICS
        _refuse_other(path)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if _step(line) <= step]
        with self._writing(METRICS):
            write_whole(path, "".join(f"{line}\n" for line in kept).encode())

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Say in one line that a file cannot be written, and how to go on."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            saved = (self.path / CHECKPOINT).is_file()
            advice = f"; tswift {self._kind} --resume {self.path} goes on from the last checkpoint" if saved else ""
            raise Fault(f"{self.path / name} cannot be written ({reason}){advice}") from None


def _refuse_other(path: Path) -> None:
    """Refuse a link, which could point at anything, or a pipe, which might never end."""
    try:
        refuse_other(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})", _FIELD) from None


def _step(line: str) -> float:
    """The step of a line; infinity if the line is truncated."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
