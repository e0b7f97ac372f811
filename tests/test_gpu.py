"""What needs a CUDA device, in order of value: `make gpu` gives them a limited time.

Elsewhere they are skipped.

With GPU_DRY=1 those that can be tried on a CPU, in tiny sizes, with kernels interpreted.
"""

from __future__ import annotations

import os
from copy import deepcopy
from functools import lru_cache

import pytest
import torch

import tswift
from tests.attention.oracle import by, case, dense, error, odd_nodes, tree_of
from tests.helpers import METHODS, decode_steps, random_prompt, tiny_heads, tiny_llama, tokens_of
from tswift.attention.sdpa import AttentionSpec, Layout
from tswift.caches import FullKV, KVShape
from tswift.decoding.audit import audit
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.engine import Request, begin
from tswift.forward.cuda.coded import CodedLinear
from tswift.forward.target import Target
from tswift.jobs.config import read_prompt
from tswift.loading.model import LoadedModel
from tswift.models.codes import Codes
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import noise_bits

CUDA = torch.cuda.is_available()
DRY = os.environ.get("GPU_DRY") == "1" and not CUDA
DEVICE = "cpu" if DRY else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (CUDA or DRY), reason="no CUDA device")]
cuda_only = pytest.mark.skipif(not CUDA, reason="needs CUDA itself")

# Small ones in a dry run.
# whose passes are not C, which would be compiled for ten seconds
FLOAT = "float64" if DRY else "float32"
TEXT = 10 if DRY else 2000
PROMPT = 32 if DRY else 1024
SOME = ("ar", "tokenswift") if DRY else tuple(METHODS)  # of the methods


@lru_cache(maxsize=1)  # one model fits anywhere, and its kernels are compiled once
def bundled(dtype: str, draft: bool = False) -> LoadedModel:
    return tswift.load(
        "demo", device=DEVICE, dtype=dtype, draft_model="demo-draft" if draft and not DRY else None
    )


def demo_prompt(model: LoadedModel) -> list[int]:
    return model.encode(read_prompt(None))[:PROMPT]


def demo_text(model: LoadedModel, method: str, length: int, seed: int = 1) -> list[int]:
    return tokens_of(
        list(
            begin(
                model, Request(prompt=demo_prompt(model), length=length, method=method, seed=seed)
            ).steps()
        )
    )[:length]


def core_missing(model: LoadedModel) -> str:
    """What of the core is done without: decoding is right then, too, but slow."""
    made = (model.attention, model.layers, model.target.fallbacks.graph_fault)
    return "" if made == ("triton", "fused", None) else str(made)


@cuda_only
def test_nothing_of_the_core_is_done_without():
    model = bundled("bfloat16", draft=True)
    # the first one's graphs are gone by the second
    twice = [demo_text(model, "tokenswift", 60) for _ in range(2)]
    assert twice[0] == twice[1]
    assert not core_missing(model)


@cuda_only
def test_a_model_of_8b_writes_the_same_text_by_every_method():
    """Random weights in the shape of Llama 3.1 8B: its layers,
    kernels and widths are those of the real one.
    """
    model = tswift.load("shape:llama3.1-8b", device=DEVICE)
    assert "exact" not in model.target.fallbacks
    prompt = random_prompt(1000)
    texts = [
        tokens_of(
            list(begin(model, Request(prompt=prompt, length=TEXT, method=name, seed=1)).steps())
        )
        for name in ("ar", "medusa", "tokenswift")
    ]
    assert texts[1:] == texts[:1] * 2


@cuda_only
def test_every_method_writes_the_text_of_plain_decoding_in_bfloat16():
    """Passes have one width, so nothing rounds otherwise;
    and the audit sees through another seed's text.
    """
    model = bundled("bfloat16")
    assert not core_missing(model)
    assert "exact" not in model.target.fallbacks
    plain = demo_text(model, "ar", TEXT)
    other = [
        name
        for name, method in METHODS.items()
        if "draft_model" not in method.needs and name != "ar-reference"
    ]
    differ = [name for name in other if demo_text(model, name, TEXT) != plain]
    assert not differ
    prompt, params = demo_prompt(model), SamplingParams(banned=model.eos_ids)  # as `begin` has them
    assert audit(model.target, prompt, plain, params, 1).exact == TEXT
    assert not audit(model.target, prompt, demo_text(model, "ar", TEXT, seed=2), params, 1).ok


