"""Passes of a fixed width give the same bits however a text is forwarded;
what breaks that is seen and named.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.architectures import ARCHITECTURES, checkpoint
from tests.cli.conftest import prompt, tswift  # noqa: F401
from tests.fuzzing import few
from tests.helpers import first, needs_program, needs_triton, random_prompt, refused
from tests.lossless.models import (
    DTYPES,
    KINDS,
    WIDE,
    WRONG,
    ExactOnDevice,
    by_chunks,
    by_trees,
    cache_of,
    exact_target,
    network,
    plainly,
    state_of,
)
from tswift.attention.backends import BACKENDS, exact_attention
from tswift.attention.sdpa import BatchInvariantAttention
from tswift.forward import eager as module
from tswift.forward import text
from tswift.forward.exact_passes import Inexact, fingerprint
from tswift.forward.target import Target
from tswift.loading.model import load
from tswift.models.checkpoint import silence

TEXT = 40
BORDERS = (0, 16, 64, 256, 1024, 2048)  # of chunks, tails and blocks


def same(target: Target, held: int, seed: int, length: int = TEXT, prepared: int = 0) -> bool:
    """Whether three ways of forwarding a text behind ``held`` random keys and values give the same
    bits.

    Where ``prepared`` is not 0, passes over up to so many nodes are replayed, if the attention can
    be.
    """
    text = random_prompt(length, seed, WRONG)
    found = []
    for way in (plainly, by_trees, by_chunks):
        kv = cache_of(target, held + length + 64, held, seed)
        if prepared and way is not by_chunks:
            target.prepare(kv, prepared)
        given = () if way is plainly else (Random(seed), prepared or target.fixed_rows)
        hidden, logits = way(target, text, kv, *given)
        assert kv.length == held + length
        found.append((hidden, logits, *state_of(kv)))
    assert all(part.isfinite().all() for part in found[0])
    return all(
        torch.equal(ours, plain)
        for other in found[1:]
        for ours, plain in zip(other, found[0], strict=True)
    )


@pytest.mark.slow
@few
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    border=st.sampled_from(BORDERS),
    beyond=st.integers(-TEXT, 70),
    seed=st.integers(0, 1 << 16),
)
def test_plain_passes_trees_and_chunks_have_the_same_bits(kind, dtype, border, beyond, seed):
    assert same(exact_target(kind, dtype), max(0, border + beyond), seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture(kind):
    for dtype in DTYPES:
        assert same(exact_target(kind, dtype), 0, 1, length=24), dtype


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Llama, GQA", torch.bfloat16), ("Gemma 2 (windows, soft caps)", torch.float32)],
)
def test_replayed_passes(kind, dtype):
    """Which take the length from the device, and are filled up with nodes of their own."""
    target = exact_target(kind, dtype, ExactOnDevice)
    assert target.replays
    assert same(target, 90, 3, prepared=11)


@needs_program
@pytest.mark.parametrize(
    ("held", "dtype"),
    [
        (250, DTYPES[2]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in zip((0, 1000), DTYPES[:2], strict=True)
        ),
    ],
)
def test_native_attention(held, dtype):
    target = exact_target(WIDE, dtype, BACKENDS["native"]())
    assert same(target, held, 5)


@needs_triton
@pytest.mark.slow
def test_triton_attention():
    """Interpreted, which takes a tenth of a second for every layer of a pass."""
    target = Target(network("Gemma 2 (windows, soft caps)", torch.bfloat16), BACKENDS["triton"]())
    target.fixed_rows = 5
    assert same(target, 61, 5, length=5, prepared=5)


Patch = pytest.MonkeyPatch


def wide_verification(patch: Patch):
    right = module.rows_of
    patch.setattr(module, "rows_of", lambda width, kv, nodes: right(width, kv, nodes) + (nodes > 1))


def narrow_plain_passes(patch: Patch):
    right = module.rows_of
    patch.setattr(
        module, "rows_of", lambda width, kv, nodes: 1 if nodes == 1 else right(width, kv, nodes)
    )


def large_chunks(patch: Patch):
    """A prompt's are 512 tokens, and not filled up."""

    right = text.chunks

    def chunks(target, tokens, kv, *given):
        width = target.fixed_rows
        target.fixed_rows = None
        target.forward_eager = partial(unpadded, target)
        try:
            yield from right(target, tokens, kv)
        finally:
            target.fixed_rows = width
            del target.forward_eager

    def unpadded(target, nodes, width=None):
        kv, count = nodes.kv, len(nodes)
        exact = partial(exact_attention, target.backend)
        attends = target._attends(exact, None, kv.length, count, nodes.ancestors)
        return target._compute(nodes, module.Pass(kv.write, attends, count, count))

    for each in ("tests.lossless.models", "tswift.forward.exact_passes", "tswift.decoding.loop"):
        patch.setattr(f"{each}.chunks", chunks)


