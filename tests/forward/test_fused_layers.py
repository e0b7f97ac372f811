"""Kernels between a layer's products, interpreted on the CPU: plain PyTorch's bits,
wherever a row is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from benchmarks.architectures import ARCHITECTURES
from tests.fuzzing import few
from tests.helpers import CPU, first, in_turns, needs_triton, random_tree, seeded
from tswift.attention import backends_check, sdpa
from tswift.attention.backends import BACKENDS
from tswift.attention.sdpa import TreeAttention
from tswift.caches import FullKV
from tswift.forward import adapting, exact_passes
from tswift.forward import text as texts
from tswift.forward.adapting import wrap_model
from tswift.forward.cuda import layers_check
from tswift.forward.cuda.fused_layers import fuse, is_fused, separate_layers
from tswift.forward.cuda.layers_check import (
    added_parts,
    normed_already,
    plain_exponential,
    plain_norm,
    plain_rotate,
    plain_silu_mul,
    plain_squares,
    tree_sum,
)
from tswift.forward.exact_passes import fingerprint
from tswift.forward.notes import FUSED, execution_note
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import chunks, prefill
from tswift.models.architecture import max_positions

kernels = pytest.importorskip("tswift.forward.cuda.layer_kernels", reason="triton is not installed")
pytestmark = needs_triton
HALVES = (torch.bfloat16, torch.float16)
EPS = 1e-5


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Products in tiles that tiny models have, tried with few tokens: the interpreter is slow."""
    monkeypatch.setattr(kernels, "TILE", 16)
    monkeypatch.setattr(kernels, "STEP", 8)
    monkeypatch.setattr(kernels, "_PROGRAMS", 12)
    monkeypatch.setattr(adapting, "_TRIED", 6)
    monkeypatch.setattr(backends_check, "_TRIED", ((1, 3, True),))
    monkeypatch.setattr(layers_check, "_REPEATS", 2)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Products in the tiles of a GPU."""
    monkeypatch.setattr(kernels, "TILE", 128)
    monkeypatch.setattr(kernels, "STEP", 64)
    monkeypatch.setattr(kernels, "_PROGRAMS", 120)


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed)).mul_(4).to(dtype)


def same_bits(ours: Tensor, plain: Tensor) -> bool:
    first, second = (each.contiguous().view(torch.uint8) for each in (ours, plain))
    return ours.dtype == plain.dtype and torch.equal(first, second)


# -------------------------------------------------------------------------------------------------
# Kernels


@few
@given(
    st.integers(1, 5),
    st.integers(1, 700),
    st.sampled_from(HALVES),
    st.booleans(),
    st.integers(0, 1000),
)
def test_sums_and_norms(rows, size, dtype, adds, seed):
    # rows with a gap behind them
    hidden, added = random(seed, 2, rows, size + 3, dtype=dtype)[..., :size]
    weight = random(seed + 1, size, dtype=dtype)
    total, normed = kernels.add_norm(hidden, added if adds else None, weight, EPS)
    expected = hidden + added if adds else hidden
    assert same_bits(total, expected)
    assert same_bits(normed, plain_norm(expected, weight, EPS))
    wide = F.rms_norm(expected.double(), (size,), weight.double(), EPS)
    assert (normed - wide).abs().max() <= 2 * torch.finfo(dtype).eps * wide.abs().max() + 1e-6
    at = seed % rows  # alone, and among others in other places
    row = expected[at : at + 1]
    assert same_bits(kernels.add_norm(row, None, weight, EPS)[1], normed[at : at + 1])
    squares = kernels.squares_of(expected)
    assert same_bits(squares, plain_squares(expected, kernels.TILE))
    assert same_bits(tree_sum(squares), tree_sum(expected.float() ** 2))  # a part of that tree
    around = torch.cat([hidden[:0], row.expand(3, -1), expected])
    assert same_bits(kernels.add_norm(around, None, weight, EPS)[1][2:3], normed[at : at + 1])


@few
@given(st.integers(1, 3), st.integers(1, 2500), st.sampled_from(HALVES), st.integers(0, 1000))
def test_silu(rows, size, dtype, seed):
    gate, up = random(seed, 2, rows, size, dtype=dtype).mul_(5)
    made = kernels.silu_mul(gate, up)
    assert same_bits(made, plain_silu_mul(gate, up))
    wide = F.silu(gate.double()) * up.double()
    kind = torch.finfo(dtype)
    least = kind.smallest_normal * kind.eps  # SiLU's own numbers may be no normal ones
    allowed = 4 * kind.eps * wide.abs() + least * (1 + up.double().abs())
    assert ((made - wide).abs() <= allowed).all()
    assert same_bits(kernels.silu_mul(gate[-1:], up[-1:]), made[-1:])


def test_the_exponential_is_one():
    numbers = torch.linspace(-87, 88, 200_001)
    exact = numbers.double().exp()
    assert ((plain_exponential(numbers) - exact).abs() / exact).max() < 3e-7
    assert plain_exponential(torch.tensor([0.0])).item() == 1.0
    odd = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 0.0]]).bfloat16()
    huge = odd[:, 3:].contiguous()
    assert same_bits(kernels.silu_mul(huge, huge), plain_silu_mul(huge, huge))
    assert kernels.silu_mul(odd, torch.ones_like(odd)).isnan().tolist() == [
        [False, False, True, False, False, False]
    ]


def cached(heads, head, rows, held, capacity, dtype, normed=False, seed=0, nodes=None):
    """A cache that holds so many keys and else NaN, and what rotates heads into it."""
    angles = (random(seed + 1, rows, head, dtype=dtype), random(seed + 2, rows, head, dtype=dtype))
    weights = tuple(random(seed + 3, 2, head, dtype=dtype)) if normed else (None, None)
    keys, values = torch.full((2, heads[1], capacity, head), torch.nan, dtype=dtype)
    length = torch.full((), held, dtype=torch.int32)
    given = heads, angles, weights, EPS, keys, values, length, rows if nodes is None else nodes
    return kernels.HeadPlan(*given)


def plainly(parts: list[Tensor], heads) -> list[Tensor]:
    """Queries, keys and values ``[n, heads, d]`` as plain PyTorch makes them."""
    size = heads.keys.shape[2]
    query, key, value = (part.unflatten(1, (-1, size)) for part in parts)
    rotated = [
        plain_rotate(part, heads.angles, weight, EPS)
        for part, weight in zip((query, key), heads.norms, strict=True)
    ]
    return [*rotated, value]


def kept_right(out: Tensor, heads, plain: list[Tensor], held: int) -> bool:
    """Whether queries are as they should be, and keys and values stand in their slots alone."""
    stored = min(heads.nodes, heads.keys.shape[1] - held)
    right = same_bits(out.transpose(0, 1), plain[0])
    for cache, made in zip((heads.keys, heads.values), plain[1:], strict=True):
        right &= same_bits(cache[:, held : held + stored].transpose(0, 1), made[:stored])
        right &= bool(cache[:, :held].isnan().all() and cache[:, held + stored :].isnan().all())
    return right


@few
@given(
    *(st.integers(1, 9), st.integers(1, 5), st.sampled_from([8, 24, 64])),
    *(
        st.integers(1, 6),
        st.integers(0, 20),
        st.booleans(),
        st.sampled_from(HALVES),
        st.integers(0, 1000),
    ),
)
def test_rotation_and_store(groups, kv_heads, head, rows, held, normed, dtype, seed):
    count = (min(12, groups * kv_heads), kv_heads)
    sizes = [count[0] * head, kv_heads * head, kv_heads * head]
    parts = [
        each.contiguous() for each in random(seed, rows, sum(sizes), dtype=dtype).split(sizes, 1)
    ]
    nodes = 1 + seed % rows
    # the last slots may be missing
    heads = cached(count, head, rows, held, held + 4, dtype, normed, seed, nodes)
    out = kernels.rotate(parts, heads)
    assert kept_right(out, heads, plainly(parts, heads), held)
    alone = cached(count, head, 1, held, held + 4, dtype, normed, seed)
    alone = alone._replace(
        angles=tuple(each[-1:] for each in heads.angles), length=kernels.nothing_held(CPU)
    )
    last = kernels.rotate([each[-1:] for each in parts], alone)
    assert same_bits(last[:, 0], out[:, -1])
    assert same_bits(alone.keys[:, 0], plainly(parts, heads)[1][-1])  # at slot 0


def linear(seed: int, outputs: int, inputs: int, dtype: torch.dtype, bias: bool = True):
    """A linear layer's weights and bias."""
    weights = random(seed, outputs, inputs, dtype=dtype) / 16
    return kernels.Product(weights, random(seed + 1, outputs, dtype=dtype) if bias else None)


