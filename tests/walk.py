"""Which modules of the package a command runs through: ``python -m tests.walk generate --len 100``.

A module counts if a function of it is called, other than while modules are imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
from pathlib import Path
from types import FrameType

import tswift
from tswift.cli import main

ROOT = Path(tswift.__file__).parent
# modules that need packages which may be missing
OPTIONAL = (
    "code_kernels",
    "triton",
    "sampler_triton",
    "layer_kernels",
    "device_tree_triton",
    "recurrence_triton",
    "flash",
    "plots",
)


def walk(words: list[str]) -> list[str]:
    """Their paths below the package, sorted."""
    for module in pkgutil.walk_packages([str(ROOT)], "tswift."):
        if module.name.rpartition(".")[2] not in (*OPTIONAL, "__main__"):
            importlib.import_module(module.name)
    seen = set()

    def look(frame: FrameType, event: str, argument):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        main(words)
    finally:
        sys.setprofile(None)
    return sorted(str(Path(name).relative_to(ROOT)) for name in seen if name.startswith(f"{ROOT}/"))


if __name__ == "__main__":
    modules = walk(sys.argv[1:])
    print(f"{len(modules)} modules", *modules, sep="\n", file=sys.stderr)
