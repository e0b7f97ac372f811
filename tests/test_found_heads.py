"""Heads that nobody named: installed for a model's weights, and found by a hash of those."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

import tswift
from tests.helpers import read_json, tokens_of
from tests.models.gguf_files import tiny_model, write_gguf
from tests.words import words_of
from tswift.cli import main
from tswift.errors import DecodeError
from tswift.loading.model import load
from tswift.models.checkpoint import Checkpoint
from tswift.speculators.heads import ConditionedHeads
from tswift.speculators.heads_files import found_heads, install_heads

KINDS = (Kind.Q8_0, Kind.Q4_0)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr("tswift.speculators.heads_files.cache_folder", lambda: folder)
    return folder


def heads_file(path: Path, hidden_size: int) -> Path:
    torch.manual_seed(1)
    heads = ConditionedHeads(hidden_size, 2)
    for head in heads.heads:
        torch.nn.init.normal_(head.linear.weight, std=0.1)
    heads.save(path)
    return path


@pytest.mark.slow
def test_installed_heads_are_found_by_the_weights_alone(tiny, tmp_path, cache):
    made = heads_file(tmp_path / "heads.safetensors", 32)
    name = str(tiny.model)
    assert load(name).heads is None
    installed = install_heads(name, made)
    assert installed.parent == cache
    moved = tmp_path / "moved"
    shutil.copytree(tiny.model, moved)
    for model, more in (
        (name, {}),
        (str(moved), {}),
        (name, {"dtype": "bfloat16"}),
        (name, {"dtype": "float64"}),
    ):
        loaded = load(model, **more)
        assert loaded.heads_found == installed
        assert str(installed) in loaded.remarks()
        assert loaded.about()["heads"] == "conditioned, 2"
    model = load(name, dtype="float64")
    plain, drafted = (
        tokens_of(tswift.generate(model, "the ship", 40, method=each)) for each in ("ar", "medusa")
    )
    assert drafted == plain
    without = load(name, heads="none")
    assert (without.heads, without.heads_found) == (None, None)
    assert "heads" not in without.remarks()
    named = load(name, heads=str(installed))
    assert (named.heads.count, named.heads_found) == (2, None)


def test_heads_beside_a_model_come_first_and_none_are_none(checkpoint, tmp_path, cache):
    install_heads(str(checkpoint), heads_file(tmp_path / "heads.safetensors", 32))
    assert (load(str(checkpoint)).heads.kind, load(str(checkpoint)).heads_found) == (
        "chained",
        None,
    )
    assert load(str(checkpoint), heads="none").heads is None


def test_installed_heads_come_before_those_that_come_with_tswift(
    tiny, tmp_path, cache, monkeypatch
):
    bundled = tmp_path / "bundled"
    monkeypatch.setattr("tswift.speculators.heads_files.BUNDLED", bundled)
    name = str(tiny.model)
    installed = install_heads(name, heads_file(tmp_path / "heads.safetensors", 32))
    shutil.copytree(cache, bundled)
    assert found_heads(Checkpoint.find(name)) == installed
    installed.unlink()
    loaded = load(name)
    assert loaded.heads_found == bundled / installed.name
    assert str(loaded.heads_found) in loaded.remarks()


def test_other_weights_have_another_hash(tiny, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny.model, other)
    assert Checkpoint.find(str(other)).weights_hash == Checkpoint.find(str(tiny.model)).weights_hash
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name][0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert Checkpoint.find(str(other)).weights_hash != Checkpoint.find(str(tiny.model)).weights_hash


def test_a_gguf_file_has_heads_of_its_own(tmp_path, cache):
    models = [
        str(write_gguf(tmp_path / f"{seed}.gguf", tiny_model("llama"), kind))
        for seed, kind in enumerate(KINDS)
    ]
    assert Checkpoint.find(models[0]).weights_hash != Checkpoint.find(models[1]).weights_hash
    size = load(models[0]).target.hidden_size
    installed = install_heads(models[0], heads_file(tmp_path / "made.safetensors", size))
    assert [found_heads(Checkpoint.find(model)) for model in models] == [installed, None]
    assert load(models[0]).heads_found == installed


def test_a_run_without_heads_goes_on_without_them(tiny, tmp_path, cache, capsys):
    generate = f"generate --model {tiny.model} --prompt-text ship --quiet"
    assert main([*words_of([generate]), "--len", "20", "--out", str(tmp_path / "run")]) == 0
    install_heads(str(tiny.model), heads_file(tmp_path / "heads.safetensors", 32))
    assert main(["generate", "--resume", str(tmp_path / "run"), "--len", "40"]) == 0
    assert "heads from" not in capsys.readouterr().err
    assert read_json(tmp_path / "run" / "run.json")["model"]["heads"] is None


def test_what_cannot_be_installed_is_told_in_a_line(tiny, tmp_path, monkeypatch):
    made = heads_file(tmp_path / "heads.safetensors", 32)
    monkeypatch.setattr("tswift.speculators.heads_files.cache_folder", lambda: tmp_path / "missing")
    with pytest.raises(
        DecodeError, match=r"^the heads cannot be installed in .* \(No such file or directory\)$"
    ):
        install_heads(str(tiny.model), made)
    monkeypatch.setattr("tswift.speculators.heads_files.cache_folder", lambda: None)
    with pytest.raises(
        DecodeError, match=r"^the heads cannot be installed: there is no folder for them$"
    ):
        install_heads(str(tiny.model), made)


def test_a_training_installs_its_heads_and_says_how_they_are_used(tiny, tmp_path, cache, capsys):
    out = tmp_path / "out"
    train = (
        f"train --model {tiny.model} --corpus {tiny.corpus} --seq-len 64 --steps 1 --alpha-tokens "
        "0 --device cpu"
    )
    assert main([*words_of([train]), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    command = ["generate", "--model", str(tiny.model), "--heads", str(out / "heads.safetensors")]
    assert f"tswift {shlex.join(command)}" in said
    assert [*cache.iterdir()] == []
    assert main(["train", "--resume", str(out), "--install"]) == 0
    installed = found_heads(Checkpoint.find(str(tiny.model)))
    assert f"installed: {installed}" in capsys.readouterr().err
    assert installed.read_bytes() == (out / "heads.safetensors").read_bytes()