def near(made: Tensor, rows: Tensor, product, share: float = 1e-5) -> bool:
    """Whether parts of a product add up to it, but for the rounding of sums."""
    exact = rows.double() @ product.weights.double().T
    exact += 0 if product.bias is None else product.bias.double()
    return bool(((made.double().sum(0) - exact).abs() <= share * exact.abs().max()).all())


def states_of(rows: Tensor, seed: int = 9):
    """Hidden states, with a norm to be read through, and that norm of them in plain PyTorch."""
    weight = random(seed, rows.shape[1], dtype=rows.dtype)
    states = kernels.Hidden(rows, kernels.squares_of(rows), weight, EPS)
    return states, plain_norm(rows, weight, EPS)


ROWS = [17, 1, 64]


def picked(states, at: list[int], more: Tensor | None = None):
    """Some of the rows, and others behind them."""
    rows = states.rows[at] if more is None else torch.cat([states.rows[at], more])
    return states._replace(rows=rows, squares=kernels.squares_of(rows))


SUMS = [(64, 40, 4), (24, 48, 1), (32, 192, 1), (96, 64, 4)]


@pytest.mark.parametrize(("rows", "sizes", "dtype"), first(1, in_turns(ROWS, SUMS, HALVES)))
def test_a_product_is_added_to_what_went_in(rows, sizes, dtype):
    """Close to float64, its parts added in order; a row has its bits wherever it is, and whatever
    is beside it.
    """
    inputs, outputs, parts = sizes
    given = random(1, rows, inputs + 3, dtype=dtype)[:, :inputs]
    hidden = random(5, rows, outputs, dtype=dtype)
    product = linear(2, outputs, inputs, dtype)
    sums = torch.full((parts, rows, outputs), torch.nan)
    total, squares = kernels.add_product(given, product, hidden, sums)
    assert near(sums, given, product)
    assert same_bits(total, hidden + added_parts(sums, dtype))
    assert same_bits(squares, plain_squares(total, kernels.TILE))
    row, own = given[-1:], hidden[-1:]
    around = torch.cat([row.expand(2, -1), given[:1], row, torch.full_like(row, torch.inf)])
    for at, among, beside in ((0, row, own), (3, around, own.expand(5, -1).contiguous())):
        again, twice = kernels.add_product(among, product, beside)
        assert same_bits(again[at], total[-1])
        assert same_bits(twice[at], squares[-1])


