"""The attention backends by name, and why one cannot serve; what they need is imported when one is asked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

import torch

from tswift.attention.layout import Attention, Layout
from tswift.errors import InputError


def _sdpa() -> type[Attention]:
    from tswift.attention.sdpa import TreeAttention

    return TreeAttention


def _native() -> type[Attention]:
    from tswift.attention.native import NativeAttention

    return NativeAttention


def _triton() -> type[Attention]:
    from tswift.attention.triton import TritonAttention

    return TritonAttention


def _flash() -> type[Attention]:
    from tswift.attention.flash import FlashAttention

    return FlashAttention


BACKENDS: dict[str, Callable[[], type[Attention]]] = {
    "sdpa": _sdpa,
    "native": _native,
    "triton": _triton,
    "flash": _flash,
}

USUAL = 64  # head size
_HALVES = (torch.bfloat16, torch.float16)


def why_not(name: str, dtype: torch.dtype, device: torch.device, width: int = USUAL) -> str | None:
    """Why a backend cannot serve a model here, in one line; None if it can.

    What has to be compiled for that is compiled now, not in the first pass.

    Args:
        name: a key of :data:`BACKENDS`.
        dtype: of the model.
        device: where it is.
        width: the model's head size.
    """
    if name == "native":
        if device.type != "cpu":
            return "native attention is for the CPU"
        if dtype != torch.float32:
            return f"native attention takes float32, not {_plain(dtype)}"
        return _unbuilt(width)
    if name == "triton":
        if dtype not in (torch.float32, *_HALVES):
            return f"triton attention takes float32, bfloat16 and float16, not {_plain(dtype)}"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "triton attention needs CUDA (on the CPU, TRITON_INTERPRET=1 runs it slowly, for tests)"
        return _missing("triton", "triton")
    if name == "flash":
        if dtype not in _HALVES:
            return f"flash attention takes bfloat16 and float16, not {_plain(dtype)}"
        if device.type != "cuda":
            return "flash attention needs CUDA"
        return _missing("flash_attn", "flash-attn")
    return None


def choose(name: str, dtype: torch.dtype, device: torch.device, width: int = USUAL) -> str:
    """The backend that a name stands for; the arguments are those of :func:`why_not`.

    ``auto`` is triton on CUDA and native on the CPU, where they can serve, and sdpa elsewhere.

    Raises:
        InputError: there is no such backend, or it cannot serve the model here.
    """
    if name == "auto":
        own = "triton" if device.type == "cuda" else "native"
        return own if why_not(own, dtype, device, width) is None else "sdpa"
    if name not in BACKENDS:
        raise InputError(f"no attention {name!r}; there are auto, {', '.join(BACKENDS)}", "--attention")
    reason = why_not(name, dtype, device, width)
    if reason:
        raise InputError(reason, "--attention")
    return name


def fails(name: str, dtype: torch.dtype, device: torch.device, width: int = USUAL) -> str | None:
    """Why a backend that should serve does not, in one line: a kernel is launched. None if it does."""
    layout = Layout(1, 1, dtype, device)
    try:
        query, keys, values = torch.ones(3, 1, 1, width, dtype=dtype, device=device)
        out = BACKENDS[name]()(layout, 0, 1, None)(query, keys, values, 1.0)
        return None if bool((out == 1).all()) else f"{name} attention computes nonsense here"
    except Exception as error:  # compilers, drivers and libraries have many ways to fail
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{name} attention fails here ({lines[0][:200]})"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unbuilt(width: int) -> str | None:
    from tswift.attention.building import Unbuilt
    from tswift.attention.native import library, parallel_region, takes

    try:
        parallel_region()
        library(width if takes(width) else USUAL)  # that one tells whether there is a compiler at all
    except Unbuilt as error:
        return f"native attention {error}"
    return None


def _missing(module: str, package: str) -> str | None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return f"{package} is not installed: pip install {package}"
        return f"{package} cannot be imported: {error}"
    except ImportError as error:  # built for another PyTorch, most often
        return f"{package} cannot be imported: {str(error).splitlines()[0]}"
    return None
