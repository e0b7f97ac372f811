"""Weights of 4 and 8 bits as kernels on a GPU multiply by them, interpreted on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tswift
from tests.conftest import make_checkpoint
from tests.forward.test_fused_layers import cached, kept_right, plainly, random, same_bits
from tests.fuzzing import few
from tests.helpers import CPU, first, needs_triton, options_for, refused, seeded, tokens_of
from tests.models.gguf_files import dequantized, tiny_model, write_gguf, write_one
from tswift.caches import KVShape
from tswift.forward import adapting, exact_passes
from tswift.forward.cpu.products import PackedLinear
from tswift.forward.cuda import coded, layers_check
from tswift.forward.cuda.coded import CodedLinear
from tswift.forward.cuda.fused_layers import fuse, is_fused, layers_by_form, rows_stand_alone
from tswift.forward.cuda.layers_check import added_parts, plain_silu_mul
from tswift.forward.notes import FUSED
from tswift.loading import network, packing
from tswift.loading import plan as planning
from tswift.loading.model import LoadedModel, load
from tswift.loading.plan import ModelPlan, _refuse_unfit
from tswift.models.checkpoint import Checkpoint
from tswift.models.codes import UNIT, Codes, CodesOnDevice, quantize
from tswift.models.config import ModelConfig
from tswift.models.gguf import read_gguf
from tswift.models.gguf_blocks import CODED
from tswift.speculators.heads import lm_head_rows
from tswift.speculators.mtp import MtpSpeculator

layer_kernels = pytest.importorskip(
    "tswift.forward.cuda.layer_kernels", reason="triton is not installed"
)
kernels = pytest.importorskip("tswift.forward.cuda.code_kernels")
pytestmark = needs_triton
HALVES = (torch.bfloat16, torch.float16)
FORMS = [  # bits, inputs of a block, whether they have minima
    *((4, 32, True), (8, 16, False), (4, 32, False), (8, 32, True)),
    *((4, 16, True), (8, 32, False), (4, 16, False), (8, 16, True)),
]


@pytest.fixture(autouse=True)
def few_parts(monkeypatch):
    """Sums of as many parts as small matrices can have; layers are tried with few rows."""
    monkeypatch.setattr(kernels, "_PROGRAMS", 4)
    monkeypatch.setattr(layers_check, "_TRIED", 3)
    monkeypatch.setattr(layers_check, "_REPEATS", 2)
    monkeypatch.setattr(layers_check, "_OUTPUTS", 24)


def codes(
    outputs: int, inputs: int, bits: int, block: int, minima: bool, seed: int = 0, centre: int = 0
) -> Codes:
    """Random ones; without minima, a code stands for 0."""
    source = seeded(seed)
    numbers = torch.randint(0, 2**bits, (outputs, inputs), generator=source, dtype=torch.uint8)
    scale = torch.randn(outputs, inputs // block, generator=source) / 2**bits
    minimum = -(centre or 2 ** (bits - 1)) * scale
    if minima:
        minimum = minimum + torch.randn(minimum.shape, generator=source) / 4
    return Codes(numbers, scale, minimum, bits)


def product(outputs: int, inputs: int, *form, seed: int = 0, bias: Tensor | None = None):
    return kernels.CodedProduct(CodesOnDevice(codes(outputs, inputs, *form, seed=seed)), bias)


def near(made: Tensor, rows: Tensor, by) -> bool:
    """Whether a product in float32 is that of float64, but for the rounding of its sums."""
    weights = by.weights.whole().double()
    exact, sizes = rows.double() @ weights.T, rows.double().abs() @ weights.abs().T
    if by.bias is not None:
        exact, sizes = exact + by.bias.double(), sizes + by.bias.double().abs()
    return bool(((made.double() - exact).abs() <= 2e-6 * sizes).all())


# -------------------------------------------------------------------------------------------------
# Numbers


def ulps(made: Tensor, given: Codes) -> float:
    """How far numbers are from what codes stand for, in roundings of the largest on the way."""
    largest = 2**given.bits * given.scale.abs() + given.minimum.abs()
    apart = (made - given.dequantized()).abs().unflatten(1, (-1, given.block)).amax(2)
    return float((apart / (largest * torch.finfo(torch.float32).eps).clamp(min=1e-30)).max())


@few
@given(
    *(st.integers(1, 130), st.integers(1, 4), st.sampled_from(FORMS)),
    *(st.sampled_from([8, 16, 32, 128]), st.integers(0, 1000)),
)
def test_they_are_what_codes_stand_for(outputs, units, form, centre, seed):
    given = codes(outputs, 64 * units, *form, seed=seed, centre=min(centre, 2 ** (form[0] - 1)))
    held = CodesOnDevice(given)
    assert (held.outputs, held.inputs, held.bits, held.block) == (outputs, 64 * units, *form[:2])
    minima = held.factors.shape[2] == 2
    assert minima == bool((given.minimum + held.centre * given.scale).any())
    fits = form[0] == 4 or int(given.codes.max()) - centre < 128  # less it all are signed bytes
    assert minima == (form[2] or not fits)
    whole = held.whole()
    assert ulps(whole, given) <= 2
    some = torch.tensor([[outputs - 1, 0], [outputs // 2, outputs - 1]])
    assert same_bits(held.rows(some), whole[some])


@pytest.mark.parametrize("zero", [8, 16, 32, 128])
def test_a_code_that_stands_for_nothing_leaves_room_for_all(zero):
    """Less 8, codes up to 255 would be no signed bytes."""
    counts = torch.arange(64).repeat(2, 1) * 4 + 3  # codes up to 255
    scale = torch.ones(2, 2)
    given = Codes(counts.to(torch.uint8), scale, -zero * scale, 8)
    assert torch.equal(CodesOnDevice(given).whole(), given.dequantized())


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_those_of_a_file_are_the_same_on_a_device(kind, tmp_path):
    write_one(tmp_path / "one.gguf", kind)
    file = read_gguf(tmp_path / "one.gguf")
    given = file.read(file.tensors["one"])
    assert isinstance(given, Codes)
    held = CodesOnDevice(given)
    form = file.tensors["one"].form
    block, numbers = form.block, form.numbers
    assert (held.bits, held.block) == (CODED[kind][0], block)
    kept = held.bytes[0, :, : held.outputs], held.factors[:, : held.outputs]
    assert sum(each.nbytes for each in kept) == packing.gguf_bytes(file, torch.bfloat16)
    assert ulps(held.whole(), given) <= (0 if numbers == 1 else 2)


@pytest.mark.parametrize("kind", [CodedLinear, PackedLinear])
def test_some_rows_of_an_lm_head_are_all_that_is_made(kind, monkeypatch):
    """An LM head of 8B would be 2 GB of floats, made anew by every pass of an MTP head."""
    head = kind(codes(70, 64, 8, 32, True))
    monkeypatch.setattr(type(head.packed), "whole", lambda self: pytest.fail("all are made"))
    some = torch.tensor([3, 69])
    linear = lm_head_rows(head, some, torch.float32)
    assert linear is not None
    assert same_bits(linear.weight, head.packed.rows(some))
    model = SimpleNamespace(get_output_embeddings=lambda: head)
    target = SimpleNamespace(model=model, open_logits=lambda states: "of all tokens")
    drafter: Any = SimpleNamespace(
        target=target, spec=SimpleNamespace(draft_vocab=5, vocab_size=70)
    )
    assert MtpSpeculator._scores(drafter, torch.zeros(1, 64)) == "of all tokens"


def run(assembly: str, word: Tensor) -> dict[str, Tensor]:
    """What the instructions of a device make of 32 bits ``$4``, by the manual of PTX."""
    held = {"$4": word}
    for line in assembly.strip("{}\n;").split(";"):
        name, *operands = line.replace(",", " ").split()
        if name.startswith("."):
            continue  # registers have names
        to, *given = operands
        read = [held[each] if each in held else int(each, 0) for each in given]
        if name == "shr.u32":
            held[to] = read[0] >> read[1]
        else:  # the bits of the first and the second, or of the third
            assert (name, read.pop()) == ("lop3.b32", 0xEA)
            held[to] = read[0] & read[1] | read[2]
    return held


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_device_makes_numbers_of_all_codes(bits, dtype):
    """The interpreter has no assembler, and the kernel is told its codes there."""
    first = torch.arange(1 << 16)
    words = first | first.flip(0) << 16
    name = f"_{bits}_" + ("BFLOAT16" if dtype == torch.bfloat16 else "FLOAT16")
    found = run(getattr(kernels, name).value, words)
    made = [
        torch.stack([found[f"${at}"] & 0xFFFF, found[f"${at}"] >> 16]).short().view(dtype).float()
        for at in range(4)
    ]
    zero = 136.0 if dtype == torch.bfloat16 else 1032.0
    numbers = (
        [each - zero for each in made] if bits == 4 else [made[0] - made[2], made[1] - made[3]]
    )
    both = torch.stack([words & 0xFFFF, words >> 16])
    for at, number in enumerate(numbers):
        code = both >> at * bits & 2**bits - 1
        assert torch.equal(number, (code - 8 if bits == 4 else code.to(torch.int8)).float())


def test_rows_that_are_no_units_are_refused():
    with pytest.raises(ValueError, match="96 inputs are no multiple of 64"):
        CodesOnDevice(codes(4, 96, 4, 32, True))


# -------------------------------------------------------------------------------------------------
# Products


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_that_of_the_numbers(form, dtype):
    """Of odd sizes, with a bias; a row has its bits wherever it is, and whatever is beside it."""
    outputs, inputs = (70, 256) if form[2] else (5, 192)
    bias = random(3, outputs, dtype=dtype) if form[1] == 32 else None
    by = product(outputs, inputs, *form, bias=bias)
    rows = random(1, 3, inputs + 3, dtype=dtype)[:, :inputs]
    parts = kernels.product_parts(inputs, -(-outputs // kernels.TILE))
    assert parts == (2 if form[2] else 1)
    sums = torch.full((parts, 3, outputs), torch.nan)
    made = kernels.multiply_rows(rows, by, sums)
    assert near(sums.sum(0), rows, by)
    assert same_bits(made, added_parts(sums, dtype))
    row = rows[-1:]
    around = torch.cat([rows[:1].expand(18, -1), row, torch.full_like(row, torch.inf)])
    assert same_bits(kernels.multiply_rows(row, by)[0], made[-1])
    assert same_bits(kernels.multiply_rows(around, by)[18], made[-1])


@pytest.mark.parametrize("count", first(2, [64, 130, 16, 8, 9, 17, 33, 65]))
@pytest.mark.parametrize("form", FORMS[:2])
def test_rows_have_the_same_bits_in_every_pass(form, count):
    by = product(64, 256, *form)
    assert kernels.product_parts(256, 1) == 4
    rows = random(1, count, 256, dtype=torch.bfloat16)
    made = kernels.multiply_rows(rows, by)
    for at in (0, count // 2, count - 1):
        assert same_bits(kernels.multiply_rows(rows[at : at + 1], by)[0], made[at])


def test_scales_of_both_dtypes_are_read_in_one_launch():
    """As of Q4_1 beside Q4_K, whose codes are alike."""
    rows = random(1, 3, 128, dtype=torch.bfloat16)
    floats = codes(70, 128, *FORMS[0])
    halves = replace(
        floats, scale=floats.scale.half().float(), minimum=floats.minimum.half().float()
    )
    both = [kernels.CodedProduct(CodesOnDevice(each)) for each in (halves, floats)]
    assert [each.weights.kind for each in both] == [torch.float16, torch.float32]
    sums = torch.full((1, 3, 140), torch.nan)
    kernels.multiply_silu(rows, *both, sums)
    for found, by in zip(sums.sum(0).split(70, 1), both, strict=True):
        assert near(found, rows, by)


@pytest.mark.parametrize("dtype", first(1, HALVES))
@pytest.mark.parametrize("count", [3, 70])
def test_what_follows_is_made_of_the_parts(count, dtype):
    """To the bit, in a narrow pass and in a wide one, whose sums have been added already."""
    rows, hidden = random(1, count, 256, dtype=dtype), random(2, count, 70, dtype=dtype)
    by, up = product(70, 256, *FORMS[0], bias=hidden[0]), product(70, 256, *FORMS[3], seed=5)
    wide = count > layer_kernels.MOST_ROWS
    sums = torch.full((1 if wide else 2, count, 70), torch.nan)
    (total,) = kernels.add_product(rows, by, hidden, sums)
    assert near(sums.sum(0), rows, by)
    assert same_bits(total, hidden + added_parts(sums, dtype))
    sums = torch.full((1, count, 140), torch.nan)
    active = kernels.multiply_silu(rows, by, up, sums)
    gate, other = sums.sum(0).split(70, 1)
    assert near(gate, rows, by)
    assert near(other, rows, up)
    assert same_bits(active, plain_silu_mul(*added_parts(sums, dtype).split(70, 1)))
    row = rows[-1:]
    assert same_bits(kernels.add_product(row, by, hidden[-1:])[0][0], total[-1])
    assert same_bits(kernels.multiply_silu(row, by, up)[0], active[-1])


@pytest.mark.parametrize("dtype", first(1, HALVES))
@pytest.mark.parametrize(
    ("heads", "head", "normed"),
    first(2, [((4, 2), 16, True), ((2, 1), 96, False), ((3, 3), 24, True)]),
)
@pytest.mark.parametrize("count", first(1, [18, 1, 70]))
def test_heads_are_rotated_and_stored(heads, head, normed, count, dtype):
    """Those of queries, keys and values in codes of three kinds."""
    rows = random(1, count, 128, dtype=dtype)
    sizes = [head * each for each in (heads[0], heads[1], heads[1])]
    three = [
        product(size, 128, *form, seed=size, bias=random(size, size, dtype=dtype))
        for size, form in zip(sizes, FORMS, strict=False)
    ]
    kept = cached(heads, head, count, 5, 5 + count, dtype, normed, nodes=max(1, count - 1))
    tiles = sum(sizes) // head * (2 if head > kernels.TILE else 1)
    parts = kernels.product_parts(128, tiles)
    sums = torch.full((parts, count, sum(sizes)), torch.nan)
    out = kernels.project_heads(rows, three, kept, sums)
    for found, by in zip(sums.sum(0).split(sizes, 1), three, strict=True):
        assert near(found, rows, by)
    plain = plainly(list(added_parts(sums, dtype).split(sizes, 1)), kept)
    assert kept_right(out, kept, plain, 5)


def test_layers_of_wide_heads_are_tried_by_parts_that_there_are(monkeypatch):
    """Two programs multiply for a head of 128, so sums have fewer parts than one would make."""
    monkeypatch.setattr(layers_check, "_REPEATS", 1)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 128, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, num_attention_heads=1, num_key_value_heads=1)
    (layer,) = model.to(torch.bfloat16).get_decoder().layers
    for name, module in list(layer.named_modules()):
        if type(module) is torch.nn.Linear:
            given = codes(module.out_features, module.in_features, *FORMS[5])
            layer.set_submodule(name, CodedLinear(given))
    assert kernels.product_parts(128, 3) != kernels.product_parts(128, 6)
    assert layers_check.layer_fault(layer, torch.bfloat16) is None


def test_what_is_not_counted_has_no_bound(monkeypatch):
    """A wide pass adds its parts up by itself: an LM head has more tiles than there are counters,
    and only what waits for two products counts.
    """
    monkeypatch.setattr(kernels, "_counters", lambda device: torch.zeros(4, dtype=torch.int32))
    given, form = random(1, 70, 128, dtype=torch.bfloat16), FORMS[2]
    alone = kernels.multiply_rows(given[-1:], product(130, 128, *form))
    assert same_bits(kernels.multiply_rows(given, product(130, 128, *form))[-1:], alone)
    with pytest.raises(ValueError, match="70 rows of 260 products are too many"):
        kernels.multiply_silu(given, product(130, 128, *form), product(130, 128, *form))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_learn_through_codes(dtype):
    """The kernel has no gradient, and takes 16 bits alone: heads are float32, products bfloat16."""
    linear = CodedLinear(codes(70, 64, *FORMS[0]), random(3, 70, dtype=torch.bfloat16))
    rows = random(1, 2, 3, 64, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        made = linear(rows)
        judged = linear(rows.detach())
    assert made.dtype == judged.dtype == torch.bfloat16
    assert (made - judged).abs().max() <= 0.05 * made.abs().max()
    made.float().sum().backward()
    assert rows.grad is not None
    assert (rows.grad - linear.weight.sum(0)).abs().max() < 0.01 * linear.weight.abs().sum(0).max()


def test_how_a_sum_is_cut(monkeypatch):
    monkeypatch.setattr(kernels, "_PROGRAMS", 520)
    assert kernels.product_parts(4096, 64) == 16
    assert kernels.product_parts(4096, 448) == 2
    assert kernels.product_parts(14_336, 64) == 16
    assert kernels.product_parts(576, 9) == 1  # 9 units


# -------------------------------------------------------------------------------------------------
# Models

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
FIELDS = {"nodes": 12, "budget": 64, "sinks": 4}


@pytest.fixture
def on_device(monkeypatch):
    """Codes are what they are on a GPU; the interpreter is slow, so little is tried."""
    monkeypatch.setattr(coded, "by_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "_PROGRAMS", 1)
    monkeypatch.setattr(exact_passes, "_HELD_KEYS", 40)
    monkeypatch.setattr(exact_passes, "_OTHER_LENGTHS", (0,))
    monkeypatch.setattr(adapting, "_TRIED", 6)


def made(folder: Path, weights: str, attention: str, dtype: str, **changes) -> LoadedModel:
    """A tiny model in codes."""
    name = str(make_checkpoint(folder / "m", **{**SIZES, **changes}))
    asked = {"weights": weights, "dtype": dtype, "attention": attention}
    return load(name, device="cpu", exact=True, **asked)


def text(model: LoadedModel, method: str, length: int = 6) -> list[int]:
    prompt = model.encode("The ship had lain")
    fields = FIELDS | {"costs": "nominal"} if method == "auto" else FIELDS
    options = options_for(method, **fields)
    steps = tswift.generate(model, prompt, length, method=method, options=options)
    return tokens_of(steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "methods"),
    [("int4", ("tokenswift", "magicdec")), ("int8", ("medusa", "reuse", "auto"))],
)
def test_methods_write_what_plain_decoding_does(weights, methods, tmp_path, on_device):
    model = made(tmp_path, weights, "sdpa", "bfloat16")
    assert model.exact is not None
    plain = text(model, "ar")
    for method in methods:
        assert text(model, method) == plain, method


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "dtype", "changes"),
    [
        ("int4", "bfloat16", {"attention_bias": True}),
        ("int8", "float16", {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ],
)
def test_layers_and_rows_stand_alone(weights, dtype, changes, tmp_path, on_device):
    """All products are kernels', so rows are exact without padding."""
    model = made(tmp_path, weights, "triton", dtype, **changes)
    target = model.target
    assert (model.layers, target.fallbacks) == (FUSED, {})
    assert rows_stand_alone(target.model)
    assert target.runner.exact_rows == target.fixed_rows
    assert model.exact is not None  # the fingerprint raises where a row's bits depend on others
    assert text(model, "tokenswift", 4) == text(model, "ar", 4)