MADE = [(64, (6, 2), 16, True), (24, (1, 1), 64, False), (96, (3, 3), 24, True)]


@pytest.mark.parametrize(("rows", "made", "dtype"), first(1, in_turns(ROWS, MADE, HALVES)))
def test_heads_are_made_of_hidden_states(rows, made, dtype):
    """Normalised, multiplied, rotated and stored, as plain PyTorch does it of the product's parts;
    a row has its bits wherever it is.
    """
    hidden, heads, head, normed = made
    states, normalised = states_of(random(1, rows, hidden, dtype=dtype))
    sizes = [head * count for count in (heads[0], heads[1], heads[1])]
    three = [linear(10 * at, size, hidden, dtype) for at, size in enumerate(sizes)]
    kept = cached(heads, head, rows, 5, 5 + rows, dtype, normed, nodes=max(1, rows - 1))
    parts = kernels.product_parts(hidden, sum(sizes) // head)
    sums = torch.full((parts, rows, sum(sizes)), torch.nan)
    out = kernels.project_heads(states, three, kept, sums)
    for found, product in zip(sums.split(sizes, -1), three, strict=True):
        assert near(found, normalised, product)
    plain = plainly(list(added_parts(sums, dtype).split(sizes, 1)), kept)
    assert kept_right(out, kept, plain, 5)
    read = torch.empty_like(sums)
    kernels.project_heads(normed_already(normalised), three, kept, read)
    assert same_bits(read, sums)
    more = torch.full_like(states.rows[:1], torch.inf)
    for at, among in ((0, picked(states, [-1])), (2, picked(states, [0, 0, -1], more))):
        count = len(among.rows)
        alone = cached(heads, head, count, 5, 5 + count, dtype, normed)
        angles = tuple(each[-1:].expand(count, -1).contiguous() for each in kept.angles)
        found = kernels.project_heads(among, three, alone._replace(angles=angles))
        assert same_bits(found[:, at], out[:, -1])
        assert same_bits(alone.keys[:, 5 + at], plain[1][-1])


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype"), first(1, in_turns(ROWS, [(64, 40), (24, 48)], HALVES))
)
def test_an_mlp_begins_with_two_products(rows, sizes, dtype):
    hidden, inner = sizes
    states, normalised = states_of(random(1, rows, hidden, dtype=dtype) / 4)
    gate, up = (linear(seed, inner, hidden, dtype) for seed in (2, 4))
    active = kernels.multiply_silu(states, gate, up)
    exact = [
        normalised.double() @ each.weights.double().T + each.bias.double() for each in (gate, up)
    ]
    wide = F.silu(exact[0]) * exact[1]
    assert same_bits(kernels.multiply_silu(normed_already(normalised), gate, up), active)
    assert ((active - wide).abs() <= 4 * torch.finfo(dtype).eps * wide.abs().max()).all()
    more = torch.full_like(states.rows[:1], torch.inf)
    for at, among in ((0, picked(states, [-1])), (2, picked(states, [0, 0, -1], more))):
        assert same_bits(kernels.multiply_silu(among, gate, up)[at], active[-1])


