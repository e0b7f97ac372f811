"""The flash-attn backend, against a stand-in that has its signature and keeps to its contract."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import ModuleType

import pytest
import torch

from tests.attention.oracle import case, chain, dense
from tswift.attention.flash import FlashAttention
from tswift.attention.layout import Layout

# flash-attn 2.7 and 2.8, flash_attn/flash_attn_interface.py: parameters and their defaults
PUBLISHED = {
    "q": inspect.Parameter.empty,
    "k_cache": inspect.Parameter.empty,
    "v_cache": inspect.Parameter.empty,
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


class StandIn:
    """Computes what flash-attn's function documents, in float64, and insists on what it asks for."""

    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=d) for name, d in PUBLISHED.items()]
    )

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def __call__(self, *args, **kwargs):
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        self.calls.append(given)
        query, keys, values = given["q"], given["k_cache"], given["v_cache"]
        assert query.dim() == keys.dim() == values.dim() == 4
        batch, positions, heads, size = query.shape
        assert keys.shape == values.shape == (batch, keys.shape[1], heads, size)
        assert keys.shape[1] > 0
        assert query.dtype == keys.dtype == values.dtype
        assert keys.stride(-1) == values.stride(-1) == 1
        assert given["return_softmax_lse"]
        used = {"q", "k_cache", "v_cache", "softmax_scale", "return_softmax_lse"}
        assert all(given[name] == default for name, default in PUBLISHED.items() if name not in used)
        query, keys, values = (x.double().transpose(1, 2) for x in (query, keys, values))
        scores = query @ keys.transpose(2, 3) * given["softmax_scale"]
        out = (scores.softmax(-1) @ values).transpose(1, 2)
        assert out.shape == (batch, positions, heads, size)
        return out.to(given["q"].dtype), scores.logsumexp(-1).float()


@pytest.fixture
def flash(monkeypatch) -> StandIn:
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = StandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module.flash_attn_with_kvcache


def within(given, buffer) -> bool:
    """Whether a tensor is a view into another's memory."""
    start = buffer.untyped_storage().data_ptr()
    return start <= given.data_ptr() < start + buffer.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (4, 7, 64), (2, 1, 96)])
@pytest.mark.parametrize("prefix", [1, 129, 1000])
@pytest.mark.parametrize("nodes", [1, 41])
def test_prefix_through_flash(flash, dtype, kv_heads, group, dim, prefix, nodes) -> None:
    query, keys, values, ancestors, scale = case(kv_heads, group, dim, prefix, nodes, dtype)
    out = FlashAttention(Layout(kv_heads, group, dtype, query.device), prefix, nodes, ancestors)(
        query, keys, values, scale
    )
    exact = dense(query, keys, values, ancestors, scale)
    assert out.shape == query.shape
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() < TOLERANCE[dtype]
    (given,) = flash.calls
    assert given["q"].shape == (kv_heads, group * nodes, 1, dim)
    # a single node attends to itself as it does to what is before it
    assert given["k_cache"].shape == (kv_heads, prefix + (nodes == 1), 1, dim)
    assert within(given["k_cache"], keys)
    assert within(given["v_cache"], values)
    assert given["softmax_scale"] == scale


def test_a_chunk_and_a_text_without_a_prefix(flash) -> None:
    for prefix, calls in ((0, 0), (50, 1)):
        query, keys, values, _, scale = case(2, 2, 64, prefix, 70, torch.float16)
        out = FlashAttention(Layout(2, 2, torch.float16, query.device), prefix, 70, None)(query, keys, values, scale)
        assert (out.double() - dense(query, keys, values, chain(70), scale)).abs().max() < TOLERANCE[torch.float16]
        assert len(flash.calls) == calls


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
def test_the_signature_is_the_installed_one() -> None:
    from flash_attn import flash_attn_with_kvcache

    installed = inspect.signature(flash_attn_with_kvcache).parameters
    assert {name: parameter.default for name, parameter in installed.items()} == PUBLISHED
