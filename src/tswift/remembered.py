"""What checks have found on this machine, so that a later process need not make them.

When a model is loaded, its logits are compared with those of transformers, its passes with each
other, and kernels of a GPU with plain PyTorch. What comes of that depends on what is checked, the
processor, the card and its driver, the libraries and our sources, and all of them are in a file's
name. Only what was passed is kept; what failed is tried again. Attention is tried in every process:
that check has found the one fault that a GPU had.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch
import transformers

import tswift
from tswift.errors import Object, SlowWarning
from tswift.files import cache_folder, put
from tswift.machine import processor

_FOLDER = "checks"  # in the cache folder
# which libraries read
_SETTINGS = ("ATEN_", "DNNL_", "KMP_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "TRITON_")
T = TypeVar("T")


def recalled(file: Path | None, made: Callable[[Object], T | None]) -> T | None:
    """What is ``made`` of the object in a file of the cache; None where there is no such file.

    Of one that holds something else a line is told, and it is removed: what it was to hold is found
    anew.
    """
    with suppress(OSError):
        if file is None:
            return None
        content = file.read_bytes()
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if (known := made(json.loads(content))) is not None:
                return known
        warnings.warn(f"{file} is broken: it is made anew", SlowWarning, stacklevel=2)
        file.unlink()
    return None


def remember(file: Path | None, known: Object) -> None:
    """Keep an object in a file of the cache, if there is a place and room for it."""
    with suppress(OSError):
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        put(file, lambda beside: beside.write_text(json.dumps(known)))


class Checks:
    """What was found by checks, by what was asked.

    Args:
        about: what was checked, and how it was loaded; without anything nothing is kept.
    """

    def __init__(self, *about: object) -> None:
        self._file: Path | None = None
        folder = cache_folder() if about else None
        if folder is not None:
            key = repr([*map(str, about), _machine()]).encode()
            self._file = folder / _FOLDER / f"{sha256(key).hexdigest()[:32]}.json"

    def found(self, what: str) -> str | None:
        """What a check found; None if it has to be made."""
        return self._known().get(what)

    def keep(self, what: str, value: str) -> None:
        """Remember it, if there is a place for it."""
        remember(self._file, {**self._known(), what: value})

    def _known(self) -> dict[str, str]:
        return recalled(self._file, _texts) or {}


def _texts(known: Object) -> dict[str, str] | None:
    return known if all(isinstance(value, str) for value in known.values()) else None


NO_CHECKS = Checks()


def forget() -> None:
    """Have all checks made again."""
    folder = cache_folder()
    if folder is not None:
        shutil.rmtree(folder / _FOLDER, ignore_errors=True)


def _machine() -> str:
    """The processor, the libraries and their settings, and a hash of our sources."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS))
    about = [torch.__version__, transformers.__version__, torch.get_num_threads(), settings]
    return repr([*about, torch.backends.cpu.get_cpu_capability(), _processor(), _sources()])


def _processor() -> dict[str, str]:
    """What the system says of the first processor, but for what changes with its clock."""
    return {name: told for name, told in processor().items() if name != "cpu MHz"}


@cache
def _sources() -> str:
    files = sorted(Path(tswift.__file__).parent.rglob("*.[pch]*"))
    texts = (file.read_bytes() for file in files if file.suffix in (".py", ".c", ".h"))
    return sha256(b"\0".join(texts)).hexdigest()