@pytest.mark.parametrize("dtype", first(1, HALVES))
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"), first(1, [(128, 128, 160), (256, 128, 512), (64, 256, 130)])
)
def test_rows_among_many_have_the_bits_that_they_have_among_few(
    as_on_a_device, inputs, outputs, rows, dtype
):
    """Products of a wide pass are those of passes of a width."""
    assert kernels.product_parts(inputs, outputs // kernels.TILE) == inputs // 64
    given, hidden = random(1, rows, inputs, dtype=dtype), random(5, rows, outputs, dtype=dtype)
    product = linear(2, outputs, inputs, dtype)
    few = [
        kernels.add_product(some, product, beside)
        for some, beside in zip(given.split(32), hidden.split(32), strict=True)
    ]
    for made, parts in zip(
        kernels.add_product(given, product, hidden), zip(*few, strict=True), strict=True
    ):
        assert same_bits(made, torch.cat(parts))
    states, _ = states_of(given)
    three = [linear(10 * at, 64, inputs, dtype) for at in range(3)]
    ats = torch.arange(rows).split(32)
    kept = cached((1, 1), 64, rows, 0, rows, dtype)
    out = kernels.project_heads(states, three, kept)
    gate, up = linear(2, 64, inputs, dtype), linear(4, 64, inputs, dtype)
    active = kernels.multiply_silu(states, gate, up)
    for at in ats[:1] + ats[-1:]:
        own = cached((1, 1), 64, len(at), 0, len(at), dtype)
        own = own._replace(angles=tuple(each[at] for each in kept.angles))
        narrow = picked(states, at.tolist())
        assert same_bits(kernels.project_heads(narrow, three, own), out[:, at])
        assert same_bits(own.keys, kept.keys[:, at])
        assert same_bits(own.values, kept.values[:, at])
        assert same_bits(kernels.multiply_silu(narrow, gate, up), active[at])


def test_how_a_sum_is_cut(as_on_a_device):
    assert kernels.product_parts(4096, 48) == 4
    assert kernels.product_parts(14_336, 32) == 4
    assert kernels.product_parts(4096, 224) == 1
    assert kernels.product_parts(576, 5) == 1  # 9 steps


def test_a_sum_is_a_tree_of_pairs():
    big = 2.0**24  # where an addition of 1 is lost
    assert tree_sum(torch.tensor([big, 1.0, 1.0, 0.0])).item() == big
    assert tree_sum(torch.tensor([1.0, 1.0, big])).item() == big + 2


# -------------------------------------------------------------------------------------------------
# Layers

FIT = ("Llama, MQA, biases", "Mistral 7B v0.1", "Qwen2.5", "Qwen3")


def network(name: str, dtype: torch.dtype = torch.bfloat16, layers: int = 2) -> PreTrainedModel:
    known = next(each for each in ARCHITECTURES if each.startswith(name) and "MoE" not in each)
    made = ARCHITECTURES[known].make(97).to(dtype)
    made.model.layers = made.model.layers[:layers]
    made.config.num_hidden_layers = len(made.model.layers)
    return made


def wrapped(name: str, dtype: torch.dtype, layers: int = 2) -> Target:
    return wrap_model(network(name, dtype, layers), name, "triton")


def tree_pass(target: Target, static: bool = False) -> tuple[Tensor, FullKV]:
    """Hidden states of a tree behind a text, and the cache."""
    tree = random_tree(6, Random(2))
    ancestors = tree.ancestors()
    kv = FullKV(target.kv_shape, 40)
    prefill(target, [(7 * at + 3) % 97 for at in range(9)], kv)
    kv.buffers[0][:, :, 9:] = kv.buffers[1][:, :, 9:] = torch.nan
    if static:
        target.prepare(kv, 6)
    tokens = torch.arange(6) * 11 % 97
    return target.forward(Nodes(tokens, 9 + ancestors.sum(1) - 1, kv, ancestors)).hidden, kv


def test_a_replayed_pass_is_made_by_kernels_whoever_asks(small):
    """Where gradients could be wanted layers are transformers' own: nobody wants a pass's."""
    target = Target(network(FIT[2], torch.bfloat16, 1), BACKENDS["triton"]())
    zero = torch.zeros(1, dtype=torch.int64)
    asked = Nodes(zero, zero, FullKV(target.kv_shape, 4)), torch.zeros((), dtype=torch.int32)
    with torch.enable_grad():
        assert target.compute_static(*asked).hidden.is_inference()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), zip(FIT, [*HALVES, *HALVES], strict=True))
