"""Runs with published drafters from the outside: the text of plain decoding, going on, comparisons,
refusals.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.conftest import TEXT
from tests.conftest import make_checkpoint
from tests.drafters import HIDDEN, drafter_folder
from tests.helpers import read_json
from tswift.drafting.methods import cache_slots
from tswift.drafting.options import DraftOptions, find_method
from tswift.loading.plan import plan_model
from tswift.memory import Demand, preflight
from tswift.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("load_once")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def drafters(model: Path, tmp_path_factory) -> dict[str, Path]:
    vocab = read_json(model / "config.json")["vocab_size"]
    folder = tmp_path_factory.mktemp("drafters")
    changes = {"vocab_size": vocab}
    inverse = {"t2d": torch.zeros(vocab, dtype=torch.bool)}
    return {
        "block": drafter_folder(folder / "block", "dflash", changes),
        "eagle": drafter_folder(folder / "eagle", "eagle-safeai", changes, inverse),
    }


def words(model: Path, method: str, *more) -> list[object]:
    asked = f"--model {model} --prompt-text '{TEXT}' --dtype float64 --seed 4 --method {method}"
    return ["generate", asked, *more]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["block", "eagle"])
def test_the_text_is_plain_decodings_and_goes_on(method, tswift, model, drafters, tmp_path):
    tswift(*words(model, "ar", f"--len 40 --out {tmp_path}/ar"))
    how = ["--drafter", drafters[method], "--budget 64 --costs nominal"]
    tswift(*words(model, method, *how, f"--len 17 --out {tmp_path}/run")).ok()
    about = read_json(tmp_path / "run" / "run.json")["model"]["drafter"]
    assert about == {
        "name": str(drafters[method]),
        "kind": {"block": "dflash", "eagle": "eagle3"}[method],
    }
    tswift(f"generate --resume {tmp_path}/run --len 40").ok()
    assert (tmp_path / "run" / "tokens.u32").read_bytes() == (
        tmp_path / "ar" / "tokens.u32"
    ).read_bytes()


def test_what_it_needs(model, drafters):
    options = DraftOptions(budget=64, gamma=4)
    how = {"dtype": "float64", "drafter": str(drafters["eagle"])}
    need = preflight(
        plan_model(ModelConfig(model=str(model), **how)), Demand(20, 30, "eagle", options)
    )
    plain = preflight(
        plan_model(ModelConfig(model=str(model), dtype="float64")),
        Demand(20, 30, "ar", DraftOptions()),
    )
    kept = 64 + 1 + 3 * 5  # the window, the spare slot, and what three of the levels feed back
    assert need.caches["drafter's KV"] == kept * 2 * 2 * 16 * 8
    # norms; fc, LM head, MLP
    attention, rest = 64 * 64 + 3 * 32 * 64, 4 * HIDDEN + (3 * HIDDEN + 40 + 3 * 48) * HIDDEN
    assert need.loaded["drafter"] == 8 * (attention + rest)
    assert "drafter's KV" not in plain.caches
    assert "drafter" not in plain.loaded
    assert cache_slots(find_method("ar"), options, 50)[2] == 0
