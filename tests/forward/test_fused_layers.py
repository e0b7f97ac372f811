"""Kernels between a layer's products, interpreted on the CPU: plain PyTorch's bits,
wherever a row is.
"""

from __future__ import annotations

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
from tests.helpers import first, random_tree
from tswift.attention import sdpa
from tswift.attention.backends import BACKENDS, why_not
from tswift.attention.sdpa import TreeAttention
from tswift.caches import FullKV
from tswift.forward import adapting, draft_weights, fused_layers
from tswift.forward import target as forward_target
from tswift.forward.adapting import FUSED, execution_note, fingerprint, wrap_model
from tswift.forward.fused_layers import (
    fuse,
    is_fused,
    plain_exponential,
    plain_norm,
    plain_rotate,
    plain_silu_mul,
    separate_layers,
    tree_sum,
)
from tswift.forward.joined import join
from tswift.forward.target import Target, chunks, prefill
from tswift.models.architecture import max_positions

kernels = pytest.importorskip("tswift.forward.layer_kernels", reason="triton is not installed")
REASON = why_not("triton", torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(4).to(dtype)


def same_bits(ours: Tensor, plain: Tensor) -> bool:
    first, second = (each.contiguous().view(torch.uint8) for each in (ours, plain))
    return ours.dtype == plain.dtype and torch.equal(first, second)


# -------------------------------------------------------------------------------------------------
# Kernels


@few
@given(
    st.integers(1, 5),
    st.integers(1, 700),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 1000),
)
def test_sums_and_norms(rows: int, size: int, dtype: torch.dtype, adds: bool, seed: int) -> None:
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
    around = torch.cat([hidden[:0], row.expand(3, -1), expected])
    assert same_bits(kernels.add_norm(around, None, weight, EPS)[1][2:3], normed[at : at + 1])


@few
@given(st.integers(1, 3), st.integers(1, 2500), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_silu(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    joined = random(seed, rows, 2 * size, dtype=dtype).mul_(5)
    gate, up = joined.split(size, 1)
    made = kernels.silu_mul(gate, up)
    assert same_bits(made, plain_silu_mul(gate, up))
    wide = F.silu(gate.double()) * up.double()
    assert ((made - wide).abs() <= 4 * torch.finfo(dtype).eps * wide.abs() + 1e-6).all()
    assert same_bits(kernels.silu_mul(gate[-1:], up[-1:]), made[-1:])


def test_the_exponential_is_one() -> None:
    numbers = torch.linspace(-87, 88, 200_001)
    exact = numbers.double().exp()
    assert ((plain_exponential(numbers) - exact).abs() / exact).max() < 3e-7
    assert plain_exponential(torch.tensor([0.0])).item() == 1.0
    odd = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 0.0]])
    assert same_bits(
        kernels.silu_mul(odd[:, 3:], odd[:, 3:]), plain_silu_mul(odd[:, 3:], odd[:, 3:])
    )
    assert kernels.silu_mul(odd, torch.ones_like(odd)).isnan().tolist() == [
        [False, False, True, False, False, False]
    ]


