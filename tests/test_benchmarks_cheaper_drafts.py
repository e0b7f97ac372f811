"""benchmarks/cheaper_drafts.py: weights land on the grids they should, and no draft changes the text."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_llama

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the source distribution has no benchmarks", allow_module_level=True)

from benchmarks.cheaper_drafts import Outcome, fp8, grouped, integers, main, table, weights, without  # noqa: E402


def random_weights() -> torch.Tensor:
    """``[6, 64]``, the rows of very different sizes."""
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 6).unsqueeze(1)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 64), (4, 128), (2, 32)])
def test_a_group_has_as_many_values_as_its_bits_tell_apart(bits: int, group: int) -> None:
    before = random_weights()
    after = grouped(bits, group)(before)
    for old, new in zip(before.reshape(-1, min(group, 64)), after.reshape(-1, min(group, 64)), strict=True):
        assert len(new.unique()) <= 2**bits
        step = (old.max() - old.min()) / (2**bits - 1)
        assert (new - old).abs().max() <= 0.501 * step


def test_a_scale_for_each_channel() -> None:
    before = random_weights()
    largest = before.abs().amax(1, keepdim=True)
    eight = integers(8)(before)
    torch.testing.assert_close((eight / largest * 127).round() / 127 * largest, eight)
    assert ((eight - before).abs() <= 0.501 * largest / 127).all()
    float8 = fp8(before)
    assert not torch.equal(float8, before)
    # three bits of mantissa: half of the last one is a 16th; below the least normal number steps are even
    assert ((float8 - before).abs() <= before.abs() / 16 * 1.001 + largest * 2**-10 / 448).all()
    assert torch.equal(integers(8)(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_the_lm_head_keeps_its_bits_unless_asked() -> None:
    network = tiny_llama("gqa", torch.float32)
    for lm_head in (False, True):
        copy = deepcopy(network)
        weights(integers(2), lm_head)(copy)
        assert torch.equal(copy.lm_head.weight, network.lm_head.weight) is not lm_head
        assert torch.equal(copy.get_input_embeddings().weight, network.get_input_embeddings().weight)
        for layer in copy.model.layers:
            for linear in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
                assert all(len(row.unique()) <= 3 for row in linear.weight)


def test_a_layer_left_out_adds_nothing() -> None:
    network = tiny_llama("gqa", torch.float32)
    ids = torch.arange(9).unsqueeze(0)
    skipped, shorter = deepcopy(network), deepcopy(network)
    without(0)(skipped)
    del shorter.model.layers[0]
    with torch.inference_mode():
        whole, found, wanted = (each(ids, use_cache=False).logits for each in (network, skipped, shorter))
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, whole)


def test_a_table_of_two_seeds() -> None:
    counts = [("exact", 1, 5, 10, 40, 0.6, 4.0), ("exact", 2, 5, 30, 60, 0.2, 2.0), ("int9", 1, 5, 20, 50, 0.3, 2.5)]
    lines = table([Outcome(*each, same=each[0] == "exact") for each in counts]).splitlines()
    assert lines[2] == "| exact | 0.300 | 100% | 2.50 | 100% | 0.600, 0.200 | the same |"
    assert lines[3] == "| int9 | 0.300 | 100% | 2.50 | 100% | 0.300 | ANOTHER |"


def test_drafts_of_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--len",
        "60",
        "--prefill",
        "100",
        "--seeds",
        "3",
        "--only",
        "^int2|layer 1",
        "--json",
        tmp_path / "out.json",
    ]
    monkeypatch.setattr(sys, "argv", ["benchmarks.cheaper_drafts", *map(str, words)])
    assert main() == 0
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert [each["variant"][:13] for each in outcomes] == ["exact, budget", "int2 in group", "without layer"]
    assert all(each["same"] and each["tokens"] == 60 for each in outcomes)
    exact, coarse, short = (each["alpha"] for each in outcomes)
    assert exact > coarse > 0  # what is lost is seen
    assert exact > short
    assert capsys.readouterr().out.count("| the same |") == 3
