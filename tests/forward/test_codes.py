"""A KV cache of 8 bits as kernels on a GPU keep it: codes, and behind a head's codes their steps.

Methods are tried with attention by PyTorch that reads such a cache, kernels in the interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.oracle import NOTHING, dense, error
from tests.forward.test_fused_layers import network as small_network
from tests.helpers import (
    CPU,
    METHODS,
    decode,
    drafter_of,
    first,
    needs_triton,
    options_for,
    random_prompt,
    random_tree,
    refused,
    seeded,
    tiny_draft,
    tiny_heads,
    tokens_of,
)
from tests.lossless.models import CodesOnDevice, network
from tests.lossless.test_tokens import TREES
from tswift.attention.sdpa import Attention, AttentionSpec, BatchInvariantAttention, Layout
from tswift.caches import FullKV, KVShape, PartialKV, steps_of
from tswift.decoding.audit import audit
from tswift.decoding.loop import Decoding
from tswift.drafting.methods import make_drafter
from tswift.forward import adapting, exact_passes
from tswift.forward.adapting import wrap_model
from tswift.forward.cuda import layers_check
from tswift.forward.cuda.fused_layers import fuse
from tswift.forward.exact_passes import choose_fixed_rows, fingerprint
from tswift.forward.target import Target
from tswift.forward.text import chunks
from tswift.loading.plan import plan_model
from tswift.models.config import ModelConfig
from tswift.sampling.parameters import SamplingParams

backend = pytest.importorskip("tswift.attention.triton", reason="triton is not installed")
kernels = pytest.importorskip("tswift.forward.cuda.layer_kernels")
HALVES = (torch.bfloat16, torch.float16)
PARAMS = SamplingParams(min_p=0.02, window=24)
NAMES = [name for name, method in METHODS.items() if name != "ar" and not method.reference]


def cache(heads: int, size: int, slots: int, layers: int = 1) -> FullKV:
    """One that holds nothing: what is not there must not be read."""
    kv = FullKV(KVShape(layers, heads, size, torch.int8, CPU, steps_behind=True), slots)
    for buffer in kv.buffers:
        buffer.fill_(torch.nan if buffer.is_floating_point() else 99)
    return kv


def numbers(kv: FullKV, count: int) -> list[Tensor]:
    return [kv.numbers(part, 0, slice(count)) for part in (0, 1)]


def new_rows(heads: int, count: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Keys and values ``[2, heads, count, size]`` of very different sizes."""
    source = seeded(seed)
    made = torch.randn(2, heads, count, size, generator=source)
    return made.mul_(torch.rand(2, heads, count, 1, generator=source).mul_(8).exp2_()).to(dtype)


# -------------------------------------------------------------------------------------------------
# The cache


@pytest.mark.parametrize("heads", [1, 3])
def test_codes_and_steps_are_the_bytes_of_a_cache_by_rows(heads):
    """As the C program has them, but for their places and the sign."""
    made = new_rows(heads, 37, 24, torch.float32)
    kv = cache(heads, 24, 45)
    kv.write(0, *made)
    rows = FullKV(replace(kv.shape, steps_behind=False), 45)
    rows.write(0, *made)
    assert [*map(torch.equal, numbers(kv, 37), numbers(rows, 37))] == [True, True]
    assert torch.equal(kv.keys[0][:, :37] ^ -128, rows.keys[0][:, :37, :24])
    assert kv.nbytes == rows.nbytes == 45 * kv.shape.bytes_per_token
    for layer, part in zip(kv.keys, kv.buffers[2], strict=True):
        assert layer.data_ptr() % 16 == steps_of(layer).data_ptr() % 16 == 0
        assert torch.equal(steps_of(layer)[:, :37], part[:, :37, 0])
        assert layer.stride(0) % 16 == 0


def test_what_is_broken_is_broken():
    kv = cache(2, 8, 5)
    for bad in (torch.nan, torch.inf, -torch.inf):
        made = new_rows(2, 5, 8, torch.float32)
        made[0, 1, 3, 2] = bad
        kv.write(0, *made)
        broken = [kv.shape.broken(each[0]).any(-1).any(0).tolist() for each in kv.buffers]
        assert broken == [[False] * 5, [False] * 5, [at == 3 for at in range(5)], [False] * 5]
        assert kv.numbers(0, 0, slice(5))[1, 3].isnan().all()


