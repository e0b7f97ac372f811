"""Passes and heads as C functions: what PyTorch computes but for rounding,
and every row by itself.
"""

from __future__ import annotations

import copy
from itertools import product
from math import isfinite
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.forward.plain_products import multiply_plainly
from tests.helpers import decode, decode_method, first, needs_program, random_tree, refused, seeded
from tswift.attention import native
from tswift.caches import FullKV
from tswift.decoding.audit import audit
from tswift.decoding.loop import NotFinite
from tswift.drafting.chains import DraftModel
from tswift.drafting.heads import HeadSource
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.forward import adapting
from tswift.forward.adapting import wrap_model
from tswift.forward.cpu import products
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.products import PackedLinear
from tswift.forward.cpu.program import PassProgram
from tswift.forward.eager import EagerRunner
from tswift.forward.exact_passes import fingerprint
from tswift.forward.notes import PROGRAM, execution_note
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.models.codes import quantize
from tswift.native_build import Unbuilt, widest_vectors
from tswift.sampling.parameters import LogitBias, SamplingParams
from tswift.sampling.rule import Sampler
from tswift.speculators.heads import HEAD_TYPES, prepare

pytestmark = needs_program
VOCAB = 97
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
WINDOW = 40
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
TWO_ROTARIES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
SCALES = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 80,  # more than a task's columns
    "linear_conv_kernel_dim": 4,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {**WINDOWED, "attn_logit_softcapping": 3.0}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {**WINDOWED, "rope_parameters": TWO_ROTARIES}),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {"pad_token_id": 0, "sliding_window": WINDOW, "rope_parameters": HALF},
    ),
    "granite": (GraniteConfig, GraniteForCausalLM, SCALES),
    "qwen3.5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, DELTA),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM, WINDOWED),
    "rotary": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    # sizes that fill no vector
    **{
        f"of {inner}": (LlamaConfig, LlamaForCausalLM, {"intermediate_size": inner})
        for inner in (50, 57, 172)
    },
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}


def network(kind: str = "llama", half: bool = False, **changed) -> PreTrainedModel:
    config, model, about = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        settings = {
            **SHAPE,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            **about,
            **changed,
        }
        made = model(config(**settings)).eval().requires_grad_(False)
        for name, weight in made.named_parameters():
            if "norm" in name or "bias" in name:
                nn.init.normal_(weight, 1 if "norm" in name else 0, 0.2)
    return made.bfloat16().float() if half else made


IN_BYTES = [("tokenswift", torch.int8), ("magicdec", torch.int8), ("recall", torch.int8)]
KINDS_OF_KV = (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int8)


def target_of(
    kind: str = "llama",
    half: bool = False,
    kv_dtype: torch.dtype = torch.float32,
    **changed,
) -> Target:
    return wrap_model(network(kind, half, **changed), kind, "native", kv_dtype=kv_dtype)


def filled(target: Target, held: int, room: int) -> FullKV:
    kv = FullKV(target.kv_shape, held + room)
    random = seeded(held)
    for part, buffer in enumerate(kv.buffers):
        for layer in range(len(buffer)):
            sizes = *buffer.shape[1:3], kv.shape.head_dim
            made = torch.empty(sizes).normal_(generator=random)
            buffer[layer] = kv.shape.narrowed(made, part, layer)
    kv.length = held
    for state in () if kv.states is None else (kv.states.rows, kv.states.matrices):
        state.normal_(generator=random)
    return kv


