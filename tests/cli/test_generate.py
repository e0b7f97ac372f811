"""``tswift generate`` on a tiny model: the same tokens from every method,
and files that say what happened.
"""

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
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.helpers import CPU, NO_PROGRAM, first, read_json
from tests.jobs.killing import Process
from tests.jobs.test_prompt import TEMPLATE
from tests.words import words_of
from tswift.attention.backends import choose
from tswift.decoding.pass_costs import PassCosts

pytestmark = pytest.mark.usefixtures("load_once")


@pytest.fixture
def words(checkpoint: Path, prompt: Path) -> str:
    return f"generate --model {checkpoint} --prompt {prompt}"


def decoded(checkpoint: Path, tokens: list[int]) -> str:
    return AutoTokenizer.from_pretrained(checkpoint).backend_tokenizer.decode(
        tokens, skip_special_tokens=False
    )


def tokens_in(folder: Path, name: str = "tokens") -> list[int]:
    return np.fromfile(folder / f"{name}.u32", "<u4").tolist()


def record_of(folder: Path):
    return read_json(folder / "run.json")


def test_run_json(tswift, prompt, checkpoint, tmp_path):
    out = tmp_path / "run"
    words = f"generate --model {checkpoint} --prompt {prompt} --prefill 7 --len 20"
    words += f" --seed 3 --method tokenswift --gamma 1 --out {out}"
    result = tswift(words).ok()
    run = record_of(out)
    ids = AutoTokenizer.from_pretrained(checkpoint)(prompt.read_text())["input_ids"][:7]
    assert (run["schema"], run["state"], run["command"]) == (
        2,
        "finished",
        ["tswift", *words_of([words])],
    )
    assert (run["options"]["seed"], run["options"]["length"], run["sampling"]["banned"]) == (
        3,
        20,
        [0],
    )
    assert (run["drafting"]["tree"], run["drafting"]["nodes"]) == ([1, 2], 8)
    model = run["model"]
    why = ", as its heads are of a size that native attention does not take"
    assert {len(model.pop(name)) for name in ("weights", "config", "tokenizer")} == {64}
    assert model == {
        "name": str(checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "attention": choose("auto", torch.float32, CPU),
        "layers": f"eager{why if NO_PROGRAM is None else ''}",
        "exact": None,
        "heads": "chained, 3",
        "eos_ids": [0],
        "simulated": False,
        "quantization": None,
    }
    digest = sha256(np.array(ids, "<u4").tobytes()).hexdigest()
    assert run["prompt"] == {"source": str(prompt), "tokens": 7, "sha256": digest}
    assert {"python", "torch", "transformers", "tswift", "platform", "cpu", "threads"} <= run[
        "environment"
    ].keys()
    figures = run["figures"]
    assert (figures["tokens"], figures["tokens_per_step"]) == (20, 20 / figures["target_passes"])
    assert sum(run["accepted"].values()) == figures["target_passes"]
    names = ["journal", "prompt.u32", "run.json", "text.txt", "tokens.u32"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert tokens_in(out, "prompt") == ids
    for said in (
        "tree 1,2",
        "float32",
        "KV memory",
        "prompt 7 tokens",
        "Distinct-1..4",
        "peak memory",
        "alpha",
    ):
        assert said in result.err


@pytest.mark.parametrize("second", [1.2, 1.6])
def test_a_machine_where_drafts_hardly_pay(tswift, words, monkeypatch, second):
    """It is told where a second node costs much, and drafts are chosen by what is measured."""
    costs = PassCosts((1, 2), (1e-3, second * 1e-3), (0.0, 0.0), 0.0)
    monkeypatch.setattr("tswift.engine.costs_of", lambda target, heads: costs)
    line = "takes 1.60 times one over one here: drafting pays only where more than 60% of"
    assert (line in tswift(words, "--len 3").err) == (second == 1.6)
    assert "drafting pays" not in tswift(words, "--len 3 --method ar").err


def test_quiet(tswift, words):
    result = tswift(words, "--len 3 --quiet")
    assert (result.code, result.err) == (0, "")
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("Z-auto")
    assert (folder / "text.txt").read_bytes() == result.out


def test_progress_lines(tswift, words, monkeypatch):
    words += " --len 3 --method ar"
    assert "/ 3 tokens" not in tswift(words).err  # one every 30 seconds
    monkeypatch.setattr("tswift.cli.output._LOG_SECONDS", 0.0)
    assert "tswift: 2 / 3 tokens, " in tswift(words).err
    unsaid = tswift(words, "--no-progress").err
    assert "/ 3 tokens" not in unsaid
    assert "Distinct" in unsaid


def test_standard_input(tswift, words, prompt, monkeypatch):
    words += " --len 8 --method ar"
    from_file = tswift(words)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.read_bytes())))
    assert tswift(words, "--prompt -").out == from_file.out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert tswift(words, "--prompt -").err == "tswift: error: --prompt: standard input is empty\n"


