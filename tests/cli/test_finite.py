"""A model that gives NaN on the way: one line, exit code 1, and what was written stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def run(tswift, prompt: Path, checkpoint: Path, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    """A finished run of plain decoding."""
    words = ["--model", checkpoint, "--prompt", prompt, "--len", 60, "--seed", 5, "--method", "ar"]
    assert tswift("generate", *words, "--out", tmp_path / "run").code == 0
    return tmp_path / "run"


@pytest.fixture
def broken(run: Path, prompt: Path, checkpoint: Path, tmp_path: Path) -> tuple[Path, int]:
    """The model with NaN for the embedding of a token that the run wrote, and the place where that stands first."""
    prompted, tokens = (np.fromfile(run / name, "<u4").tolist() for name in ("prompt.u32", "tokens.u32"))
    place = next(at for at in range(10, 59) if tokens[at] not in [*prompted, *tokens[:at], *range(8)])
    model = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][tokens[place]] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model, place


def test_generate(tswift, run: Path, broken: tuple[Path, int], prompt: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """By each method: tests/decoding/test_finite.py."""
    model, place = broken
    words = ["--model", model, "--prompt", prompt, "--len", 60, "--seed", 5, "--method", "tokenswift", "--no-progress"]
    result = tswift("generate", *words, "--out", tmp_path / "again")
    assert result.code == 1
    prompted, tokens = (np.fromfile(run / name, "<u4").tolist() for name in ("prompt.u32", "tokens.u32"))
    at = len(prompted) + place
    assert result.err.splitlines()[-1] == (
        f"tswift: error: the logits for position {at + 1} are NaN; the first output that is not finite is that of "
        f"model.embed_tokens at position {at}: its weights are broken, or float32 is too narrow for the model; "
        f"{place + 1} tokens are saved in {tmp_path / 'again'}, "
        f"and tswift generate --resume {tmp_path / 'again'} goes on from there"
    )
    assert "Traceback" not in result.err
    assert np.fromfile(tmp_path / "again" / "tokens.u32", "<u4").tolist() == tokens[: place + 1]


def test_verify(tswift, run: Path, broken: tuple[Path, int], prompt: Path) -> None:  # type: ignore[no-untyped-def]
    model, place = broken
    at = len(np.fromfile(run / "prompt.u32", "<u4")) + place
    words = ["--model", model, "--prompt", prompt, "--tokens", run / "tokens.u32", "--seed", 5, "--quiet"]
    result = tswift("verify", *words)
    assert result.code == 1
    assert result.out == b""
    (line,) = result.err.splitlines()
    assert line.startswith("tswift: error: the logits for position ")
    assert f" are NaN; the first output that is not finite is that of model.embed_tokens at position {at}: " in line