def bare_lm_head(patch: Patch):
    patch.setattr(Target, "logits", lambda self, hidden: self.output(hidden))


OF_WIDTH: dict[str, Callable[[Patch], None]] = {
    "wider verification": wide_verification,
    "plain passes over one row": narrow_plain_passes,
    "large chunks of a prompt": large_chunks,
    "LM head over as many rows as there are": bare_lm_head,
}


@pytest.mark.parametrize(
    ("name", "dtype"), first(1, zip(OF_WIDTH, (*DTYPES, DTYPES[0]), strict=True))
)
def test_bits_see_another_width(name, dtype, monkeypatch):
    """Products whose bits depend on the number of rows: with some on every machine,
    here with each.
    """
    model = network("Llama, GQA", dtype)
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(
                lambda part, given, out: out + out * (out.shape[-2] * torch.finfo(dtype).eps)
            )
    target = Target(model, BatchInvariantAttention)
    target.fixed_rows = 16
    fingerprint(target)
    assert same(target, 70, 7)
    OF_WIDTH[name](monkeypatch)
    assert not same(target, 70, 7)


class OverRows(nn.Module):
    """A norm that also looks at the other rows."""

    def forward(self, hidden):
        return hidden / hidden.std(dim=(1, 2), keepdim=True)


class ByPlace(nn.Module):
    """Of rows that stand further back a little more."""

    def forward(self, hidden):
        rows = torch.arange(hidden.shape[1]).view(1, -1, 1).to(hidden)
        return hidden + hidden * rows * torch.finfo(hidden.dtype).eps


class ByNumber(nn.Module):
    """Of many rows more than of few."""

    def forward(self, hidden):
        return hidden + hidden * (hidden.shape[1] * torch.finfo(hidden.dtype).eps)


PLACES = ["model.layers.0.mlp.act_fn", "model.layers.1.post_attention_layernorm", "model.norm"]


def with_module(place: str, module: type, dtype: torch.dtype) -> Target:
    """A model with another module behind the one at ``place``."""
    model = network("Llama, GQA", dtype)
    model.set_submodule(place, nn.Sequential(model.get_submodule(place), module()))
    target = Target(model, BatchInvariantAttention)
    target.fixed_rows = 16
    return target


@pytest.mark.parametrize("module", [OverRows, ByPlace])
@pytest.mark.parametrize(("place", "dtype"), zip(PLACES, DTYPES, strict=True))
def test_a_module_that_looks_beyond_its_row_is_named(place, module, dtype):
    with pytest.raises(Inexact, match=rf"^the result of {place}\.1 depends on"):
        fingerprint(with_module(place, module, dtype))


@pytest.mark.parametrize("place", PLACES)
def test_the_number_of_rows_may_be_looked_at_as_it_is_always_the_same(place, monkeypatch):
    target = with_module(place, ByNumber, torch.float32)
    fingerprint(target)
    monkeypatch.setattr(module, "rows_of", lambda width, kv, nodes: nodes)
    with pytest.raises(Inexact, match="depends on"):
        fingerprint(target)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3 MoE", "OLMoE"])
def test_experts_are_named(name, tmp_path):
    """How many rows an expert gets depends on the others;
    in 16 bits a tiny one rounds alike by chance.
    """
    with silence():
        checkpoint(ARCHITECTURES[name], tmp_path)
    with refused(r"^exact: cannot be had here: an expert takes as many rows as choose it$"):
        load(str(tmp_path), dtype="float16", device="cpu", exact=True)
    model = load(str(tmp_path), dtype="float16", device="cpu")
    assert (model.exact, model.target.fixed_rows) == (None, None)
    assert model.about()["inexact"] == "an expert takes as many rows as choose it"


@pytest.mark.slow
def test_learned_positions_that_end_early(tmp_path):
    with silence():
        checkpoint(ARCHITECTURES["GPT-2"], tmp_path)
    assert load(str(tmp_path), dtype="bfloat16", device="cpu").exact is not None


def test_every_row_is_looked_at():
    class AtOnePlace(nn.Module):
        row = 0

        def forward(self, hidden):
            scale = torch.ones(hidden.shape[1]).to(hidden)
            if hidden.shape[1] > self.row:
                scale[self.row] = 1.01
            return hidden * scale[:, None]

    target = with_module("model.norm", AtOnePlace, torch.float32)
    for AtOnePlace.row in range(1, 16):
        with pytest.raises(Inexact, match=r"^the result of model.norm\.1 depends on its place"):
            fingerprint(target)