@pytest.mark.slow
def test_the_bundled_model_goes_on_with_the_bundled_novel_and_others_with_a_prompt(
    tswift, checkpoint, tmp_path
):
    tswift(f"generate --len 1 --method ar --out {tmp_path}/demo").ok()
    found = record_of(tmp_path / "demo")["prompt"]
    assert (found["source"], found["tokens"]) == ("bundled", 1024)
    words = f"generate --model {checkpoint} --len 5 --method ar --out {tmp_path}/run"
    result = tswift(words)
    assert result.code == 2
    assert result.err.startswith("tswift: error: --prompt: required for ")
    tswift(words, "--prompt-text", "Once upon a time").ok()
    assert record_of(tmp_path / "run")["prompt"]["source"] == "prompt_text"


def test_ctrl_c_keeps_what_was_made(tswift, checkpoint, words, tmp_path):
    out = tmp_path / "run"
    process = Process([words, f"--len 4000 --method ar --out {out}"], tmp_path / "text")
    process.begin()
    process.send(signal.SIGINT)
    assert process.wait(300) == 130, process.errors.read_text()
    err = process.errors.read_text()
    assert "Traceback" not in err
    assert "stopped by SIGINT; " in err
    assert "tokens are saved in" in err
    tokens = tokens_in(out)
    run = record_of(out)
    assert run["state"] == "interrupted"
    assert run["figures"]["tokens"] == len(tokens) < 4000
    assert (
        (out / "text.txt").read_bytes()
        == process.output.read_bytes()
        == decoded(checkpoint, tokens).encode()
    )
    found = tswift(f"verify {out} --json -")
    assert (found.code, found.json["tokens"]) == (0, len(tokens))


@pytest.mark.slow
def test_a_closed_pipe_ends_the_run_quietly(words, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-c", "import sys; from tswift.cli import main; sys.exit(main())"]
    command += words_of([f"{words} --len 4000 --method ar --out {out}"])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=300) == 141, err
    assert b"rror" not in err
    run = record_of(out)
    assert run["state"] == "interrupted"
    assert run["figures"]["tokens"] == len(tokens_in(out)) < 4000


# --- presets and chat models


def test_a_preset_with_another_model_and_without_the_hub(tswift, words, prompt, tmp_path):
    more = f"--len 12 --preset llama3.1-8b --method ar --out {tmp_path}/a"
    tswift(f"generate --prompt {prompt}", more).refused(
        "no folder 'TokenSwift/TokenSwift-Llama-3.1-8B', and the hub is unreachable"
    )
    assert not (tmp_path / "a").exists()
    result = tswift(words, more).ok()
    assert (
        "llama3.1-8b; its banned ids mean something else to this tokenizer, and are left out\n"
        in result.err
    )
    assert record_of(tmp_path / "a")["sampling"]["banned"] == [0]  # end of text