def test_layers_compute_what_transformers_does(name, dtype):
    target = wrapped(name, dtype)
    assert (execution_note(target), target.fallbacks) == (FUSED, {})
    eager = Target(network(name, dtype), TreeAttention)
    (ours, cache), (theirs, other) = tree_pass(target), tree_pass(eager)
    for one, another in zip((ours, *cache.buffers), (theirs, *other.buffers), strict=True):
        if one is not ours:
            one, another = one[:, :, :15], another[:, :, :15]
        assert (one - another).norm() / another.norm() < 0.05
    replayed, written = tree_pass(target, static=True)
    assert torch.equal(replayed, ours)
    assert torch.equal(written.buffers[0][:, :, :15], cache.buffers[0][:, :, :15])
    assert torch.equal(written.buffers[1][:, :, :15], cache.buffers[1][:, :, :15])
    separate_layers(target.model)
    assert not is_fused(target.model)


def counted(made: Counter[str], name: str, right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def count(*given, **named) -> Tensor:
        made[name] += 1
        return right(*given, **named)

    return count


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("Qwen2.5", 1), ("Qwen3", 2)])
def test_products_of_ours_and_pytorchs(monkeypatch, name, layers):
    """All products of a narrow pass are ours, and those of a prompt PyTorch's;
    together they are transformers' layers."""
    made = Counter[str]()
    for each in ("project_heads", "add_product", "multiply_silu", "squares_of"):
        right = getattr(kernels, each)
        monkeypatch.setattr(kernels, each, counted(made, each, right))
    target = wrapped(name, torch.bfloat16, layers)
    assert (execution_note(target), target.fallbacks) == (FUSED, {})
    made.clear()
    ours, cache = tree_pass(target)
    count = 2 * target.kv_shape.layers  # a text and a tree
    wanted = {"project_heads": count, "add_product": 2 * count, "multiply_silu": count}
    assert made == wanted | {"squares_of": 2}  # of embeddings; later ones come with the sums
    theirs, _ = tree_pass(Target(network(name, torch.bfloat16, layers), TreeAttention))
    assert ((ours - theirs).norm() / theirs.norm()) < 0.05
    replayed, written = tree_pass(target, static=True)
    assert torch.equal(replayed, ours)
    assert torch.equal(written.buffers[0][:, :, :15], cache.buffers[0][:, :, :15])
    monkeypatch.setattr(kernels, "MOST_ROWS", 5)
    made.clear()
    prompt, _ = tree_pass(target)
    assert not made
    assert ((prompt - ours).norm() / ours.norm()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3"])
def test_rows_are_exact(name, monkeypatch):
    monkeypatch.setattr(exact_passes, "_HELD_KEYS", 70)  # the interpreter is slow
    monkeypatch.setattr(exact_passes, "_OTHER_LENGTHS", (0,))
    target = wrapped(name, torch.bfloat16)
    target.fixed_rows = 6
    fingerprint(target)  # raises where a row's bits depend on anything else


SHORT = ("Qwen2.5", 1, 6)


@pytest.fixture(params=[SHORT])
def narrow(request, monkeypatch) -> Target:
    """A model with products of ours, whose passes have 2 or 8 rows, a prompt's 6 or 24."""
    name, layers, wide = request.param
    few = wide // 3
    for place, attribute, value in (
        (exact_passes, "_HELD_KEYS", 2 * wide),  # the interpreter is slow
        (adapting, "_TRIED", 2),
        (exact_passes, "_CHUNK_SIZES", (wide, 1)),
        (exact_passes, "PROMPT_CHUNK", wide),
        (texts, "PROMPT_CHUNK", wide),
        (texts, "_REPLAYED", 2),
        (kernels, "STEP", 16),
        (layers_check, "_TRIED", few),
        (kernels, "MOST_ROWS", few),
        # as many as few rows are padded to: NumPy sums otherwise in another shape
        (kernels, "_MANY_ROWS", 16),
        (sdpa, "MAX_WIDTH", few),
    ):
        monkeypatch.setattr(place, attribute, value)
    target = wrap_model(network(name, torch.bfloat16, layers), name, "triton")
    target.set_fixed_rows(few, True)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [SHORT, ("Mistral 7B v0.1", 1, 24)], indirect=True)
