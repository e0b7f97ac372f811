"""Whether an attention backend computes of random rows what plain products in float64 do;
always tried at load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tswift.attention.backends import BACKENDS, USUAL_HEAD_SIZE
from tswift.attention.sdpa import AttentionSpec, Layout, MaskedAttention
from tswift.caches import FullKV, KVShape
from tswift.checking import Compared, difference

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


def fails(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    width: int = USUAL_HEAD_SIZE,
    heads: tuple[int, int] = (1, 1),
    spec: Iterable[AttentionSpec] = (_NOTHING,),
    codes: bool = False,
) -> str | None:
    """Why a backend that should serve does not, in one line; None if it does.

    What it computes of random rows, over odd numbers of keys, is compared with plain products in
    float64. ``heads`` are KV heads and query heads per KV head; ``spec`` the layers' specs, more
    than nothing only if the backend takes them. With ``codes`` keys and values are int8, which a
    backend reads that has ``STEPS_BEHIND``.
    """
    layout = Layout(*heads, dtype, device)
    fault = difference(row for each in spec for row in _compared(name, layout, width, each, codes))
    return fault and f"{name} attention fails here ({fault})"


def _compared(
    name: str, layout: Layout, width: int, spec: AttentionSpec, codes: bool
) -> Iterator[Compared]:
    """A backend's outputs, and those of plain products."""
    backend = BACKENDS[name]()
    device, dtype = layout.device, layout.dtype
    tried = _TRIED_ON_CUDA if device.type == "cuda" else _TRIED
    scale = width**-0.5
    asked = dict[str, object]()
    if spec:
        spec = replace(spec, window=spec.window and min(spec.window, _WIDEST))
        asked = {"spec": spec}
        tried = _around(spec.window)
        # by smaller scores no key stands out, and no soft cap shows
        scale *= max(4.0, (spec.softcap or 0) / 4)
    slots = max(held + nodes for held, nodes, _ in tried) + 1
    most = max(nodes for _, nodes, _ in tried)
    source = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, width, generator=source, device=device).to(dtype)

    given = random(2, layout.kv_heads, slots)
    rows = random(most, layout.kv_heads * layout.groups)
    kept = torch.int8 if codes else dtype
    shape = KVShape(1, layout.kv_heads, width, kept, device, steps_behind=codes)
    whole = FullKV(shape, slots)
    both = torch.stack(whole.write(0, *given))
    for held, nodes, tree in tried:
        ancestors = _binary(nodes).to(device) if tree else None
        query, (keys, values) = rows[:nodes].transpose(0, 1), both[:, :, : held + nodes]
        own = torch.arange(nodes, device=device) if ancestors is None else ancestors.sum(1) - 1
        whole.length = held
        plain = MaskedAttention(torch.float64, [spec], whole, own + held, ancestors)
        expected = plain(0, query.double(), keys.double(), values.double(), scale)
        allowed = max(4 * torch.finfo(dtype).eps, _LEAST) * expected.abs().max()
        what = f"outputs of {nodes} x {held + nodes:,} scores"
        if not codes:
            out = backend(layout, held, nodes, ancestors)(query, keys, values, scale, **asked)
            yield what, out, expected, allowed
        if backend.STATIC:  # as in passes that are replayed: after the length there is anything
            length = torch.full((), held, dtype=torch.int32, device=device)
            room = FullKV(shape, slots)
            for buffer in room.buffers:
                buffer.fill_(torch.nan if buffer.is_floating_point() else 1)
            room.write(0, *given[:, :, :held])
            new_keys, new_values = given[:, :, held : held + nodes]
            keys, values = room.parts[0][:2]
            backend.store(keys, values, new_keys, new_values, length)
            out = backend(layout, length, nodes, ancestors)(query, keys, values, scale, **asked)
            yield what, out, expected, allowed


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
