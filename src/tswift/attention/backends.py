"""The attention backends by name, and why one cannot serve;
what they need is imported when one is asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tswift.attention.sdpa import (
    Attention,
    AttentionSpec,
    BatchInvariantAttention,
    Layout,
    MaskedAttention,
    TreeAttention,
)
from tswift.caches import FullKV, KVShape
from tswift.errors import InputError, cause_of


def _load(module: str, name: str) -> type[Attention]:
    return getattr(importlib.import_module(f"tswift.attention.{module}"), name)


BACKENDS: dict[str, Callable[[], type[Attention]]] = {
    "sdpa": partial(_load, "sdpa", "TreeAttention"),
    "native": partial(_load, "native", "NativeAttention"),
    "triton": partial(_load, "triton", "TritonAttention"),
    "flash": partial(_load, "sdpa", "FlashAttention"),
}

USUAL = 64  # head size
_HALVES = (torch.bfloat16, torch.float16)
_Tried = tuple[tuple[int, int, bool], ...]
# Tried before a backend is used: keys held, nodes, and whether these are a tree; more on a GPU,
# which is quick at it. Each size of a tree may be a kernel of its own, which has to be compiled:
# these are sizes that decoding uses, nearly.
_TRIED: _Tried = ((0, 1, False), (1, 3, True), (130, 17, False), (517, 32, True))
_TRIED_ON_CUDA: _Tried = (*_TRIED, (37, 17, True), (8191, 1, False), (37, 133, False))
_WIDEST = 8192  # a wider window is tried as this one
_NOTHING = AttentionSpec()
# backends may differ by this from sdpa, as a share of the largest output, however precise the dtype
_LEAST = 2e-5


def why_not(name: str, dtype: torch.dtype, device: torch.device, width: int = USUAL) -> str | None:
    """Why a backend, a key of :data:`BACKENDS`, cannot serve a model here, in one line; None if it
    can.

    What has to be compiled for that, and for the model's head size, is compiled now, not in the
    first pass.
    """
    if name == "sdpa":
        return None
    if name == "native" and device.type != "cpu":
        return "native attention is for the CPU"
    if dtype not in (_HALVES if name != "native" else (torch.float32, *_HALVES)):
        taken = "bfloat16 and float16" if name != "native" else "float32, bfloat16 and float16"
        return f"{name} attention takes {taken}, not {str(dtype).removeprefix('torch.')}"
    if name == "native":
        return _unbuilt(width, dtype)
    if name == "triton":
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return (
                "triton attention needs CUDA (on the CPU, TRITON_INTERPRET=1 runs it slowly, for "
                "tests)"
            )
        return _missing("triton", "triton")
    return (
        _missing("flash_attn", "flash-attn")
        if device.type == "cuda"
        else "flash attention needs CUDA"
    )


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
        raise InputError(
            f"no attention {name!r}; there are auto, {', '.join(BACKENDS)}", "attention"
        )
    reason = why_not(name, dtype, device, width)
    if reason:
        raise InputError(reason, "attention")
    return name


def exact_attention(attention: type[Attention], layout: Layout, *given: Any) -> Attention:
    """What attends in an exact pass: the backend itself,
    or stock operators where it has none for heads of a size.
    """
    from tswift.attention.native import NativeAttention, takes

    # to operators whose rows are not exact
    left = attention is NativeAttention and not takes(layout.width)
    kind = attention if attention.EXACT and not left else BatchInvariantAttention
    return kind(layout, *given)


def fails(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    width: int = USUAL,
    heads: tuple[int, int] = (1, 1),
    spec: Iterable[AttentionSpec] = (_NOTHING,),
) -> str | None:
    """Why a backend that should serve does not, in one line; None if it does.

    What it computes of random rows, over odd numbers of keys, is compared with plain products in
    float64. ``heads`` are KV heads and query heads per KV head; ``spec`` the layers' specs, more
    than nothing only if the backend takes them.
    """
    try:
        backend = BACKENDS[name]()
        layout = Layout(*heads, dtype, device)
        errors = [_max_relative_error(backend, layout, width, each) for each in spec]
        error = float(torch.tensor(errors).max())  # NaN if any is
    except Exception as failure:  # compilers, drivers and libraries have many ways to fail
        return f"{name} attention fails here ({cause_of(failure)})"
    if error <= max(4 * torch.finfo(dtype).eps, _LEAST):
        return None
    return f"{name} attention failed its numerical check (relative error {error:.2g})"


def _max_relative_error(
    backend: type[Attention], layout: Layout, width: int, spec: AttentionSpec
) -> float:
    """How far a backend's outputs are from those of plain products at most,
    as a share of the largest.
    """
    device = layout.device
    asked = dict[str, object]()
    tried = _TRIED_ON_CUDA if device.type == "cuda" else _TRIED
    scale = width**-0.5
    if spec:
        spec = replace(spec, window=spec.window and min(spec.window, _WIDEST))
        tried = _around(spec.window)
        asked = {"spec": spec}
        # by smaller scores no key stands out, and no soft cap shows
        scale *= max(4.0, (spec.softcap or 0) / 4)
    slots = max(held + nodes for held, nodes, _ in tried) + 1
    source = torch.Generator(device).manual_seed(0)
    both = torch.randn(2, layout.kv_heads, slots, width, generator=source, device=device).to(
        layout.dtype
    )
    max_nodes = max(nodes for _, nodes, _ in tried)
    heads = layout.kv_heads * layout.groups
    rows = torch.randn(max_nodes, heads, width, generator=source, device=device).to(layout.dtype)
    exact = replace(layout, dtype=torch.float64)
    errors = []
    # only its length counts
    cache = FullKV(KVShape(1, layout.kv_heads, width, layout.dtype, device), 0)
    for held, nodes, tree in tried:
        ancestors = _binary(nodes).to(device) if tree else None
        query, keys, values = rows[:nodes].transpose(0, 1), *both[:, :, : held + nodes]
        reference_args = query.double(), keys.double(), values.double(), scale
        if spec:
            depths = (
                torch.arange(nodes, device=device) if ancestors is None else ancestors.sum(1) - 1
            )
            cache.length = held
            expected = MaskedAttention(exact.dtype, [spec], cache, depths + held, ancestors)(
                0, *reference_args
            )
        else:
            expected = TreeAttention(exact, held, nodes, ancestors)(*reference_args)
        outputs = [backend(layout, held, nodes, ancestors)(query, keys, values, scale, **asked)]
        if backend.STATIC:  # as in passes that are replayed: after the length there is anything
            length = torch.full((), held, dtype=torch.int32, device=device)
            room = torch.full_like(both, torch.nan)
            room[:, :, :held] = both[:, :, :held]
            backend.store(room[0], room[1], keys[:, held:], values[:, held:], length)
            keys, values = room
            outputs.append(
                backend(layout, length, nodes, ancestors)(query, keys, values, scale, **asked)
            )
        errors += [(out.double() - expected).abs().max() / expected.abs().max() for out in outputs]
    return float(torch.stack(errors).max())  # NaN if any is


def _around(window: int | None) -> _Tried:
    """Cases to check a window with, in the form of :data:`_TRIED`: lengths just below and above it.

    Sinks show beside few keys only, and chains of more than 128 nodes may be a kernel of their own.
    """
    below, above = (130, 517) if window is None else (window - 1, window + 3)
    shapes = ((17, False), (32, True))
    return (
        (1, 3, True),
        *((held, *shape) for held in (below, above) for shape in shapes),
        (above, 133, False),
    )


def _binary(nodes: int) -> Tensor:
    """``[nodes, nodes]`` ancestors in a tree whose nodes have two children each."""
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[(node - 1) // 2]
    return ancestors


def _unbuilt(width: int, dtype: torch.dtype) -> str | None:
    from tswift.attention.native import library, parallel_region, takes
    from tswift.native_build import Unbuilt

    try:
        parallel_region()
        # that one tells whether there is a compiler at all
        library(width if takes(width) else USUAL, dtype)
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
