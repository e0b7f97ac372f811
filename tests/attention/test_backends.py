"""Which attention can serve, and the line that says why not;
flash-attn by a stand-in with its signature.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.attention.oracle import GROUP, KV_HEADS, NOTHING, SINKS, SPECS, case, chain, dense
from tests.forward.test_passes import LengthOnDevice
from tests.helpers import CPU, refused
from tswift.attention.backends import BACKENDS, choose, why_not
from tswift.attention.backends_check import fails
from tswift.attention.sdpa import (
    AttentionSpec,
    FlashAttention,
    Layout,
    ReferenceAttention,
    TreeAttention,
)


def why(name: str, dtype=torch.bfloat16, device="cuda") -> str | None:
    return why_not(name, dtype, torch.device(device))


@pytest.fixture
def installed(monkeypatch):
    def install(name: str, there: bool):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if there else None)

    return install


def test_what_a_backend_can_take(monkeypatch):
    assert BACKENDS["sdpa"]() is TreeAttention
    for device in ("cpu", "cuda"):
        assert all(
            why("sdpa", dtype, device) is None
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, dtype, device, reason in (
        (
            "triton",
            torch.float32,
            "cuda",
            "triton attention takes bfloat16 and float16, not float32",
        ),
        ("triton", torch.float16, "cpu", "triton attention needs CUDA"),
        ("flash", torch.float32, "cuda", "flash attention takes bfloat16 and float16, not float32"),
        ("flash", torch.bfloat16, "cpu", "flash attention needs CUDA"),
        ("native", torch.float32, "cuda", "native attention is for the CPU"),
        (
            "native",
            torch.float64,
            "cpu",
            "native attention takes float32, bfloat16 and float16, not float64",
        ),
    ):
        line = why(name, dtype, device)
        assert line.startswith(reason)
        assert "\n" not in line


def test_what_is_not_installed(installed):
    for name, module, package in (
        ("triton", "triton", "triton"),
        ("flash", "flash_attn", "flash-attn"),
    ):
        installed(module, True)
        assert why(name) is None
        installed(module, False)
        assert why(name) == f"{package} is not installed: pip install {package}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10\\nand more')", "undefined symbol: _ZN3c10"),
        ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
    ],
)
def test_a_broken_installation(tmp_path, monkeypatch, source, reason):
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flash_attn.py").write_text(source)
    assert why("flash") == f"flash-attn cannot be imported: {reason}"


def test_the_backend_that_is_chosen(installed):
    for name, dtype, device, there, chosen in (
        ("auto", torch.bfloat16, "cuda", True, "triton"),
        ("auto", torch.bfloat16, "cuda", False, "sdpa"),
        ("auto", torch.float64, "cuda", True, "sdpa"),
        ("auto", torch.float64, "cpu", True, "sdpa"),
        ("triton", torch.float16, "cuda", True, "triton"),
        ("auto", torch.float32, "cuda", True, "sdpa"),
        ("sdpa", torch.float32, "cuda", True, "sdpa"),
    ):
        installed("triton", there)
        assert choose(name, dtype, torch.device(device)) == chosen
    for name, message in (
        ("eager", "no attention 'eager'; there are auto, sdpa, native, triton, flash"),
        ("flash", "flash attention needs CUDA"),
    ):
        with refused(f"attention: {message}"):
            choose(name, torch.bfloat16, CPU)


@pytest.fixture
def served(monkeypatch):
    """Why an attention cannot serve, on the CPU in float32."""

    def tell(
        attention: type,
        heads: tuple[int, int] = (2, 3),
        spec: AttentionSpec | None = None,
        dtype=torch.float32,
    ):
        monkeypatch.setitem(BACKENDS, "own", lambda: attention)
        return fails(
            "own", dtype, CPU, 16, heads, [AttentionSpec(), spec] if spec else [AttentionSpec()]
        )

    return tell


def test_attention_that_computes_what_sdpa_does(served):
    for attention in (TreeAttention, LengthOnDevice, ReferenceAttention):
        assert served(attention) is served(attention, (1, 1)) is None


def test_a_kernel_that_cannot_be_launched_is_told_in_a_line(served):
    class Broken(TreeAttention):
        def __call__(self, query, keys, values, scale):
            raise RuntimeError("Failed to find C compiler.\nand more")

    said = served(Broken)
    assert said.startswith(
        "own attention fails here (Failed to find C compiler. (attention/backends_check.py:"
    )
    assert "\n" not in said


def test_attention_that_lies_in_one_element(served):
    class Lying(TreeAttention):
        def __init__(self, *given):
            super().__init__(*given)
            self.lies = given[2] == nodes

        def __call__(self, query, keys, values, scale):
            out = super().__call__(query, keys, values, scale)
            if self.lies:
                largest = out.abs().argmax()
                out.view(-1)[largest] *= wrong
            return out

    for nodes, wrong in ((1, torch.nan), (1, 1.001), (3, 1.001), (17, 1.001), (32, 1.001)):
        said = f"own attention fails here (outputs of {nodes} x "
        assert served(Lying).startswith(said), wrong


def test_keys_that_are_stored_in_the_wrong_place(served):
    for off in (-1, 1):

        class Misplaced(LengthOnDevice):
            @staticmethod
            def store(keys, values, new_keys, new_values, length, off=off):
                LengthOnDevice.store(
                    keys, values, new_keys, new_values, (length + off).clamp_min(0)
                )

        assert "scores differ from plain ones by up to " in served(Misplaced)


class Wanting(LengthOnDevice):
    """Attention that does what layers want, or something near it."""

    SPECS = True

    def __init__(self, layout, prefix, nodes, ancestors):
        super().__init__(layout, prefix, nodes, ancestors)
        self.prefix = int(prefix)
        self.static = isinstance(prefix, torch.Tensor)
        self.ancestors = chain(nodes) if ancestors is None else ancestors
        self.tree = ancestors is not None

    def understood(self, spec: AttentionSpec) -> AttentionSpec:
        return spec

    def __call__(self, query, keys, values, scale, spec=NOTHING):
        if not spec:
            return super().__call__(query, keys, values, scale)
        keys = keys[:, : self._end]
        values = values[:, : self._end]
        return dense(query, keys, values, self.ancestors, scale, self.understood(spec)).to(
            query.dtype
        )


WIDE = AttentionSpec(600)
KINDS = {
    **SPECS,
    "usual sizes": AttentionSpec(128, 50.0, SINKS),
    "a wide window": WIDE,
    "a mild cap": AttentionSpec(softcap=50.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_does_what_layers_want(served, dtype):
    for name, spec in KINDS.items():
        assert served(Wanting, (KV_HEADS, GROUP), spec, dtype) is None, name


LIES: dict[str, tuple[AttentionSpec, Callable[[Wanting, AttentionSpec], AttentionSpec]]] = {
    "no window": (WIDE, lambda self, spec: AttentionSpec()),
    "no soft cap": (KINDS["a mild cap"], lambda self, spec: AttentionSpec()),
    "no sinks": (SPECS["sinks"], lambda self, spec: AttentionSpec()),
    "a window that is wider by one": (
        KINDS["usual sizes"],
        lambda self, spec: replace(spec, window=129),
    ),
    "a window that is narrower by one": (
        KINDS["usual sizes"],
        lambda self, spec: replace(spec, window=127),
    ),
    "sinks of other heads": (
        SPECS["sinks"],
        lambda self, spec: replace(spec, sinks=spec.sinks.flip(0)),
    ),
    "in trees": (WIDE, lambda self, spec: AttentionSpec() if self.tree else spec),
    "in chains": (WIDE, lambda self, spec: spec if self.tree else AttentionSpec()),
    "in prompts": (WIDE, lambda self, spec: AttentionSpec() if len(self.ancestors) > 128 else spec),
    "in replayed passes": (WIDE, lambda self, spec: AttentionSpec() if self.static else spec),
    "in passes of their own": (WIDE, lambda self, spec: spec if self.static else AttentionSpec()),
    "below the window": (
        WIDE,
        lambda self, spec: spec if self.prefix >= 600 else replace(spec, window=20),
    ),
    "above the window": (WIDE, lambda self, spec: AttentionSpec() if self.prefix > 600 else spec),
}


@pytest.mark.parametrize("name", LIES)
def test_attention_that_does_not_do_what_layers_want(served, monkeypatch, name):
    spec, lie = LIES[name]
    monkeypatch.setattr(Wanting, "understood", lie)
    said = served(Wanting, (KV_HEADS, GROUP), spec, torch.bfloat16)  # hides more than float32
    assert said.startswith("own attention fails here (outputs of ")


def test_what_is_behind_the_length_shows_in_layers_that_want_something(served):
    class Beyond(Wanting):
        def __call__(self, query, keys, values, scale, spec=NOTHING):
            out = super().__call__(query, keys, values, scale, spec)
            return out + 0 * values[:, self._end :].sum() if spec else out

    assert "by up to nan" in served(Beyond, (KV_HEADS, GROUP), SPECS["window"])


TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


class StandIn:
    """Computes what flash-attn's function documents, in float64,
    and insists on what it asks for.
    """

    def __init__(self):
        self.calls: list[dict] = []

    def __call__(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        """Parameters and defaults are those of flash-attn 2.7 and 2.8,
        flash_attn/flash_attn_interface.py.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(given)
        batch, positions, heads, size = q.shape
        assert k_cache.shape == v_cache.shape == (batch, k_cache.shape[1], heads, size)
        assert k_cache.shape[1] > 0
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert return_softmax_lse
        used = {"q", "k_cache", "v_cache", "softmax_scale", "return_softmax_lse"}
        defaults = inspect.signature(self).parameters
        assert all(
            value == defaults[name].default for name, value in given.items() if name not in used
        )
        query, keys, values = (x.double().transpose(1, 2) for x in (q, k_cache, v_cache))
        scores = query @ keys.transpose(2, 3) * softmax_scale
        out = (scores.softmax(-1) @ values).transpose(1, 2)
        return out.to(q.dtype), scores.logsumexp(-1).float()


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


@pytest.mark.parametrize("nodes", [1, 41])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "prefix", "dtype"),
    [
        (8, 4, 128, 1, torch.bfloat16),
        (4, 7, 64, 129, torch.float16),
        (2, 1, 96, 1000, torch.bfloat16),
    ],
)
def test_prefix_through_flash(flash, dtype, kv_heads, group, dim, prefix, nodes):
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


def test_a_chunk_and_a_text_without_a_prefix(flash):
    for prefix, calls in ((0, 0), (50, 1)):
        query, keys, values, _, scale = case(2, 2, 64, prefix, 70, torch.float16)
        out = FlashAttention(Layout(2, 2, torch.float16, query.device), prefix, 70, None)(
            query, keys, values, scale
        )
        assert (
            out.double() - dense(query, keys, values, chain(70), scale)
        ).abs().max() < TOLERANCE[torch.float16]
        assert len(flash.calls) == calls


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed"
)
def test_the_signature_is_the_installed_one():
    from flash_attn import flash_attn_with_kvcache

    installed = inspect.signature(flash_attn_with_kvcache).parameters
    expected = inspect.signature(StandIn()).parameters
    assert {name: each.default for name, each in installed.items()} == {
        name: each.default for name, each in expected.items()
    }
