"""The device that a model goes to, its dtype, and how much memory is left there."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import torch

from tswift.errors import InputError
from tswift.models.ranks import Ranks

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


def find_dtype(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        InputError: there is none that a model could be run in.
    """
    if name not in DTYPES:
        raise InputError(f"no dtype {name!r}; there are auto, {', '.join(DTYPES)}", "--dtype")
    return DTYPES[name]


def own_dtype(config: Any) -> torch.dtype:
    """The dtype that a model was published in; float32 where its configuration does not say.

    Raises:
        InputError: none that a model could be run in.
    """
    own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    return find_dtype(str(own).removeprefix("torch."))


def dtype_for(dtype: str, place: torch.device) -> Any:
    """The dtype of a name on a device; ``auto`` where the checkpoint says which.

    Raises:
        InputError: there is no such dtype.
    """
    if dtype == "auto":
        return "auto" if place.type == "cuda" else torch.float32
    return find_dtype(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


_ROOT = Path("/")


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch's own, to be reused
        return torch.cuda.mem_get_info(device)[0] + held
    known = [count for count in (_of_system(_ROOT), *_of_groups(_ROOT)) if count is not None]
    return min(known, default=None)


def _of_system(root: Path) -> int | None:
    """What the machine has left, as its kernel estimates it."""
    sizes = [line.split()[1] for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


def _of_groups(root: Path) -> list[int | None]:
    """What the control groups that this process is in, and those around them, have left of their limits.

    A container or a batch system gives a process less than the machine has, and kills it when it takes more.
    """
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        if not controllers:  # version 2
            mount, names, prefix = root / "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            mount, prefix = root / "sys/fs/cgroup/memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        path = PurePosixPath(place.lstrip("/"))
        found += [_left(mount / group, names, prefix) for group in (path, *path.parents)]
    return found


def _left(group: Path, names: tuple[str, str], prefix: str) -> int | None:
    """What a group has left; None if it has no limit. Files in memory make room when they must."""
    limit, used = ("".join(_lines(group / name)) for name in names)
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    files = (f"{prefix}inactive_file ", f"{prefix}active_file ")
    room = sum(int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith(files))
    return max(0, int(limit) - int(used) + room)


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
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # PyTorch's allocator for the CPU has no type of its own for that
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def find_device(device: str) -> torch.device:
    """The device of a name; ``auto`` is CUDA where there is one.

    Raises:
        InputError: there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, ValueError):
        place = None
    if place is None or place.type not in ("cpu", "cuda") or (place.type == "cpu" and place.index):
        raise InputError(f"no device {device!r}; there are auto, cpu, cuda, cuda:0, ...", "--device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InputError(f"PyTorch finds {torch.cuda.device_count()} CUDA devices here, wanted {device}", "--device")
    return place


def place_for(device: str, ranks: Ranks) -> torch.device:
    """Where the weights go; a rank has its place already.

    Raises:
        InputError: there is no such device, or the ranks are on devices of another type.
    """
    if ranks.device is None:
        return find_device(device)
    if device.partition(":")[0] not in ("auto", ranks.device.type):
        raise InputError(f"the ranks are on {ranks.device.type}, got {device}", "--device")
    return ranks.device
