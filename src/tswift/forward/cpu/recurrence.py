"""The recurrence of gated delta nets and Mamba2 in C."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tswift.forward.cpu.products import C
from tswift.forward.recurrence import Rows
from tswift.native_build import Unbuilt, build, parallel_region, widest_vectors

_COLUMNS = 64  # as in recurrence.c


@functools.cache
def recurrence_library() -> ctypes.CDLL | None:
    """The compiled recurrence; None if there is none here."""
    try:
        parallel_region()
        return build(Path(__file__).with_name("recurrence.c"), options=widest_vectors())
    except Unbuilt:
        return None


def step_in_c(
    library: ctypes.CDLL,
    rows: Rows,
    state: Tensor,
    nodes: Sequence[int],
    parents: Sequence[int],
    after: Tensor | None,
) -> Tensor:
    """As :func:`step_states`."""
    given = (rows.queries, rows.keys, rows.contents, rows.decays, rows.rates)
    held = [each.contiguous() for each in given]
    order = torch.tensor([[*nodes], [*parents]])
    count = order.shape[1]
    heads, keys, values = state.shape
    states = 1 if list(parents) == [*range(-1, count - 1)] else count
    threads = torch.get_num_threads()
    out = state.new_empty(count, heads, values)
    scratch = state.new_empty(threads * states * keys * _COLUMNS)
    places = torch.empty_like(order)
    call = C.Steps(
        state.data_ptr(),
        None if after is None else after.data_ptr(),
        *(each.data_ptr() for each in (*held, *order, places, out, scratch)),
        parallel_region(),
        *(count, heads, heads // held[1].shape[1], keys, values, states, threads),
        *(held[1].stride(0), held[2].stride(0), rows.corrects),
    )
    library.tswift_recur(ctypes.byref(call))
    return out
