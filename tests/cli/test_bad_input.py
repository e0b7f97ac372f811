"""Every bad input: one clear line on stderr, exit code 2, nothing on stdout, no folder left behind."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch

import tswift.engine as limits


def _one_line(result, expected: str) -> None:  # type: ignore[no-untyped-def]
    assert result.code == 2, result
    assert result.out == b""
    assert result.err.startswith(f"tswift: error: {expected}")
    assert result.err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--method ar --no-shared-noise", "--shared-noise: ar does not use it"),
        ("--method tokenswift --tree auto --ngrams 20", "--ngrams: tokenswift does not use it with --tree auto, but "),
        ("--tree 1,x", "--tree: wants auto, or numbers and commas, such as 1,3,3,3, got '1,x'"),
        ("--prompt /nowhere/prompt.txt", "--prompt: there is no file /nowhere/prompt.txt"),
        ("--model /etc/hostname", "--model: /etc/hostname is a file; give the folder it is in"),
        ("--model nobody/nothing", "--model: nobody/nothing cannot be loaded from the hub, and is no folder here"),
        ("--device tpu", "--device: no device 'tpu'"),
        ("--dtype int8", "--dtype: no dtype 'int8'; there are auto, float32, float64, bfloat16, float16"),
        ("--attention flash", "--attention: flash attention takes bfloat16 and float16, not float32"),
        ("--len 5 --out /proc/run", "--out: /proc/run cannot be written to"),
    ],
)
def test_options(tswift, prompt: Path, checkpoint: Path, words: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    defaults = {"--prompt": prompt, "--model": checkpoint}
    rest = [part for name, value in defaults.items() if name not in words for part in (name, value)]
    _one_line(tswift("generate", *rest, *words.split()), expected)


def test_empty_standard_input(tswift, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    _one_line(tswift("generate", "--model", checkpoint, "--prompt", "-"), "--prompt: standard input is empty")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--prefill 3000 --len 9", "--prefill: asks for 3,000 tokens, the prompt has "),
        ("--len 10000000", "--len: "),
        ("--method tokenswift --tree 1,2,2,2,2", "--tree: tokenswift can draft 4 levels with these heads, got 5"),
        ("--method tokenswift --gamma 9", "--gamma: must be between 0 and 3 for tokenswift, got 9"),
        ("--method medusa --gamma 0", "--gamma: must be between 1 and 3 for medusa, got 0"),
    ],
)
def test_what_only_the_model_can_tell(tswift, prompt: Path, checkpoint: Path, words: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    out = Path("runs") / "new"
    result = tswift("generate", "--model", checkpoint, "--prompt", prompt, "--out", out, *words.split())
    _one_line(result, expected)


def test_positions_are_told(tswift, prompt: Path, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    result = tswift("generate", "--model", checkpoint, "--prompt", prompt, "--prefill", 3, "--len", 4094)
    _one_line(result, "--len: at least 3 prompt tokens and 4,094 new ones need 4,097 positions, the model has 4,096")
    tokens = "--len: ([0-9]+) prompt tokens and 4,090 new ones need 4,1[0-9]+ positions, the model has 4,096"
    result = tswift("generate", "--model", checkpoint, "--prompt", prompt, "--len", 4090)
    assert re.fullmatch(f"tswift: error: {tokens}\n", result.err)


def test_memory(tswift, prompt: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(limits, "available_bytes", lambda device: 1_000_000)
    words = ("--model", checkpoint, "--prompt", prompt, "--method", "tokenswift")
    result = tswift("generate", *words, "--prefill", 2, "--len", 2000)
    _one_line(result, (
        "--len: weights 0.2 MB + heads 0.0 MB + KV 0.5 MB + drafting KV 1.0 MB + logits 0.1 MB = 1.8 MB, "
        "cpu has 1.0 MB free"
    ))  # fmt: skip
    monkeypatch.setattr(limits, "available_bytes", lambda device: 100_000)
    result = tswift("generate", "--model", checkpoint, "--prompt", prompt, "--len", 1, "--method", "ar")
    _one_line(result, "--model: weights 0.2 MB + heads 0.0 MB + KV 0.0 MB + logits 0.0 MB = ")


def test_cuda_where_there_is_none(tswift, prompt: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = tswift("generate", "--model", checkpoint, "--prompt", prompt, "--device", "cuda")
    _one_line(result, "--device: PyTorch finds 0 CUDA devices here, wanted cuda")


def test_never_overwrites(tswift, prompt: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "old"
    out.mkdir()
    (out / "text.txt").write_text("mine")
    result = tswift("generate", "--prompt", prompt, "--out", out)
    _one_line(result, f"--out: {out} is not empty")
    assert (out / "text.txt").read_text() == "mine"
