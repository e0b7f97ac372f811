"""What stands between a model and a decode: how a text ends, and what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import options_for, tokens_of
from tswift.attention.reference import ReferenceAttention
from tswift.decoding.params import SamplingParams
from tswift.decoding.step import Walk
from tswift.drafting.methods import METHODS
from tswift.drafting.options import DraftOptions
from tswift.engine import begin, ending, generate
from tswift.errors import InputError
from tswift.models.load import load


def test_end_of_text_is_banned_or_stops() -> None:
    params = SamplingParams(banned=(5,))
    assert ending(params, (2, 7), stop_at_eos=True) == (params, (2, 7))
    banned, stop = ending(params, (2, 7), stop_at_eos=False)
    assert banned.banned == (2, 5, 7)
    assert stop == ()


@pytest.mark.parametrize("method", METHODS)
def test_need_is_what_is_allocated(checkpoint: Path, method: str) -> None:
    model = load(str(checkpoint), draft_model=str(checkpoint) if METHODS[method].draft else None)
    run = begin(model, [1, 2, 3], 50, method=method, options=DraftOptions(budget=128))
    assert run.need.full_bytes == run.decoding._context.kv.nbytes
    assert (run.need.partial_bytes > 0) == METHODS[method].partial
    assert (run.need.draft_kv_bytes > 0) == METHODS[method].draft
    assert run.need.positions == 53


@pytest.mark.parametrize("method", METHODS)
def test_a_text_goes_on_from_its_tokens(checkpoint: Path, method: str) -> None:
    draft = str(checkpoint) if METHODS[method].draft else None
    model, options = load(str(checkpoint), dtype="float64", draft_model=draft), options_for(method, budget=64)
    asked = {"method": method, "options": options, "seed": 3}
    whole = tokens_of(list(generate(model, "The ship", 90, **asked)))
    need = begin(model, model.encode("The ship"), 70, **asked).need
    for cut in (0, 1, 57, 69):
        run = begin(model, model.encode("The ship"), 70, written=whole[:cut], **asked)
        assert run.need == need  # those written are part of the length, and counted once
        if cut:
            assert tokens_of(list(run.steps())) == whole[cut:70]
    assert tokens_of(list(generate(model, "The ship", 90, written=whole[:70], **asked))) == whole[70:]


def test_the_reference_decodes_with_the_attention_of_reference_implementations(checkpoint: Path) -> None:
    model = load(str(checkpoint), dtype="float64")
    plain, reference = (begin(model, [1, 2, 3], 40, method=method) for method in ("ar", "ar-reference"))
    assert [run.decoding._target._attention is ReferenceAttention for run in (plain, reference)] == [False, True]
    assert tokens_of(list(reference.steps())) == tokens_of(list(plain.steps()))


def test_a_length_that_leaves_nothing_to_generate(checkpoint: Path) -> None:
    model = load(str(checkpoint))
    with pytest.raises(InputError, match=r"^length: must be at least 3, got 2, as 2 tokens are there already$"):
        begin(model, [1], 2, written=[4, 5])
    with pytest.raises(InputError, match=r"^length: must be at least 1, got 0$"):
        begin(model, [1], 0)


def test_every_method_says_what_it_uses() -> None:
    fields = set(DraftOptions.__dataclass_fields__)
    assert set().union(*(method.uses for method in METHODS.values())) == fields


def test_a_walk_is_made_for_the_methods_depth(checkpoint: Path) -> None:
    model, asked = load(str(checkpoint)), []

    def make(depth: int) -> Walk:
        asked.append(depth)
        return lambda tree, drawn: [0]

    runs = [begin(model, [1, 2, 3], 20, method=method, walk=make) for method in ("medusa", "tokenswift")]
    assert asked == [run.depth for run in runs] == [3, 4]
    assert [step.accepted for step in runs[1].steps()] == [0] * 20


def test_heads_that_are_missing(checkpoint: Path) -> None:
    from dataclasses import replace

    model = replace(load(str(checkpoint)), heads=None)
    with pytest.raises(InputError, match="tokenswift drafts with heads and the model has none") as caught:
        begin(model, [1], 5)
    others = str(caught.value).rpartition("without heads there are ")[2].split(", ")
    assert others == ["ar", "recall", "reuse", "magicdec"]
    for method in others:
        assert sum(len(step.tokens) for step in begin(model, [1], 5, method=method).steps()) == 5
