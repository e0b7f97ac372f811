"""Checks that a token's bits do not depend on how it is forwarded, once per model, before that is promised.

A product over one row sums in another order than one over forty, so in bfloat16 two candidates that nearly tie swap,
and texts of different methods part. Passes of one fixed number of rows sum alike (``Target.width``), if nothing in the
model looks at other rows, or at where a row stands. That is tried here, on this machine, with the model as loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tswift.attention.layout import MOST_WIDTH, ROWS
from tswift.kv.full import FullKV
from tswift.models.passes import Forwarded
from tswift.models.shapes import routed
from tswift.models.target import Target

_CPU_WIDTH = 16
_LEAST_WIDTH = 8
_HELD = 1_500  # random keys that the passes read: several chunks of every attention
_OTHERS = (0, 99, 700)


class Inexact(Exception):
    """Why a token's bits depend on how it is forwarded, in one line."""


def usual_width(device: torch.device, groups: int) -> int:
    """Rows of every pass over a text: as many as a draft tree usually has, which cost little more than one.

    Args:
        device: where the model is.
        groups: query heads per KV head.
    """
    return _CPU_WIDTH if device.type == "cpu" else min(MOST_WIDTH, max(_LEAST_WIDTH, ROWS // groups))


def exact_by_default(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether passes have a fixed width if nothing is said: where texts of different methods would part without it."""
    return dtype.itemsize < torch.float32.itemsize or device.type == "cuda"


@torch.inference_mode()
def fingerprint(target: Target) -> str:
    """Hash of what a model computes on this machine in passes of its fixed width.

    Where the hash is the same, the same text has the same bits.

    Raises:
        Inexact: a token's bits depend on its place in a pass, on the other nodes, or on whether its ancestors are
            drafted or committed.
    """
    width, device = target.width, target.device
    assert width is not None
    random = torch.Generator().manual_seed(0)
    before = max(0, min(_HELD, target.max_positions - width))  # learned positions end
    kv = FullKV(target.kv_shape, before + width)
    for buffer in (kv.keys, kv.values):
        buffer[:, :, :before] = torch.randn(buffer[0, :, :before].shape, generator=random).to(buffer)
    ids = torch.randint(target.vocab_size, (width,), generator=random).to(device)
    index = torch.arange(width, device=device)

    def forward(tokens: Tensor, depths: Tensor, ancestors: Tensor | None, held: int = before) -> Forwarded:
        kv.length = held
        return target.forward(tokens, before + depths, kv, ancestors)

    def alike() -> Forwarded:  # the same token on every row
        return forward(ids[:1].expand(width), index * 0, torch.eye(width, dtype=torch.bool, device=device))

    def chain() -> Forwarded:
        return forward(ids, index, None)

    def tree() -> Forwarded:  # the chain's first half, other nodes between
        on_path = index % 2 == 0
        ancestors = (index <= index[:, None]) & on_path | (index == index[:, None])
        tokens = torch.where(on_path, ids[index // 2], ids.flip(0))
        return forward(tokens, (index + 1) // 2, ancestors)

    same = alike()
    for row in (1, width // 2, width - 1):
        _compare(target, (same, 0, alike), (same, row, alike), "its place in the pass")
    whole = chain()
    written = [buffer[:, :, before:].clone() for buffer in (kv.keys, kv.values)]
    _compare(target, (whole, 0, chain), (same, 0, alike), "other nodes")
    mixed = tree()
    for depth in {1, width // 2 - 1}:
        _compare(target, (whole, depth, chain), (mixed, 2 * depth, tree), "other nodes")
    for depth in (0, 1, 2):  # one by one, as plain decoding does
        last = index[depth : depth + 1]
        alone = partial(forward, ids[last], last, None, before + depth)
        _compare(target, (whole, depth, chain), (alone(), 0, alone), "its ancestors being drafted")
        for buffer, known in zip((kv.keys, kv.values), written, strict=True):
            if not torch.equal(buffer[:, :, before + depth], known[:, :, depth]):
                raise Inexact("keys and values depend on a token's ancestors being drafted")
    parts = [whole.hidden, target.logits(whole.hidden)]
    parts += [forward(ids, index, None, held).hidden for held in _OTHERS]  # one pass may round alike by chance
    bits = b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    return hashlib.sha256(bits).hexdigest()[:16]


_Row = tuple[Forwarded, int, Callable[[], Forwarded]]  # a pass, a row in it, and how to run it again


def _compare(target: Target, one: _Row, other: _Row, cause: str) -> None:
    """Refuse rows that should have the same bits and do not, naming the first module where they differ."""
    rows = [target.logits(forwarded.hidden)[row] for forwarded, row, _ in (one, other)]
    hidden = [forwarded.hidden[row] for forwarded, row, _ in (one, other)]
    if torch.equal(*rows) and torch.equal(*hidden):
        return
    seen = [_outputs(target, run, row) for _, row, run in (one, other)]
    for (name, given, out), (_, twin, made) in zip(*seen, strict=True):
        if not torch.equal(out, made):
            where = name if torch.equal(given, twin) else f"what comes before {name}"
            raise Inexact(f"the result of {where} depends on {cause}")
    where = "the compiled layers" if torch.equal(*rows) else "the LM head"
    raise Inexact(f"the result of {where} depends on {cause}")


def _outputs(target: Target, run: Callable[[], Forwarded], row: int) -> list[tuple[str, Tensor, Tensor]]:
    """Of every module with an input and an output per row, in the order in which they end: name, and both of a row."""
    found: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            if given and all(isinstance(each, Tensor) and each.dim() == 3 for each in (given[0], out)):
                found.append((name, given[0][0, row].clone(), out[0, row].clone()))

        return hook

    hooks = [part.register_forward_hook(keep(name)) for name, part in target.model.named_modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def set_width(target: Target, attention: str, exact: bool | None) -> str | None:
    """Give the passes of a loaded model their fixed width, if they are to be exact, before its layers are compiled.

    Args:
        target: the model.
        attention: the backend in use.
        exact: whether they are to be; None for what is usual.

    Returns:
        Why they are not although they should be; None if nothing is amiss.
    """
    wanted = exact_by_default(target.dtype, target.device) if exact is None else exact
    if not wanted:
        return None
    if target.split:
        return "ranks hold the model together"
    if attention == "flash":
        return "flash attention sums in an order of its own"
    if routed(target.model.config):
        return "as many rows come to an expert as choose it"
    target.width = usual_width(target.device, target.groups)
    return None
