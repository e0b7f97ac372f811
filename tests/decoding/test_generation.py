"""Between a model and a decode: how a text ends, what it needs, and what is refused,
before loading and after.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers import METHODS, NO_PROGRAM, needs_program, tokens_of
from tswift import memory
from tswift.attention.sdpa import ReferenceAttention
from tswift.drafting.history import LogitHistory
from tswift.drafting.methods import cache_slots
from tswift.drafting.options import DraftOptions, find_method
from tswift.engine import Request, begin
from tswift.errors import InputError
from tswift.loading.model import load
from tswift.loading.plan import plan_model
from tswift.memory import Demand, preflight
from tswift.models.config import ModelConfig
from tswift.models.hashes import named_weights
from tswift.sampling.parameters import SamplingParams, apply_eos_policy


def test_end_of_text_is_banned_or_stops():
    params = SamplingParams(banned=(5,))
    assert apply_eos_policy(params, (2, 7), stop_at_eos=True) == (params, (2, 7))
    assert apply_eos_policy(params, (2, 7), stop_at_eos=False) == (
        replace(params, banned=(2, 5, 7)),
        (),
    )


def test_the_reference_decodes_with_the_attention_of_reference_implementations(
    checkpoint,
):
    model = load(str(checkpoint), dtype="float64")
    plain, reference = (
        begin(model, Request(prompt=[1, 2, 3], length=40, method=method))
        for method in ("ar", "ar-reference")
    )
    assert [run.decoding._target.backend is ReferenceAttention for run in (plain, reference)] == [
        False,
        True,
    ]
    assert tokens_of(list(reference.steps())) == tokens_of(list(plain.steps()))


def test_a_length_that_leaves_nothing_to_generate(checkpoint):
    model = load(str(checkpoint))
    with pytest.raises(
        InputError, match=r"^length: must be at least 3, got 2, as 2 tokens are there already$"
    ):
        begin(model, Request(prompt=[1], length=2, written=[4, 5]))
    assert (
        begin(model, Request(prompt=[1], length=9, written=[4, 5])).need
        == begin(model, Request(prompt=[1], length=9)).need
    )  # those are part of the length
    with pytest.raises(InputError, match=r"^length: must be at least 1, got 0$"):
        begin(model, Request(prompt=[1], length=0))


def test_every_method_says_what_it_uses():
    assert set().union(*(method.uses for method in METHODS.values())) == set(
        DraftOptions.__dataclass_fields__
    )


@pytest.mark.slow
def test_heads_that_are_missing(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    (folder / "heads.safetensors").unlink()
    model = load(str(folder))
    others = ["ar", "cascade", "recall", "reuse", "magicdec", "auto"]
    message = (
        f"method: {{}} drafts with heads and the model has none; without heads there are "
        f"{', '.join(others)}"
    )
    with pytest.raises(InputError, match=message.format("tokenswift")):
        begin(model, Request(prompt=[1], length=5, method="tokenswift"))
    for options in (DraftOptions(), DraftOptions(gamma=2)):  # before loading, too
        with pytest.raises(InputError, match=message.format("medusa")):
            preflight(plan_model(ModelConfig(model=str(folder))), Demand(1, 1, "medusa", options))
    for method in METHODS.keys() & others:
        preflight(plan_model(ModelConfig(model=str(folder))), Demand(1, 5, method, DraftOptions()))
        assert (
            len(tokens_of([*begin(model, Request(prompt=[1], length=5, method=method)).steps()]))
            == 5
        )


def limit_memory(monkeypatch, free: int | None):
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_foreseen_is_what_comes(checkpoint, method):
    dtype = "float64" if method == "medusa" else "float32"
    kind = METHODS[method]
    options = DraftOptions(budget=128, nodes=5 if "nodes" in kind.uses else None)
    draft = str(checkpoint) if "draft_model" in kind.loads else None
    ahead = preflight(
        plan_model(ModelConfig(model=str(checkpoint), dtype=dtype, draft_model=draft)),
        Demand(3, 50, method, options),
    )
    model = load(str(checkpoint), dtype=dtype, draft_model=draft)
    run = begin(model, Request(prompt=[1, 2, 3], length=50, method=method, options=options))
    need = run.need
    token_bytes = model.target.kv_shape.bytes_per_token
    numbers = sum(weight.numel() for _, weight in named_weights(model.target.model))
    weights = numbers * model.target.dtype.itemsize
    heads = 0 if model.heads is None else sum(weight.nbytes for weight in model.heads.parameters())
    # what is there needs no more memory
    assert replace(ahead, loaded={}) == need
    drafting = {"draft model": weights} if draft else {}
    assert ahead.loaded == {"weights": weights, "heads": heads, **drafting}
    assert ahead.total_bytes == need.total_bytes + weights + heads + (weights if draft else 0)
    nodes = 5 if "nodes" in kind.uses else (kind.gamma or 0) + 1
    assert (need.positions, need.passing) == (53, {"logits": 3 * nodes * 320 * 8})
    own = need.caches.get("draft model's KV", 0)
    assert need.caches["KV"] == run.decoding._context.kv.nbytes == (53 + nodes) * token_bytes
    assert own == cache_slots(find_method(method), run.options, 53)[1] * token_bytes
    held = need.caches["drafting KV"] > 0, own > 0, need.recall_bytes > 0
    recalls = NO_PROGRAM is None and method in ("recall", "cascade", "auto")
    assert held == (kind.drafts_itself, draft is not None, recalls)


def test_too_little_memory(checkpoint, monkeypatch):
    asked = (
        plan_model(ModelConfig(model=str(checkpoint))),
        Demand(3, 2000, "tokenswift", DraftOptions(budget=1000)),
    )
    loaded = load(str(checkpoint))
    need = preflight(*asked)
    there = begin(loaded, Request(prompt=[1, 2, 3], length=50, method="ar")).need
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    for free in (need.total_bytes, None):
        limit_memory(monkeypatch, free)
        assert preflight(*asked) == need
    limit_memory(monkeypatch, need.total_bytes - 1)
    with pytest.raises(InputError) as caught:
        preflight(*asked)
    assert str(caught.value) == (
        "length: weights 0.1 MB + heads 0.0 MB + KV 0.3 MB + drafting KV 0.1 MB + logits 0.1 MB = "
        "0.6 MB, cpu has 0.6 MB free"
    )
    limit_memory(monkeypatch, need.loaded["weights"])
    with pytest.raises(InputError, match=r"^model: weights 0.1 MB \+ heads "):
        # no text is short enough
        preflight(*asked)
    limit_memory(monkeypatch, there.total_bytes)  # weights count once
    begin(loaded, Request(prompt=[1, 2, 3], length=50, method="ar"))
    limit_memory(monkeypatch, there.total_bytes - 1)
    with pytest.raises(
        InputError, match=r"^length: KV 0.0 MB \+ logits 0.0 MB = 0.0 MB, cpu has 0.0 MB free$"
    ):
        begin(loaded, Request(prompt=[1, 2, 3], length=50, method="ar"))


@needs_program
@pytest.mark.parametrize(
    ("method", "tree"), [("recall", None), ("auto", None), ("medusa", "auto"), ("medusa", None)]
)
def test_what_is_recalled_counts(checkpoint, monkeypatch, method, tree):
    need = preflight(
        plan_model(ModelConfig(model=str(checkpoint))),
        Demand(3, 2000, method, DraftOptions(tree=tree)),
    )
    recalls = tree is not None or method != "medusa"
    assert need.recall_bytes == (LogitHistory.bytes_for(2003, 320, 64) if recalls else 0)
    held = [need.held_bytes(torch.device(device)) for device in ("cpu", "cuda")]
    assert held == [need.kv_bytes + need.recall_bytes, need.kv_bytes]
    if recalls:
        options = DraftOptions(tree=tree, recall=10)
        assert (
            preflight(
                plan_model(ModelConfig(model=str(checkpoint))), Demand(3, 2000, method, options)
            ).recall_bytes
            < need.recall_bytes
        )
        limit_memory(monkeypatch, need.total_bytes - 1)
        with pytest.raises(InputError, match=r" \+ recall 0\.6 MB \+ logits "):
            preflight(
                plan_model(ModelConfig(model=str(checkpoint))),
                Demand(3, 2000, method, DraftOptions(tree=tree)),
            )


def test_too_few_positions(checkpoint):
    preflight(
        plan_model(ModelConfig(model=str(checkpoint))), Demand(96, 4000, "ar", DraftOptions())
    )
    needed = (
        "at least 97 prompt tokens and 4,000 new ones need 4,097 positions, the model has 4,096; "
        "--yarn gives more to one with rotary embeddings"
    )
    with pytest.raises(InputError, match=f"^length: {needed}$"):
        preflight(
            plan_model(ModelConfig(model=str(checkpoint))), Demand(97, 4000, "ar", DraftOptions())
        )


def test_on_cuda_a_share_of_all_that_is_held_counts(monkeypatch):
    """An 8B model at 100,000 tokens takes 0.31 to 0.45 GB beside what is held."""
    limit_memory(monkeypatch, None)
    demand = Demand(4096, 100_000, "tokenswift", DraftOptions(nodes=32))
    plan = plan_model(ModelConfig(model="shape:llama3.1-8b", dtype="bfloat16", attention="sdpa"))
    need = preflight(replace(plan, device=torch.device("cuda")), demand)
    held = sum(need.loaded.values()) + need.kv_bytes
    assert need.passing["workspace"] == pytest.approx(held / 100, abs=1)
    assert 0.25e9 < need.passing["workspace"] < 0.45e9
    assert need.total_bytes == held + sum(need.passing.values())
