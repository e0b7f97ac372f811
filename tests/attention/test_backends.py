"""Which attention can serve, and the line that says why not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.attention.oracle import chain
from tests.attention.test_special import GROUP, KV_HEADS, SINKS, WANTS, dense
from tests.models.test_passes import LengthOnDevice
from tswift.attention.backends import BACKENDS, choose, fails, why_not
from tswift.attention.reference import ReferenceAttention
from tswift.attention.sdpa import TreeAttention
from tswift.attention.special import AttentionSpec
from tswift.errors import InputError


def why(name: str, dtype=torch.bfloat16, device="cuda") -> str | None:
    return why_not(name, dtype, torch.device(device))


@pytest.fixture
def installed(monkeypatch):
    def install(name: str, there: bool) -> None:
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if there else None)

    return install


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sdpa_serves_everywhere(dtype, device) -> None:
    assert BACKENDS["sdpa"]() is TreeAttention
    assert why("sdpa", dtype, device) is None


@pytest.mark.parametrize(
    ("name", "dtype", "device", "reason"),
    [
        ("triton", torch.float64, "cuda", "triton attention takes float32, bfloat16 and float16, not float64"),
        ("triton", torch.float32, "cpu", "triton attention needs CUDA"),
        ("flash", torch.float32, "cuda", "flash attention takes bfloat16 and float16, not float32"),
        ("flash", torch.bfloat16, "cpu", "flash attention needs CUDA"),
        ("native", torch.float32, "cuda", "native attention is for the CPU"),
        ("native", torch.float64, "cpu", "native attention takes float32, bfloat16 and float16, not float64"),
    ],
)
def test_what_a_backend_cannot_take(monkeypatch, name, dtype, device, reason) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    line = why(name, dtype, device)
    assert line.startswith(reason)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "module", "package"), [("triton", "triton", "triton"), ("flash", "flash_attn", "flash-attn")]
)
def test_what_is_not_installed(installed, monkeypatch, name, module, package) -> None:
    installed(module, True)
    assert why(name) is None
    installed(module, False)
    assert why(name) == f"{package} is not installed: pip install {package}"


def test_the_interpreter_serves_on_the_cpu(installed, monkeypatch) -> None:
    installed("triton", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why("triton", torch.float32, "cpu") is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10\\nand more')", "undefined symbol: _ZN3c10"),
        ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
    ],
)
def test_a_broken_installation(tmp_path, monkeypatch, source, reason) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flash_attn.py").write_text(source)
    assert why("flash") == f"flash-attn cannot be imported: {reason}"


def test_naming_the_backends_imports_none() -> None:
    code = (
        "import sys; import tswift.attention.backends; "
        "print([m for m in ('triton', 'flash_attn', 'tswift.attention.triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "dtype", "device", "there", "chosen"),
    [
        ("auto", torch.bfloat16, "cuda", True, "triton"),
        ("auto", torch.bfloat16, "cuda", False, "sdpa"),
        ("auto", torch.float64, "cuda", True, "sdpa"),
        ("auto", torch.float64, "cpu", True, "sdpa"),
        ("triton", torch.float32, "cuda", True, "triton"),
        ("sdpa", torch.float32, "cuda", True, "sdpa"),
    ],
)
def test_the_backend_that_is_chosen(installed, name, dtype, device, there, chosen) -> None:
    installed("triton", there)
    assert choose(name, dtype, torch.device(device)) == chosen


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eager", "no attention 'eager'; there are auto, sdpa, native, triton, flash"),
        ("flash", "flash attention needs CUDA"),
    ],
)
def test_what_cannot_be_chosen(name, message) -> None:
    with pytest.raises(InputError, match=f"attention: {message}"):
        choose(name, torch.bfloat16, torch.device("cpu"))


@pytest.fixture
def served(monkeypatch):
    """Why an attention cannot serve, on the CPU in float32."""

    def tell(attention: type, heads: tuple[int, int] = (2, 3), wants: AttentionSpec | None = None, dtype=torch.float32):
        monkeypatch.setitem(BACKENDS, "own", lambda: attention)
        return fails(
            "own", dtype, torch.device("cpu"), 16, heads, [AttentionSpec(), wants] if wants else [AttentionSpec()]
        )

    return tell


@pytest.mark.parametrize("attention", [TreeAttention, LengthOnDevice, ReferenceAttention])
def test_attention_that_computes_what_sdpa_does(served, attention) -> None:
    assert served(attention) is None
    assert served(attention, (1, 1)) is None


def test_a_kernel_that_cannot_be_launched_is_told_in_a_line(served) -> None:
    class Broken(TreeAttention):
        def __call__(self, query, keys, values, scale):
            raise RuntimeError("Failed to find C compiler.\nand more")

    assert served(Broken) == "own attention fails here (Failed to find C compiler.)"


@pytest.mark.parametrize("wrong", [1.001, torch.nan])
@pytest.mark.parametrize("nodes", [1, 3, 17, 32])
def test_attention_that_lies_in_one_element(served, nodes: int, wrong: float) -> None:
    class Lying(TreeAttention):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.lies = given[2] == nodes

        def __call__(self, query, keys, values, scale):
            out = super().__call__(query, keys, values, scale)
            if self.lies:
                largest = out.abs().argmax()
                out.view(-1)[largest] *= wrong
            return out

    assert "own attention computes nonsense here (off by " in served(Lying)


@pytest.mark.parametrize("off", [-1, 1])
def test_keys_that_are_stored_in_the_wrong_place(served, off: int) -> None:
    class Misplaced(LengthOnDevice):
        @staticmethod
        def store(keys, values, new_keys, new_values, length) -> None:
            LengthOnDevice.store(keys, values, new_keys, new_values, (length + off).clamp_min(0))

    assert "computes nonsense" in served(Misplaced)


NOTHING = AttentionSpec()


class Wanting(LengthOnDevice):
    """Attention that does what layers want, or something near it."""

    WANTS = True

    def __init__(self, layout, prefix, nodes, ancestors) -> None:
        super().__init__(layout, prefix, nodes, ancestors)
        self.prefix, self.static = int(prefix), isinstance(prefix, torch.Tensor)
        self.ancestors, self.tree = chain(nodes) if ancestors is None else ancestors, ancestors is not None

    def understood(self, wants: AttentionSpec) -> AttentionSpec:
        return wants

    def __call__(self, query, keys, values, scale, wants=NOTHING):
        if not wants:
            return super().__call__(query, keys, values, scale)
        keys, values = keys[:, : self._end], values[:, : self._end]
        places, depths = torch.arange(self.prefix).expand(KV_HEADS, -1), self.ancestors.sum(1) - 1
        wants = self.understood(wants)
        return dense(query, keys, values, self.ancestors, scale, wants, places, self.prefix + depths).to(query.dtype)


WIDE = AttentionSpec(600)
KINDS = {
    **WANTS,
    "usual sizes": AttentionSpec(128, 50.0, SINKS),
    "a wide window": WIDE,
    "a mild cap": AttentionSpec(softcap=50.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_attention_that_does_what_layers_want(served, name: str, dtype: torch.dtype) -> None:
    assert served(Wanting, (KV_HEADS, GROUP), KINDS[name], dtype) is None


LIES: dict[str, tuple[AttentionSpec, Callable[[Wanting, AttentionSpec], AttentionSpec]]] = {
    "no window": (WIDE, lambda self, wants: AttentionSpec()),
    "no soft cap": (KINDS["a mild cap"], lambda self, wants: AttentionSpec()),
    "no sinks": (WANTS["sinks"], lambda self, wants: AttentionSpec()),
    "a window that is wider by one": (KINDS["usual sizes"], lambda self, wants: replace(wants, window=129)),
    "a window that is narrower by one": (KINDS["usual sizes"], lambda self, wants: replace(wants, window=127)),
    "sinks of other heads": (WANTS["sinks"], lambda self, wants: replace(wants, sinks=wants.sinks.flip(0))),
    "in trees": (WIDE, lambda self, wants: AttentionSpec() if self.tree else wants),
    "in chains": (WIDE, lambda self, wants: wants if self.tree else AttentionSpec()),
    "in prompts": (WIDE, lambda self, wants: AttentionSpec() if len(self.ancestors) > 128 else wants),
    "in replayed passes": (WIDE, lambda self, wants: AttentionSpec() if self.static else wants),
    "in passes of their own": (WIDE, lambda self, wants: wants if self.static else AttentionSpec()),
    "below the window": (WIDE, lambda self, wants: wants if self.prefix >= 600 else replace(wants, window=20)),
    "above the window": (WIDE, lambda self, wants: AttentionSpec() if self.prefix > 600 else wants),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIES)
def test_attention_that_does_not_do_what_layers_want(served, monkeypatch, name: str, dtype: torch.dtype) -> None:
    wants, lie = LIES[name]
    monkeypatch.setattr(Wanting, "understood", lie)
    assert "own attention computes nonsense here (off by " in served(Wanting, (KV_HEADS, GROUP), wants, dtype)


def test_what_is_behind_the_length_shows_in_layers_that_want_something(served) -> None:
    class Beyond(Wanting):
        def __call__(self, query, keys, values, scale, wants=NOTHING):
            out = super().__call__(query, keys, values, scale, wants)
            return out + 0 * values[:, self._end :].sum() if wants else out

    assert "off by nan" in served(Beyond, (KV_HEADS, GROUP), WANTS["window"])
