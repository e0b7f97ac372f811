"""Compiling a C file: once, in the cache, and in one line why not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from tests.conftest import make_checkpoint
from tests.rows import every_row
from tswift.attention import native
from tswift.attention.backends import choose, why_not
from tswift.attention.native import Unbuilt, build
from tswift.errors import InputError
from tswift.models.load import load

CPU = torch.device("cpu")
REASON = why_not("native", torch.float32, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path: Path):
    """An empty cache, and nothing loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native._attempted.cache_clear()
    yield
    native._attempted.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return ANSWER; }\n")
    return path


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "tswift").iterdir())


def again(source: Path, *defined: str) -> int:
    """As another process would."""
    native._attempted.cache_clear()
    return build(source, *defined).answer()


def no_compiler(monkeypatch) -> None:
    def refuse(command: list[str]) -> None:
        raise AssertionError(f"compiled again: {command}")

    monkeypatch.setattr(native, "_compile", refuse)


def test_it_is_compiled_once(monkeypatch, tmp_path: Path, source: Path) -> None:
    assert again(source, "ANSWER=42") == 42
    assert [path.name.split("-")[0] for path in kept(tmp_path)] == ["answer"]
    no_compiler(monkeypatch)
    assert again(source, "ANSWER=42") == 42


def test_another_macro_or_text_is_another_library(tmp_path: Path, source: Path) -> None:
    assert [again(source, "ANSWER=42"), again(source, "ANSWER=43")] == [42, 43]
    source.write_text("int answer(void) { return ANSWER + 1; }\n")
    assert again(source, "ANSWER=42") == 43
    assert len(kept(tmp_path)) == 3


def test_a_broken_file_in_the_cache_is_replaced(monkeypatch, tmp_path: Path, source: Path) -> None:
    assert again(source, "ANSWER=6") == 6
    (path,) = kept(tmp_path)
    path.unlink()  # the library is loaded, and would be loaded by its name
    path.write_bytes(b"half a librar")
    assert again(source, "ANSWER=6") == 6
    assert kept(tmp_path) == [path]
    assert path.stat().st_size > 100


@pytest.mark.parametrize("blocked", ["a file", "no permission"])
def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path: Path, source: Path, blocked: str) -> None:
    if blocked == "a file":
        (tmp_path / "cache").write_text("")
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        (tmp_path / "cache").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    assert again(source, "ANSWER=5") == 5
    assert not (tmp_path / "cache" / "tswift").exists()


@pytest.mark.parametrize(
    ("compiler", "line"),
    [
        ("no-such-compiler -x", "needs a C compiler: no-such-compiler (CC) is not there"),
        ("cc '", "needs a C compiler: CC cannot be read: No closing quotation"),
        ("false", "needs another C compiler: it says nothing"),
        ("true", "fails: what the C compiler made does not load"),
        ("sh -c 'echo broken >&2; echo more >&2; exit 3'", "needs another C compiler: broken"),
    ],
)
def test_compilers_that_do_not_serve(monkeypatch, source: Path, compiler: str, line: str) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(Unbuilt) as caught:
        build(source, "ANSWER=1")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_options_that_the_compiler_refuses_are_left_out(source: Path) -> None:
    assert build(source, "ANSWER=7", options=("-mno-such-vectors",)).answer() == 7


def test_without_a_compiler_the_stock_operators_serve(monkeypatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert choose("auto", torch.float32, CPU) == "sdpa"
    assert why_not("native", torch.float32, CPU) == (
        "native attention needs a C compiler: no-such-compiler (CC) is not there"
    )


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_a_models_own_head_size_is_built_before_it_is_loaded(monkeypatch, tmp_path: Path, broken: bool) -> None:
    """And no other; where that fails it is told, and not found out in a pass."""
    built, compiled = [], native._compile

    def noted(command: list[str]) -> None:
        built.extend(word for word in command if "WIDTH" in word)
        if broken:
            raise Unbuilt("needs another C compiler: broken")
        compiled(command)

    monkeypatch.setattr(native, "_compile", noted)
    native._kernel.cache_clear()
    model = str(make_checkpoint(tmp_path / "m", head_dim=32))
    assert load(model, device="cpu", dtype="float32").attention == ("sdpa" if broken else "native")
    if broken:
        with pytest.raises(InputError, match="attention: native attention needs another C compiler: broken"):
            load(model, device="cpu", dtype="float32", attention="native")
    assert set(built) == {"-DWIDTH=32"}


@every_row(("machine", "capability"), [("aarch64", "DEFAULT"), ("x86_64", "DEFAULT")])
def test_other_processors(monkeypatch, source: Path, machine: str, capability: str) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with pytest.raises(Unbuilt, match="needs an x86 processor with AVX2"):
        build(source, "ANSWER=1")