def test_a_text_in_wide_passes_has_the_bits_of_narrow_ones(narrow, monkeypatch):
    wide = texts.PROMPT_CHUNK
    text = [(7 * at + 3) % 97 for at in range(2 * wide + 2)]
    found = []
    passes = Counter[int]()
    right = narrow._compute
    monkeypatch.setattr(
        narrow, "_compute", lambda ids, *more: passes.update([len(ids)]) or right(ids, *more)
    )
    for _ in range(2):
        kv = FullKV(narrow.kv_shape, len(text))
        # all but a chunk and a token are behind
        hidden = [part.hidden for part in chunks(narrow, text, kv, wide + 1)]
        found.append((torch.cat(hidden), kv.buffers[0].clone(), kv.buffers[1].clone()))
        if narrow.chunked_text is False:
            assert passes == {wide: 1, wide // 3: 3, 1: 2}
            narrow.chunked_text = exact_passes.wide_text_has_the_bits(narrow)
            assert (narrow.chunked_text, narrow.fallbacks) == (True, {})
            passes.clear()
    assert passes == {wide: 2, 1: 2}
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_wide_passes_are_tried_by_the_first_text_that_is_no_prompt(narrow):
    asked: list[Target] = []
    narrow.chunked_text = lambda target: bool(asked.append(target))
    for prompt, count in ((None, 0), (7, 0), (2, 1), (2, 1)):  # decoding forwards one token more
        for _ in chunks(narrow, list(range(8)), FullKV(narrow.kv_shape, 8), prompt):
            pass
        assert len(asked) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add_product", "multiply_silu"])
def test_a_text_stays_in_narrow_passes_where_wide_ones_have_other_bits(narrow, monkeypatch, name):
    right = getattr(kernels, name)

    def otherwise(*given):
        out = right(*given)
        made = out if name == "multiply_silu" else out[0]
        if len(made) > kernels.MOST_ROWS:
            made[-1, -1] += 1
        return out

    monkeypatch.setattr(kernels, name, otherwise)
    assert not exact_passes.wide_text_has_the_bits(narrow)
    assert "narrow passes: rows of wide ones differ from plain ones by" in execution_note(narrow)


@pytest.mark.slow
def test_a_layer_takes_only_the_squares_of_its_own_input():
    """A hook may change what a layer gives the next one."""
    target, eager = wrapped("Llama, GQA", torch.bfloat16), Target(network("Llama, GQA"))
    for each in (target, eager):
        layer = each.model.get_decoder().layers[0]
        layer.register_forward_hook(lambda module, given, out: out * 3 + 1)
    ours, theirs = tree_pass(target)[0], tree_pass(eager)[0]
    assert (ours - theirs).norm() / theirs.norm() < 0.05


@pytest.mark.parametrize(
    "name", first(1, ["Llama 3.1", "Llama 2 (YaRN)", "Llama 2 (linear scaling)", "Qwen3"])
)
@pytest.mark.parametrize("dtype", first(1, HALVES))
def test_angles_are_looked_up_with_the_bits_of_the_model(name, dtype):
    made, plain = network(name, dtype, 1), network(name, dtype, 1)
    assert fuse(made, lambda *given: None) is None
    last = max_positions(made.config) + 500  # a drafted node may lie beyond the text
    places = torch.tensor([[0, 1, 5, last // 2, last], [7, 6, 3, 2, 4]])
    like = torch.zeros(1, dtype=dtype)
    ours, theirs = (each.get_decoder().rotary_emb(like, places) for each in (made, plain))
    assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))
    wide = made.get_decoder().rotary_emb(like.double(), places)[0]
    assert same_bits(wide, plain.get_decoder().rotary_emb(like.double(), places)[0])
    separate_layers(made)
    assert type(made.get_decoder().rotary_emb) is type(plain.get_decoder().rotary_emb)


@pytest.mark.slow
def test_few_operators_surround_the_layers(monkeypatch):
    """Those of a pass and its logits that are not a layer's: each takes a GPU 1.8 us."""
    target = wrapped("Llama, MQA", torch.bfloat16, 1)
    target.fixed_rows = 8
    operators = Operators()
    monkeypatch.setattr(kernels, "add_norm", operators.counting("norm", kernels.add_norm))
    layer = target.model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda *given: setattr(operators, "on", False))
    layer.register_forward_hook(lambda *given: setattr(operators, "on", True))
    kv = FullKV(target.kv_shape, 20)
    length = torch.full((), 5, dtype=torch.int32)
    for nodes, most in ((8, 4), (1, 6)):
        ids = torch.arange(nodes)
        places = torch.arange(nodes) + 5
        operators.seen.clear()
        with torch.inference_mode(), operators:
            operators.on = True
            forwarded = target.compute_static(Nodes(ids, places, kv), length)
            target.logits(forwarded.padded)
            operators.on = False
        assert operators.seen["product"] == 1
        found = operators.seen - Counter(["product"])
        assert found.total() <= most, found


@pytest.mark.slow
def test_a_call_without_our_cache_goes_the_old_way():
    made = network("Qwen3")
    ids = torch.arange(7).unsqueeze(0)
    expected = made(ids).logits
    target = wrap_model(made, "tiny", "triton")
    made.set_attn_implementation("sdpa")
    assert is_fused(target.model)
    assert torch.equal(made(ids).logits, expected)  # with gradients
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, expected)


