"""``tswift generate`` with presets, and with chat models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.jobs.test_chat import TEMPLATE

QUIET = ("--no-progress", "--len", 12)


def tokens(folder: Path, name: str = "tokens") -> list[int]:
    return np.fromfile(folder / f"{name}.u32", "<u4").tolist()


@pytest.fixture
def chatty(checkpoint: Path, tmp_path: Path) -> Path:
    """A model with a chat template, and a tokenizer that begins every text with a token."""
    folder = tmp_path / "chatty"
    shutil.copytree(checkpoint, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = first
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_preset_where_nothing_is_typed(tswift, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("generate", *QUIET, "--prompt", prompt, "--model", checkpoint, "--method", "tokenswift")
    words += ("--preset", "qwen2.5-7b")
    result = tswift(*words, "--out", tmp_path / "a", "--min-p", 0.02, "--ngrams", 7)
    assert result.code == 0, result.err
    assert "tswift: preset qwen2.5-7b; but for --model, --min-p, --ngrams\n" in result.err
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    sampling = {name: record["sampling"][name] for name in ("min_p", "penalty", "top_p", "window", "temperature")}
    assert sampling == {"min_p": 0.02, "penalty": 1.15, "top_p": 1.0, "window": 1024, "temperature": 1.0}
    assert (record["drafting"]["tree"], record["drafting"]["ngrams"]) == ([1, 3, 3, 3], 7)
    same = ("--min-p", 0.02, "--penalty", 1.15, "--tree", "1,3,3,3", "--ngrams", 7)
    tswift(*words[:-2], *same, "--out", tmp_path / "b")
    assert tokens(tmp_path / "a") == tokens(tmp_path / "b")


def test_ids_that_mean_something_else_are_not_banned(tswift, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("--model", checkpoint, "--preset", "llama3.1-8b", "--method", "ar", "--out", tmp_path / "a")
    result = tswift("generate", *QUIET, "--prompt", prompt, *words)
    assert result.code == 0, result.err
    assert "but for --model; its banned ids mean something else to this tokenizer, and are left out\n" in result.err
    assert json.loads((tmp_path / "a" / "run.json").read_text())["sampling"]["banned"] == [0]  # end of text


def test_the_model_of_a_preset_needs_the_hub(tswift, prompt: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("--preset", "llama3.1-8b", "--prompt", prompt, "--out", tmp_path / "a")
    result = tswift("generate", *QUIET, *words)
    assert result.code == 2
    assert "TokenSwift/TokenSwift-Llama-3.1-8B cannot be loaded from the hub" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_a_chat(tswift, chatty: Path, prompt: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    system = tmp_path / "system.txt"
    system.write_text("Be brief.")
    words = ("generate", "--no-progress", "--prompt", prompt, "--model", chatty, "--chat", "--system", system)
    result = tswift(*words, "--len", 30, "--out", tmp_path / "a")
    assert result.code == 0, result.err
    ids = tokens(tmp_path / "a", "prompt")
    text = f"<|endoftext|>[system]Be brief.\n[user]{prompt.read_text()}\n[assistant]"
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    assert tokenizer.decode(ids) == text
    # the first token is the template's alone, although the tokenizer begins every text with it
    assert tokenizer(text)["input_ids"] == [0, *ids]
    assert ids.count(0) == 1
    # a run that stopped goes on with the same prompt
    assert tswift(*words, "--len", 9, "--out", tmp_path / "b").code == 0
    system.unlink()
    assert tswift("generate", "--no-progress", "--resume", tmp_path / "b", "--len", 30, "--chat").code == 0
    assert tokens(tmp_path / "b") == tokens(tmp_path / "a")
