"""Commands on models whose weights are integers: of a GGUF file,
or rounded when they were loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cli.bad_inputs.runs import record as edited
from tests.cli.conftest import TEXT
from tests.cli.conftest import tswift as tswift
from tests.helpers import first, needs_program, read_json
from tests.models.gguf_files import tiny_model, write_gguf
from tswift import native_build
from tswift.loading import packing


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where rounded weights are kept."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(packing, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What failed for want of a compiler is tried again."""
    yield
    native_build._attempted.cache_clear()


@pytest.fixture(params=first(1, ["GGUF", "--weights int4"]))
def model(request, checkpoint: Path, tmp_path) -> str:
    """Words that name such a model."""
    if request.param == "GGUF":
        return f"--model {write_gguf(tmp_path / 'tiny.gguf', tiny_model('llama'))}"
    return f"--model {checkpoint} --weights int4"


def tokens(run: Path) -> list[int]:
    return np.fromfile(run / "tokens.u32", "<u4").tolist()


@pytest.mark.slow
def test_heads_that_are_trained_for_it(model, tswift, tmp_path):
    (tmp_path / "corpus").mkdir()
    for name in "abcd":
        (tmp_path / "corpus" / f"{name}.txt").write_text(f"{TEXT} {name}\n" * 40)
    where = f"--corpus {tmp_path}/corpus --out {tmp_path}/heads --steps 2 --seq-len 128"
    tswift(
        "train", model.removesuffix(" --weights int4"), where
    ).ok()  # heads of the plain model serve the rounded one
    words = f"generate {model} --prompt-text '{TEXT}' --len 80 --quiet"
    tswift(words, f"--method ar --out {tmp_path}/plain").ok()
    heads = f"--heads {tmp_path}/heads --method medusa"
    tswift(words, heads, f"--out {tmp_path}/run").ok()
    assert tokens(tmp_path / "run") == tokens(tmp_path / "plain")


@pytest.mark.slow
def test_other_commands(model, tswift, tmp_path):
    (tmp_path / "prompt.txt").write_text(TEXT)
    prompt = f"--prompt {tmp_path}/prompt.txt --len 40"
    tswift("compare", model, prompt, "--methods reuse,auto").ok()
    tswift(
        *["bench", model, f"--prompts {tmp_path}/prompt.txt --prefill 8 --lens 16"],
        f"--methods reuse --out {tmp_path}/bench --no-progress",
    ).ok()
    tswift("env", model).ok()
    if "--weights" not in model:
        known = "--bandwidth 100 --flops 10 --len 100 --prefill 8"
        tswift("roofline", model, known).ok()


MADE_BY = {
    "a compiler": "a C program's products of integers",
    "none": "PyTorch's products of floats",
}


@needs_program
@pytest.mark.parametrize(("made", "here"), [("a compiler", "none"), ("none", "a compiler")])
def test_a_run_with_a_compiler_does_not_go_on_without_and_the_other_way_round(
    made, here, tswift, tmp_path, monkeypatch
):
    """The text would be another; nor is it judged by what did not make it."""

    def on_a_machine_with(compiler):
        monkeypatch.delenv("CC", raising=False)
        if compiler == "none":
            monkeypatch.setenv("CC", "no-such-compiler")
        native_build._attempted.cache_clear()

    run = tmp_path / "run"
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    on_a_machine_with(made)
    words = f"--model {file} --prompt-text '{TEXT}' --len 20 --quiet --out {run}"
    tswift("generate", words).ok()
    before = tokens(run)
    record = read_json(run / "run.json")
    assert record["model"]["products"] == MADE_BY[made].split()[-1]
    layers = "one C program" if made == "a compiler" else "eager, as native attention needs a C"
    assert record["model"]["layers"].startswith(layers)
    on_a_machine_with(here)
    for command in (f"generate --len 30 --resume {run}", f"verify {run}"):
        result = tswift(command)
        assert result.code == 2
        assert result.err.splitlines()[-1] == (
            f"tswift: error: --model: {run} was made with {MADE_BY[made]}; here are "
            f"{MADE_BY[here]}, which make another text"
        )
        assert tokens(run) == before
    on_a_machine_with(made)
    if made == "a compiler":  # as all runs were before they said so
        edited(lambda told: told["model"].pop("products"))(run)
    tswift(f"generate --len 30 --resume {run}").ok()
    assert tokens(run)[:20] == before
    tswift(f"verify {run}").ok()


def test_a_run_of_a_gpu_does_not_go_on_here(tswift, tmp_path):
    run = tmp_path / "run"
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    words = f"--model {file} --prompt-text '{TEXT}' --len 20 --quiet --out {run}"
    tswift("generate", words).ok()
    edited(lambda told: told["model"].update(products="kernels"))(run)
    for command in (f"generate --len 30 --resume {run}", f"verify {run}"):
        result = tswift(command)
        assert result.code == 2
        said = result.err.splitlines()[-1]
        assert f"{run} was made with kernels' products of integers; here are " in said


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_floor_on_a_gpu_counts_codes_and_scales(kind, tswift):
    """Of LLaMA3.1-8b: 6.98e9 weights in layers, 525e6 in the LM head, which has 8 bits."""
    words = f"roofline --model shape:llama3.1-8b --device h100 --weights {kind}"
    result = tswift(words, "--json -").ok()
    told = result.json
    layers, head, norms = 32 * 218_103_808, 128_256 * 4096, 65 * 4096
    each = {"int4": 0.625, "int8": 1.125}[kind]
    assert told["shape"]["weight_bytes"] == layers * each + head * 1.125 + norms * 2
    assert told["weights"] == kind
    assert "beside it with weights of codes on one H200 (results/h200)." in " ".join(
        tswift(words).text.split()
    )
    (least, *_) = told["passes"]  # of one node: 3.82 ms on an H200 in int4, where the floor is 1.46
    assert least["reckoned_seconds"] - least["floor_seconds"] == pytest.approx(2.3e-3, abs=0.07e-3)


def test_a_floor_without_a_compiler_counts_floats(tswift, tmp_path, monkeypatch):
    """What a pass reads there."""
    network = tiny_model("llama")
    file = write_gguf(tmp_path / "tiny.gguf", network)
    monkeypatch.setenv("CC", "no-such-compiler")
    native_build._attempted.cache_clear()
    result = tswift(f"roofline --model {file} --json -").ok()
    embeddings = network.get_input_embeddings().weight.numel()
    floats = sum(weight.numel() for weight in network.parameters()) - embeddings
    assert result.json["shape"]["weight_bytes"] == 4 * floats
