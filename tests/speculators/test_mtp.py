"""A model's own head for multi-token prediction: what it computes, where it is found;
no text changes by it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from benchmarks.architectures import ARCHITECTURES, checkpoint
from benchmarks.mtp import StockHead
from tests.helpers import options_for, random_prompt, tokens_of
from tswift.caches import FullKV, WindowKV
from tswift.engine import generate
from tswift.errors import InputError
from tswift.forward.target import prefill
from tswift.loading import LoadedModel, load

KIND = "Qwen3.5 to 3.8 (gated delta nets)"
pytestmark = pytest.mark.skipif(
    not ARCHITECTURES[KIND].there, reason="not in this version of transformers"
)


def with_head(folder: Path) -> tuple[PreTrainedModel, StockHead]:
    """Write a checkpoint that has one."""
    model = checkpoint(ARCHITECTURES[KIND], folder)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        head = StockHead(model)
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.3)
    head.save(folder)
    return model, head


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, StockHead]:
    folder = tmp_path_factory.mktemp("mtp")
    return (folder, *with_head(folder))


@pytest.fixture(scope="module")
def model(made: tuple[Path, PreTrainedModel, StockHead]) -> LoadedModel:
    return load(str(made[0]), device="cpu", attention="sdpa", exact=True)


@torch.inference_mode()
def test_it_computes_what_layers_of_transformers_do(made) -> None:
    folder, stock, head = made
    model = load(str(folder), device="cpu", dtype="float64", attention="sdpa")
    target = model.target
    network = model.target.speculator
    assert network is not None
    stock.set_attn_implementation("eager")
    text = torch.tensor(random_prompt(20, 2, target.vocab_size))
    before = stock.get_decoder()(text.unsqueeze(0), use_cache=False).last_hidden_state[:, :-1]
    expected = head(stock, before, text[None, 1:])[0, -1]
    full = FullKV(target.kv_shape, 40)
    states = torch.cat([prefill(target, [token], full).hidden for token in text[:-1].tolist()])
    kv = WindowKV(network.spec.kv_shape(target.dtype, target.device), 32, 4, 8)
    places = torch.arange(len(text) - 1)
    last = network.remember(states, text[1:], places, places, kv, full)[-1:]
    kv.hold(places)
    found = network.begin(last, text[-1:], torch.tensor([len(text) - 1]), kv, kv.held)(
        0, None, text[-1:]
    )
    torch.testing.assert_close(
        found[0].float(), expected, rtol=0, atol=2e-4 * float(expected.std())
    )


def test_no_text_changes_by_it(model: LoadedModel) -> None:
    """Bit for bit; and it drafts."""
    prompt = model.encode("The ship had lain")
    options = options_for("mtp", costs="nominal", nodes=12)
    steps = {name: [*generate(model, prompt, 60, method=name)] for name in ("ar", "reuse")}
    steps["mtp"] = [*generate(model, prompt, 60, method="mtp", options=options)]
    assert tokens_of(steps["mtp"]) == tokens_of(steps["ar"])
    assert max(step.nodes for step in steps["mtp"]) > 2
    assert model.about()["drafter"]["kind"] == "mtp"


def test_a_model_without_one_is_refused(tmp_path: Path) -> None:
    checkpoint(ARCHITECTURES[KIND], tmp_path)
    bare = load(str(tmp_path), device="cpu", attention="sdpa")
    with pytest.raises(
        InputError, match="mtp drafts with the model's own MTP head, and it has none"
    ):
        generate(bare, "The ship", 5, method="mtp")


def test_a_head_of_other_sizes_is_refused(tmp_path: Path) -> None:
    with_head(tmp_path)
    save_file({"mtp.fc.weight": torch.zeros(3, 3)}, tmp_path / "mtp.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="mtp"):
        load(str(tmp_path), device="cpu", attention="sdpa")