@pytest.mark.slow
def test_a_copy_is_fused_for_itself():
    target = wrapped("Qwen3", torch.bfloat16, 1)
    copied = deepcopy(target.model)
    other = Target(copied, BACKENDS["triton"]())
    assert torch.equal(tree_pass(other)[0], tree_pass(target)[0])
    copied.get_decoder().layers[0].mlp.up_proj.weight.mul_(2)
    assert not torch.equal(tree_pass(other)[0], tree_pass(target)[0])


@pytest.mark.slow
def test_taps_see_what_they_saw():
    target = wrapped("Llama, GQA", torch.bfloat16)
    eager = Target(network("Llama, GQA"))
    for each in (target, eager):
        each.tap()
        each.tap([0, 1])
    token = torch.tensor([5])
    passes = [
        each.forward(Nodes(token, token * 0, FullKV(each.kv_shape, 1), None))
        for each in (target, eager)
    ]
    for state in ("pre_norm", "layer_states"):
        torch.testing.assert_close(*(getattr(each, state) for each in passes), rtol=0.05, atol=0.05)


@pytest.fixture
def lying(monkeypatch) -> Callable[[str], None]:
    """Make one kernel lie in one element."""

    def lie(name: str):
        right = getattr(kernels, name)

        def wrong(*given, **named):
            out = right(*given, **named)
            (out[-1] if isinstance(out, tuple) else out)[-1, -1].mul_(1.5)
            return out

        monkeypatch.setattr(kernels, name, wrong)

    return lie


@pytest.mark.parametrize(
    ("name", "word"),
    first(
        5,
        [
            ("add_norm", "norms"),
            ("silu_mul", "SiLUs"),
            ("rotate", "rotated heads"),
            ("squares_of", "squares"),
            ("project_heads", "rotated heads"),
            ("add_product", "squares"),
            ("multiply_silu", "products with SiLU"),
        ],
    ),
)
def test_kernels_that_lie_are_not_used(lying, name, word):
    made = network("Qwen3")
    lying(name)
    said = fuse(made, layers_check.layer_fault)
    assert said.startswith(f"{word} differ from plain ones by up to ")
    assert not is_fused(made)


