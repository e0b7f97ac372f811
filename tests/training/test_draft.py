"""A small model trained from nothing: it learns to draw what the large one draws, stopped and gone on with or not."""

from __future__ import annotations

import csv
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import tswift
from tests.helpers import tiny_llama
from tests.training.tiny import Tiny
from tswift.errors import InputError
from tswift.models.shapes import skeleton
from tswift.models.target import Target
from tswift.training.documents import Documents
from tswift.training.draft import MODEL, resume, train
from tswift.training.draft_plan import SHAPES, DraftPlan
from tswift.training.folder import CHECKPOINT, METRICS, RECORD
from tswift.training.imitation import DraftTrainer, Imitator, optimizers_of
from tswift.training.pretrain import CAUSAL

STEPS = 6


def plan_of(tiny: Tiny, **changes: object) -> DraftPlan:
    plan = DraftPlan(
        corpus=str(tiny.corpus), model=str(tiny.model), seq_len=64, steps=STEPS, batch=4, accumulate=2, warmup=2,
        reach=1000, device="cpu",
    )  # fmt: skip
    return replace(plan, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(plan_of(tiny, eval_every=2), folder).signum is None
    return folder


@pytest.mark.parametrize("objective", ["text", "distill"])
def test_it_learns_to_draw_what_the_model_draws(tiny: Tiny, tmp_path: Path, objective: str) -> None:
    outcome = train(plan_of(tiny, objective=objective, steps=25, accumulate=1), tmp_path / "out")
    before, after = outcome.before, outcome.after
    assert after.loss < before.loss - 2
    assert after.target_loss == before.target_loss < after.loss
    assert after.agreement > before.agreement + 0.3
    # what was measured is the folder, and the folder is what drafts
    loaded = tswift.load(str(tiny.model), draft=str(tmp_path / "out"))
    assert loaded.draft is not None
    assert loaded.draft.max_positions == 1000
    row = [5, 9, 4, 7, 7, 3]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    wanted = plain(torch.tensor([row])).logits[0]
    from tswift.kv.full import FullKV

    hidden = [part.hidden for part in loaded.draft.chunks(row, FullKV(loaded.draft.kv_shape, len(row)))]
    torch.testing.assert_close(loaded.draft.logits(torch.cat(hidden)), wanted, rtol=0, atol=1e-5)


def test_figures_are_kept(whole: Path) -> None:
    record = json.loads((whole / RECORD).read_text())
    assert (record["kind"], record["state"], record["steps"]) == ("train-draft", "finished", STEPS)
    lines = [json.loads(line) for line in (whole / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out" in line] == [0, 2, 4, 6]
    assert lines[-1]["held_out"] == record["after"]
    assert all(len(line["loss"]) == 1 for line in lines if "loss" in line)
    assert {path.name for path in whole.iterdir()} >= {MODEL, "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not [path for path in whole.iterdir() if path.is_dir() or path.name.endswith(".new")]
    assert {str(value.dtype) for value in load_file(whole / MODEL).values()} == {"torch.bfloat16"}


def test_stopped_and_gone_on_with_it_comes_to_the_same_weights(
    tiny: Tiny, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, calls = Documents.batch, []

    def interrupted(self, rows, length, key):  # type: ignore[no-untyped-def]
        calls.append(key)
        if len(calls) == 6:  # in the third step
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, rows, length, key)

    monkeypatch.setattr(Documents, "batch", interrupted)
    out = tmp_path / "out"
    outcome = train(plan_of(tiny, eval_every=2), out)
    assert (outcome.signum, outcome.after) == (signal.SIGTERM, None)
    assert 0 < outcome.steps < STEPS
    assert not (out / MODEL).exists()
    monkeypatch.setattr(Documents, "batch", batch)
    with pytest.raises(InputError, match=r"^--reach: .* was begun with 1000, got 900$"):
        resume(out, {"reach": 900})
    assert resume(out, {"eval_every": 2}).steps == STEPS
    ours, theirs = load_file(out / CHECKPOINT), load_file(whole / CHECKPOINT)
    assert ours.keys() == theirs.keys()
    assert {name.split(".")[0] for name in ours} == {"draft", "optimizer"}
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert (out / MODEL).read_bytes() == (whole / MODEL).read_bytes()
    before = (out / MODEL).read_bytes()
    assert resume(out, {}).after is not None  # it is finished
    assert (out / MODEL).read_bytes() == before


def test_a_training_of_heads_is_none_of_a_draft_model(whole: Path) -> None:
    from tswift.training.train import resume as resume_heads

    with pytest.raises(InputError, match=r"^--resume: .*train\.json is of kind train-draft"):
        resume_heads(whole, {})


@pytest.mark.parametrize("objective", ["text", "distill"])
def test_stretches_change_no_gradient(objective: str) -> None:
    target, network = Target(tiny_llama("gqa", torch.float64)), tiny_llama("gqa", torch.float64)
    network.set_attn_implementation(CAUSAL)
    network.requires_grad_(True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    ids = torch.randint(network.config.vocab_size, (3, 9), generator=generator)
    positions = torch.arange(9).repeat(3, 1)
    positions[:, 4:] += 50
    logits = network(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].flatten(0, 1)
    goal = ids[:, 1:].flatten()
    if objective == "distill":
        twin = tiny_llama("gqa", torch.float64)
        twin.set_attn_implementation(CAUSAL)
        goal = twin(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].softmax(-1).flatten(0, 1)
    wanted = F.cross_entropy(logits, goal.detach())
    wanted.backward()
    gradients = {name: weight.grad.clone() for name, weight in network.named_parameters()}
    for room in (1 << 20, 2 * 3 * network.config.vocab_size, 1):
        network.zero_grad()
        trainer = DraftTrainer(Imitator(network, target, objective, room), optimizers_of(network, 0.01, 0.0))
        tally = trainer.learn(ids, positions)
        torch.testing.assert_close(tally.losses[0], wanted.item())
        best = (logits.topk(3).indices == ids[:, 1:].flatten()[:, None]).cumsum(-1).double().mean(0)
        torch.testing.assert_close(torch.tensor(tally.accuracy[0], dtype=torch.float64), best)
        for name, weight in network.named_parameters():
            torch.testing.assert_close(weight.grad, gradients[name], msg=name)


def test_the_shape_of_table_11() -> None:
    """Its rows, as the paper's appendix has them, and the number in its title."""
    table = """hidden_size,768
hidden_act,silu
intermediate_size,3072
max_position_embeddings,2048
num_attention_heads,12
num_key_value_heads,12
rope_theta,500000
vocab_size,128256"""
    config = SHAPES["205m"]
    for key, value in csv.reader(table.splitlines()):
        found = config.rope_parameters[key] if key == "rope_theta" else getattr(config, key)
        assert found == (value if key == "hidden_act" else int(value)), key
    parameters = sum(weight.numel() for weight in skeleton(config).parameters())
    assert parameters == 215_879_424
    assert parameters >> 20 == 205


def test_the_bundled_shape_has_half_a_million_parameters() -> None:
    parameters = sum(weight.numel() for weight in skeleton(SHAPES["demo"]).parameters())
    assert 450_000 < parameters < 550_000


def test_rows_jump_as_far_as_the_model_is_to_reach() -> None:
    plan = DraftPlan("x", seq_len=64, batch=400, reach=100_000)
    positions = plan.positions((1, 2, 3))
    assert positions is not None
    assert positions.shape == (400, 64)
    steps = np.diff(positions, axis=1)
    assert (steps.min(), positions[:, 0].max()) == (1, 0)
    assert ((steps > 1).sum(1) <= 1).all()
    assert 50_000 < positions.max() < 100_000
    assert np.array_equal(positions, plan.positions((1, 2, 3)))
    assert not np.array_equal(positions, plan.positions((1, 2, 4)))
    assert replace(plan, reach=65).positions((1, 2, 3)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "7b"}, "--shape: is one of 205m, demo, got '7b'"),
        ({"objective": "both"}, "--objective: is one of text, distill, got 'both'"),
        ({"reach": 1}, "--reach: must be at least 2, got 1"),
        ({"reach": 1 << 40}, "--reach: must be at most 16777216, got"),
        ({"seq_len": 1}, "--seq-len: must be at least 2, got 1"),
        ({"shape": "205m", "seq_len": 4096}, "--seq-len: is 4,096, the draft model is to have 2,048 positions"),
        ({"lr": 0.0}, "--lr: must be a number above 0"),
    ],
)
def test_plans_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        DraftPlan("x", **changes)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