def tree_of(nodes: int, held: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    tree = random_tree(nodes, Random(seed), VOCAB)
    return torch.tensor(tree.tokens), torch.tensor(tree.depths) + held, tree.ancestors()


@pytest.mark.parametrize(
    ("kind", "half"),
    first(3, [*((kind, kind in ("llama", "qwen3")) for kind in KINDS), ("llama", False)]),
)
def test_a_pass_is_the_modeling_codes(kind, half):
    target = target_of(kind, half)
    assert target.runner.program is not None, target.fallbacks
    assert execution_note(target) == PROGRAM
    for held, nodes in ((0, 1), (0, 7), (200, 1), (200, 23), (130, 64)):
        tree = tree_of(nodes, held)
        kv = filled(target, held, nodes)
        passes = []
        untapped = target.forward(Nodes(*tree[:2], kv, tree[2]))
        target.tap()
        target.tap([1, 0, 1])
        for runner in (target.runner, EagerRunner(target)):
            kept = target.runner
            target.runner = runner
            out = target.forward(Nodes(*tree[:2], kv, tree[2]))
            queries = torch.stack([query[:, :nodes] for query in out.queries])
            cache = kv.buffers[0].clone(), kv.buffers[1].clone()
            passes.append(
                (
                    out.hidden,
                    out.pre_norm,
                    out.layer_states,
                    queries,
                    target.logits(out.hidden),
                    *cache,
                )
            )
            target.runner = kept
        assert torch.equal(passes[0][0], untapped.hidden)
        for own, other in zip(*passes, strict=True):
            assert own.shape == other.shape
            assert torch.allclose(own, other, rtol=1e-4, atol=1e-4 * float(other.std()))


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [*(("llama", kv_dtype) for kv_dtype in KINDS_OF_KV), ("qwen3.5", torch.int16)],
)
def test_a_row_has_the_same_bits_in_every_pass(kind, kv_dtype):
    target = target_of(kind, kv_dtype=kv_dtype)
    held = 150
    nodes = 29
    tokens = torch.arange(nodes) % VOCAB
    positions = torch.arange(held, held + nodes)
    kv = filled(target, held, nodes)
    before = kv.mark()
    whole = target.forward(Nodes(tokens, positions, kv, None))
    logits = target.logits(whole.hidden)
    keys = kv.buffers[0].clone()
    for size in (1, 2, 5, 6, 7, 13):
        kv.rewind(before)
        for start in range(0, nodes, size):
            part = slice(start, min(start + size, nodes))
            found = target.forward(Nodes(tokens[part], positions[part], kv, None))
            kv.commit(range(len(tokens[part])))
            assert torch.equal(found.hidden, whole.hidden[part])
            assert torch.equal(target.logits(found.hidden), logits[part])
        assert torch.equal(kv.buffers[0], keys)


@pytest.mark.slow
@pytest.mark.skipif("-mavx512f" not in widest_vectors(), reason="no AVX-512")
@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [
        ("qwen3", KINDS_OF_KV[0]),
        ("qwen3.5", KINDS_OF_KV[0]),
        *(("qwen3", dtype) for dtype in KINDS_OF_KV[1:]),
        ("gemma2", torch.int16),
        ("olmo2", torch.int16),
    ],
)
def test_avx2_has_the_bits_of_avx512(kind, kv_dtype, monkeypatch):
    found = []
    for vectors in (widest_vectors(), ()):
        for module in (products, native):
            monkeypatch.setattr(module, "widest_vectors", lambda vectors=vectors: vectors)
        target = target_of(kind, kv_dtype=kv_dtype)
        assert target.runner.program is not None, target.fallbacks
        assert products.library().tswift_lanes() == (16 if vectors else 8)
        target.fixed_rows = target.runner.program.most_nodes
        found.append(fingerprint(target))
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_dtype", KINDS_OF_KV[1:])
def test_keys_and_values_are_rounded_to_the_nearest(kv_dtype):
    """As PyTorch rounds: those of the first layer are the same numbers before,
    whatever the cache's dtype.
    """
    written, caches = [], []
    for kind in (torch.float32, kv_dtype):
        target = target_of(kv_dtype=kind)
        kv = filled(target, 3, 40)
        tree = tree_of(40, 3)
        target.forward(Nodes(*tree[:2], kv, tree[2]))
        caches.append(kv)
        assert kv.shape.dtype == kind
        written.append([buffer[0, :, 3:] for buffer in kv.buffers])
    assert target.runner.program is not None, target.fallbacks
    assert [target.runner.program.takes(each, 1) for each in caches] == [False, True]
    for part, (wide, narrow) in enumerate(zip(*written, strict=True)):
        assert torch.equal(kv.shape.narrowed(wide, part, 0), narrow)
        assert (
            kv.shape.widened(narrow, part, 0).float().sub(wide).abs().max()
            < 0.01 * wide.abs().max()
        )