@pytest.mark.parametrize("name", ["project_heads", "add_product"])
def test_a_product_that_is_read_too_soon_is_not_used(monkeypatch, name):
    """A part that comes late is in the sum that is looked at, and not in what was made of it."""
    right = getattr(kernels, name)

    def early(*given):
        out = right(*given)
        given[-1][-1] += 1
        return out

    monkeypatch.setattr(kernels, name, early)
    assert re.search(
        "products|rotated heads", fuse(network("Qwen3", layers=1), layers_check.layer_fault)
    )


@pytest.mark.slow
def test_layers_that_lie_are_not_used(monkeypatch):
    monkeypatch.setattr(adapting, "layer_fault", lambda *given: None)
    right = kernels.multiply_silu
    monkeypatch.setattr(kernels, "multiply_silu", lambda *given: right(*given) * 3)
    target = wrap_model(network("Llama, GQA"), "tiny", "triton")
    assert execution_note(target) == "eager, as kernels in their place gave other logits"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma 2", "no kernels are written for gemma2"),
        ("Phi-3", "no kernels are written for phi3"),
    ],
)
def test_other_layers_stay_eager(name, reason):
    assert fuse(network(name), layers_check.layer_fault) == reason


def test_sizes_that_do_not_fit(monkeypatch):
    assert (
        fuse(network("Llama, GQA", torch.float64), layers_check.layer_fault)
        == "they are in float64"
    )
    assert (
        fuse(network("Llama, GQA", torch.float32), layers_check.layer_fault)
        == "they are in float32"
    )
    made = network("Llama, GQA")
    made.config.hidden_act = "gelu"
    assert fuse(made, layers_check.layer_fault) == "no kernels are written for gelu"
    made.config.hidden_act = "silu"
    made.get_decoder().layers[1].mlp.up_proj = torch.nn.Sequential()
    made.get_decoder().layers[1].mlp.up_proj.in_features = 32
    assert fuse(made, layers_check.layer_fault) == "their weights are quantised"
    monkeypatch.setattr(kernels, "STEP", 64)
    assert (
        fuse(network("Llama, GQA"), layers_check.layer_fault) == "a row of 32 is no multiple of 64"
    )


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators, but for views and allocations, while it is on;
    kernels are counted by their names.
    """

    VIEWS = (
        "view",
        "view_as",
        "flatten",
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "t",
    )
    FREE: ClassVar = {
        *VIEWS,
        "transpose",
        "empty",
        "new_empty",
        "expand",
        "detach",
        "alias",
        "_reshape_alias",
        "unflatten",
    }

    def __init__(self):
        super().__init__()
        self.on = False
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        view = name == "reshape" and out.data_ptr() == args[0].data_ptr()
        if self.on and name not in self.FREE and not view:
            self.seen["product" if name in ("mm", "addmm", "linear") else name] += 1
        return out

    def counting(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        """A launcher that counts as one, whatever the interpreter does for it."""

        def counted(*given, **named):
            before = self.on
            self.on = False
            out = launch(*given, **named)
            self.on = before
            self.seen[name] += before
            return out

        return counted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fits"), [("Qwen3", True), ("Gemma 2", False)])
def test_a_layer_is_six_kernels(monkeypatch, name, fits):
    """Four products and the attention's two; also where a pass is padded to a width."""
    target = wrapped(name, torch.bfloat16)
    target.fixed_rows = 8
    operators = Operators()
    launched = {"project_heads": 1, "add_product": 2, "multiply_silu": 1}
    for each in launched:
        monkeypatch.setattr(kernels, each, operators.counting(each, getattr(kernels, each)))
    attention = target.backend
    monkeypatch.setattr(attention, "__call__", operators.counting("attention", attention.__call__))
    layer = target.model.get_decoder().layers[1]
    layer.register_forward_pre_hook(lambda *given: setattr(operators, "on", True))
    layer.register_forward_hook(lambda *given: setattr(operators, "on", False))
    kv = FullKV(target.kv_shape, 20)
    ids = torch.arange(3)
    length = torch.full((), 5, dtype=torch.int32)
    with torch.inference_mode(), operators:
        target.compute_static(Nodes(ids, ids + 5, kv), length)
    assert (operators.seen == launched | {"attention": 1}) == fits, operators.seen
