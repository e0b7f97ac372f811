"""The compiled C program of passes and products, and the structures that it shares with Python."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tswift.attention import native
from tswift.native_build import build, structures, widest_vectors

_SOURCE = Path(__file__).with_name("program.c")
# of weights and scales, as in products.c
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


C = structures(*(_SOURCE.with_name(name) for name in ("products.c", "recurrence.c", "program.c")))


def library() -> ctypes.CDLL:
    """The compiled program.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    built = build(_SOURCE, options=widest_vectors())
    for function in (built.tswift_block, built.tswift_lanes, built.tswift_space):
        function.restype = ctypes.c_int64
    return built


def multiply(linear: ctypes.Structure, input: Tensor, program: ctypes.CDLL | None = None) -> Tensor:
    """``[..., inputs]`` float32 to ``[..., outputs]``, by the compiled program,
    or by one that is given.

    Raises:
        Unbuilt: there is none here.
    """
    given: Any = linear
    rows = input.contiguous()
    out = torch.empty(*rows.shape[:-1], given.outputs, dtype=torch.float32)
    (program or library()).tswift_multiply(
        ctypes.byref(linear),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(rows.numel() // given.inputs),
        ctypes.c_void_p(native.parallel_region()),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return out
