"""Attention and compiled layers that are not to be trusted: their twins take over, and the records say why."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

import tswift
from tests.helpers import decode_steps, drafter_of, random_prompt, tiny_target, tokens_of
from tests.models.refusals import refuse
from tests.models.test_passes import OPTIONS, PARAMS, static_target
from tests.rows import every_row
from tswift.attention.backends import why_not
from tswift.attention.native import NativeAttention
from tswift.kv.cache import FullKV
from tswift.models import shapes
from tswift.models.adapting import heads_of
from tswift.models.load import LoadedModel
from tswift.models.target import Target

native = pytest.mark.skipif(why_not("native", torch.float32, torch.device("cpu")) is not None, reason="no compiler")


@pytest.fixture
def compiler() -> Iterator[None]:
    """One that has compiled nothing before, nor given up on anything afterwards."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def text(target: Target, method: str = "tokenswift") -> list[int]:
    return tokens_of(decode_steps(target, drafter_of(method, target, OPTIONS), random_prompt(30), PARAMS, 3, 60))


def layers(target: Target) -> str:
    return LoadedModel("tiny", None, target, None, (), prepared="compiled").about()["layers"]


@native
def test_attention_that_lies_in_one_element_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = NativeAttention.__call__

    def lying(self, query, keys, values, scale):
        out = right(self, query, keys, values, scale)
        if query.shape[1] == 17:
            out[0, 5, 7] += 1
        return out

    trusted = tswift.load(device="cpu")
    assert trusted.about()["attention"] == "native"
    monkeypatch.setattr(NativeAttention, "__call__", lying)
    model = tswift.load(device="cpu")
    assert model.about()["attention"] == "sdpa"
    assert "as native attention computes nonsense here (off by " in model.about()["layers"]
    refuse("demo", "native attention computes nonsense here", "attention", attention="native")
    texts = [tokens_of(list(tswift.generate(each, "The ship", 40, seed=1))) for each in (model, trusted)]
    assert texts[0] == texts[1]


def test_what_many_layers_round_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over 48 layers of random weights in bfloat16 and one in float32: as far apart as wide models' are."""
    monkeypatch.setattr(shapes, "_STD", 1.28 / 256**0.5)  # products gain as with a hidden size of 4096 and 0.02
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=48,
        num_attention_heads=4,
        num_key_value_heads=1,
    )
    network = shapes.random_weights(config, torch.bfloat16, torch.device("cpu"), "random")
    narrow, wide = Target(deepcopy(network)), Target(network.float())
    places, hidden = torch.arange(80), []
    for target in (narrow, wide):
        kv = FullKV(target.kv_shape, len(places))
        hidden.append(target.forward(places, places, kv, None).hidden.double())
    apart = ((hidden[0] - hidden[1]).norm(dim=-1) / hidden[1].norm(dim=-1)).max()
    assert tiny_target("gqa", torch.bfloat16).rounding < apart < narrow.rounding
    assert wide.rounding < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "wrong"), [(1, 1.5), (3, 1.5), (17, 1.5), (32, torch.nan)])
def test_compiled_layers_that_lie_in_one_row_are_not_used(compiler, rows: int, wrong: float) -> None:
    def lying(graph, inputs):
        def run(*given):
            outs = graph.forward(*given)
            for out in outs:
                if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[1] == rows:
                    out[:, -1] *= wrong
            return outs

        return run

    target = static_target()
    assert "compiled layers gave other hidden states" in target.compile(backend=lying)
    assert text(target) == text(tiny_target())


@pytest.mark.parametrize("method", ["ar", "tokenswift"])
def test_what_the_compiler_gives_up_on_is_told(compiler, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr("tswift.models.target._RECOMPILES", 1)
    torch._dynamo.config.recompile_limit = 1
    target = static_target()
    assert target.compile(backend="eager") is None
    assert text(target, method) == text(tiny_target(), "ar")
    told = "compiled in part, as the compiler stopped: Dynamo recompile limit exceeded"
    assert layers(target) == told
    other = static_target()  # the same functions: nothing is tried anew
    torch._dynamo.utils.counters["frames"].clear()
    assert other.compile(backend="eager") is None
    assert layers(other) == told


@pytest.mark.slow
def test_a_function_that_cannot_be_compiled_is_told(compiler) -> None:
    target = static_target()
    assert target.compile(backend="eager") is None
    torch._dynamo.utils.counters["frames"]["total"] += 1
    assert layers(target).startswith("compiled in part, as the compiler stopped: ")


@every_row(
    ("config", "heads"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, (8, 4)),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, (4, 1)),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, (1, 1)),
        ({"num_attention_heads": 4, "num_key_value_heads": 0}, (1, 1)),
        ({"num_attention_heads": 4, "num_key_value_heads": None}, (1, 1)),
        ({}, (1, 1)),
    ],
)
def test_heads_by_the_configuration(config: dict[str, object], heads: tuple[int, int]) -> None:
    text = SimpleNamespace(**config)
    assert heads_of(SimpleNamespace(get_text_config=lambda: text))[:2] == heads