# kv heads, query heads per KV head, head size
LAYOUTS = {
    "llama3.1-8b": (8, 4, 128),
    "qwen2.5-7b": (4, 7, 128),
    "yarn-llama2-7b": (32, 1, 128),
    "qwen2.5-1.5b": (2, 6, 128),
}
# worst error over the largest output
TRITON_TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@pytest.fixture
def triton_attention():
    backend = pytest.importorskip("tswift.attention.triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1" and not DRY:
        pytest.skip("TRITON_INTERPRET=1: the kernels would be interpreted")
    return backend


def on_device(*shape, dtype: torch.dtype, sharp: float = 4.0):
    """A case on the GPU, its scores spread out so that some keys matter among 100,000."""
    return case(*shape, dtype=dtype, sharp=sharp, device=DEVICE)


@pytest.mark.parametrize("form", [(4, 32, True), (8, 16, False), (4, 32, False), (8, 32, True)])
def test_products_of_codes_against_float64(form):
    """And a row has the same bits alone and among any others."""
    pytest.importorskip("tswift.forward.cuda.code_kernels", reason="triton is not installed")
    bits, block, minima = form
    outputs, inputs, wide = (70, 128, 66) if DRY else (4096, 14_336, 589)
    counts = torch.randint(2**bits, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    scale, more = torch.randn(2, outputs, inputs // block, device=DEVICE) / 2**bits
    minimum = more * 8 * minima - 2 ** (bits - 1) * scale
    linear = CodedLinear(Codes(counts, scale, minimum, bits))
    assert linear.packed.form[:3] == form
    rows = torch.randn(wide, inputs, device=DEVICE).to(torch.bfloat16)
    made = linear(rows)
    exact = rows.double() @ linear.weight.double().T
    assert (made - exact).abs().max() <= torch.finfo(made.dtype).eps * exact.abs().max()
    for count in (1, 17) if DRY else (1, 8, 16, 17, 32, 33, 64, 65):
        assert torch.equal(linear(rows[-count:]), made[-count:]), count


def codes_of(keys: torch.Tensor, values: torch.Tensor) -> FullKV:
    """A cache of 8 bits that holds them, as PyTorch makes codes."""
    heads, slots, size = keys.shape
    kv = FullKV(KVShape(1, heads, size, torch.int8, keys.device, steps_behind=True), slots)
    kv.write(0, keys, values)
    return kv


@pytest.mark.parametrize(("prefix", "nodes"), [(20_000, 1), (100_000, 32)])
def test_triton_over_codes_against_float64(triton_attention, prefix, nodes):
    """And the kernel that stores them makes PyTorch's, to the bit."""
    shape = (1, 4, 16) if DRY else LAYOUTS["llama3.1-8b"]
    prefix, nodes = (prefix // 500, min(nodes, 9)) if DRY else (prefix, nodes)
    query, keys, values, ancestors, scale = on_device(*shape, prefix, nodes, dtype=torch.bfloat16)
    kv, stored = codes_of(keys, values), codes_of(keys * 0, values * 0)
    length = torch.zeros((), dtype=torch.int32, device=DEVICE)
    attention = triton_attention.TritonAttention
    attention.store(*stored.parts[0][:2], keys, values, length)
    assert all(map(torch.equal, kv.buffers, stored.buffers))
    run = attention(Layout(*shape[:2], query.dtype, query.device), prefix, nodes, ancestors)
    numbers = [kv.numbers(part, 0, slice(None)) for part in (0, 1)]
    assert (
        error(run(query, kv.keys[0], kv.values[0], scale), dense(query, *numbers, ancestors, scale))
        < TRITON_TOLERANCE[torch.bfloat16]
    )


@cuda_only
def test_triton_over_codes_gives_a_row_the_same_bits_in_every_pass(triton_attention):
    """Alone, with its path committed, and in trees."""
    for start, nodes in ((510, 4), (4094, 33), (20_000, 64)):
        query, keys, values, _, scale = on_device(2, 4, 128, start, nodes, dtype=torch.bfloat16)
        ancestors = tree_of(nodes, 3, nodes)
        layout = Layout(2, 4, query.dtype, query.device)
        attention = triton_attention.TritonAttention
        kept = codes_of(keys, values).parts[0][:2]
        found = attention(layout, start, nodes, ancestors.to(DEVICE))(query, *kept, scale)
        for node in range(0, nodes, 8):
            path = torch.cat([torch.arange(start), start + ancestors[node].nonzero().flatten()])
            path = path.to(DEVICE)
            alone = codes_of(keys[:, path], values[:, path]).parts[0][:2]
            one = attention(layout, len(path) - 1, 1, None)(
                query[:, node : node + 1], *alone, scale
            )
            assert torch.equal(one, found[:, node : node + 1]), (start, nodes, node)


@cuda_only
def test_every_method_writes_the_text_of_plain_decoding_over_codes():
    model = tswift.load("demo", device=DEVICE, dtype="bfloat16", kv_dtype="int8")
    assert not core_missing(model)
    assert (model.about()["kv_dtype"], model.target.kv_shape.steps_behind) == ("int8", True)
    plain = demo_text(model, "ar", TEXT // 2)
    assert plain != demo_text(bundled("bfloat16"), "ar", TEXT // 2)
    for name in ("tokenswift", "cascade", "recall", "magicdec", "auto"):
        assert demo_text(model, name, TEXT // 2) == plain, name
    params = SamplingParams(banned=model.eos_ids)
    assert audit(model.target, demo_prompt(model), plain, params, 1).exact == len(plain)


@pytest.mark.parametrize("method", SOME[1:])
def test_the_bundled_model_writes_the_text_of_plain_decoding_in_float32(method):
    model = bundled(FLOAT, draft=True)
    plain = plain_text()
    assert len(plain) == TEXT
    assert demo_text(model, method, TEXT) == plain


@lru_cache
def plain_text() -> list[int]:
    return demo_text(bundled(FLOAT, draft=True), "ar", TEXT)


@cuda_only
@pytest.mark.parametrize("without", ["graphs", "programs"])
@pytest.mark.parametrize("method", ["ar", "tokenswift"])
def test_replayed_programs_write_the_text_of_others(method, without, monkeypatch):
    """Of the same programs without graphs, and of steps that the host takes launch by launch."""
    model = bundled("bfloat16", draft=True)
    replayed = demo_text(model, method, 500)
    assert not core_missing(model)
    if without == "graphs":
        monkeypatch.setattr(Target, "capture", lambda self, run: run)
    else:
        monkeypatch.setattr(Target, "replays", False)
    assert demo_text(model, method, 500) == replayed


def error_of(
    backend, shape: tuple[int, int, int], prefix: int, nodes: int, dtype, sharp=4.0, tree=True
) -> float:
    """Of a backend, in a tree, or in a chain that it is told of by giving no ancestors."""
    query, keys, values, ancestors, scale = on_device(
        *shape, prefix, nodes, dtype=dtype, sharp=sharp
    )
    told = ancestors if tree else None
    return error(
        by(backend)(query, keys, values, told, scale), dense(query, keys, values, told, scale)
    )


@cuda_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_triton_in_a_graph_serves_other_lengths(triton_attention, dtype):
    """Captured at one length, replayed at others;
    storing the new keys and values is part of the graph.
    """
    nodes, capacity = 41, 30_100
    query, keys, values, ancestors, scale = on_device(8, 4, 128, 30_000, nodes, dtype=dtype)
    wholes = torch.full((2, 8, capacity, 128), torch.nan, dtype=dtype, device="cuda")
    new_keys, new_values = (
        x[:, -nodes:].transpose(0, 1).contiguous().transpose(0, 1) for x in (keys, values)
    )
    length = torch.tensor(1000, device="cuda", dtype=torch.int32)
    run = triton_attention.TritonAttention(
        Layout(8, 4, dtype, query.device), length, nodes, ancestors
    )

    def step():
        triton_attention.TritonAttention.store(*wholes, new_keys, new_values, length)
        return run(query, *wholes, scale)

    wholes[:, :, :1000] = torch.stack([keys, values])[:, :, :1000]
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for prefix in (1000, 0, 1, 63, 29_999, 30_000):
        wholes.fill_(torch.nan)
        wholes[:, :, :prefix] = torch.stack([keys, values])[:, :, :prefix]
        length.fill_(prefix)
        graph.replay()
        exact = dense(
            query,
            torch.cat([keys[:, :prefix], new_keys], dim=1),
            torch.cat([values[:, :prefix], new_values], dim=1),
            ancestors,
            scale,
        )
        assert error(out, exact) < TRITON_TOLERANCE[dtype]


def test_the_noise_has_the_same_bits_everywhere():
    tokens = torch.arange(5000)
    assert torch.equal(
        noise_bits(7, range(40), tokens), noise_bits(7, range(40), tokens.to(DEVICE)).cpu()
    )


@pytest.mark.parametrize(
    ("model", "dtype", "prefix", "nodes"),
    # every combination of model, dtype and nodes is another kernel to compile, of which there is
    # time for a dozen
    [
        *(
            ("llama3.1-8b", torch.bfloat16, prefix, nodes)
            for nodes in (1, 32)
            for prefix in (20_000, 100_000)
        ),
        *((model, torch.bfloat16, 100_000, 18) for model in LAYOUTS if model != "llama3.1-8b"),
        ("llama3.1-8b", torch.bfloat16, 100_000, 128),
        ("qwen2.5-7b", torch.float16, 20_000, 18),
    ],
)
def test_triton_against_float64(triton_attention, model, dtype, prefix, nodes):
    kv_heads, group, size = LAYOUTS[model]
    if DRY and (nodes > 18 or prefix == 20_000):
        pytest.skip("interpreted kernels are slow")
    if DRY:
        kv_heads = 1
        size = 16
        prefix = prefix // 500
    assert (
        error_of(triton_attention.TritonAttention, (kv_heads, group, size), prefix, nodes, dtype)
        < TRITON_TOLERANCE[dtype]
    )


@cuda_only
@pytest.mark.parametrize("start", [250, 510, 4094, 20_000])
def test_triton_gives_a_row_the_same_bits_in_every_pass(triton_attention, start):
    """Of up to 64 nodes, some of which have programs of another layout."""

    def made(*shape):
        return case(*shape, device=DEVICE)

    attend = by(triton_attention.TritonAttention)
    for nodes in (2, 4, 33, 64):
        for tree in (nodes, tree_of(nodes, 3, nodes)):
            assert (
                odd_nodes(
                    attend,
                    tree,
                    start,
                    torch.bfloat16,
                    (2, 4, 128),
                    nodes=range(0, nodes, 8),
                    made=made,
                )
                == []
            )


@pytest.mark.parametrize("nodes", [1, 41])
def test_triton_windows_soft_caps_and_sinks(triton_attention, nodes):
    # interpreted kernels are slow
    shape, prefix = ((2, 2, 16), 300) if DRY else ((8, 4, 128), 5000)
    query, keys, values, ancestors, scale = on_device(
        *shape, prefix, nodes, dtype=torch.bfloat16, sharp=1.0
    )
    wants = AttentionSpec(200, 2.0, torch.linspace(-1, 2, len(query), device=query.device))
    out = by(triton_attention.TritonAttention)(query, keys, values, ancestors, scale, wants)
    assert (
        error(out, dense(query, keys, values, ancestors, scale, wants))
        < TRITON_TOLERANCE[torch.bfloat16]
    )


@cuda_only
def test_triton_never_waits_for_the_device(triton_attention):
    query, keys, values, ancestors, scale = on_device(2, 6, 128, 5000, 41, dtype=torch.bfloat16)
    layout = Layout(2, 6, torch.bfloat16, query.device)
    length = torch.tensor(5000, device="cuda")
    # compiles
    triton_attention.TritonAttention(layout, length, 41, ancestors)(query, keys, values, scale)
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_attention.TritonAttention(layout, length, 41, ancestors)(query, keys, values, scale)
        triton_attention.TritonAttention(layout, 5000, 41, ancestors)(query, keys, values, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cuda_only
def test_triton_reads_a_chunk_of_the_prompt(triton_attention):
    shape = triton_attention.TritonAttention, (8, 4, 128), 8192, 512, torch.bfloat16
    assert error_of(*shape, sharp=1.0, tree=False) < TRITON_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_method_writes_the_text_of_plain_decoding(dtype):
    """With PyTorch's attention, and no graphs."""
    target = Target(deepcopy(tiny_llama("gqa", dtype)).to(DEVICE))
    heads = deepcopy(tiny_heads(dtype)).to(DEVICE)
    draft = Target(deepcopy(tiny_llama("mqa", dtype)).to(DEVICE))
    params = SamplingParams(window=20, min_p=0.02)
    options = DraftOptions(budget=64)
    texts = [
        tokens_of(
            decode_steps(
                target,
                make_drafter(name, target, heads, options, draft),
                random_prompt(30),
                params,
                3,
                TEXT // 10,
            )
        )
        for name in SOME
    ]
    assert texts == [texts[0]] * len(SOME)


@cuda_only
@pytest.mark.parametrize(
    ("size", "dtype"), [*((size, torch.bfloat16) for size in (64, 80, 256)), (96, torch.float16)]
)
def test_triton_head_sizes(triton_attention, size, dtype):
    for tree in (True, False):
        shape = triton_attention.TritonAttention, (2, 3, size), 3000, 128, dtype
        assert error_of(*shape, sharp=1.0, tree=tree) < TRITON_TOLERANCE[dtype]


@cuda_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", LAYOUTS)
def test_flash_against_float64(model, dtype):
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    from tswift.attention.sdpa import FlashAttention

    assert error_of(FlashAttention, LAYOUTS[model], 20_000, 41, dtype) < TRITON_TOLERANCE[dtype]
