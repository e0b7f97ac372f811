"""Tree attention on the CPU by a C kernel of our own, prefix and tree in one go.

PyTorch's CPU operator multiplies 2 to 16 rows far below the processor's bandwidth: 8 rows took it 2.5 times as long as
one. The kernel reads keys and values once for all rows, and is compiled where the user has a C compiler.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from tswift.attention.building import Unbuilt, build
from tswift.attention.layout import Attention, Layout
from tswift.attention.sdpa import TreeAttention

_SOURCE = Path(__file__).with_name("native.c")
_MOST_ROWS = 128  # with more, as in a prompt's chunks, the stock operators compute well
_WIDEST = 256  # head size
_TILE = 16  # head sizes are a multiple; rows are padded to one where a part keeps their sums
_LEAST_PART, _MOST_PARTS, _BLOCK = 480, 64, 120  # keys; parts per KV head; keys that a part is a multiple of


class _Call(ctypes.Structure):
    """``Call`` in native.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "ancestors", "out", "scratch", "parallel")),
        *((name, ctypes.c_int64) for name in ("keys_head", "values_head", "kv_heads", "rows", "prefix", "nodes")),
        *((name, ctypes.c_int64) for name in ("part", "parts", "threads", "next")),
        ("scale", ctypes.c_float),
    ]


class NativeAttention:
    """An :class:`~tswift.attention.layout.Attention` for x86 CPUs in float32.

    Head sizes that are no multiple of 16 or above 256, passes with more than 128 rows per KV head, and those that are
    differentiated are left to :class:`~tswift.attention.sdpa.TreeAttention`.
    """

    STATIC: ClassVar[bool] = False
    WANTS: ClassVar[bool] = False
    MOST_NODES: ClassVar[int | None] = None
    EXACT: ClassVar[bool] = False

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        self._given = layout, int(prefix), nodes, ancestors
        self._stock: Attention | None = None
        self._ancestors = None if ancestors is None else ancestors.contiguous()
        self._threads = torch.get_num_threads()
        self._scratch = torch.empty(0, dtype=torch.float32, device=layout.device)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        layout, prefix, nodes, _ = self._given
        rows, width = layout.groups * nodes, query.shape[-1]
        attend = _kernel(width) if query.dtype == torch.float32 else None
        learns = query.requires_grad and torch.is_grad_enabled()  # the kernel has no gradient
        if attend is None or learns or rows > _MOST_ROWS:
            self._stock = self._stock or TreeAttention(*self._given)
            return self._stock(query, keys, values, scale)
        keys, values = (x if x.stride()[1:] == (width, 1) else x.contiguous() for x in (keys, values))
        held, heads = prefix + nodes, len(keys)
        part = max(_LEAST_PART, -(-held // _MOST_PARTS // _BLOCK) * _BLOCK)
        parts = -(-held // part)
        size = heads * parts * (2 * -(-rows // _TILE) * _TILE + rows * width)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.float32, device=layout.device)
        packed = query.contiguous()
        out = torch.empty_like(packed)
        call = _Call(
            packed.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            0 if self._ancestors is None else self._ancestors.data_ptr(),
            out.data_ptr(),
            self._scratch.data_ptr(),
            parallel_region(),
            keys.stride(0),
            values.stride(0),
            heads,
            rows,
            prefix,
            nodes,
            part,
            parts,
            self._threads,
            0,
            scale * math.log2(math.e),
        )
        attend(ctypes.byref(call))
        return out


def takes(width: int) -> bool:
    """Whether the kernel can be built for heads of a size; others are left to the stock operators."""
    return 0 < width <= _WIDEST and width % _TILE == 0


def library(width: int) -> ctypes.CDLL:
    """The kernel for a head size.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    return build(_SOURCE, f"WIDTH={width}")


@functools.cache
def _kernel(width: int) -> Callable[[Any], None] | None:
    """What computes heads of this size; None if the stock operators have to."""
    if not takes(width):
        return None
    try:
        return cast("Callable[[Any], None]", library(width).tswift_attend)
    except Unbuilt:  # another size was built when the model was loaded: its layers have heads of several
        return None


@functools.cache
def parallel_region() -> int:
    """The address of OpenMP's ``GOMP_parallel``, in the library that PyTorch itself uses.

    Another one would have threads of its own, which wait for work by spinning on the cores that PyTorch's run on.

    Raises:
        Unbuilt: PyTorch uses none that has it.
    """
    try:
        # looks in what the library was linked with, too
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError) as error:
        raise Unbuilt("needs a PyTorch that uses OpenMP") from error
    return ctypes.cast(found, ctypes.c_void_p).value or 0