@pytest.mark.slow
def test_a_file_is_read_as_one_of_floats_is(tmp_path, on_device):
    """Embeddings, tied LM head, biases and norms are where they belong."""
    model = tiny_model("qwen2", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.Q8_0)
    loaded = load(str(path), device="cpu", dtype="bfloat16", attention="sdpa", exact=False)
    network, right = loaded.target.model, dequantized(model, path)
    network.set_attn_implementation("sdpa")
    ids = torch.arange(3, 9).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = network(ids).logits.float(), right(ids).logits
    assert (ours - theirs).norm() < 0.03 * theirs.norm()
    assert (loaded.quantization, loaded.dtype_note) == ("Q8_0", "")
    assert loaded.about()["products"] == "kernels"


def test_a_layer_of_each_form_is_tried():
    """As files of 4 bits have more of them in some layers."""
    model = tiny_model("llama", **{**SIZES, "num_hidden_layers": 3}).to(torch.bfloat16)
    for name, module in list(model.get_decoder().named_modules()):
        if type(module) is torch.nn.Linear:
            bits = 8 if name == "layers.1.self_attn.v_proj" else 4
            model.get_decoder().set_submodule(name, CodedLinear(quantize(module.weight, bits)))
    layers = model.get_decoder().layers
    assert {*layers_by_form(model)} == {layers[0], layers[1]}

    def check(layer, dtype):
        return "its values" if layer is layers[1] else None

    assert fuse(model, check) == "its values"
    assert not is_fused(model)


