"""The recipe of small models that draft: its shapes, loss and schedule, how it is gone on with,
and how often two models draw the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import tswift
from recipes import agreement, demo_draft, draft
from recipes.agreement import measure_agreement
from recipes.demo_draft import agreements
from recipes.draft import SHAPES, DraftPlan, text_loss, train_draft
from recipes.pretrain import CAUSAL
from tests.helpers import CPU, VOCAB, refused, seeded, tiny_llama, tokens_of
from tests.rows import every_row
from tests.training.test_losses import IDS, JUMPING, ROWS
from tswift.forward.target import Target
from tswift.models.architecture import skeleton
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler


def test_the_shape_of_table_11():
    """Its rows, as the paper's appendix has them, and the number in its title."""
    table = {
        "hidden_size": 768,
        "hidden_act": "silu",
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
    }
    table |= {"num_attention_heads": 12, "num_key_value_heads": 12}
    config = LlamaConfig(**SHAPES["205m"], vocab_size=128_256)
    assert {name: getattr(config, name) for name in table} == table
    assert config.rope_parameters["rope_theta"] == 500_000
    sizes = {
        name: sum(
            weight.numel()
            for weight in skeleton(LlamaConfig(**SHAPES[name], vocab_size=size)).parameters()
        )
        for name, size in {"205m": 128_256, "demo": 2048}.items()
    }
    assert sizes == {"205m": 215_879_424, "demo": 491_904}
    assert sizes["205m"] >> 20 == 205


def changed(share: float, seed: int) -> LlamaForCausalLM:
    """The stock model with other weights."""
    network = tiny_llama("gqa", torch.float64)
    generator = seeded(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight += (
                share
                * weight.std()
                * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            )
    return network.requires_grad_(True)


@pytest.mark.parametrize("most", [1 << 20, 2 * ROWS * VOCAB, 1])
def test_it_learns_in_stretches_as_in_one_piece(most):
    network = changed(0.02, 3)
    network.set_attn_implementation(CAUSAL)
    logits = network(input_ids=IDS, position_ids=JUMPING, use_cache=False).logits[:, :-1]
    wanted = F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
    found = text_loss(network, IDS, JUMPING, most)
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(loss, [*network.parameters()]) for loss in (found, wanted)]
    torch.testing.assert_close(*slopes)


@every_row(
    ("given", "message"),
    [
        ({"steps": 0}, "steps: must be at least 1, got 0"),
        ({"batch": 0}, "batch: must be at least 1, got 0"),
        ({"shape": "205m", "seq_len": 4096}, "seq_len: is 4,096, the draft model is to have 2,048"),
    ],
)
def test_what_cannot_be_trained(given, message):
    with refused(f"^{message}"):
        DraftPlan(**{"corpus": "x", "steps": 3, **given})


def test_a_draft_model_learns_and_is_gone_on_with(tiny, tmp_path, monkeypatch):
    narrow = {**SHAPES["demo"], "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    monkeypatch.setitem(SHAPES, "demo", narrow)
    model = draft.load_large(str(tiny.model), "cpu")
    plan = DraftPlan(str(tiny.corpus), 15, reach=1000, seq_len=64, batch=4, warmup=2, save_every=5)
    record = train_draft(model, plan, tmp_path / "out", tmp_path / "work")
    before, after = record["before"], record["after"]
    assert after["target_loss"] == before["target_loss"] < after["loss"] < before["loss"] - 1.5
    assert after["agreement"] > before["agreement"] + 0.2

    step = draft.Trainer.step
    steps = []

    def cut(self, factor):
        steps.append(factor)
        if len(steps) == 13:
            raise KeyboardInterrupt
        step(self, factor)

    monkeypatch.setattr(draft.Trainer, "step", cut)
    with pytest.raises(KeyboardInterrupt):
        train_draft(model, plan, tmp_path / "again", tmp_path / "cut")
    train_draft(model, plan, tmp_path / "again", tmp_path / "cut")
    assert len(steps) == 13 + 5  # after the tenth step, the last that was saved
    weights, others = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "again")
    )
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    for name, value in weights.items():
        assert torch.equal(others[name], value), name
    assert train_draft(model, plan, tmp_path / "out", tmp_path / "work") == record  # finished
    with refused(r"^--work: .* another recipe"):
        train_draft(model, replace(plan, seed=1), tmp_path / "out", tmp_path / "work")
    model = tswift.load(str(tiny.model), dtype="float64", draft_model=str(tmp_path / "out"))
    plain, drafted = (
        tokens_of(tswift.generate(model, "the ship", 40, method=each))
        for each in ("ar", "standalone")
    )
    assert drafted == plain


@pytest.mark.parametrize(
    "params", [SamplingParams(window=30, penalty=4), SamplingParams(penalty=1, min_p=0)]
)
def test_agreement_counts_tokens_that_both_draw(params, monkeypatch):
    monkeypatch.setattr(agreement, "_ROWS", 7)
    monkeypatch.setattr(demo_draft, "_ROWS", 7)
    large = tiny_llama("gqa", torch.float64).requires_grad_(False)
    large.set_attn_implementation(CAUSAL)
    small = changed(0.3, 5)
    text = torch.randint(VOCAB, (140,), generator=seeded(5)).tolist()
    all_logits = [model(torch.tensor([text])).logits[0].float() for model in (large, small)]
    target, draft = Target(tiny_llama("gqa", torch.float64)), Target(small)
    scores = agreements(target, draft, text, (0, 70), 60, params, recent=140)
    for (whole, recent), start in zip(scores, (0, 70), strict=True):
        assert recent == whole  # so many that they are the whole text
        same = 0
        for node in range(start, start + 60):
            sampler = Sampler(params, 0, large.config.vocab_size, CPU)
            sampler.extend(text[: node + 1])
            seen = sampler.seen(
                torch.tensor([text[node]]), torch.tensor([node]), torch.ones(1, 1, dtype=torch.bool)
            )
            one, other = (
                sampler.draw(logits[node : node + 1], seen, [node + 1]) for logits in all_logits
            )
            same += one == other
        goal = torch.tensor(text[start + 1 : start + 61])
        target_loss, loss = (
            F.cross_entropy(logits[start : start + 60], goal).item() for logits in all_logits
        )
        assert whole == pytest.approx(
            {"loss": loss, "target_loss": target_loss, "agreement": same / 60}, abs=1e-5
        )
        assert 0 < same < 60
    assert measure_agreement(target, draft, text[:61], params) == scores[0][0]


def test_recent_tokens_are_read_at_their_own_positions():
    small = tiny_llama("gqa", torch.float64)
    text = torch.randint(small.config.vocab_size, (400,), generator=seeded(5)).tolist()
    ((whole, recent),) = agreements(
        Target(small), Target(small), text, (390,), 5, SamplingParams(), recent=16
    )
    positions = torch.arange(374, 395).unsqueeze(0)
    logits = tiny_llama("gqa", torch.float64)(
        torch.tensor([text[374:395]]), position_ids=positions
    ).logits[0, 16:]
    wanted = F.cross_entropy(logits.float(), torch.tensor(text[391:396]))
    assert recent["loss"] == pytest.approx(wanted.item(), abs=1e-5)
    assert recent["loss"] != pytest.approx(whole["loss"], abs=1e-3)