@few
@given(
    *(st.integers(1, 9), st.integers(1, 5), st.sampled_from([8, 24, 64])),
    *(
        st.integers(1, 6),
        st.integers(0, 20),
        st.booleans(),
        st.sampled_from(DTYPES),
        st.integers(0, 1000),
    ),
)
def test_rotation_and_store(groups, kv_heads, head, rows, held, normed, dtype, seed) -> None:
    heads = min(12, groups * kv_heads)
    joined = random(seed, rows, (heads + 2 * kv_heads) * head, dtype=dtype)
    query, key, value = joined.split([heads * head, kv_heads * head, kv_heads * head], 1)
    angles = (random(seed + 1, rows, head, dtype=dtype), random(seed + 2, rows, head, dtype=dtype))
    weights = tuple(random(seed + 3, 2, head, dtype=dtype)) if normed else (None, None)
    nodes, capacity = 1 + seed % rows, held + 4  # the last slots may be missing
    cache = torch.full((2, kv_heads, capacity, head), torch.nan, dtype=dtype)
    length = torch.full((), held, dtype=torch.int32)
    out = kernels.rotate(
        query, key, value, angles, weights, EPS, (cache[0], cache[1], length), nodes
    )
    first, second = (
        plain_rotate(part.unflatten(1, (-1, head)), angles, weight, EPS)
        for part, weight in zip((query, key), weights, strict=True)
    )
    assert same_bits(out.transpose(0, 1), first)
    stored = min(nodes, capacity - held)
    for cached, made in zip(cache, (second, value.unflatten(1, (-1, head))), strict=True):
        assert same_bits(cached[:, held : held + stored].transpose(0, 1), made[:stored])
        assert cached[:, :held].isnan().all()
        assert cached[:, held + stored :].isnan().all()
    alone = kernels.rotate(
        query[-1:],
        key[-1:],
        None,
        tuple(each[-1:] for each in angles),
        weights,
        EPS,
        (fresh := torch.empty(kv_heads, 1, head, dtype=dtype), None, None),
        1,
    )
    assert same_bits(alone[:, 0], out[:, -1])
    assert same_bits(fresh[:, 0], second[-1])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in tiles that tiny models have."""
    monkeypatch.setattr(kernels, "_TILE", 16)
    monkeypatch.setattr(kernels, "_STEP", 8)
    monkeypatch.setattr(kernels, "_PROGRAMS", 12)


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", first(1, HALVES))
@pytest.mark.parametrize(
    ("inputs", "outputs", "parts"), first(1, [(64, 32, 8), (24, 48, 1), (32, 192, 1), (96, 64, 4)])
)
@pytest.mark.parametrize("rows", first(1, [17, 1, 64]))
def test_products(
    small, rows: int, inputs: int, outputs: int, parts: int, dtype: torch.dtype
) -> None:
    """Close to float64; a row has its bits wherever it is, and whatever is beside it."""
    given = random(1, rows, inputs + 3, dtype=dtype)[:, :inputs]
    weights = random(2, outputs, inputs, dtype=dtype) / 16
    bias = random(3, outputs, dtype=dtype)
    made = kernels.multiply(given, weights, None, bias)
    assert made.shape == (parts, rows, outputs)
    exact = given.double() @ weights.double().T
    assert ((made.double().sum(0) - exact - bias.double()).abs() <= 1e-5 * exact.abs().max()).all()
    active = kernels.multiply_silu(given, weights)
    gate, up = exact.chunk(2, 1)
    wide = F.silu(gate) * up
    assert ((active - wide).abs() <= 4 * torch.finfo(dtype).eps * wide.abs().max()).all()
    row = given[-1:]
    around = torch.cat([row.expand(2, -1), given[:1], row, torch.full_like(row, torch.inf)])
    for at, among in ((0, row), (3, around)):
        assert same_bits(kernels.multiply(among, weights, None, bias)[:, at], made[:, -1])
        assert same_bits(kernels.multiply_silu(among, weights)[at], active[-1])


@pytest.mark.parametrize("dtype", first(1, HALVES))
@pytest.mark.parametrize(("inputs", "outputs", "rows"), first(1, [(256, 128, 512), (64, 256, 130)]))
def test_rows_among_many_have_the_bits_that_they_have_among_few(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype
) -> None:
    """Products of a wide pass are those of passes of a width,
    whose parts are added where they are read.
    """
    given = random(1, rows, inputs, dtype=dtype)
    weights = random(2, outputs, inputs, dtype=dtype) / 16
    bias = random(3, outputs, dtype=dtype)
    assert kernels.product_parts(inputs, outputs) == inputs // 64
    made = kernels.multiply(given, weights, None, bias)
    active = kernels.multiply_silu(given, weights)
    assert made.shape == (1, rows, outputs)
    few = given.split(32)
    products = [whole(kernels.multiply(each, weights, None, bias), dtype) for each in few]
    assert same_bits(whole(made, dtype), torch.cat(products))
    assert same_bits(active, torch.cat([kernels.multiply_silu(each, weights) for each in few]))


@pytest.mark.parametrize("rows", [1, 5])
def test_products_with_weights_in_fp8(small, rows: int) -> None:
    given, whole = random(1, rows, 64, dtype=torch.bfloat16), random(2, 32, 64, dtype=torch.float32)
    scale = whole.abs().amax(1) / 448
    weights = (whole / scale[:, None]).to(torch.float8_e4m3fn)
    known = weights.double() * scale.double()[:, None]
    made = kernels.multiply(given, weights, scale)
    exact = given.double() @ known.T
    assert ((made.double().sum(0) - exact).abs() <= 1e-5 * exact.abs().max()).all()
    gate, up = exact.chunk(2, 1)
    wide = F.silu(gate) * up
    assert (
        (kernels.multiply_silu(given, weights, scale) - wide).abs() <= 0.02 * wide.abs().max()
    ).all()


def test_products_of_other_sizes_are_not_ours() -> None:
    assert kernels.product_parts(4096, 6144) == 4
    assert kernels.product_parts(14_336, 4096) == 4
    assert kernels.product_parts(4096, 28_672) == 1
    assert kernels.product_parts(576, 960) == 0  # 960 is no multiple of a tile
    assert kernels.product_parts(100, 1024) == 0


def whole(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of its parts, added in their order, and rounded."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


@few
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(HALVES),
    st.booleans(),
    st.integers(0, 1000),
)
def test_parts_are_added_where_they_are_read(parts, rows, dtype, normed, seed) -> None:
    head, heads, kv_heads = 8, 4, 2
    made = random(seed, parts, rows, (heads + 2 * kv_heads) * head, dtype=torch.float32)
    split = [heads * head, kv_heads * head, kv_heads * head]
    angles = (random(seed + 1, rows, head, dtype=dtype), random(seed + 2, rows, head, dtype=dtype))
    weights = tuple(random(seed + 3, 2, head, dtype=dtype)) if normed else (None, None)
    found = []
    for query, key, value in (made.split(split, -1), whole(made, dtype).split(split, -1)):
        cache = torch.full((2, kv_heads, rows, head), torch.nan, dtype=dtype)
        out = kernels.rotate(
            query, key, value, angles, weights, EPS, (cache[0], cache[1], None), rows
        )
        found.append((out, cache))
    assert same_bits(found[0][0], found[1][0])
    assert same_bits(found[0][1], found[1][1])
    hidden, weight = (
        random(seed + 4, rows, split[0], dtype=dtype),
        random(seed + 5, split[0], dtype=dtype),
    )
    added = made[..., : split[0]]
    ours, plain = (
        kernels.add_norm(hidden, each, weight, EPS) for each in (added, whole(added, dtype))
    )
    assert same_bits(ours[0], plain[0])
    assert same_bits(ours[1], plain[1])


def test_a_sum_is_a_tree_of_pairs() -> None:
    big = 2.0**24  # where an addition of 1 is lost
    assert tree_sum(torch.tensor([big, 1.0, 1.0, 0.0])).item() == big
    assert tree_sum(torch.tensor([1.0, 1.0, big])).item() == big + 2


# -------------------------------------------------------------------------------------------------
# Layers

FIT = ("Llama, MQA, biases", "Mistral 7B v0.1", "Qwen2.5", "Qwen3")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are tried with few tokens: the interpreter is slow."""
    monkeypatch.setattr(adapting, "_TRIED", 6)


