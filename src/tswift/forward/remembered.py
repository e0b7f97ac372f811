"""What checks of a model have found on this machine, so that a later process need not make them.

A model's logits are compared with those of transformers, and its passes with each other, when it is
loaded. What comes of that depends on the weights, the processor, the libraries and our sources, and
all of them are in a file's name. Only what was passed is kept; what failed is tried again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import tswift
from tswift.files import cache_folder, put
from tswift.models.checkpoint import config_hash, weights_hash

_FOLDER = "checks"  # in the cache folder
_SETTINGS = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_")  # which libraries read


class Checks:
    """What was found of a model on the CPU of this machine, by what was asked.

    Args:
        network: the model; None for one of which nothing is kept.
        asked: how it was to be loaded.
    """

    def __init__(self, network: PreTrainedModel | None, *asked: object) -> None:
        self._file: Path | None = None
        folder = None if network is None else cache_folder()
        if network is not None and folder is not None:
            about = [*map(str, asked), weights_hash(network), config_hash(network), _machine()]
            self._file = folder / _FOLDER / f"{sha256(repr(about).encode()).hexdigest()[:32]}.json"

    def found(self, what: str) -> str | None:
        """What a check found; None if it has to be made."""
        value = self._known().get(what)
        return value if isinstance(value, str) else None

    def keep(self, what: str, value: str) -> None:
        """Remember it, if there is a place for it."""
        if self._file is None:
            return
        known = json.dumps({**self._known(), what: value})
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            put(self._file, lambda beside: beside.write_text(known))

    def _known(self) -> dict[str, object]:
        with suppress(OSError, ValueError):
            known = json.loads(self._file.read_text()) if self._file is not None else None
            return known if isinstance(known, dict) else {}
        return {}


NO_CHECKS = Checks(None)


def _machine() -> str:
    """The processor, the libraries and their settings, and a hash of our sources."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS))
    about = [torch.__version__, transformers.__version__, torch.get_num_threads(), settings]
    return repr([*about, torch.backends.cpu.get_cpu_capability(), _processor(), _sources()])


@cache
def _processor() -> str:
    """What the system says of the first processor, but for what changes with its clock."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if "MHz" not in line)


@cache
def _sources() -> str:
    files = sorted(Path(tswift.__file__).parent.rglob("*.[pc]*"))
    texts = (file.read_bytes() for file in files if file.suffix in (".py", ".c"))
    return sha256(b"\0".join(texts)).hexdigest()