@pytest.mark.parametrize("how", ["GGUF", "int4"])
def test_one_matrix_at_a_time_is_packed_the_largest_first(how, tmp_path, monkeypatch):
    """On the way a matrix takes four times its memory, which a device need not have."""
    busy, sizes = Lock(), list[int]()

    def packed(given):
        assert busy.acquire(blocking=False)
        sizes.append(given.codes.numel())
        made = CodesOnDevice(given)
        busy.release()
        return made

    monkeypatch.setattr(coded, "by_kernels", lambda device: True)
    monkeypatch.setattr(packing, "CodesOnDevice", packed)
    monkeypatch.setattr(coded, "CodesOnDevice", packed)
    if how == "GGUF":
        model = tiny_model("qwen2", **{**SIZES, "num_hidden_layers": 4})
        checkpoint = Checkpoint.find(str(write_gguf(tmp_path / "m.gguf", model, Kind.Q8_0)))
        for threads in (8, 1):  # those of one come in their order
            sizes.clear()
            monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
            packing.load_gguf(checkpoint, torch.bfloat16, CPU)
    else:
        checkpoint = Checkpoint.find(str(make_checkpoint(tmp_path / "m", **SIZES)))
        stored = (checkpoint, checkpoint.tensors, "int4", lambda: pytest.fail("renamed"))
        packing.load_rounded(*stored, torch.bfloat16, CPU)
    assert sizes == sorted(sizes, reverse=True)
    assert len({*sizes}) > 2


