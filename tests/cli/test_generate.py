"""``tswift generate`` on a tiny model: the same tokens from every method, and files that say what happened."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.jobs.killing import Process
from tests.jobs.test_prompt import TEMPLATE
from tswift.attention.backends import choose
from tswift.decoding.sampling import row_type

METHODS = ["ar", "medusa", "tokenswift", "reuse"]
LENGTH = 61
FLOAT64 = ["--dtype", "float64", "--temperature", "1.3", "--min-p", "0"]


def _decoded(checkpoint: Path, tokens: list[int]) -> str:
    return AutoTokenizer.from_pretrained(checkpoint).backend_tokenizer.decode(tokens, skip_special_tokens=False)


def test_all_methods_make_the_same_files(tswift, prompt: Path, checkpoint: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ["generate", "--model", checkpoint, "--prompt", prompt, "--len", LENGTH, "--seed", 5, *FLOAT64]
    outs = {}
    for method in METHODS:
        result = tswift(*words, "--method", method, "--out", tmp_path / method)
        assert result.code == 0, result.err
        outs[method] = (tmp_path / method / "tokens.u32").read_bytes()
        text = (tmp_path / method / "text.txt").read_bytes()
        assert result.out == text
        assert text.decode() == _decoded(checkpoint, np.frombuffer(outs[method], "<u4").tolist())
    assert len(outs["ar"]) == 4 * LENGTH
    assert len(set(outs.values())) == 1
    assert 0 not in np.frombuffer(outs["ar"], "<u4")  # the end-of-text token is never drawn


def test_stop_strings_and_log_probabilities(tswift, prompt: Path, checkpoint: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ["generate", "--model", checkpoint, "--prompt", prompt, "--len", LENGTH, "--seed", 5, *FLOAT64]
    assert tswift(*words, "--out", tmp_path / "whole").code == 0
    whole = (tmp_path / "whole" / "text.txt").read_text()
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["end"] == {"reason": "length"}
    stop = next(whole[at : at + 3] for at in range(20, 60) if "\ufffd" not in whole[at : at + 3])
    found = {}
    for method in METHODS:
        out = tmp_path / method
        result = tswift(*words, "--method", method, "--stop", "never", "--stop", stop, "--logprobs", 3, "--out", out)
        assert result.code == 0, result.err
        assert f"ended at       {stop!r}"[:9] in result.err
        assert result.out.decode() == (out / "text.txt").read_text() == whole[: whole.index(stop)]
        run = json.loads((out / "run.json").read_text())
        assert (run["end"], run["state"]) == ({"reason": "stop", "string": stop}, "finished")
        assert (run["options"]["stop"], run["options"]["logprobs"]) == (["never", stop], 3)
        found[method] = np.fromfile(out / "tokens.u32", "<u4"), np.fromfile(out / "logprobs.bin", row_type(3))
        assert stop in _decoded(checkpoint, found[method][0].tolist())
        assert stop not in _decoded(checkpoint, found[method][0][:-1].tolist()).rstrip("\ufffd")
        assert found[method][0].tolist() == found["ar"][0].tolist()
        np.testing.assert_allclose(found[method][1]["warped"], found["ar"][1]["warped"], rtol=0, atol=1e-9)
        assert len(found[method][1]) == len(found[method][0])
    again = tswift("generate", "--resume", tmp_path / "ar")
    assert (again.code, again.out) == (0, b"")
    assert "is finished" in again.err


def test_run_json(tswift, prompt: Path, checkpoint: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "run"
    words = ["generate", "--model", str(checkpoint), "--prompt", str(prompt), "--prefill", "7", "--len", "20"]
    words += ["--seed", "3", "--method", "tokenswift", "--gamma", "1", "--out", str(out)]
    result = tswift(*words)
    assert result.code == 0, result.err
    run = json.loads((out / "run.json").read_text())
    ids = AutoTokenizer.from_pretrained(checkpoint)(prompt.read_text())["input_ids"][:7]
    assert run["schema"] == 2
    assert run["state"] == "finished"
    assert run["command"] == ["tswift", *words]
    assert run["options"]["seed"] == 3
    assert run["options"]["length"] == 20
    assert run["sampling"]["banned"] == [0]
    assert run["drafting"]["tree"] == [1, 2]
    assert run["drafting"]["nodes"] == 8
    assert {"weights", "config"} <= run["model"].keys()
    assert {name: value for name, value in run["model"].items() if name not in ("weights", "config")} == {
        "name": str(checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "attention": choose("auto", torch.float32, torch.device("cpu")),
        "layers": "eager",
        "exact": None,
        "heads": "chained, 3",
        "eos_ids": [0],
        "simulated": False,
        "quantization": None,
        "ranks": 1,
    }
    assert run["prompt"]["tokens"] == 7
    assert run["prompt"]["sha256"] == sha256(np.array(ids, "<u4").tobytes()).hexdigest()
    assert {"python", "torch", "transformers", "tswift", "platform", "cpu", "threads"} <= run["environment"].keys()
    figures = run["figures"]
    assert figures["tokens"] == 20
    assert figures["tokens_per_step"] == 20 / figures["target_passes"]
    assert sum(run["accepted"].values()) == figures["target_passes"]
    assert sorted(path.name for path in out.iterdir()) == [
        *("journal", "prompt.u32", "run.json", "text.txt", "tokens.u32")
    ]
    assert np.fromfile(out / "prompt.u32", "<u4").tolist() == ids
    for said in ("tree 1,2", "float32", "KV memory", "prompt 7 tokens", "Distinct-1..4", "peak memory", "alpha"):
        assert said in result.err


def test_quiet(tswift, prompt: Path, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    result = tswift("generate", "--model", checkpoint, "--prompt", prompt, "--len", 3, "--quiet")
    assert result.code == 0
    assert result.err == ""
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("Z-auto")
    assert (folder / "text.txt").read_bytes() == result.out


def test_progress_lines(tswift, prompt: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tswift.cli.output._LOG_SECONDS", 0.0)
    words = ["generate", "--model", checkpoint, "--prompt", prompt, "--len", 3, "--method", "ar"]
    assert "tswift: 2 / 3 tokens, " in tswift(*words).err
    unsaid = tswift(*words, "--no-progress").err
    assert "/ 3 tokens" not in unsaid
    assert "Distinct" in unsaid


def test_standard_input(tswift, prompt: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    words = ["generate", "--model", checkpoint, "--len", 8, "--method", "ar", "--prompt"]
    from_file = tswift(*words, prompt)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.read_bytes())))
    assert tswift(*words, "-").out == from_file.out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert tswift(*words, "-").err == "tswift: error: --prompt: standard input is empty\n"


def test_the_bundled_model_goes_on_with_the_bundled_novel(tswift, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ["generate", "--len", 1, "--method", "ar", "--out", tmp_path / "run"]
    assert tswift(*words).code == 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["prompt"]["source"], run["prompt"]["tokens"]) == ("bundled", 1024)


def test_another_model_is_asked_for_a_prompt(tswift, checkpoint: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ["generate", "--model", checkpoint, "--len", 5, "--method", "ar", "--out", tmp_path / "run"]
    result = tswift(*words)
    assert result.code == 2
    assert result.err.startswith("tswift: error: --prompt: names a text for ")
    assert tswift(*words, "--prompt-text", "Once upon a time").code == 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["prompt"]["source"] == "prompt_text"
    both = tswift(*words, "--prompt-text", "Once", "--prompt", "x")
    assert both.err == "tswift: error: --prompt-text: cannot be given together with --prompt\n"


def _without_end(checkpoint: Path, prompt: Path, out: Path) -> list[object]:
    return ["generate", "--model", checkpoint, "--prompt", prompt, "--len", 4000, "--method", "ar", "--out", out]


def test_ctrl_c_keeps_what_was_made(tswift, checkpoint: Path, prompt: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "run"
    process = Process(_without_end(checkpoint, prompt, out), tmp_path / "text")
    process.begin()
    process.send(signal.SIGINT)
    assert process.wait(300) == 130, process.errors.read_text()
    err = process.errors.read_text()
    assert "Traceback" not in err
    assert "stopped by SIGINT; " in err
    assert "tokens are saved in" in err
    tokens = np.fromfile(out / "tokens.u32", "<u4").tolist()
    run = json.loads((out / "run.json").read_text())
    assert run["state"] == "interrupted"
    assert run["figures"]["tokens"] == len(tokens) < 4000
    assert (out / "text.txt").read_bytes() == process.output.read_bytes() == _decoded(checkpoint, tokens).encode()
    found = tswift("verify", out, "--json", "-")
    assert (found.code, json.loads(found.out)["tokens"]) == (0, len(tokens))


@pytest.mark.slow
def test_a_closed_pipe_ends_the_run_quietly(checkpoint: Path, prompt: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", "import sys; from tswift.cli import main; sys.exit(main())"]
    command += map(str, _without_end(checkpoint, prompt, out))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=300) == 141, err
    assert b"Traceback" not in err
    assert b"rror" not in err
    run = json.loads((out / "run.json").read_text())
    assert run["state"] == "interrupted"
    assert run["figures"]["tokens"] == (out / "tokens.u32").stat().st_size // 4 < 4000


# ---------------------------------------------------------------------------------------------------------------------
# presets and chat models


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
    assert "tswift: preset qwen2.5-7b\n" in result.err
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
    assert "llama3.1-8b; its banned ids mean something else to this tokenizer, and are left out\n" in result.err
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
