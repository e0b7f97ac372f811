"""Weights as codes: they come back as packed, products are the definition's,
and every method's text is ar's.
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.forward.plain_products import fused, multiply_plainly, rounded
from tests.forward.test_program import VOCAB, network
from tests.fuzzing import many
from tests.helpers import decode, decode_method, first, needs_program, random_tree, seeded
from tswift.attention.native import Unbuilt, build
from tswift.caches import FullKV
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.errors import SlowWarning
from tswift.forward.adapting import wrap_model
from tswift.forward.cpu import products
from tswift.forward.cpu.products import PackedEmbedding, PackedLinear, hold_floats, lay_together
from tswift.forward.eager import EagerRunner
from tswift.forward.exact_passes import choose_fixed_rows, fingerprint
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import chunks, prefill
from tswift.models.codes import Codes, PackedCodes, quantize
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.heads import HEAD_TYPES, prepare

WIDE = ("-mavx512f", "-mavx512bw", "-mprefer-vector-width=512")
INSTRUCTIONS = {  # the compiler's options, and what the processor has to have
    "AVX2": ((), "avx2"),
    "AVX-VNNI": (("-mavxvnni",), "avx_vnni"),
    "AVX-512": (WIDE, "avx512bw"),
    "AVX-512 VNNI": ((*WIDE, "-mavx512vnni"), "avx512_vnni"),
}
SIZES = [(1, 16), (40, 64), (97, 48), (33, 576), (72, 1536)]  # outputs and inputs


def codes_of(
    outputs: int, inputs: int, bits: int, half: bool = True, block: int = 0, centre: int = 0
) -> Codes:
    random = seeded(outputs)
    weight = torch.randn(outputs, inputs, generator=random)
    made = quantize(weight, bits)
    if block and block != made.block:
        codes = torch.randint(2**bits, (outputs, inputs), generator=random).to(torch.uint8)
        factors = torch.randn(2, outputs, inputs // block, generator=random)
        scale, minimum = (factors / torch.tensor([64, 1])[:, None, None]).half().float()
        made = Codes(codes, scale, minimum, bits)
    scale, minimum = (each if half else each * (1 + 2**-20) for each in (made.scale, made.minimum))
    return Codes(made.codes, scale, -centre * scale if centre else minimum, bits)


def rows_of(count: int, inputs: int) -> Tensor:
    rows = torch.randn(count, inputs) * torch.randn(count, 1).exp()
    rows[count // 2] = 0
    rows[-1, :16] = 0
    return rows


@given(
    outputs=st.integers(1, 40),
    blocks=st.integers(1, 5),
    block=st.sampled_from([16, 32]),
    bits=st.sampled_from([4, 8]),
    half=st.booleans(),
    centre=st.sampled_from([0, 8, 128]),
)
@many
def test_codes_come_back_as_they_were_packed(outputs, blocks, block, bits, half, centre):
    codes = codes_of(outputs, blocks * block, bits, half, block, centre)
    layer = PackedLinear(codes)
    back = layer.packed.codes()
    for name in ("codes", "scale", "minimum"):
        assert torch.equal(getattr(back, name), getattr(codes, name))
    size = (2 if half else 4) * (1 if centre else 2)  # of an output's scale and minimum
    assert layer.packed.bytes.nbytes == -(-outputs // 16) * 16 * blocks * (block * bits // 8 + size)
    embeddings = PackedEmbedding(layer.packed)
    tokens = torch.randint(outputs, (2, 3))
    assert torch.equal(embeddings(tokens), codes.dequantized()[tokens])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_to_the_nearest_code(bits):
    weight = torch.randn(64, 96)
    codes = quantize(weight, bits)
    apart = (codes.dequantized() - weight).abs().unflatten(1, (-1, codes.block))
    spread = weight.unflatten(1, (-1, codes.block))
    step = (spread.amax(2) - spread.amin(2)) / (2**bits - 1)
    assert (apart <= 0.5 * step.unsqueeze(2) + 4e-3).all()
    constant = quantize(torch.full((2, 32), 0.25), bits)
    assert torch.equal(constant.dequantized(), torch.full((2, 32), 0.25))
    with pytest.raises(ValueError, match="40 inputs are no multiple of 16"):
        quantize(torch.randn(2, 40), bits)


@pytest.mark.parametrize(("bits", "apart"), [(8, 2e-2), (16, 1e-4)])
def test_a_product_is_that_of_the_weights_but_for_rounded_inputs(bits, apart):
    codes = codes_of(200, 1536, 4)
    rows = rows_of(8, 1536)
    wanted = rows.double() @ codes.dequantized().double().T
    found = multiply_plainly(rows, codes, bits)
    assert ((found - wanted).norm() / wanted.norm()) < apart
    counts, step = rounded(rows, 32, bits)
    assert (counts.abs() <= (127 if bits == 8 else 32639)).all()
    assert torch.allclose(
        (counts * step.unsqueeze(2)).flatten(1), rows, rtol=0, atol=float(step.max())
    )


def test_sums_are_rounded_once():
    """As the C library's own fused operation does, near ties and everywhere."""
    fmaf = ctypes.CDLL("libm.so.6").fmaf
    fmaf.argtypes = [ctypes.c_float] * 3
    fmaf.restype = ctypes.c_float
    x, y, z = (torch.randn(30_000) * torch.randint(-9, 9, (30_000,)).exp2() for _ in range(3))
    z[:10_000] = -(x * y)[:10_000]
    x[10_000:20_000] = x[10_000:20_000].half().float()
    # halfway between two numbers, and just beside that
    y[10_000:20_000] = 2.0 ** torch.randint(-30, 3, (10_000,))
    wanted = torch.tensor(
        [fmaf(*each) for each in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)]
    )
    assert torch.equal(fused(x, y, z), wanted)