@pytest.mark.parametrize(("gigabytes", "held"), [(None, 20_000), (20, 20_000), (1.3, 1500)])
def test_a_card_that_is_nearly_full_tries_exact_passes_over_less(gigabytes, held, monkeypatch):
    """8B in 4 bits leave 1.3 of 8 GB: 20,000 tokens would take 2.6."""
    free = gigabytes and int(gigabytes * 1e9)
    monkeypatch.setattr(exact_passes, "available_bytes", lambda device: free)
    shape = KVShape(32, 8, 128, torch.bfloat16, torch.device("cuda"))
    assert exact_passes._held_by(shape) == held


# -------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize("wrong", [True, False])
def test_kernels_that_fail_are_told_before_weights_are_read(
    wrong, tmp_path, on_device, monkeypatch
):
    def product(self, rows):
        if wrong:
            return rows.new_zeros(len(rows), self.out_features)
        raise RuntimeError("no compiler for kernels\nand more")

    monkeypatch.setattr(CodedLinear, "forward", product)
    monkeypatch.setattr(network, "_stored_network", lambda *given: pytest.fail("it is read"))
    says = "m: products differ from plain ones by up to " if wrong else "no compiler for kernels"
    with refused(says):
        made(tmp_path, "int4", "sdpa", "bfloat16")


