"""The machine: its memory, processor, versions and clock."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePosixPath

import torch
import transformers
from torch import Tensor

import tswift
from tswift.errors import Object

_ROOT = Path("/")


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where the system does not say."""
    if device.type == "cuda":
        # PyTorch's own, to be reused
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    available = [
        line.split()[1]
        for line in _lines(_ROOT / "proc/meminfo")
        if line.startswith("MemAvailable:")
    ]
    return min([*(int(size) * 1024 for size in available), *_free_of_groups()], default=None)


def _free_of_groups() -> Iterator[int]:
    """Bytes that the control groups of this process, and those around them,
    have left of their limits.

    A container or a batch system gives a process less than the machine has, and kills it when it
    takes more. The page cache counts as free.
    """
    for line in _lines(_ROOT / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            mount = _ROOT / "sys/fs/cgroup"
            names = ("memory.max", "memory.current")
            prefix = ""
        elif "memory" in controllers.split(","):
            mount = _ROOT / "sys/fs/cgroup/memory"
            prefix = "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        for folder in (mount / part for part in (path, *path.parents)):
            limit, used = ("".join(_lines(folder / name)) for name in names)
            if limit.isdecimal() and used.isdecimal():
                cached = (f"{prefix}inactive_file ", f"{prefix}active_file ")
                sizes = [
                    int(row.split()[1])
                    for row in _lines(folder / "memory.stat")
                    if row.startswith(cached)
                ]
                yield max(0, int(limit) - int(used) + sum(sizes))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def gigabytes(count: int) -> str:
    """Bytes for people, in units of 10^6 or 10^9 bytes."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def ran_out(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left."""
    # PyTorch's allocator for the CPU has no type of its own for that
    of_cpu = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return of_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def environment(device: torch.device) -> Object:
    """Versions, platform, processors and git commit, as they go into ``run.json``."""
    gpu = gpu_name(device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tswift": tswift.__version__,
        "git_commit": _git_commit(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "driver": gpu and driver_version(),
    }


def gpu_name(device: torch.device) -> str | None:
    """What a GPU is called; None for another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@cache
def driver_version() -> str | None:
    """The version of the GPU's driver; None if nothing tells it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = _output(query)
    return found.splitlines()[0] if found else None


def architecture() -> str:
    """The processor's: ``x86_64``, ``aarch64``, or another name that the system gives it."""
    name = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


@cache
def processor() -> dict[str, str]:
    """What Linux or macOS says of the first processor, by the system's names; nothing elsewhere."""
    told = "\n".join(_lines(Path("/proc/cpuinfo"))) or _output(["sysctl", "hw.optional", "machdep"])
    first = (told or "").partition("\n\n")[0]
    pairs = (line.partition(":")[::2] for line in first.splitlines())
    return {name.strip(): value.strip() for name, value in pairs}


def processor_features() -> set[str]:
    """The instruction sets of the processor, by Linux's names."""
    known = processor()
    if "hw.optional.arm64" in known:  # Apple's
        dots = known.get("hw.optional.arm.FEAT_DotProd") == "1"
        return {"asimd", *(["asimddp"] if dots else [])}
    return {*known.get("flags", known.get("Features", "")).split()}


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def peak_bytes(device: torch.device) -> int | None:
    """Most memory this process has held on the device so far;
    None where the system does not say.
    """
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


def return_free_memory() -> None:
    """Have the C library return memory that is free to the system, which it else keeps;
    where it can.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _cpu_name() -> str:
    """The processor with its family, as many are sold under one name, and what it computes with:
    ``Intel Xeon (family 6 model 143), AVX-512 VNNI BF16 AMX``.
    """
    known = processor()
    sets = [words for words, names in _SETS.items() if processor_features() & {*names}]
    vectors = " ".join(sets[1:] if sets[:2] == ["AVX2", "AVX-512"] else sets)
    with suppress(KeyError):
        if "CPU part" in known:  # Linux on ARM
            return f"ARM {known['CPU implementer']} {known['CPU part']}, {vectors}"
        if "hw.optional.arm64" in known:
            return f"{known['machdep.cpu.brand_string']}, {vectors}"
        name = known["model name"].replace("(R)", "").replace("(TM)", "").replace(" Processor", "")
        return f"{name} (family {known['cpu family']} model {known['model']}), {vectors}"
    return platform.processor()


_SETS = {  # of instructions, by the features that tell of them
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "NEON": ("asimd",),
    "DotProd": ("asimddp",),
    "BF16": ("avx512_bf16", "bf16"),
    "AMX": ("amx_int8", "amx_bf16"),
}


def _git_commit() -> str | None:
    """The commit of the source tree, if the package lies in one;
    with ``-dirty`` if files have changed since.
    """
    root = Path(tswift.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    return _output(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    )


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ask_for_huge_pages(buffer: Tensor) -> None:
    """Let Linux map memory in pages of 2 MiB: with those of 4 KiB,
    reading 98,000 keys and values took 16% longer.
    """
    if not buffer.is_cpu or sys.platform != "linux":
        return
    start = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = buffer.data_ptr() + buffer.nbytes - start
    if size > 0:  # a kernel without such pages refuses, and nothing is lost
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