def network(name: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> PreTrainedModel:
    known = next(each for each in ARCHITECTURES if each.startswith(name) and "MoE" not in each)
    made = ARCHITECTURES[known].make(97).to(dtype)
    made.model.layers = made.model.layers[:layers]
    made.config.num_hidden_layers = len(made.model.layers)
    return made


def wrapped(name: str, dtype: torch.dtype, layers: int = 2) -> Target:
    return wrap_model(network(name, dtype, layers), name, "triton", joined=True)


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
    return target.forward(tokens, 9 + ancestors.sum(1) - 1, kv, ancestors).hidden, kv


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (FIT[0], torch.bfloat16),
        (FIT[1], torch.float32),
        (FIT[2], torch.float32),
        (FIT[3], torch.bfloat16),
    ],
)
def test_layers_compute_what_transformers_does(name: str, dtype: torch.dtype) -> None:
    target = wrapped(name, dtype)
    assert (execution_note(target), target.fallbacks) == (FUSED, {})
    eager = Target(network(name, dtype), TreeAttention)
    (ours, cache), (theirs, other) = tree_pass(target), tree_pass(eager)
    allowed = 1e-5 if dtype == torch.float32 else 0.05
    assert ((ours - theirs).norm() / theirs.norm()) < allowed
    assert (
        (cache.buffers[0][:, :, :15] - other.buffers[0][:, :, :15]).norm()
        / other.buffers[0][:, :, :15].norm()
    ) < allowed
    replayed, written = tree_pass(target, static=True)
    assert torch.equal(replayed, ours)
    assert torch.equal(written.buffers[0][:, :, :15], cache.buffers[0][:, :, :15])
    assert torch.equal(written.buffers[1][:, :, :15], cache.buffers[1][:, :, :15])
    separate_layers(target.model)
    assert not is_fused(target.model)


