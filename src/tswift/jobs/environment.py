"""The machine and the software a run was made with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import tswift


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, platform, processors and git commit, as they go into ``run.json``."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = _output(query) if device.type == "cuda" else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tswift": tswift.__version__,
        "git_commit": _git_commit(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": driver.splitlines()[0] if driver else None,
    }


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def peak_bytes(device: torch.device) -> int | None:
    """Most memory this process has held on the device so far; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Main memory that this process holds now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _git_commit() -> str | None:
    """The commit of the source tree, if the package lies in one; with ``-dirty`` if files have changed since."""
    root = Path(tswift.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    return _output(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