@pytest.mark.slow
def test_integers_show_what_is_broken():
    """NaN and infinity become NaN, whoever keeps them;
    and no number that the weights can give is too large.
    """
    target = target_of("qwen3", kv_dtype=torch.int16)
    shape = target.kv_shape
    kv = filled(target, 0, 9)
    made = torch.randn(shape.heads, 3, shape.head_dim)
    made[0, 1, 5], made[1, 2, 3], made[1, 0, 0] = torch.nan, torch.inf, -torch.inf
    kept = shape.narrowed(made, 1, 0)
    assert torch.equal(shape.widened(kept, 1, 0).isnan(), ~made.isfinite())
    assert torch.equal(shape.broken(kept), ~made.isfinite())
    # "qwen2" and "llama" have biases, OLMo has no norm before attention
    for kind in ("qwen3", "qwen2", "llama", "olmo2", "olmo3"):
        largest = target_of(kind)
        steps = target_of(kind, kv_dtype=torch.int16).kv_shape.steps
        wide = filled(largest, 0, 40)
        largest.forward(Nodes(*tree_of(40, 0)[:2], wide, tree_of(40, 0)[2]))
        assert steps is not None
        for part, buffer in enumerate(wide.buffers):
            assert (buffer.abs().amax(2) <= steps[part] * (2**15 - 1)).all()
    embeddings = target.model.get_input_embeddings().weight
    embeddings[3] = torch.nan
    target.forward(
        Nodes(torch.tensor([1, 3, 5]), torch.arange(3), kv, torch.eye(3, dtype=torch.bool))
    )
    assert shape.broken(kv.buffers[0])[:, :, 1].all()
    assert not shape.broken(kv.buffers[0])[:, :, [0, 2]].any()


@pytest.mark.parametrize(
    ("prompt", "kv_dtype"),
    first(2, [*product(([1, 2, 3, 4, 5], [1, 2, 3, *[4] * 100]), (torch.int16, torch.int8))]),
)
def test_what_is_broken_in_a_prompt_is_told(prompt, kv_dtype):
    target = target_of(kv_dtype=kv_dtype)
    target.model.get_input_embeddings().weight[3] = torch.nan
    with pytest.raises(NotFinite, match="embed_tokens at position 2"):
        decode_method("ar", target, prompt, SamplingParams(), 3, 5)
    target.fixed_rows = 16  # an audit of exact passes does not look at the logits of a prompt
    with pytest.raises(NotFinite, match="embed_tokens at position 2"):
        audit(target, prompt, [5, 6, 7], SamplingParams(), 3)


def test_exact_passes_are_tried_over_keys_and_values_of_the_usual_size(
    monkeypatch,
):
    """Integers of a few steps would all be as good as 0; and nothing is filled up."""
    target = target_of(kv_dtype=torch.int16)
    held = list[Tensor]()
    compiled_pass = PassProgram.__call__

    def watched(self, texts, *rest):
        kv = texts[0].kv
        held.append(kv.shape.widened(kv.buffers[0][0, :, : kv.length], 0, 0))
        return compiled_pass(self, texts, *rest)

    monkeypatch.setattr(PassProgram, "__call__", watched)
    target.fixed_rows = 16
    assert fingerprint(target) == fingerprint(target)
    assert 0.9 < held[0].std() < 1.1
    tree = tree_of(17, 0)
    kv = filled(target, 0, 17)
    with pytest.raises(ValueError, match="does not fit"):
        target.forward(Nodes(*tree[:2], kv, tree[2]))