def test_each_form_and_size_that_a_model_has_is_tried(tmp_path, on_device, monkeypatch):
    right = CodedLinear.forward

    def product(self, rows):  # right for the unit that is tried before weights are read
        return right(self, rows) * (1 if self.bias is None and len(self.weight) == UNIT else 2)

    monkeypatch.setattr(CodedLinear, "forward", product)
    with refused("products differ from plain ones by up to "):
        made(tmp_path, "int4", "sdpa", "bfloat16")


@pytest.mark.parametrize(
    ("changes", "dtype", "option", "reason"),
    [
        ({}, "bfloat16", "weights", "m has rows of 96; kernels of integers take multiples of 64"),
        (SIZES, "float32", "dtype", "is bfloat16 or float16 with weights of integers .int4. on"),
        ("experts", "bfloat16", "weights", "m has experts, whose integers are multiplied on a CPU"),
        ("triton", "bfloat16", "weights", "multiplied by Triton's kernels on CUDA: triton is not"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    changes, dtype, option, reason, tmp_path, monkeypatch
):
    sizes = changes if isinstance(changes, dict) and changes else {**SIZES}
    if changes == {}:
        sizes["intermediate_size"] = 96
    if changes == "experts":
        monkeypatch.setattr(planning, "is_moe", lambda config: True)
    if changes == "triton":
        monkeypatch.setattr(planning, "why_not", lambda *given: "triton is not installed")
    model = str(make_checkpoint(tmp_path / "m", **sizes))
    kind = getattr(torch, dtype)
    asked = ModelConfig(model=model, weights="int4")
    plan = ModelPlan(asked, Checkpoint.find(model), torch.device("cuda"), kind, kind)
    with refused(reason) as caught:
        _refuse_unfit(plan)
    assert caught.value.field == option
    _refuse_unfit(replace(plan, device=CPU, dtype=torch.float32))
