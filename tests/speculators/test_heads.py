"""Heads: their rules by hand, levels of logits, and their file."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.helpers import CPU, HIDDEN, VOCAB, medusa_heads, refused, seeded, tiny_heads
from tests.rows import every_row
from tswift.speculators.heads import HEAD_TYPES, Heads, build
from tswift.speculators.heads_files import find_heads, load_heads

LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=seeded(1), dtype=torch.float64)


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=seeded(2), dtype=torch.float64)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_each_chained_head_refines_the_state_of_the_one_before():
    heads = tiny_heads()
    hidden = states(5)
    out = heads(hidden)
    assert out.shape == (3, 5, HIDDEN)
    for index, head in enumerate(heads.heads):
        hidden = hidden + norm(hidden, head.input_layernorm.weight) @ head.linear.weight.T
        torch.testing.assert_close(out[index], norm(hidden, head.post_layernorm.weight))


def test_a_conditioned_head_reads_the_token_before():
    heads = tiny_heads(kind="conditioned")
    hidden = states(5)
    before = states(3, 5)
    out = heads(hidden, before)
    for index, head in enumerate(heads.heads):
        read = [
            norm(hidden, head.input_layernorm.weight),
            norm(before[index], head.embedding_layernorm.weight),
        ]
        mixed = torch.cat(read, dim=-1) @ head.mix.weight.T
        hidden = hidden + (mixed * mixed.sigmoid()) @ head.linear.weight.T
        torch.testing.assert_close(out[index], norm(hidden, head.post_layernorm.weight))


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_medusa_heads_side_by_side(layers):
    heads = medusa_heads(layers=layers)
    start = states()
    expected = []
    for head in heads.heads:
        state = start
        for block in head.blocks:
            inner = block.weight @ state + block.bias
            state = state + inner / (1 + torch.exp(-inner))
        expected.append(head.lm_head.weight @ state)
    torch.testing.assert_close(heads.levels(start, F.linear), torch.stack(expected))
    out = heads(start.expand(2, 4, HIDDEN))
    assert out.shape == (3, 2, 4, HIDDEN)
    torch.testing.assert_close(heads.heads[1].lm_head(out[1, 1, 2]), expected[1])


@pytest.mark.parametrize("kind", ["chained", "medusa"])
@pytest.mark.parametrize("levels", [1, 2, 3, 4, None])
def test_levels_begin_with_those_of_the_models_own_lm_head(kind, levels):
    heads = medusa_heads() if kind == "medusa" else tiny_heads()
    start, first = states(2)
    calls = []

    def lm_head(hidden):
        calls.append(hidden.shape)
        return hidden @ LM_HEAD.T

    alone = heads.levels(start, lm_head)
    assert len(alone) == 3
    if kind == "chained":
        torch.testing.assert_close(alone, heads(start) @ LM_HEAD.T)
    calls.clear()
    logits = heads.levels(start, lm_head, first, levels)
    assert len(calls) == 1  # it is large
    torch.testing.assert_close(logits, torch.cat([(LM_HEAD @ first)[None], alone])[:levels])


@pytest.mark.parametrize("kind", [*HEAD_TYPES, "medusa"])
@pytest.mark.parametrize("raw", [False, True])
def test_a_file_gives_back_what_was_saved(tmp_path, kind, raw):
    path = tmp_path / "heads.safetensors"
    heads: Heads = medusa_heads(layers=2) if kind == "medusa" else tiny_heads(kind=kind)
    if kind != "medusa":
        heads = type(heads)(HIDDEN, 2, 1e-3, raw).double()
        for weight in heads.parameters():
            torch.nn.init.normal_(weight)
    again = build(heads.about())
    assert again.about() == heads.about()
    assert {name: w.shape for name, w in again.state_dict().items()} == {
        name: w.shape for name, w in heads.state_dict().items()
    }
    for dtype in (torch.float64, torch.bfloat16):
        heads.save(path, dtype, "a fingerprint")
        loaded = load_heads(path, HIDDEN, torch.float64, CPU)
        assert (loaded.about(), loaded.base) == (heads.about(), "a fingerprint")
        assert not any([loaded.training, *(weight.requires_grad for weight in loaded.parameters())])
        for name, value in heads.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value.to(dtype).double())


@every_row(
    ("field", "value"),
    [
        *(("count", value) for value in (-1, 2, 4, None, float("nan"), "two")),
        *(("hidden_size", value) for value in (0, 33, "32", float("nan"))),
        *(("eps", value) for value in (-1.0, float("inf"), float("nan"), None, "x")),
        *(("kind", ["chained"]), ("format", 7), ("raw", 3)),
        *(("base", value) for value in (7, [], {"a": 1}, True)),
        *(("draft_vocabulary", value) for value in (-1, 4, "4", 1 << 40)),
    ],
)
def test_a_header_that_says_something_impossible_is_refused(tmp_path, field, value):
    path = tmp_path / "heads.safetensors"
    tiny_heads().save(path)
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["tswift"])
    save_file(load_file(path), path, {"tswift": json.dumps({**told, field: value})})
    with refused(r"^heads: "):
        load_heads(path, HIDDEN, torch.float32, CPU)


def test_a_file_has_the_draft_vocabulary(tmp_path):
    path = tmp_path / "heads.safetensors"
    heads = copy.deepcopy(tiny_heads(kind="conditioned"))
    weights = heads.state_dict().keys()
    assert "draft_vocabulary" not in heads.about()
    heads.draft_ids = torch.tensor([1, 4, VOCAB - 1], dtype=torch.int32)
    assert heads.state_dict().keys() == weights
    assert heads.about()["draft_vocabulary"] == 3
    heads.double().save(path)
    file = find_heads(path)
    file.refuse_misfit(HIDDEN, VOCAB)
    assert (file.parameters, file.about["draft_vocabulary"]) == (
        sum(w.numel() for w in heads.parameters()),
        3,
    )
    loaded = load_heads(path, HIDDEN, torch.float32, CPU)
    assert loaded.draft_ids is not None
    assert loaded.draft_ids.dtype == torch.int32
    assert loaded.draft_ids.tolist() == [1, 4, VOCAB - 1]
    again = build(loaded.about())
    assert again.draft_ids is not None
    assert again.draft_ids.shape == (3,)


UNORDERED = ([1, 3, 3], [3, 1, 4], [-1, 1, 4])


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        *((each, "its draft_ids are no ascending ids of tokens") for each in UNORDERED),
        (torch.tensor([1, 3, 5]), "has draft_ids of int64, where int32 belongs"),
        ([1, 3], r"has draft_ids of shape \[2\], where \[3\] belongs"),
        ([], r"has draft_ids of shape \[0\], where \[3\] belongs"),
        ([1, 3, VOCAB], f"drafts token {VOCAB}, the model has {VOCAB} tokens"),
        (None, "lacks draft_ids"),
    ],
)
def test_a_broken_draft_vocabulary_is_refused(tmp_path, ids, said):
    if isinstance(ids, list):
        ids = torch.tensor(ids, dtype=torch.int32)
    path = tmp_path / "heads.safetensors"
    heads = copy.deepcopy(tiny_heads())
    heads.draft_ids = torch.arange(3, dtype=torch.int32)
    heads.save(path)
    with safe_open(path, "pt") as file:
        told = file.metadata()
    tensors = load_file(path)
    del tensors["draft_ids"]
    save_file(tensors if ids is None else {**tensors, "draft_ids": ids}, path, told)
    with refused(said):
        find_heads(path).refuse_misfit(HIDDEN, VOCAB)
    if ids is None or (ids < VOCAB).all():
        with refused(said):
            load_heads(path, HIDDEN, torch.float32, CPU)


def test_heads_with_lm_heads_of_their_own_have_no_draft_vocabulary(tmp_path):
    path = tmp_path / "heads.safetensors"
    heads = copy.deepcopy(medusa_heads())
    heads.draft_ids = torch.arange(3, dtype=torch.int32)
    heads.save(path)
    with refused("its draft_vocabulary is 3"):
        find_heads(path)