@pytest.mark.parametrize(
    ("method", "kv_dtype"),
    first(
        1,
        [
            *zip(("tokenswift", "medusa", "magicdec", "recall"), KINDS_OF_KV, strict=False),
            *IN_BYTES,
        ],
    ),
)
def test_every_method_writes_plain_decodings_text(method, kv_dtype):
    """In float32, bit for bit: there are no near-ties between passes of one row and of many."""
    target = target_of(kv_dtype=kv_dtype)
    params = SamplingParams(penalty=1.1)
    prompt = [*range(1, 60), *range(20, 50)]
    assert target.runner.program is not None, target.fallbacks
    heads = HEAD_TYPES["conditioned"](48, 3).requires_grad_(False)
    prepare(heads)
    wanted = decode_method("ar", target, prompt, params, 3, 100)
    options = DraftOptions(budget=64) if method in ("tokenswift", "magicdec") else DraftOptions()
    assert (
        decode(target, make_drafter(method, target, heads, options, None), prompt, params, 3, 100)
        == wanted
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 1), (5, 64), (48, 97), (256, 130), (1100, 4000)]
)
def test_a_product(inputs, outputs, threads):
    torch.manual_seed(inputs)
    layer = nn.Linear(inputs, outputs, bias=inputs != 48).requires_grad_(False)
    product = PackedLinear(layer.weight, layer.bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = torch.randn(2, 9, inputs)
        found = product(rows)
    finally:
        torch.set_num_threads(before)
    wanted = layer.double()(rows.double())
    assert (found.double() - wanted).abs().max() < 1e-6 * inputs**0.5 * 4
    for row in range(9):
        assert torch.equal(product(rows[1, row]), found[1, row])


class Rounded(nn.Module):
    """A layer of heads as they are drafted with, by PyTorch."""

    def __init__(self, layer):
        super().__init__()
        self.codes = quantize(layer.weight, 8)

    def forward(self, rows: Tensor) -> Tensor:
        return multiply_plainly(rows.view(-1, rows.shape[-1]), self.codes, 8).view(
            *rows.shape[:-1], -1
        )


@pytest.mark.parametrize("kind", HEAD_TYPES)
def test_heads(kind):
    torch.manual_seed(1)
    heads = HEAD_TYPES[kind](48, 3, eps=1e-5).requires_grad_(False)
    for name, weight in heads.named_parameters():
        nn.init.normal_(weight, float("norm" in name), 0.2)
    unrounded, plain = copy.deepcopy(heads), copy.deepcopy(heads)
    for head in plain.heads:
        for name in ("mix", "linear") if heads.conditioned else ("linear",):
            setattr(head, name, Rounded(getattr(head, name)))
    prepare(heads)
    assert heads.program is not None
    assert copy.deepcopy(heads).program is None  # its weights may change
    for rows in ((48,), (3, 48)):
        hidden, embeddings = torch.randn(rows), torch.randn(3, *rows)
        told = embeddings if heads.conditioned else None
        assert torch.allclose(heads(hidden, told), plain(hidden, told), rtol=1e-4, atol=1e-4)
        assert torch.allclose(plain(hidden, told), unrounded(hidden, told), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: network(hidden_act="gelu"), "activation"),
        (lambda: network(head_dim=8), "size"),
        (lambda: network().double(), "float32"),
        (lambda: nn.Linear(1, 1), "has no program"),
    ],
)
def test_what_there_is_no_program_for(made, why):
    with pytest.raises(Unfit, match=why):
        PassProgram(made())