@cache
def wanted_of(
    size: tuple[int, int], bits: int, held: tuple[bool, int, int], input_bits: int
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(size[1])
    rows = rows_of(64, size[1])
    return rows, multiply_plainly(rows, codes_of(*size, bits, *held), input_bits)


@needs_program
@pytest.mark.parametrize(
    ("instructions", "threads"),
    first(1, [("all that are here", 2), *((each, 2) for each in INSTRUCTIONS), ("AVX2", 1)]),
)
@pytest.mark.parametrize(("bits", "input_bits"), first(1, [(4, 16), (8, 8), (8, 16), (4, 8)]))
def test_a_product_has_the_bits_of_its_definition(instructions, threads, input_bits, bits):
    program = None
    if instructions in INSTRUCTIONS:
        options, needed = INSTRUCTIONS[instructions]
        if needed not in Path("/proc/cpuinfo").read_text().split():
            pytest.skip(f"this processor has no {instructions}")
        program = build(products._SOURCE, options=options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size, held in (
            (size, held) for size in SIZES for held in HELD if size[1] % held[1] == 0
        ):
            rows, wanted = wanted_of(size, bits, held, input_bits)
            layer = PackedLinear(codes_of(*size, bits, *held), input_bits=input_bits)
            for count in (*range(1, 10), 13, 16, 17, 31, 64):
                assert torch.equal(
                    products.multiply(layer.c, rows[:count], program), wanted[:count]
                )
    finally:
        torch.set_num_threads(before)


# scales in 16 bits or not, inputs of a block, and the code of 0
HELD = [(True, 32, 0), (True, 16, 128), (False, 32, 8), (False, 16, 0)]


@needs_program
@pytest.mark.parametrize("input_bits", [8, 16])
def test_a_rows_bits_are_its_own(input_bits):
    """Whatever the others are, how many there are and where it is among them;
    a broken row breaks no other.
    """
    torch.manual_seed(7)
    rows, bias = torch.randn(600, 96), torch.randn(50)
    layer = PackedLinear(quantize(torch.randn(50, 96), 4), bias, input_bits)
    whole = layer(rows)
    for begin, count in ((0, 1), (599, 1), (3, 64), (100, 500), (7, 5)):
        assert torch.equal(layer(rows[begin : begin + count]), whole[begin : begin + count])
    rows[5, 40], rows[70, 3] = torch.nan, torch.inf
    broken = layer(rows)
    assert not broken[[5, 70]].isfinite().any()
    kept = [row for row in range(600) if row not in (5, 70)]
    assert torch.equal(broken[kept], whole[kept])


def without_a_compiler(monkeypatch):
    def unbuilt() -> ctypes.CDLL:
        raise Unbuilt("needs a C compiler")

    monkeypatch.setattr(products, "library", unbuilt)


@pytest.mark.parametrize("bias", [None, torch.randn(40)])
def test_without_a_compiler_floats_are_multiplied(monkeypatch, bias):
    without_a_compiler(monkeypatch)
    codes = codes_of(40, 64, 4)
    layer = PackedLinear(codes, bias)
    for shape in ((2, 3, 64), (1, 1, 64), (64,)):
        rows = torch.randn(shape)
        wanted = nn.functional.linear(rows, codes.dequantized(), bias)
        made_anew = layer(rows)
        assert torch.allclose(made_anew, wanted, rtol=0, atol=1e-5)
        hold_floats(layer)
        assert torch.equal(layer.packed.floats, codes.dequantized())
        assert torch.equal(layer(rows), made_anew)
        layer.packed.floats = None


@pytest.mark.parametrize("tied", [False, True])
def test_as_many_floats_are_held_as_memory_allows(monkeypatch, recwarn, tied):
    """Whatever it is, results have the same bits."""
    without_a_compiler(monkeypatch)
    made = coded("llama", 4, tied=tied)
    ids = torch.arange(20)[None]
    held = [*dict.fromkeys(each.packed for each in made.modules() if hasattr(each, "in_features"))]
    bytes_of_all = 4 * sum(packed.outputs * packed.inputs for packed in held)
    logits = []
    for share, count in ((0, 0), (1, 5), (2, len(held))):
        some = 4 * sum(packed.outputs * packed.inputs for packed in held[:count])
        monkeypatch.setattr(products, "available_bytes", lambda device, free=2 * some: free)
        for packed in held:
            packed.floats = None
        hold_floats(made)
        assert [packed.floats is not None for packed in held] == [
            at < count for at in range(len(held))
        ]
        said = [str(each.message) for each in recwarn if each.category is SlowWarning]
        recwarn.clear()
        assert said == [
            f"{len(held) - count} of {len(held)} matrices of codes are made floats anew for each "
            f"product: all would take {bytes_of_all / 1e9:.1f} GB, more than 50% of the free memory"
        ] * (share < 2)
        with torch.inference_mode():
            logits.append(made(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_floats_are_exact_at_a_fixed_width_and_only_if_that_is_asked_for(
    monkeypatch,
):
    without_a_compiler(monkeypatch)
    made = coded("llama", 4)
    hold_floats(made)
    target = wrap_model(made, "llama", "sdpa")
    assert choose_fixed_rows(target, "sdpa", None) is None
    assert target.fixed_rows is None
    assert choose_fixed_rows(target, "sdpa", True) is None
    assert target.fixed_rows == 16
    fingerprint(target)
    params = SamplingParams(penalty=1.05)
    prompt = [*range(1, 60)]
    wanted = decode_method("ar", target, prompt, params, 3, 60)
    for method in ("reuse", "magicdec"):
        options = DraftOptions(budget=64) if method == "magicdec" else DraftOptions()
        drafter = make_drafter(method, target, None, options, None)
        assert decode(target, drafter, prompt, params, 3, 60) == wanted


def test_gradients_flow_through_it():
    layer = PackedLinear(codes_of(40, 64, 8))
    rows = torch.randn(3, 64, requires_grad=True)
    layer(rows).sum().backward()
    assert torch.allclose(rows.grad, layer.weight.sum(0).expand(3, -1), atol=1e-4)


def coded(kind: str, bits: int, input_bits: int = 8, tied: bool = False) -> PreTrainedModel:
    """A tiny network whose matrices are codes."""
    made = network(kind, hidden_size=64, intermediate_size=96)
    for name, layer in [*made.named_modules()]:
        if isinstance(layer, nn.Linear):
            made.set_submodule(
                name, PackedLinear(quantize(layer.weight, bits), layer.bias, input_bits)
            )
    own = (
        made.get_output_embeddings()
        if tied
        else PackedLinear(quantize(made.get_input_embeddings().weight, 8))
    )
    made.set_input_embeddings(PackedEmbedding(own.packed))
    return made


def target_of(kind: str, bits: int, **options: int | bool) -> Target:
    target = wrap_model(coded(kind, bits, **options), kind, "native", kv_dtype=torch.int16)
    assert choose_fixed_rows(target, "native", None) is None
    return target


def filled(target: Target, prompt: list[int], room: int) -> FullKV:
    kv = FullKV(target.kv_shape, len(prompt) + room)
    prefill(target, prompt, kv)
    return kv


def test_codes_of_a_network_lie_together():
    made = coded("llama", 4, tied=True)
    held = [module for module in made.modules() if isinstance(module, PackedCodes)]
    before = [module.codes().dequantized() for module in held]
    lay_together(made)
    assert len({module.bytes.untyped_storage().data_ptr() for module in held}) == 1
    assert all(module.bytes.data_ptr() % 64 == 0 for module in held)
    where = [module.bytes.data_ptr() for module in held]
    lay_together(made)
    assert [module.bytes.data_ptr() for module in held] == where
    for module, weight in zip(held, before, strict=True):
        assert torch.equal(module.codes().dequantized(), weight)


KINDS = ["llama", "mistral", "qwen2", "qwen3"]


@needs_program
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_pass_is_the_modeling_codes(kind, bits):
    made = coded(kind, bits, 16, tied=bits == 8)
    target = wrap_model(made, kind, "native")
    assert target.runner.program is not None
    prompt = [*range(90)]
    tree = random_tree(23, Random(3), VOCAB)
    nodes = torch.tensor(tree.tokens), torch.tensor(tree.depths) + 90, tree.ancestors()
    kv = filled(target, prompt, 23)
    passes = []
    for runner in (target.runner, EagerRunner(target)):
        kept = target.runner
        target.runner = runner
        hidden = target.forward(Nodes(*nodes[:2], kv, nodes[2])).hidden
        passes.append((hidden, target.logits(hidden)))
        target.runner = kept
    for own, other in zip(*passes, strict=True):
        assert (own - other).norm() / other.norm() < 2e-3


@needs_program
@pytest.mark.parametrize("input_bits", [8, 16])
def test_a_long_chain_has_the_bits_of_short_passes(input_bits):
    """So a run that is gone on with, whose text is forwarded at once,
    is the run that was not stopped.
    """
    target = target_of("qwen3", 4, input_bits=input_bits)
    assert fingerprint(target) == fingerprint(target)
    text = torch.randint(VOCAB, (700,), generator=seeded(2)).tolist()
    whole = filled(target, text, 0)
    slow = FullKV(target.kv_shape, 700)
    start = 0
    for size in (3, 64, 200, 1, 300, 131, 1):
        last = prefill(target, text[start : start + size], slow)
        start += size
    assert (whole.length, slow.length) == (700, 700)
    assert torch.equal(whole.buffers[0], slow.buffers[0])
    assert torch.equal(whole.buffers[1], slow.buffers[1])
    assert last is not None
    again = FullKV(target.kv_shape, 700)
    assert torch.equal(last.hidden[-1], [*chunks(target, text, again)][-1].hidden[-1])


@needs_program
@pytest.mark.parametrize("kind", first(1, KINDS))
def test_every_method_writes_plain_decodings_text(kind):
    target = target_of(kind, 8 if kind == "qwen2" else 4)
    params = SamplingParams(penalty=1.05)
    prompt = [*range(1, 60), *range(20, 50)]
    wanted = decode_method("ar", target, prompt, params, 3, 400)
    assert len({*wanted}) > 20
    heads = HEAD_TYPES["conditioned"](64, 3).requires_grad_(False)
    prepare(heads)
    for method in ("tokenswift", "medusa", "magicdec", "recall", "auto"):
        options = (
            DraftOptions(budget=64) if method in ("tokenswift", "magicdec") else DraftOptions()
        )
        assert (
            decode(
                target, make_drafter(method, target, heads, options, None), prompt, params, 3, 400
            )
            == wanted
        )


def test_rows_of_codes_are_those_of_the_whole_a_few_unpacked_at_a_time(monkeypatch):
    packed = PackedCodes(quantize(torch.randn(600, 64, generator=seeded(1)), 8))
    unpacked = []
    unpack = PackedCodes._unpacked

    def counted(self, codes, factors):
        unpacked.append(len(codes))
        return unpack(self, codes, factors)

    monkeypatch.setattr(PackedCodes, "_unpacked", counted)
    wanted = torch.arange(600).flip(0)[1::2]
    rows = packed.rows(wanted)
    # all at once, those of a draft vocabulary took 900 MB; whole groups, eight times as long
    assert max(unpacked) <= 256
    assert sum(unpacked) == 300
    monkeypatch.undo()
    assert torch.equal(rows, packed.whole()[wanted])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("kept", ["a centre", "halves", "floats"])
def test_chosen_codes_are_packed_as_if_alone(bits, block, kept):
    """In any order, and where they fill no group of 16 outputs, or one and a part."""
    random = seeded(bits + block)
    scale = torch.rand(50, 3, generator=random) + 0.1
    minimum = torch.randn(50, 3, generator=random)
    if kept != "floats":
        scale, minimum = scale.half().float(), minimum.half().float()
    if kept == "a centre":
        minimum = -(1 << (bits - 1)) * scale
    codes = torch.randint(1 << bits, (50, 3 * block), generator=random, dtype=torch.uint8)
    packed = PackedCodes(Codes(codes, scale, minimum, bits))
    assert (packed.centre > 0, packed.halves) == (kept == "a centre", kept != "floats")
    for count in (1, 15, 16, 17, 50):
        ids = torch.randperm(50, generator=random)[:count]
        found = packed.chosen(ids)
        alone = PackedCodes(Codes(codes[ids], scale[ids], minimum[ids], bits))
        assert (found.form, found.bytes.shape) == (alone.form, alone.bytes.shape)
        for ours, theirs in zip(astuple(found.codes()), astuple(alone.codes()), strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