def counted(made: Counter[str], name: str, right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def count(*given: Any, **named: Any) -> Tensor:
        made[name] += 1
        return right(*given, **named)

    return count


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("Qwen2.5", 1), ("Qwen3", 2)])
def test_layers_with_products_of_ours(
    small, monkeypatch: pytest.MonkeyPatch, name: str, layers: int
) -> None:
    """All products of a narrow pass are ours, and those of a prompt PyTorch's;
    together they are transformers' layers.

    Also with weights in FP8, for drafts.
    """
    made = Counter[str]()
    for each in ("multiply", "multiply_silu"):
        right = getattr(kernels, each)
        monkeypatch.setattr(kernels, each, counted(made, each, right))
    target = wrapped(name, torch.bfloat16, layers)
    assert (execution_note(target), target.fallbacks) == (FUSED, {})
    made.clear()
    ours, cache = tree_pass(target)
    assert made == {
        "multiply": 2 * 3 * target.kv_shape.layers,
        "multiply_silu": 2 * target.kv_shape.layers,
    }
    theirs, _ = tree_pass(Target(network(name, torch.bfloat16, layers), TreeAttention))
    assert ((ours - theirs).norm() / theirs.norm()) < 0.05
    replayed, written = tree_pass(target, static=True)
    assert torch.equal(replayed, ours)
    assert torch.equal(written.buffers[0][:, :, :15], cache.buffers[0][:, :, :15])
    monkeypatch.setattr(kernels, "MOST_ROWS", 5)
    made.clear()
    tree_pass(target)
    assert not made
    monkeypatch.setattr(kernels, "MOST_ROWS", 64)
    monkeypatch.setattr(draft_weights, "_DEVICES", ("cpu",))
    cheap = Target(draft_weights.cheaper_copy(target.model), BACKENDS["triton"]())
    assert is_fused(cheap.model)
    made.clear()
    drafted, _ = tree_pass(cheap)
    assert made["multiply_silu"] == 2 * target.kv_shape.layers
    assert ((drafted - ours).norm() / ours.norm()) < 0.3


@pytest.mark.slow
def test_rows_are_exact_with_products_of_ours(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "_HELD", 70)  # the interpreter is slow
    monkeypatch.setattr(adapting, "_OTHERS", (0,))
    target = wrapped("Qwen2.5", torch.bfloat16)
    target.width = 6
    fingerprint(target)  # raises where a row's bits depend on anything else


SHORT = ("Qwen2.5", 1, 6)


@pytest.fixture(params=[SHORT])
def narrow(request: pytest.FixtureRequest, small, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A model with products of ours, whose passes have 2 or 8 rows, a prompt's 6 or 24."""
    name, layers, wide = request.param
    few = wide // 3
    for place, attribute, value in (
        (adapting, "_HELD", 2 * wide),  # the interpreter is slow
        (adapting, "_TRIED", 2),
        (adapting, "_WIDE", (wide, 1)),
        (adapting, "CHUNK", wide),
        (forward_target, "CHUNK", wide),
        (forward_target, "_REPLAYED", 2),
        (kernels, "_STEP", 16),
        (kernels, "MOST_ROWS", few),
        # as many as few rows are padded to: NumPy sums otherwise in another shape
        (kernels, "_MANY_ROWS", 16),
        (sdpa, "MAX_WIDTH", few),
    ):
        monkeypatch.setattr(place, attribute, value)
    target = wrap_model(network(name, torch.bfloat16, layers), name, "triton", joined=True)
    target.set_width(few, True)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [SHORT, ("Mistral 7B v0.1", 1, 24)], indirect=True)