def test_a_program_that_computes_something_else_or_cannot_be_had_is_not_used(monkeypatch):
    right = PassProgram.__call__

    def wrong(self, *given):
        found = right(self, *given)
        found[0].hidden.mul_(1.01)
        return found

    def unbuilt(*given):
        raise Unbuilt("needs a C compiler")

    monkeypatch.setattr(PassProgram, "__call__", wrong)
    target = target_of()
    assert (target.runner.program, execution_note(target)) == (
        None,
        "eager, as a C program gave other logits",
    )
    monkeypatch.setattr("tswift.forward.cpu.runner.PassProgram", unbuilt)
    assert execution_note(target_of()) == "eager, as a C program needs a C compiler"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(banned=(3, 5, 8), logit_bias=LogitBias([(6, 2.0), (8, 9.0), (9, 1.5)])),
        SamplingParams(penalty=1, min_p=0),
        SamplingParams(temperature=0),
        SamplingParams(presence_penalty=0.9, frequency_penalty=0.4),
    ],
)
@pytest.mark.parametrize("drafted", [None, range(5, VOCAB, 3), range(7)])
def test_all_levels_at_once_are_those_one_by_one(direct, params, drafted):
    target = target_of()
    random = seeded(4)
    heads = HEAD_TYPES["conditioned"](48, 3).requires_grad_(False)
    for weight in heads.parameters():
        weight.normal_(std=0.3, generator=random)
    if drafted:
        heads.draft_ids = torch.tensor(drafted, dtype=torch.int32)
    prepare(heads)
    source = HeadSource(
        target, heads, DraftModel(target) if direct else None, (1, 3, 2), shared_noise=True
    )
    sampler = Sampler(params, 1, VOCAB, target.device)
    sampler.extend([*range(40), 7])
    for place in range(20):
        hidden = torch.randn(48, generator=random)
        given = hidden, None, 7, range(41 + place, 44 + place), sampler
        known = source.guess_by_program(*given)
        assert known is not None
        tokens, scores = source.guess(*given)
        assert known[0] == tokens.flatten().tolist()
        # PyTorch rounds what counts have lowered
        near = {"rel": 1e-6, "abs": 1e-6} if sampler.counting else {"rel": 0.0, "abs": 0.0}
        assert known[1] == pytest.approx(scores.flatten().tolist(), **near)
        drafts = {token for token, score in zip(*known, strict=True) if isfinite(score)}
        assert drafted is None or drafts <= {*drafted}


class Quantised(Tensor):
    pass


def test_weights_that_are_no_plain_numbers_bound_no_integers():
    model = network()
    layer = model.model.layers[1].self_attn.v_proj
    layer.weight = nn.Parameter(layer.weight.as_subclass(Quantised), requires_grad=False)
    with refused("cannot have a cache in int16: its weights are quantised"):
        wrap_model(model, "some/model", "native", kv_dtype=torch.int16)


@pytest.mark.parametrize("program", [True, False])
def test_changed_weights_bound_integers_anew(program):
    target = target_of("qwen2", kv_dtype=torch.int16)
    prompt = [*range(1, 60)]
    if not program:
        target.runner = EagerRunner(target)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.v_proj.weight.mul_(50)
    fresh = wrap_model(target.model, "m", "native", kv_dtype=torch.int16)
    after, expected = (FullKV(each.kv_shape, 59) for each in (target, fresh))
    prefill(target, prompt, after)
    prefill(fresh, prompt, expected)
    assert torch.equal(target.kv_shape.steps, fresh.kv_shape.steps)
    assert (after.buffers[1].int() - expected.buffers[1].int()).abs().max() < (
        1 if program else 100
    )


def test_changed_weights_are_packed_anew():
    target = target_of()
    prompt = [*range(1, 60)]
    before = decode_method("ar", target, prompt, SamplingParams(), 3, 40)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.mul_(0.7)
    after = decode_method("ar", target, prompt, SamplingParams(), 3, 40)
    assert target.runner.program is not None, target.fallbacks
    fresh = wrap_model(target.model, "m", "native")
    assert before != after == decode_method("ar", fresh, prompt, SamplingParams(), 3, 40)


def test_a_cache_that_nobody_asked_for_gives_way(monkeypatch):
    monkeypatch.setattr(adapting, "_CACHED", 0)
    with refused("m does not bear a cache in int16"):
        wrap_model(network(), "m", "native", kv_dtype=torch.int16)
    target = wrap_model(network(), "m", "native", kv_dtype=torch.int16, usual=True)
    assert target.kv_shape.dtype == torch.float32
    assert execution_note(target) == f"{PROGRAM}; the model does not bear a cache in int16"
    prompt = [*range(1, 60)]
    assert decode_method("ar", target, prompt, SamplingParams(), 3, 20) == decode_method(
        "ar", target_of(), prompt, SamplingParams(), 3, 20
    )
