"""The target against transformers' own forward of the same model: logits, windows, masks,
queries.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from benchmarks.architectures import ARCHITECTURES, WINDOW, Architecture
from tests.helpers import random_prompt, tiny_llama, tiny_target
from tswift.attention.sdpa import AttentionSpec
from tswift.caches import FullKV, LayerKV
from tswift.forward.hf import UnsupportedModel, output_of, probe_attention
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import prefill


@pytest.mark.parametrize(
    ("kind", "attention", "tolerance"),
    # the stock eager attention takes its softmax in float32 whatever the model's dtype
    [
        ("gqa", "sdpa", 1e-10),
        ("mha", "sdpa", 1e-10),
        ("mqa", "sdpa", 1e-10),
        ("gqa", "eager", 1e-5),
    ],
)
def test_logits_are_those_of_the_stock_model(kind, attention, tolerance):
    text = random_prompt(700, 2)  # more than a chunk
    stock = tiny_llama(kind, torch.float64, attention, layers=2)
    with torch.inference_mode():
        expected = stock(torch.tensor([text])).logits[0]
    target = tiny_target(kind, layers=2)
    kv = FullKV(target.kv_shape, 720)
    prefill(target, text[:600], kv)
    for at in range(600, 610):  # one by one
        one = torch.ones(1, 1, dtype=torch.bool)
        hidden = target.forward(
            Nodes(torch.tensor(text[at : at + 1]), torch.tensor([at]), kv, one)
        ).hidden
        kv.commit([0])
        torch.testing.assert_close(target.logits(hidden)[0], expected[at], rtol=0, atol=tolerance)
    rest = prefill(target, text[610:], kv)
    torch.testing.assert_close(target.logits(rest.hidden), expected[610:], rtol=0, atol=tolerance)
    assert kv.length == 700


def test_a_tree_pass_gives_every_path_its_own_logits():
    target = tiny_target(layers=2)
    stock = tiny_llama("gqa", torch.float64, layers=2)
    text = random_prompt(40, 3)
    kv = FullKV(target.kv_shape, 60)
    prefill(target, text[:-1], kv)
    tokens, parents = [text[-1], 5, 6, 5, 5, 9], [-1, 0, 0, 1, 2, 4]
    depths = [0, 1, 1, 2, 2, 3]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    ancestors = torch.zeros(6, 6, dtype=torch.bool)
    for node, path in enumerate(paths):
        assert parents[node] == (path[-2] if node else -1)
        ancestors[node, path] = True
    positions = torch.tensor(depths) + 39
    logits = target.logits(
        target.forward(Nodes(torch.tensor(tokens), positions, kv, ancestors)).hidden
    )
    for node, path in enumerate(paths):
        whole = text[:-1] + [tokens[n] for n in path]
        with torch.inference_mode():
            expected = stock(torch.tensor([whole])).logits[0, -1]
        torch.testing.assert_close(logits[node], expected, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_far_positions():
    """Past position 4,096, against the stock model on the whole text."""
    text = random_prompt(4200, 4)
    with torch.inference_mode():
        expected = tiny_llama("mqa", torch.float64)(torch.tensor([text]), logits_to_keep=3).logits[
            0
        ]
    target = tiny_target("mqa")
    kv = FullKV(target.kv_shape, len(text))
    prefill(target, text[:-3], kv)
    last = prefill(target, text[-3:], kv)
    torch.testing.assert_close(target.logits(last.hidden), expected, rtol=0, atol=1e-10)


def test_the_queries_of_a_pass_are_rotated_and_one_per_layer():
    target = tiny_target("gqa", layers=2)
    kv = FullKV(target.kv_shape, 40)
    last = prefill(target, random_prompt(12), kv)
    assert [tuple(query.shape) for query in last.queries] == [(4, 12, 8)] * 2
    assert torch.equal(last.queries_of([7])[1], last.queries[1][:, 7:8])
    # layer 0: rotated query of the same token at two positions have the same norm and different
    # directions
    last = prefill(target, [3, 3], FullKV(target.kv_shape, 2))
    first, second = last.queries[0].unbind(1)
    torch.testing.assert_close(first.norm(dim=-1), second.norm(dim=-1))
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("LlamaConfig", {}),
        ("PhiConfig", {}),  # its LM head has a bias
        ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    ],
)
def test_logits_are_the_models_own(config, settings):
    model = Architecture(config, settings).make(97)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(output_of(model)(hidden), wanted, rtol=0, atol=0)
        assert settings == {} or not torch.equal(model.get_output_embeddings()(hidden), wanted)


def probed(config: str, **settings):
    return probe_attention(Architecture(config, settings).make(97))


@pytest.mark.parametrize(
    ("kind", "heads"), [("mha", (4, 4, 8)), ("gqa", (4, 2, 8)), ("mqa", (4, 1, 8))]
)
def test_an_ordinary_model_wants_nothing(kind, heads):
    seen = probe_attention(tiny_llama(kind, torch.float32, layers=3))
    ((kv_heads, size), layout) = next(iter(seen.layouts.items()))
    assert (kv_heads * layout.groups, kv_heads, size) == heads
    assert seen.kept == [LayerKV(kv_heads, size, layer) for layer in range(3)]
    assert (seen.layer_specs, seen.attention_features) == ([AttentionSpec()] * 3, "")


@pytest.mark.parametrize("window", [1, 7, 511, 512, 100_000])
def test_windows_are_measured(window):
    found = window if window < 512 else None  # that many positions there are
    assert [each.window for each in probed("MistralConfig", sliding_window=window).layer_specs] == [
        found,
        found,
    ]


def test_windows_of_some_layers():
    seen = probed("Gemma2Config", sliding_window=WINDOW, head_dim=8)
    assert [each.window for each in seen.layer_specs] == [WINDOW, None]
    assert {each.softcap for each in seen.layer_specs} == {50.0}
    assert seen.attention_features == f"sliding windows of {WINDOW} tokens and soft-capped scores"


def test_a_window_that_is_named_and_not_used():
    """OLMoE hands its attention a window, and masks as if it had none;
    Llama knows of no windows at all.
    """
    assert (
        probed(
            "OlmoeConfig", sliding_window=WINDOW, num_experts=4, num_experts_per_tok=2
        ).attention_features
        == ""
    )
    assert probed("LlamaConfig", sliding_window=WINDOW).attention_features == ""


def test_sinks_are_the_models_own():
    model = ARCHITECTURES["gpt-oss (windows, sinks)"].make(97)
    seen = probe_attention(model)
    assert [
        each.sinks is layer.self_attn.sinks
        for each, layer in zip(seen.layer_specs, model.model.layers, strict=True)
    ] == [True] * 2
    assert seen.attention_features.endswith("and attention sinks")


@pytest.mark.parametrize(
    "rule",
    [
        transformers.masking_utils.chunked_causal_mask_function(
            100, torch.zeros(1, dtype=torch.int64)
        ),
        transformers.masking_utils.bidirectional_mask_function,  # sees the future
    ],
)
def test_masks_of_another_kind(rule, monkeypatch):
    from transformers.models.llama import modeling_llama

    def masked(config, **kwargs):
        return transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
            mask_function=rule
        )

    monkeypatch.setattr(modeling_llama, "create_causal_mask", masked)
    with pytest.raises(UnsupportedModel, match="masks of its own"):
        probed("LlamaConfig")


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"indices": torch.zeros(1)}, "attention with indices"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "masks of its own"),
        ({"value": torch.zeros(1, 2, 1, 4)}, "keys and values of different sizes"),
        ({"query": torch.zeros(1, 2, 1, 8)}, "layers with different numbers of query heads"),
        ({"tswift": None}, "keep arguments from their attention"),
    ],
)
def test_what_a_layer_may_not_ask(monkeypatch, asked, match):
    from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name, default):
        def attend(module, query, key, value, attention_mask, **kwargs):
            given = dict(query=query, key=key, value=value, attention_mask=attention_mask, **kwargs)
            return right(name, default)(
                module, **(given | (asked if module.layer_idx == 1 else {}))
            )

        return attend

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface)
    with pytest.raises(UnsupportedModel, match=match):
        probe_attention(tiny_llama("gqa", torch.float32, layers=2))


def test_a_model_with_windows_does_not_replay():
    from tests.forward.test_passes import LengthOnDevice

    windowed = Target(ARCHITECTURES["Mistral 7B v0.1 (sliding window)"].make(97), LengthOnDevice)
    plain = Target(tiny_llama("gqa", torch.float32), LengthOnDevice)
    assert (windowed.replays, plain.replays) == (False, True)
    kv = FullKV(windowed.kv_shape, 8)
    windowed.prepare(kv, 4)
    assert not windowed.runner.passes
