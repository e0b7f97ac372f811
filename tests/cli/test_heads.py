"""``tswift heads`` from the outside."""

from __future__ import annotations

import re

import torch

from tests.cli.conftest import Result
from tests.drafters import drafter_folder
from tests.helpers import HIDDEN, VOCAB, medusa_heads, read_json, tiny_heads
from tests.published import make_base, medusa_file, tokenswift_model


def said(result: Result) -> dict[str, str]:
    assert (result.code, result.err) == (0, "")
    return dict(re.split(" {2,}", line) for line in result.text.splitlines()[2:])


def test_heads_of_ours(tswift, tmp_path):
    path = tmp_path / "heads.safetensors"
    tiny_heads(kind="conditioned").save(path, base="0123abcd")
    found = said(tswift(f"heads inspect {path}"))
    parameters = sum(weight.numel() for weight in tiny_heads(kind="conditioned").parameters())
    assert (found["kind"], found["tokens drafted"], found["hidden size"]) == (
        "conditioned",
        "3",
        str(HIDDEN),
    )
    assert (found["parameters"], found["dtypes"], found["layout"]) == (
        f"{parameters:,}",
        "BF16",
        "tswift",
    )
    assert found["base model"] == "0123abcd"
    assert said(tswift(f"heads inspect {tmp_path}")) == found  # the folder they are in
    path = tmp_path / "medusa.safetensors"
    medusa_heads(layers=2).save(path, torch.float32)
    assert said(tswift(f"heads inspect {path} --json {tmp_path}/about.json"))["kind"] == "medusa"
    record = tswift(f"heads inspect {path} --json -").json
    assert record["kind"] == "heads"
    assert read_json(tmp_path / "about.json")["heads"] == record["heads"]
    parameters = 3 * (2 * HIDDEN * (HIDDEN + 1) + VOCAB * HIDDEN)
    kind = {
        "path": str(path),
        "layout": "tswift",
        "kind": "medusa",
        "count": 3,
        "raw": False,
        "base": None,
    }
    sizes = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "parameters": parameters,
        "dtypes": ["F32"],
    }
    assert record["heads"] == {**kind, **sizes, "draft_vocabulary": None}


def test_heads_of_others(tswift, tmp_path):
    base = make_base(tmp_path / "base")
    model = said(tswift("heads inspect", tokenswift_model(base, tmp_path / "m")))
    assert (model["layout"], model["kind"], model["tokens drafted"]) == (
        "TokenSwift",
        "chained",
        "3",
    )
    assert model["dtypes"] == "F32"
    assert model["parameters"] == f"{3 * (32 * 32 + 2 * 32):,}"
    assert (model["read the state before the final norm"], model["vocab size"]) == ("yes", "-")
    folder = medusa_file(base, tmp_path)
    for path in (folder, folder / "medusa_lm_head.safetensors"):
        medusa = said(tswift(f"heads inspect {path}"))
        assert (medusa["layout"], medusa["kind"], medusa["tokens drafted"]) == (
            "Medusa",
            "medusa",
            "3",
        )
        assert medusa["vocab size"] != "-"


def test_drafters(tswift, tmp_path):
    folder = drafter_folder(tmp_path / "d", "dspark")
    found = said(tswift(f"heads inspect {folder}"))
    assert (found["kind"], found["tokens drafted"], found["layout"]) == ("dspark", "4", "DeepSpec")
    assert found["not read"] == "confidence_head.proj.weight, confidence_head.proj.bias"
    record = tswift(f"heads inspect {folder} --json -").json
    assert record["heads"]["taps"] == [1, 4]
    refused = tswift(
        "heads inspect", drafter_folder(tmp_path / "d", "dspark", tensors={"fc.weight": None})
    )
    assert (refused.code, refused.err) == (2, f"tswift: error: FILE: {folder} lacks fc.weight\n")
    eagle = said(tswift("heads inspect", drafter_folder(tmp_path / "e", "eagle-safeai")))
    assert (eagle["kind"], eagle["vocab size"], eagle["tokens it can guess"]) == (
        "eagle3",
        "97",
        "40",
    )
