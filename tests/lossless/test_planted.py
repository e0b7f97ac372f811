"""Faults that the comparison of bits has to see: each of them computes well, but not always the same way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.attention.test_chunked import FAULTS as ATTENTION
from tests.lossless.models import DTYPES, WIDE, exact_target, network
from tests.lossless.test_bits import same
from tswift.attention.chunked import ChunkedAttention
from tswift.attention.sdpa import TreeAttention
from tswift.kv.buffer import KVBuffer
from tswift.models import target as module
from tswift.models.adapting import fingerprint
from tswift.models.target import Target

HELD = 1100  # several blocks
Patch = pytest.MonkeyPatch


def in_attention(name: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(*ATTENTION[name])


def wide_verification(patch: Patch) -> None:
    right = Target._rows
    patch.setattr(Target, "_rows", lambda self, kv, nodes: right(self, kv, nodes) + (nodes > 1))


def narrow_plain_passes(patch: Patch) -> None:
    right = Target._rows
    patch.setattr(Target, "_rows", lambda self, kv, nodes: 1 if nodes == 1 else right(self, kv, nodes))


def large_chunks(patch: Patch) -> None:
    """A prompt's are 512 tokens, and not filled up."""

    def chunks(self, tokens, kv):
        width, self.width = self.width, None
        exact, self._pass = self._pass, lambda positions, kv, ancestors: self._unpadded(kv, len(positions), ancestors)
        try:
            yield from Target._chunks(self, tokens, kv)
        finally:
            self.width, self._pass = width, exact

    def unpadded(self, kv, nodes, ancestors):
        return module.Pass(kv.write, self._exact(self._layout, kv.length, nodes, ancestors), None, nodes, nodes)

    patch.setattr(Target, "_chunks", Target.chunks, raising=False)
    patch.setattr(Target, "_unpadded", unpadded, raising=False)
    patch.setattr(Target, "chunks", chunks)


def bare_lm_head(patch: Patch) -> None:
    patch.setattr(Target, "logits", lambda self, hidden: self._output(hidden))


def wrong_slots(patch: Patch) -> None:
    patch.setattr(KVBuffer, "commit", lambda self, slots: self.advance(len(slots)))


def stock_attention(patch: Patch) -> None:
    patch.setattr(exact_target(WIDE, torch.float32), "_exact", TreeAttention)


ROUNDED: dict[str, Callable[[Patch], None]] = {
    **{name: in_attention(name) for name in ATTENTION},
    "stock attention": stock_attention,
    "wrong slots committed": wrong_slots,
}
OF_WIDTH: dict[str, Callable[[Patch], None]] = {
    "wider verification": wide_verification,
    "plain passes over one row": narrow_plain_passes,
    "large chunks of a prompt": large_chunks,
    "LM head over as many rows as there are": bare_lm_head,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_bits_see_it(name: str, monkeypatch: Patch) -> None:
    target = exact_target(WIDE, torch.float32)
    assert same(target, HELD, 7)
    ROUNDED[name](monkeypatch)
    assert not same(target, HELD, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_WIDTH)
def test_bits_see_another_width(name: str, dtype: torch.dtype, monkeypatch: Patch) -> None:
    """Products whose bits depend on the number of rows: with some on every machine, here with each."""
    model = network("Llama, GQA", dtype)
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda part, given, out: out + out * (out.shape[-2] * torch.finfo(dtype).eps))
    target = Target(model, ChunkedAttention)
    target.width = 16
    fingerprint(target)
    assert same(target, 70, 7)
    OF_WIDTH[name](monkeypatch)
    assert not same(target, 70, 7)
