"""The attention backends by name, and why one cannot serve;
what they need is imported when one is asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial

import torch

from tswift.attention.sdpa import (
    Attention,
    BatchInvariantAttention,
    Layout,
)
from tswift.errors import InputError


def _load(module: str, name: str) -> type[Attention]:
    return getattr(importlib.import_module(f"tswift.attention.{module}"), name)


USUAL_HEAD_SIZE = 64
BACKENDS: dict[str, Callable[[], type[Attention]]] = {
    "sdpa": partial(_load, "sdpa", "TreeAttention"),
    "native": partial(_load, "native", "NativeAttention"),
    "triton": partial(_load, "triton", "TritonAttention"),
    "flash": partial(_load, "sdpa", "FlashAttention"),
}

HALVES = (torch.bfloat16, torch.float16)


def why_not(
    name: str, dtype: torch.dtype, device: torch.device, width: int = USUAL_HEAD_SIZE
) -> str | None:
    """Why a backend, a key of :data:`BACKENDS`, cannot serve a model here, in one line; None if it
    can.

    What has to be compiled for that, and for the model's head size, is compiled now, not in the
    first pass.
    """
    if name == "sdpa":
        return None
    cuda = device.type == "cuda"
    if name == "native" and cuda:
        return "native attention is for the CPU"
    if dtype not in (HALVES if name != "native" else (torch.float32, *HALVES)):
        taken = "bfloat16 and float16" if name != "native" else "float32, bfloat16 and float16"
        return f"{name} attention takes {taken}, not {str(dtype).removeprefix('torch.')}"
    if name == "native":
        return _unbuilt(width, dtype)
    if name == "triton":
        if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return (
                "triton attention needs CUDA (on the CPU, TRITON_INTERPRET=1 runs it slowly, for "
                "tests)"
            )
        return _missing("triton", "triton")
    return _missing("flash_attn", "flash-attn") if cuda else "flash attention needs CUDA"


def own_backend(device: torch.device) -> str:
    """The backend that should serve on a device."""
    return "triton" if device.type == "cuda" else "native"


def choose(
    name: str, dtype: torch.dtype, device: torch.device, width: int = USUAL_HEAD_SIZE
) -> str:
    """The backend that a name stands for; the arguments are those of :func:`why_not`.

    ``auto`` is triton on CUDA and native on the CPU, where they can serve, and sdpa elsewhere.

    Raises:
        InputError: there is no such backend, or it cannot serve the model here.
    """
    if name == "auto":
        own = own_backend(device)
        return own if why_not(own, dtype, device, width) is None else "sdpa"
    if name not in BACKENDS:
        raise InputError(
            f"no attention {name!r}; there are auto, {', '.join(BACKENDS)}", "attention"
        )
    reason = why_not(name, dtype, device, width)
    if reason:
        raise InputError(reason, "attention")
    return name


def exact_attention(attention: type[Attention], layout: Layout, *given: object) -> Attention:
    """What attends in an exact pass: the backend itself,
    or stock operators where it has none for heads of a size.
    """
    from tswift.attention.native import NativeAttention, takes

    # to operators whose rows are not exact
    left = attention is NativeAttention and not takes(layout.width)
    exact = attention.EXACT and not left
    kind: Callable[..., Attention] = attention if exact else BatchInvariantAttention
    return kind(layout, *given)


def _unbuilt(width: int, dtype: torch.dtype) -> str | None:
    from tswift.attention.native import library, takes
    from tswift.native_build import Unbuilt, parallel_region

    try:
        parallel_region()
        # that one tells whether there is a compiler at all
        library(width if takes(width) else USUAL_HEAD_SIZE, dtype)
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
