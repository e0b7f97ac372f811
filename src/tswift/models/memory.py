"""How much memory a device still has."""

from __future__ import annotations

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch's own, to be reused
        return torch.cuda.mem_get_info(device)[0] + held
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else None


def gigabytes(count: int) -> str:
    """Bytes for people, in units of 10^6 or 10^9 bytes."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def ran_out(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # PyTorch's allocator for the CPU has no type of its own for that
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
