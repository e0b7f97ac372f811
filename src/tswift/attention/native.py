"""Tree attention on the CPU by a C kernel of our own, prefix and tree in one go.

PyTorch's CPU operator multiplies 2 to 16 rows far below the processor's bandwidth: 8 rows took it
2.5 times as long as one. The kernel reads keys and values once for all rows.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tswift.attention.sdpa import MAX_WIDTH, Attention, AttentionSpec, Layout, TreeAttention
from tswift.native_build import Unbuilt, build, parallel_region, structures, widest_vectors

_SOURCE = Path(__file__).with_name("native.c")
_MAX_ROWS = 128  # with more, as in a prompt's chunks, the stock operators compute well
_WIDEST = 512  # head size
_TILE = 16  # head sizes are a multiple
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 3, torch.int8: 4}
_C = structures(_SOURCE)


class NativeAttention(Attention):
    """Attention for x86 and ARM CPUs in float32, bfloat16 and float16.

    Keys and values are read in their own dtype; all else is computed in float32. With ``steps``
    they are int16, and int8 ones have a step each: see native.c. A path's slots are in the order of
    its positions. Head sizes that are no multiple of 16 or above 512, passes with more than 64
    nodes and 128 rows per KV head, and those that are differentiated are left to
    :class:`~tswift.attention.sdpa.TreeAttention`.
    """

    EXACT: ClassVar[bool] = True

    def __init__(
        self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None
    ) -> None:
        self._given = layout, int(prefix), nodes, ancestors
        self._stock: Attention | None = None
        self._ancestors = None if ancestors is None else ancestors.contiguous()
        self._depths = None if ancestors is None else ancestors.sum(1) - 1
        self._threads = torch.get_num_threads()
        self._scratch = torch.empty(0, dtype=torch.float32, device=layout.device)
        self.steps: Tensor | None = None  # [2, kv heads, d], as a layer's of KVShape
        self.spec = AttentionSpec()  # without sinks; passes of the stock operators have none

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        layout, prefix, nodes, _ = self._given
        rows = layout.groups * nodes
        width = query.shape[-1]
        kernel = _kernel(width, keys.dtype)
        learns = query.requires_grad and torch.is_grad_enabled()  # the kernel has no gradient
        if kernel is None or learns or (nodes > MAX_WIDTH and rows > _MAX_ROWS):
            self._stock = self._stock or TreeAttention(*self._given)
            return self._stock(query, keys, values, scale)
        keys, values = (
            x if x.stride()[1:] == (x.shape[-1], 1) else x.contiguous() for x in (keys, values)
        )
        packed = query.to(torch.float32).contiguous()
        out = torch.empty_like(packed)
        given = packed, keys, values, self._ancestors, self._depths, out, None
        call = _C.Call(
            *(None if each is None else each.data_ptr() for each in given),
            parallel_region(),
            *((None, None) if self.steps is None else (each.data_ptr() for each in self.steps)),
            *(keys.stride(0), values.stride(0), len(keys), rows, prefix, nodes, self._threads),
            self.spec.window or 0,
            scale * math.log2(math.e),
            self.spec.softcap or 0.0,
        )
        size = kernel.tswift_scratch(ctypes.byref(call))
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.float32, device=layout.device)
        call.scratch = self._scratch.data_ptr()
        kernel.tswift_attend(ctypes.byref(call))
        return out.to(query.dtype)


def takes(width: int) -> bool:
    """Whether the kernel can be built for heads of a size;
    others are left to the stock operators.
    """
    return 0 < width <= _WIDEST and width % _TILE == 0


def library(width: int, dtype: torch.dtype) -> ctypes.CDLL:
    """The kernel for a head size and a dtype of keys and values, one of :data:`KINDS`.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    defined = f"WIDTH={width}", f"KIND={KINDS[dtype]}", f"DRAFTED={MAX_WIDTH}"
    kernel = build(_SOURCE, *defined, options=widest_vectors())
    kernel.tswift_scratch.restype = ctypes.c_int64
    return kernel


@functools.cache
def _kernel(width: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """What computes heads of this size; None if the stock operators have to."""
    if not takes(width) or dtype not in KINDS:
        return None
    try:
        return library(width, dtype)
    except Unbuilt:
        # another size was built when the model was loaded: its layers have heads of several
        return None
