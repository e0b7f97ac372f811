"""What a model's layers are seen to ask of their attention."""

from __future__ import annotations

import pytest
import torch
import transformers

from benchmarks.architectures import ARCHITECTURES, WINDOW, Architecture
from tests.helpers import tiny_llama
from tswift.attention.special import AttentionSpec
from tswift.kv.full import FullKV
from tswift.models.hf import UnsupportedModel, probe_attention
from tswift.models.target import Target


def surveyed(config: str, **settings: object):
    return probe_attention(Architecture(config, settings).make(97))


@pytest.mark.parametrize(("kind", "heads"), [("mha", (4, 4, 8)), ("gqa", (4, 2, 8)), ("mqa", (4, 1, 8))])
def test_an_ordinary_model_wants_nothing(kind: str, heads: tuple[int, int, int]) -> None:
    seen = probe_attention(tiny_llama(kind, torch.float32, layers=3))
    assert (seen.heads, seen.wants, seen.special) == (heads, [AttentionSpec()] * 3, "")


@pytest.mark.parametrize("window", [1, 7, 511])
def test_windows_are_measured(window: int) -> None:
    assert [each.window for each in surveyed("MistralConfig", sliding_window=window).wants] == [window, window]


@pytest.mark.parametrize("window", [512, 100_000])
def test_a_window_that_holds_all_positions_is_none(window: int) -> None:
    assert surveyed("MistralConfig", sliding_window=window).special == ""


def test_windows_of_some_layers() -> None:
    seen = surveyed("Gemma2Config", sliding_window=WINDOW, head_dim=8)
    assert [each.window for each in seen.wants] == [WINDOW, None]
    assert {each.softcap for each in seen.wants} == {50.0}
    assert seen.special == f"sliding windows of {WINDOW} tokens and soft-capped scores"


def test_a_window_that_is_named_and_not_used() -> None:
    """OLMoE hands its attention a window, and masks as if it had none; Llama knows of no windows at all."""
    assert surveyed("OlmoeConfig", sliding_window=WINDOW, num_experts=4, num_experts_per_tok=2).special == ""
    assert surveyed("LlamaConfig", sliding_window=WINDOW).special == ""


def test_sinks_are_the_models_own() -> None:
    model = ARCHITECTURES["gpt-oss (windows, sinks)"].make(97)
    seen = probe_attention(model)
    assert [
        each.sinks is layer.self_attn.sinks for each, layer in zip(seen.wants, model.model.layers, strict=True)
    ] == [True] * 2
    assert seen.special.endswith("and attention sinks")


def test_a_mask_of_another_kind(monkeypatch) -> None:
    from transformers.models.llama import modeling_llama

    def chunked(config, inputs_embeds, attention_mask, **kwargs):
        rule = transformers.masking_utils.chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.int64))
        return transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](mask_function=rule)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", chunked)
    with pytest.raises(UnsupportedModel, match="masks of its own"):
        surveyed("LlamaConfig")


def test_masks_that_see_the_future(monkeypatch) -> None:
    from transformers.models.llama import modeling_llama

    def both_ways(config, **kwargs):
        rule = transformers.masking_utils.bidirectional_mask_function
        return transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](mask_function=rule)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", both_ways)
    with pytest.raises(UnsupportedModel, match="masks of its own"):
        surveyed("LlamaConfig")


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"indices": torch.zeros(1)}, "attention with indices"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "masks of its own"),
        ({"value": torch.zeros(1, 2, 1, 4)}, "heads of several sizes"),
        ({"key": torch.zeros(1, 1, 1, 8), "value": torch.zeros(1, 1, 1, 8)}, "heads of several sizes"),
        ({"tswift": None}, "keep arguments from their attention"),
    ],
)
def test_what_a_layer_may_not_ask(monkeypatch, asked: dict[str, object], match: str) -> None:
    from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name, default):
        def attend(module, query, key, value, attention_mask, **kwargs):
            given = dict(query=query, key=key, value=value, attention_mask=attention_mask, **kwargs)
            return right(name, default)(module, **(given | (asked if module.layer_idx == 1 else {})))

        return attend

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface)
    with pytest.raises(UnsupportedModel, match=match):
        probe_attention(tiny_llama("gqa", torch.float32))


def test_a_model_with_windows_does_not_replay() -> None:
    from tests.models.test_passes import LengthOnDevice

    windowed = Target(ARCHITECTURES["Mistral 7B v0.1 (sliding window)"].make(97), LengthOnDevice)
    plain = Target(tiny_llama("gqa", torch.float32), LengthOnDevice)
    assert (windowed.replays, plain.replays) == (False, True)
    kv = FullKV(windowed.kv_shape, 8)
    windowed.prepare(kv, 4)
    assert not windowed._passes
