"""What checks of a model found is remembered, as long as nothing that it depends on is another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tswift
from tests.helpers import needs_program, refused
from tests.models.gguf_files import tiny_model, write_gguf
from tswift import remembered
from tswift.errors import SlowWarning
from tswift.forward import adapting, exact_passes
from tswift.loading import model as loading
from tswift.stages import listening

pytestmark = needs_program


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny Llama in Q8_0."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama"))


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """Where it is remembered."""
    monkeypatch.setattr(remembered, "cache_folder", lambda: tmp_path)
    return tmp_path / "checks"


def stages(model: Path, **options: str) -> tuple[list[str], str | None, list[int]]:
    """What was told while a model was loaded, the hash of its passes, and a text of it."""
    told: list[str] = []
    with listening(told.append):
        loaded = tswift.load(str(model), **options)
    text = list(tswift.generate(loaded, "the", 20, seed=1))[-1].tokens
    return (
        [stage for stage in told if stage.split()[0] in ("comparing", "checking")],
        loaded.exact,
        text,
    )


def test_checks_are_made_once(model):
    """What was remembered gives the same passes and tokens; each dtype has checks of its own."""
    first, bits, text = stages(model)
    assert [stage.split()[0] for stage in first] == ["comparing", "checking"]
    assert stages(model) == ([], bits, text)
    assert len(stages(model, kv_dtype="float32")[0]) == 2


def _weights(model: Path, patch: pytest.MonkeyPatch):
    content = bytearray(model.read_bytes())
    content[-64] ^= 1  # a code of the last matrix
    model.write_bytes(content)


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "sources": lambda model, patch: patch.setattr(remembered, "_sources", lambda: "others"),
    "processor": lambda model, patch: patch.setattr(remembered, "_processor", lambda: "another"),
    "libraries": lambda model, patch: patch.setattr(torch, "__version__", "2.99"),
    "a setting": lambda model, patch: patch.setenv("MKL_CBWR", "AVX2"),
    "weights": _weights,  # which stay so
}


def test_what_it_depends_on(model, tmp_path, monkeypatch):
    own = Path(shutil.copy(model, tmp_path))
    stages(own)
    for name, change in CHANGES.items():
        with monkeypatch.context() as patch:
            change(own, patch)
            assert len(stages(own)[0]) == 2, name


def test_a_broken_file_is_as_none(model, kept):
    stages(model)
    (file,) = kept.iterdir()
    for content in ("{", '{"logits": 1}', "[" * 100_000):
        file.write_text(content)
        with pytest.warns(SlowWarning, match=r"\.json is broken: it is made anew$") as told:
            assert len(stages(model)[0]) == 2
        assert len(told) == 1


def test_what_failed_is_tried_again(model, kept, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(adapting, "_apart", lambda *given: 9.0)
        with refused("logits differ"):
            tswift.load(str(model))
    assert not kept.exists()
    with monkeypatch.context() as patch:  # as where there is no compiler
        patch.setattr(
            adapting, "_try_program", lambda target, *given: target.fallbacks.note("layers", "x")
        )
        assert len(stages(model)[0]) == 2
    assert len(stages(model)[0]) == 2
    shutil.rmtree(kept)
    with monkeypatch.context() as patch:
        patch.setattr(
            loading, "fingerprint", lambda target: (_ for _ in ()).throw(exact_passes.Inexact("x"))
        )
        assert stages(model)[1] is None
    assert stages(model)[1] is not None