class Divisors(TorchDispatchMode):
    """Notes by how many numbers PyTorch divides."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.startswith("div"):
            self.sizes.append(args[1].dim() if isinstance(args[1], Tensor) else 0)
        return func(*args, **(kwargs or {}))


def test_steps_are_quotients_on_a_device_too():
    """By a number of the host's PyTorch multiplies with the reciprocal there, which is another
    step in every 20th row.
    """
    with Divisors() as found:
        cache(2, 8, 5).write(0, *new_rows(2, 5, 8, torch.float32))
    assert len(found.sizes) == 4
    assert 0 not in found.sizes


# -------------------------------------------------------------------------------------------------
# Methods


def served(attention: type[Attention] = CodesOnDevice) -> Target:
    target = Target(network("Llama, GQA", torch.bfloat16), attention)
    target.set_kv_dtype(torch.int8)
    assert target.kv_shape.steps_behind is attention.STEPS_BEHIND
    assert choose_fixed_rows(target, "sdpa", True) is None
    fingerprint(target)
    return target


def drafter(target: Target, method: str, **options):
    made = TREES.get(method, options_for(method, budget=64, costs="nominal", **options))
    return make_drafter(
        method, target, tiny_heads(torch.bfloat16), made, tiny_draft(torch.bfloat16)
    )


def text(target: Target, method: str, length: int, **options) -> list[int]:
    return decode(target, drafter(target, method, **options), random_prompt(90), PARAMS, 4, length)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """The text of plain decoding by the host, over a cache by rows."""
    return text(served(BatchInvariantAttention), "ar", 70)


def test_every_method_writes_the_text_of_plain_decoding(plain):
    target = served()
    for method in ("ar", *NAMES):
        assert text(target, method, 24) == plain[:24], method


@pytest.mark.slow
def test_so_does_every_partial_cache(plain):
    target = served()
    for policy in ("full", "partial", "streaming", "snapkv"):
        made = replace(TREES["magicdec"], kv=policy)
        found = make_drafter("magicdec", target, None, made)
        assert decode(target, found, random_prompt(90), PARAMS, 4, 70) == plain, policy


def test_it_is_another_text_than_the_models_own_cache_gives(plain):
    own = Target(network("Llama, GQA", torch.bfloat16), BatchInvariantAttention)
    choose_fixed_rows(own, "sdpa", True)
    assert text(own, "ar", 70) != plain


def test_a_text_goes_on_and_is_verified(plain):
    target = served()
    prompt = random_prompt(90)
    for method, cut in (("medusa", 40), ("ar", 63)):
        found = Decoding(
            target, prompt, PARAMS, 4, drafter(target, method), 70, written=plain[:cut]
        )
        assert plain[:cut] + tokens_of(found.steps()) == plain
        kv = found._kv
        again = FullKV(target.kv_shape, kv.length)
        for _ in chunks(target, [*prompt, *plain[:-1]], again):
            pass
        assert again.length == kv.length
        for ours, theirs in zip(kv.buffers, again.buffers, strict=True):
            assert torch.equal(ours[:, :, : kv.length], theirs)
    assert audit(target, prompt, plain, PARAMS, 4).exact == 70


def test_a_selection_takes_codes_and_their_steps():
    target = served()
    full = FullKV(target.kv_shape, 100)
    for _ in chunks(target, random_prompt(100), full):
        pass
    partial = PartialKV(target.kv_shape, 40, 4)
    heads = target.groups * target.kv_shape.heads
    queries = [torch.randn(heads, 1, target.kv_shape.head_dim).bfloat16()] * target.kv_shape.layers
    partial.select(full, queries)
    for layer in range(target.kv_shape.layers):
        for part in (0, 1):
            held = partial.numbers(part, layer, slice(partial.length))
            whole = full.numbers(part, layer, slice(100))
            for head in range(len(held)):
                same = (held[head, :, None] == whole[head]).all(-1)
                assert same.any(1).all()


# -------------------------------------------------------------------------------------------------
# Kernels


@needs_triton
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "size", "nodes"), [(2, 64, 5), (1, 80, 41), (3, 8, 1)])
def test_store(heads, size, nodes, dtype):
    """Codes and steps have the bits of PyTorch's, and go nowhere else."""
    ours, plain = cache(heads, size, 60), cache(heads, size, 60)
    made = new_rows(heads, nodes, size, dtype, nodes)
    made[0, :, nodes // 2] = 0
    made[1, 0, -1, 3] = torch.inf if nodes > 5 else 1e-38  # whose step is no normal number
    plain.keep(0, 0, 13, made[0])
    plain.keep(1, 0, 13, made[1])
    backend.TritonAttention.store(ours.keys[0], ours.values[0], *made, torch.tensor(13))
    for one, other in zip(ours.buffers, plain.buffers, strict=True):
        # one NaN is as good as another
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def attend(query: Tensor, kv: FullKV, held: int, ancestors: Tensor | None, spec=NOTHING) -> Tensor:
    """By the kernel, the nodes' own keys in the cache."""
    heads = len(kv.keys[0])
    layout = Layout(heads, len(query) // heads, query.dtype, CPU)
    run = backend.TritonAttention(layout, torch.tensor(held), query.shape[1], ancestors)
    return run(query, kv.keys[0], kv.values[0], query.shape[-1] ** -0.5, spec)


@needs_triton
@pytest.mark.parametrize(
    ("heads", "group", "size", "held", "nodes", "dtype", "spec"),
    [
        (2, 3, 64, 130, 9, torch.bfloat16, NOTHING),
        *first(
            0,
            [
                (1, 4, 128, 317, 33, torch.bfloat16, NOTHING),
                (2, 2, 80, 20, 5, torch.float16, NOTHING),
                (1, 2, 256, 70, 3, torch.bfloat16, NOTHING),
                (1, 2, 64, 300, 5, torch.bfloat16, AttentionSpec(100, 1.5)),
                (1, 3, 64, 40, 140, torch.float16, NOTHING),
            ],
        ),
    ],
)
def test_attention_against_float64_of_what_the_codes_stand_for(
    heads, group, size, held, nodes, dtype, spec
):
    kv = cache(heads, size, held + nodes + 50)
    kv.write(0, *new_rows(heads, held + nodes, size, dtype))
    source = seeded(1)
    query = torch.randn(heads * group, nodes, size, generator=source).to(dtype)
    ancestors = random_tree(nodes, Random(2)).ancestors() if nodes < 140 else None
    expected = dense(query, *numbers(kv, held + nodes), ancestors, size**-0.5, spec)
    found = attend(query, kv, held, ancestors, spec)
    # the interpreter rounds no weight
    assert error(found, expected) < 2 * torch.finfo(dtype).eps
    for part in (2, 3):  # a step that is left out would show
        right = kv.buffers[part].clone()
        kv.buffers[part][:, :, : held + nodes] = right[:, :, : held + nodes].mean()
        assert error(attend(query, kv, held, ancestors, spec), expected) > 0.05
        kv.buffers[part].copy_(right)


@needs_triton
@pytest.mark.parametrize(
    ("held", "nodes", "dtype"),
    [(62, 9, torch.bfloat16), *first(0, [(126, 33, torch.float16), (318, 64, torch.bfloat16)])],
)
def test_a_row_has_the_same_bits_whatever_else_is_in_the_pass(held, nodes, dtype):
    """In a tree as alone, with all of its path committed."""
    heads, group, size = 1, 3, 64
    kv = cache(heads, size, held + nodes + 9)
    made = new_rows(heads, held + nodes, size, dtype)
    kv.write(0, *made)
    query = torch.randn(group, nodes, size, generator=seeded(1)).to(dtype)
    ancestors = random_tree(nodes, Random(3)).ancestors()
    found = attend(query, kv, held, ancestors)
    for node in {0, 1, nodes // 2, nodes - 2, nodes - 1}:
        path = torch.cat([torch.arange(held), held + ancestors[node].nonzero().flatten()])
        alone = cache(heads, size, len(path))
        alone.write(0, *made[:, :, path])
        one = attend(query[:, node : node + 1], alone, len(path) - 1, None)
        assert torch.equal(one, found[:, node : node + 1]), node


@needs_triton
@pytest.mark.parametrize("count", [0, 2, 3])
def test_accepted_nodes_are_moved_with_their_steps(count):
    """Behind the text, and into a partial cache; by kernels as by PyTorch."""
    left = []
    for attention in (backend.TritonAttention, Attention):
        kv, own = cache(2, 24, 40, layers=3), cache(2, 24, 20, layers=3)
        for layer in range(3):
            kv.write(layer, *new_rows(2, 30, 24, torch.bfloat16, layer))
        accepted = 13 + torch.tensor([0, 2, 7]), 13 + torch.arange(3), torch.tensor([count])
        for pair in kv.pairs:
            attention.append(pair, pair, *accepted)
        length = torch.tensor(5, dtype=torch.int32)
        for to, pair in zip(own.pairs, kv.pairs, strict=True):
            attention.append(to, pair, accepted[1], torch.tensor([7, 2, 5]), accepted[2], length)
        assert length == (5 if count == 0 else 8)
        left.append([*kv.buffers, *own.buffers])
    for ours, theirs in zip(*left, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.fixture
def small(monkeypatch):
    """Sizes of tiny models, as the interpreter is slow; on a device that is doubted."""
    for place, name, value in (
        (kernels, "TILE", 16),
        (kernels, "STEP", 8),
        (kernels, "_PROGRAMS", 12),
        (adapting, "_TRIED", 6),
        (exact_passes, "_HELD_KEYS", 70),
        (exact_passes, "_OTHER_LENGTHS", (0,)),
        (exact_passes, "_PROMPT_SIZES", (70,)),
        (layers_check, "_REPEATS", 2),
    ):
        monkeypatch.setattr(place, name, value)


@needs_triton
def test_kernels_of_layers_are_tried_before_they_store_codes(small, monkeypatch):
    """To the bit of plain PyTorch's."""
    model = small_network("Qwen3", torch.bfloat16, 1)
    layer = model.model.layers[0]
    assert layers_check.layer_fault(layer, torch.bfloat16, codes=True) is None
    right = kernels.rotate

    def lying(products, heads):
        out = right(products, heads)
        steps_of(heads.values)[0, 3] *= 1.01
        return out

    monkeypatch.setattr(kernels, "rotate", lying)
    said = layers_check.layer_fault(layer, torch.bfloat16, codes=True)
    assert said.startswith("rotated heads differ")


@needs_triton
@pytest.mark.slow
def test_a_models_passes_are_exact_and_its_text_plain_decodings(small, monkeypatch):
    """All by kernels, tried as on a device."""
    monkeypatch.setattr(adapting, "_DOUBTED", ("cpu",))
    target = wrap_model(small_network("Qwen2.5", torch.bfloat16, 1), "small", "triton", torch.int8)
    assert target.kv_shape.steps_behind
    assert target.fallbacks == {}
    target.set_fixed_rows(6, True)
    fingerprint(target)
    prompt = [(7 * at + 3) % 97 for at in range(66)]
    found = []
    for method in ("ar", "reuse", "magicdec"):
        options = options_for(method, nodes=6, gamma=3, budget=64)
        drafter = drafter_of(method, target, options)
        found.append(decode(target, drafter, prompt, PARAMS, 3, 5))
    assert found[1:] == found[:1] * 2


@needs_triton
def test_a_kernel_that_fails_with_codes_refuses_the_cache(small, monkeypatch):
    model = small_network("Qwen2.5", torch.bfloat16, 1)
    assert fuse(model, Mock(return_value=None)) is None
    target = Target(model, backend.TritonAttention)
    monkeypatch.setattr(adapting, "_DOUBTED", ("cpu",))
    layers = Mock(return_value="a bit differs")
    monkeypatch.setattr(adapting, "layer_fault", layers)
    for attention, reason in (("it lies", "it lies"), (None, "a bit differs")):
        monkeypatch.setattr(adapting, "fails", lambda *given, lies=attention, **named: lies)
        with refused(f"^kv_dtype: small cannot have a cache in int8: {reason}"):
            adapting._narrow_cache(target, "small", torch.int8, False, lambda: 0.0)
        assert target.kv_shape.dtype == torch.bfloat16


def test_attention_by_others_refuses_it_on_cuda():
    asked = {"device": "cpu", "dtype": "bfloat16", "kv_dtype": "int8", "attention": "sdpa"}
    plan = plan_model(ModelConfig(model="demo", **asked))
    plan = replace(plan, device=torch.device("cuda"), dtype=torch.bfloat16, kv_reader="triton")
    assert plan.kv_dtype_with("triton") == torch.int8
    for other in ("sdpa", "flash"):
        with refused(rf"^kv_dtype: int8 is read by triton attention alone .*; here it is {other}$"):
            plan.kv_dtype_with(other)