def test_a_text_in_wide_passes_has_the_bits_of_narrow_ones(
    narrow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = forward_target.CHUNK
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
        if not narrow.wide_text:
            assert passes == {wide: 1, wide // 3: 3, 1: 2}
            adapting.try_wide_text(narrow)
            assert (narrow.wide_text, narrow.fallbacks) == (True, {})
            passes.clear()
    assert passes == {wide: 2, 1: 2}
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multiply", "multiply_silu"])
def test_a_text_stays_in_narrow_passes_where_wide_ones_have_other_bits(
    narrow: Target, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right = getattr(kernels, name)

    def otherwise(rows: Tensor, *given: Any) -> Tensor:
        out = right(rows, *given)
        if len(rows) > kernels.MOST_ROWS:
            out[..., -1, -1] *= 1.01
        return out

    monkeypatch.setattr(kernels, name, otherwise)
    adapting.try_wide_text(narrow)
    assert not narrow.wide_text
    assert execution_note(narrow).endswith("narrow passes: a token has other bits in wide ones")


@pytest.mark.slow
def test_layers_with_products_of_pytorch_have_narrow_passes(
    narrow: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "product_parts", lambda inputs, outputs: 0 if outputs == 32 else 1)
    adapting.try_wide_text(narrow)
    assert (narrow.wide_text, narrow.fallbacks) == (False, {})


@pytest.mark.parametrize(
    ("name", "word"), [("multiply", "products"), ("multiply_silu", "products with SiLU")]
)
def test_products_that_lie_are_not_used(small, lying, name: str, word: str) -> None:
    made = network("Qwen3", torch.bfloat16)
    join(made)
    lying(name)
    assert fuse(made) == f"the kernel of {word} computes something else than PyTorch"
    assert not is_fused(made)


@pytest.mark.slow
def test_rows_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "_HELD", 70)  # the interpreter is slow
    monkeypatch.setattr(adapting, "_OTHERS", (0,))
    target = wrapped("Qwen3", torch.bfloat16)
    target.width = 6
    fingerprint(target)  # raises where a row's bits depend on anything else


@pytest.mark.slow
def test_a_norm_takes_only_what_was_handed_for_its_input() -> None:
    """A layer that is called alone hands its sum to the next norm,
    which may be asked for another one.
    """
    target = wrapped("Llama, GQA", torch.float32)
    norm = target.model.get_decoder().layers[0].following[0]
    hidden = random(1, 1, 2, 32, dtype=torch.float32)
    with torch.no_grad():
        expected = norm(hidden)
        norm.handed = (hidden + 1, hidden)
        assert torch.equal(norm(hidden), expected)
        norm.handed = (hidden, hidden + 1)
        assert torch.equal(norm(hidden), hidden + 1)
        assert torch.equal(norm(hidden), expected)


@pytest.mark.parametrize(
    "name", first(1, ["Llama 3.1", "Llama 2 (YaRN)", "Llama 2 (linear scaling)", "Qwen3"])
)
@pytest.mark.parametrize("dtype", first(1, DTYPES))
def test_angles_are_looked_up_with_the_bits_of_the_model(name: str, dtype: torch.dtype) -> None:
    made, plain = network(name, dtype, 1), network(name, dtype, 1)
    assert fuse(made) is None
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
def test_a_replayed_pass_is_by_kernels_outside_of_inference_mode_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed text is forwarded by such passes,
    and has to have the bits that it was decoded with.
    """
    target = wrapped("Llama, MQA", torch.bfloat16, 1)
    made = Counter[str]()
    monkeypatch.setattr(kernels, "add_norm", counted(made, "add_norm", kernels.add_norm))
    kv = FullKV(target.kv_shape, 20)
    length = torch.full((), 5, dtype=torch.int32)
    ids = torch.arange(2)
    assert torch.is_grad_enabled()
    target.compute_static(ids, ids + 5, kv, length, None)
    assert made["add_norm"] == 3


@pytest.mark.slow
def test_few_operators_surround_the_layers() -> None:
    """Those of a pass and its logits that are not a layer's: each takes a GPU 1.8 us."""
    target = wrapped("Llama, MQA", torch.bfloat16, 1)
    target.width = 8
    operators = Operators()
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
            forwarded = target.compute_static(ids, places, kv, length, None)
            target.logits(forwarded.padded)
            operators.on = False
        assert operators.seen["product"] == 1
        found = operators.seen - Counter(["product"])
        assert found.total() <= most, found


@pytest.mark.slow
def test_a_call_without_our_cache_goes_the_old_way() -> None:
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
def test_a_copy_is_fused_for_itself() -> None:
    target = wrapped("Qwen3", torch.float32)
    copied = deepcopy(target.model)
    other = Target(copied, BACKENDS["triton"]())
    norms = {id(each) for each in copied.modules()}
    assert all(id(layer.following[0]) in norms for layer in copied.get_decoder().layers)
    assert torch.equal(tree_pass(other)[0], tree_pass(target)[0])


@pytest.mark.slow
def test_taps_see_what_they_saw() -> None:
    target = wrapped("Llama, GQA", torch.float32)
    eager = Target(network("Llama, GQA"))
    for each in (target, eager):
        each.tap()
        each.tap([0, 1])
    token = torch.tensor([5])
    passes = [
        each.forward(token, token * 0, FullKV(each.kv_shape, 1), None) for each in (target, eager)
    ]
    torch.testing.assert_close(passes[0].pre_norm, passes[1].pre_norm)
    torch.testing.assert_close(passes[0].layer_states, passes[1].layer_states)


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make one kernel lie in one element."""

    def lie(name: str) -> None:
        right = getattr(kernels, name)

        def wrong(*given, **named):
            out = right(*given, **named)
            (out[-1] if isinstance(out, tuple) else out)[-1, -1].mul_(1.5)
            return out

        monkeypatch.setattr(kernels, name, wrong)

    return lie


@pytest.mark.parametrize(
    ("name", "word"), [("add_norm", "norms"), ("silu_mul", "SiLU"), ("rotate", "rotation")]
)
def test_kernels_that_lie_are_not_used(lying, name: str, word: str) -> None:
    made = network("Qwen3")
    lying(name)
    assert fuse(made) == f"the kernel of {word} computes something else than PyTorch"
    assert not is_fused(made)


@pytest.mark.slow
def test_layers_that_lie_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "_try_kernels", lambda *given: None)
    right = kernels.silu_mul
    monkeypatch.setattr(kernels, "silu_mul", lambda *given: right(*given) * 3)
    target = wrap_model(network("Llama, GQA"), "tiny", "triton")
    assert execution_note(target) == "eager, as kernels in their place gave other logits"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma 2", "no kernels are written for gemma2"),
        ("Phi-3", "no kernels are written for phi3"),
    ],
)
def test_other_layers_stay_eager(name: str, reason: str) -> None:
    assert fuse(network(name)) == reason


def test_sizes_that_do_not_fit() -> None:
    assert fuse(network("Llama, GQA", torch.float64)) == "they are in float64"
    made = network("Llama, GQA")
    made.config.hidden_act = "gelu"
    assert fuse(made) == "no kernels are written for gelu"


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators, but for views and allocations, while it is on;
    kernels are counted by their names.
    """

    VIEWS = (
        "view",
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

    def __init__(self) -> None:
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

        def counted(*given: Any, **named: Any) -> Any:
            before = self.on
            self.on = False
            out = launch(*given, **named)
            self.on = before
            self.seen[name] += before
            return out

        return counted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fits"), [("Qwen3", True), ("Gemma 2", False)])
def test_a_layer_is_ten_kernels(monkeypatch: pytest.MonkeyPatch, name: str, fits: bool) -> None:
    """Four products, the attention (two), and four of these;
    also where a pass is padded to a width.
    """
    target = wrapped(name, torch.float32)
    target.width = 8
    operators = Operators()
    for each in ("add_norm", "rotate", "silu_mul"):
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
        target.compute_static(ids, ids + 5, kv, length, None)
    wanted = {"product": 4, "attention": 1, "add_norm": 2, "rotate": 1, "silu_mul": 1}
    assert (operators.seen == wanted) == fits, operators.seen