def test_a_chat(tswift, checkpoint, prompt, tmp_path):
    """By a tokenizer that begins every text with a token."""
    model, system = tmp_path / "chatty", tmp_path / "system.txt"
    shutil.copytree(checkpoint, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    first = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = first
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    system.write_text("Be brief.")
    words = f"generate --no-progress --prompt {prompt} --model {model} --chat --system {system}"
    tswift(words, f"--len 30 --out {tmp_path}/a").ok()
    ids = tokens_in(tmp_path / "a", "prompt")
    text = f"<|endoftext|>[system]Be brief.\n[user]{prompt.read_text()}\n[assistant]"
    assert tokenizer.decode(ids) == text
    # the first token is the template's alone, although the tokenizer begins every text with it
    assert tokenizer(text)["input_ids"] == [0, *ids]
    assert ids.count(0) == 1
    # a run that stopped goes on with the same prompt
    tswift(words, f"--len 9 --out {tmp_path}/b").ok()
    system.unlink()
    tswift(f"generate --no-progress --resume {tmp_path}/b --len 30 --chat").ok()
    assert tokens_in(tmp_path / "b") == tokens_in(tmp_path / "a")


@pytest.fixture
def chatty(checkpoint: Path, tmp_path) -> Path:
    """A chat model, whose authors recommend how to sample."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "recommending"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    own = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "eos_token_id": 0,
    }
    (model / "generation_config.json").write_text(json.dumps(own))
    return model


OWN = {
    "temperature": 0.6,
    "top_k": 0,
    "top_p": 0.9,
    "min_p": 0.0,
    "penalty": 1.0,
    "repetition_penalty": 1.1,
}
PAPERS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.1,
    "penalty": 1.2,
    "window": 1024,
}
LLAMA_CPPS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
LLAMA = "llama.cpp's"
IN_WORDS = {
    LLAMA: "temperature 0.8, min-p 0.05, top-k 40, top-p 0.95",
    "the model's own": "temperature 0.6, top-p 0.9, repetition penalty 1.1",
    "the paper's": "temperature 1, min-p 0.1, penalty 1.2 over 1,024 tokens",
}


@pytest.mark.parametrize(
    ("typed", "sampling", "source"),
    first(
        2,
        [
            ("", PAPERS, "the paper's"),
            ("--chat", OWN, "the model's own"),
            ("--sampling model", OWN, "the model's own"),
            ("--chat --sampling paper", PAPERS, "the paper's"),
        ],
    ),
    ids=str,
)
def test_sampling_that_is_not_typed(
    tswift,
    chatty,
    prompt,
    tmp_path,
    typed,
    sampling,
    source,
):
    """It is said, recorded, kept when the run goes on, and judged by."""
    words = f"generate --no-progress --prompt {prompt} --model {chatty}"
    result = tswift(words, f"--len 40 {typed} --out {tmp_path}/a").ok()
    assert f"tswift: sampling: {IN_WORDS[source]} ({source})\n" in result.err
    assert {name: record_of(tmp_path / "a")["sampling"][name] for name in sampling} == sampling
    tswift(f"verify {tmp_path}/a").ok()
    tswift(words, f"--len 15 {typed} --out {tmp_path}/b").ok()
    again = tswift(f"generate --no-progress --resume {tmp_path}/b --len 40 {typed}").ok()
    assert f"({source})\n" in again.err
    assert tokens_in(tmp_path / "b") == tokens_in(tmp_path / "a")
    other = "paper" if sampling is OWN else "model"
    tswift(f"generate --resume {tmp_path}/b --len 50 --sampling {other}").refused(
        "--sampling: the run was made with"
    )


def test_what_is_typed_goes_before_the_models_own(tswift, chatty, prompt, tmp_path):
    words = f"generate --no-progress --prompt {prompt} --model {chatty} --len 5 --chat"
    result = tswift(words, f"--temperature 0.8 --penalty 1.2 --window 64 --out {tmp_path}/a").ok()
    assert (
        "sampling: temperature 0.8, top-p 0.9, penalty 1.2 over 64 tokens, repetition penalty 1.1 "
        "(the model's own, but for" in result.err
    )
    result = tswift(words, f"--preset qwen2.5-7b --out {tmp_path}/b").ok()
    assert (
        "sampling: temperature 1, min-p 0.05, penalty 1.15 over 1,024 tokens (of preset qwen2.5-7b)"
        in result.err
    )


def test_llama_cpps_sampling_where_a_model_recommends_none(tswift, chatty, prompt, tmp_path):
    (chatty / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    words = f"generate --no-progress --prompt {prompt} --model {chatty} --chat"
    said = tswift(words, f"--len 5 --out {tmp_path}/a").err
    assert f"{IN_WORDS[LLAMA]} ({LLAMA})\n" in said
    record = record_of(tmp_path / "a")
    assert record["options"]["sampling_from"] == "llama.cpp"
    assert {name: record["sampling"][name] for name in LLAMA_CPPS} == LLAMA_CPPS
    again = tswift(f"generate --no-progress --resume {tmp_path}/a --len 9").err
    assert f"{IN_WORDS[LLAMA]} ({LLAMA})\n" in again
    asked = tswift(words, f"--len 5 --out {tmp_path}/b --sampling model").err
    assert "sampling: temperature 1 (the model's own)\n" in asked


@pytest.mark.parametrize(
    ("typed", "penalty"),
    first(
        2,
        [
            ("--chat", 1.0),
            ("", 1.0),
            ("--chat --sampling paper", 1.0),
            ("--preset qwen2.5-7b --method ar", 1.0),
            ("--chat --penalty 1.3", 1.3),
            ("--penalty 1.2", 1.2),
        ],
    ),
    ids=str,
)
def test_temperature_0_has_no_penalty_that_was_not_typed(
    tswift, chatty, prompt, tmp_path, typed, penalty
):
    words = f"generate --no-progress --prompt {prompt} --model {chatty} --len 5"
    result = tswift(words, f"--temperature 0 {typed} --out {tmp_path}/a").ok()
    said = "the most likely token" + (f", penalty {penalty}" if penalty > 1 else "")
    assert f"tswift: sampling: {said}" in result.err
    drawn = record_of(tmp_path / "a")["sampling"]
    assert (drawn["temperature"], drawn["penalty"]) == (0, penalty)
    tswift(f"verify {tmp_path}/a").ok()


def test_a_chat_ends_with_its_answer(tswift, chatty, tmp_path):
    """Which has no special tokens; and what a file says ends before its last newline."""
    said = tmp_path / "said.txt"
    said.write_text("The ship\r\n")
    words = f"generate --model {chatty} --chat --len 200 --logit-bias 0=3 --quiet"
    runs = {
        "text": ("--prompt-text", "The ship"),
        "file": ("--prompt", said),
        "kept": ("--prompt", said, "--keep-special-tokens"),
        "on": ("--prompt", said, "--no-stop-at-eos"),
    }
    out = {name: tswift(words, *own, f"--out {tmp_path}/{name}").out for name, own in runs.items()}
    assert record_of(tmp_path / "text")["end"] == {"reason": "eos"}
    assert record_of(tmp_path / "on")["end"] == {"reason": "length"}
    assert tokens_in(tmp_path / "file", "prompt") == tokens_in(tmp_path / "text", "prompt")
    tokens = tokens_in(tmp_path / "text")
    assert tokens == tokens_in(tmp_path / "file") == tokens_in(tmp_path / "kept")
    assert (tokens[-1], len(tokens) < 200) == (0, True)
    assert out["text"] == out["file"] == (tmp_path / "text" / "text.txt").read_bytes()
    assert out["kept"] == out["text"] + b"<|endoftext|>"
    for name in ("text", "kept"):
        tswift(f"verify {tmp_path}/{name}").ok()
        again = tswift(f"generate --resume {tmp_path}/{name}")
        assert (again.code, "is finished" in again.err) == (0, True)


@pytest.mark.slow
def test_yarn_is_part_of_what_is_resumed(tswift, chatty, prompt, tmp_path):
    words = f"generate --no-progress --prompt {prompt} --model {chatty} --method ar --yarn 4"
    for name, count in (("whole", 40), ("part", 15)):
        tswift(words, f"--len {count} --out {tmp_path}/{name}").ok()
    tswift(f"generate --resume {tmp_path}/part --len 40 --yarn 2").refused(
        "--yarn: the run was made with 4"
    )
    tswift(f"generate --no-progress --resume {tmp_path}/part --len 40").ok()
    assert tokens_in(tmp_path / "part") == tokens_in(tmp_path / "whole")
    tswift(f"verify {tmp_path}/part").ok()


def test_what_a_model_recommends_and_cannot_be_had(tswift, chatty, prompt, tmp_path):
    (chatty / "generation_config.json").write_text(json.dumps({"do_sample": True, "min_p": 1.5}))
    words = f"generate --no-progress --prompt {prompt} --model {chatty} --len 5 --chat"
    tswift(words, f"--out {tmp_path}/a").refused(
        "--sampling: ", "generation_config.json", "min_p must be between 0 and 1, got 1.5"
    )
    assert not (tmp_path / "a").exists()
    tswift(words, f"--out {tmp_path}/a --sampling paper").ok()


# --- a model that gives NaN on the way: one line, exit code 1, and what was written stays


def test_weights_that_are_not_finite(tswift, words, checkpoint, prompt, tmp_path):
    """A token's embedding, where the text has that token; by each method:
    tests/decoding/test_finite.py.
    """
    words += " --seed 5 --no-progress --len 60"
    tswift(words, f"--method ar --out {tmp_path}/run").ok()
    prompted, tokens = tokens_in(tmp_path / "run", "prompt"), tokens_in(tmp_path / "run")
    place = next(
        at for at in range(10, 59) if tokens[at] not in [*prompted, *tokens[:at], *range(8)]
    )
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    at = len(prompted) + place
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][tokens[place]] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    words = words.replace(str(checkpoint), str(broken))
    again = tmp_path / "once again"
    result = tswift(words, f"--method tokenswift --out '{again}'")
    first = (
        "are NaN; the first output that is not finite is that of model.embed_tokens at position "
        f"{at}: "
    )
    assert result.code == 1
    assert result.err.splitlines()[-1] == (
        f"tswift: error: the logits for position {at + 1} {first}its weights are broken, or "
        f"float32 is too narrow for the model; {place + 1} tokens are saved in {again}, and "
        f"tswift generate --resume '{again}' goes on from there"
    )
    assert "Traceback" not in result.err
    assert tokens_in(again) == tokens[: place + 1]
    words = f"verify --model {broken} --prompt {prompt} --seed 5 --no-progress"
    checked = tswift(words, f"--tokens {tmp_path}/run/tokens.u32")
    assert (checked.code, checked.out, checked.err.count("\n")) == (1, b"", 1)
    assert checked.err.startswith("tswift: error: the logits for position ")
    assert first in checked.err
