"""Which documents are trained on, which are held out, and which crops of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.training.tiny import LONG, SHORT, Tiny
from tswift.errors import InputError
from tswift.training.documents import Documents, prepare

LENGTH = 96


def prepared(tiny: Tiny, **changes: object) -> Documents:
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    return prepare(str(tiny.corpus), tokenizer, 300, LENGTH, **changes)  # type: ignore[arg-type]


def encoded(tiny: Tiny) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    return [tokenizer(path.read_text())["input_ids"] for path in sorted(tiny.corpus.glob("*.txt"))]


def test_only_long_documents_are_kept_and_each_once(tiny: Tiny) -> None:
    documents, tokens = prepared(tiny), encoded(tiny)
    chosen = sorted([*documents.train, *documents.held_out])
    assert chosen == [i for i, ids in enumerate(tokens[:-1]) if len(ids) > LENGTH]
    assert len(chosen) == LONG
    about = documents.about()
    assert (about["documents"], about["kept"], about["twice"], about["held_out"]) == (LONG + SHORT + 1, LONG, 1, 1)
    assert about["train_tokens"] == sum(len(tokens[i]) for i in documents.train)


def test_held_out_documents_are_never_trained_on(tiny: Tiny) -> None:
    documents, tokens = prepared(tiny, held_out=5), encoded(tiny)
    assert len(documents.held_out) == 5
    assert not {*documents.held_out} & {*documents.train}
    held = [tokens[i] for i in documents.held_out]
    for step in range(20):
        for row in documents.batch(4, LENGTH, (0, step, 0)).tolist():
            assert not any(row == ids[at : at + LENGTH] for ids in held for at in range(len(ids)))
    for i, ids in zip(documents.held_out, held, strict=True):
        assert documents.beginning(i, LENGTH).tolist() == ids[:LENGTH]


def test_crops_are_from_everywhere_and_a_function_of_their_key(tiny: Tiny) -> None:
    documents, tokens = prepared(tiny), encoded(tiny)
    places = set()
    for step in range(200):
        batch = documents.batch(3, LENGTH, (1, step, 0))
        assert batch.shape == (3, LENGTH)
        assert batch.dtype == np.int64
        assert (batch == documents.batch(3, LENGTH, (1, step, 0))).all()
        for row in batch.tolist():
            found = [
                (i, at) for i in documents.train for at in range(len(tokens[i])) if tokens[i][at : at + LENGTH] == row
            ]
            assert found
            places.add(found[0])
    assert {i for i, _ in places} == {*documents.train}
    assert len(places) > 300
    assert (documents.batch(3, LENGTH, (1, 0, 1)) != documents.batch(3, LENGTH, (1, 0, 0))).any()


def test_the_first_and_the_last_place_are_both_drawn(tiny: Tiny) -> None:
    documents = prepared(tiny)
    one = Documents(documents.rows, documents.lengths, documents.train[:1], documents.held_out, 0, ())
    length = int(one.lengths[one.train[0]])
    assert one.batch(2, length, (0, 0, 0)).tolist() == [encoded(tiny)[one.train[0]]] * 2
    rows = one.batch(40, length - 1, (0, 0, 0))
    assert {tuple(row) for row in rows} == {tuple(encoded(tiny)[one.train[0]][at : length - 1 + at]) for at in (0, 1)}


def test_the_tokens_that_a_model_wants_first_come_first(tiny: Tiny) -> None:
    documents = prepared(tiny)
    wanting = Documents(documents.rows, documents.lengths, documents.train, documents.held_out, 0, (7, 8))
    assert (wanting.batch(3, LENGTH, (0, 0, 0))[:, :2] == [7, 8]).all()
    assert wanting.beginning(0, LENGTH).tolist() == [7, 8, *documents.beginning(0, LENGTH - 2).tolist()]


def test_fewer_documents_are_spread_over_the_corpus(tiny: Tiny) -> None:
    documents = prepared(tiny, most=9)
    assert documents.about()["documents"] == 9
    assert prepared(tiny, most=1000).about() == prepared(tiny).about()


def test_too_few_long_documents(tiny: Tiny) -> None:
    with pytest.raises(
        InputError, match=r"^--held-out: .* has 18 documents of more than 96 tokens among 25, and 18 of"
    ):
        prepared(tiny, held_out=18)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    with pytest.raises(
        InputError, match=r"^--corpus: .* has 0 documents of more than 9,000 tokens among 25, .* the longest has \d"
    ):
        prepare(str(tiny.corpus), tokenizer, 300, 9000)


def test_a_tokenizer_with_more_tokens_than_the_model(tiny: Tiny) -> None:
    with pytest.raises(InputError, match=r"^--model: the tokenizer has tokens that the model of 100 does not know"):
        prepare(str(tiny.corpus), AutoTokenizer.from_pretrained(tiny.model), 100, LENGTH)


def test_another_tokenizer_is_not_given_the_tokens_kept_for_the_first(tiny: Tiny, checkpoint: Path) -> None:
    first = prepared(tiny)
    other = prepare(str(tiny.corpus), AutoTokenizer.from_pretrained(checkpoint), 320, LENGTH)
    assert (first.lengths != other.lengths).any()
    again = prepare(
        str(tiny.corpus),
        AutoTokenizer.from_pretrained(tiny.model),
        300,
        LENGTH,
        tick=lambda *_: pytest.fail("tokenised twice"),
    )
    assert again.about() == first.about()
