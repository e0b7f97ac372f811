"""Which documents are trained on, which are held out, and which rows of them are drawn,
at which positions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from recipes.corpus import jumping_positions, load_documents, random_rows
from tests.helpers import refused
from tests.training.tiny import LONG, SHORT, Tiny
from tswift.training.config import HeadsConfig
from tswift.training.data import Documents, prepare

LENGTH = 96


@given(st.integers(1, 20), st.integers(2, 30), st.integers(2, 2000), st.integers(0, 1000))
def test_rows_are_crops_and_a_tail_of_each_jumps_below_the_limit(rows, length, more, seed):
    taken = random_rows(
        np.arange(100, 130, dtype=np.uint16), rows, length, np.random.default_rng(seed)
    )
    assert (taken.shape, taken.dtype) == ((rows, length), np.int64)
    assert (np.diff(taken, axis=1) == 1).all()
    assert 100 <= taken.min() <= taken.max() < 130
    positions = jumping_positions(rows, length, length + more, np.random.default_rng(seed))
    assert positions.shape == (rows, length)
    assert (positions[:, 0] == 0).all()
    assert positions.max() < length + more
    steps = np.sort(np.diff(positions, axis=1), axis=1)
    assert (steps[:, :-1] == 1).all()  # one jump
    assert (steps[:, -1] > 1).all()


def test_jumps_are_log_uniform_up_to_the_limit():
    jumps = jumping_positions(4000, 8, 100_008, np.random.default_rng(2))[:, -1] - 7
    assert jumps.max() > 90_000
    counts = np.histogram(np.log10(jumps), bins=[1, 2, 3, 4, 5])[0]
    assert (abs(counts / 4000 - 0.2) < 0.03).all()


def parquet(path: Path, **columns) -> str:
    from datasets import Dataset

    Dataset.from_dict(columns).to_parquet(str(path))
    return str(path)


def test_documents_of_folders_and_files(tmp_path):
    (tmp_path / "b.txt").write_text("\ufeffsecond\nline\n")
    (tmp_path / "a.txt").write_text("first ")
    assert load_documents(str(tmp_path)) == ["first", "second\nline"]
    assert load_documents(str(tmp_path / "b.txt")) == ["second\nline"]
    path = parquet(tmp_path / "c.parquet", title=["x", "y"], text=["one", None])
    assert load_documents(path) == ["one", ""]
    assert load_documents(str(tmp_path)) == ["one", ""]  # parquet first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: parquet(folder / "a.parquet", body=["x"]), "has no column text, but body"),
        (
            lambda folder: parquet(folder / "a.parquet", text=[1]),
            "has a column text that holds no texts",
        ),
        (lambda folder: (folder / "a.parquet").write_bytes(b"none"), "cannot be read (Parquet"),
        (
            lambda folder: (folder / "a.txt").write_bytes(b"\xff\xfe\0"),
            "cannot be read ('utf-8' codec",
        ),
        (lambda folder: (folder / "a.csv").write_text("a"), "holds no .parquet or .txt files"),
    ],
)
def test_a_corpus_that_cannot_be_read(tmp_path, make, message):
    make(tmp_path)
    with refused() as error:
        load_documents(str(tmp_path))
    assert str(error.value).startswith(f"corpus: {tmp_path} {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "corpus", ["", " ", "a" * 5000, "\0", "~nobody-at-all/x", "../a/b", "x y", "nobody/nothing"]
)
def test_names_that_are_no_corpus(corpus):
    with refused(r"^corpus: "):
        load_documents(corpus)


def prepared(
    tiny: Tiny, on_progress=lambda *_: None, vocabulary: int = 300, **changes
) -> Documents:
    config = HeadsConfig(str(tiny.corpus), **{"seq_len": LENGTH, **changes})
    return prepare(config, AutoTokenizer.from_pretrained(tiny.model), vocabulary, on_progress)


@pytest.fixture(scope="module")
def tokens(tiny: Tiny) -> list[list[int]]:
    """Token ids of every document, by the tokenizer alone."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    return [tokenizer(path.read_text())["input_ids"] for path in sorted(tiny.corpus.glob("*.txt"))]


def test_only_long_documents_are_kept_and_each_once(tiny, tokens):
    documents = prepared(tiny)
    chosen = sorted([*documents.train, *documents.held_out])
    assert chosen == [i for i, ids in enumerate(tokens[:-1]) if len(ids) > LENGTH]
    found = documents.summary()
    assert (found["documents"], found["kept"], found["twice"], found["held_out"]) == (
        LONG + SHORT + 1,
        LONG,
        1,
        1,
    )
    assert found["train_tokens"] == sum(len(tokens[i]) for i in documents.train)
    assert prepared(tiny, documents=9).summary()["documents"] == 9
    assert prepared(tiny, documents=1000).summary() == found
    second = sorted({len(tokens[i]) for i in chosen})[1]
    assert prepared(tiny, seq_len=second).summary()["kept"] == sum(
        len(tokens[i]) > second for i in chosen
    )


def test_rows_come_from_every_place_of_the_training_documents_alone(tiny, tokens):
    documents = prepared(tiny, held_out=5)
    assert len(documents.held_out) == 5
    assert not {*documents.held_out} & {*documents.train}
    crops = {
        tuple(tokens[i][at : at + LENGTH]): (i, at)
        for i in range(len(tokens) - 1)
        for at in range(len(tokens[i]) - LENGTH + 1)
    }
    places = set()
    for step in range(100):
        batch = documents.batch(3, LENGTH, (1, step, 0))
        assert (batch.shape, batch.dtype) == ((3, LENGTH), np.int64)
        assert (batch == documents.batch(3, LENGTH, (1, step, 0))).all()  # a function of its key
        places |= {crops[tuple(row)] for row in batch.tolist()}
    assert {i for i, _ in places} == {*documents.train}
    assert len(places) > 200
    assert (documents.batch(3, LENGTH, (1, 0, 1)) != documents.batch(3, LENGTH, (1, 0, 0))).any()
    held = [row.tolist() for row in documents.held_out_rows(LENGTH)]
    assert held == [tokens[i][:LENGTH] for i in documents.held_out]
    # the first and the last place of one are drawn, behind what a model expects first
    one = replace(documents, train=documents.train[:1], prefix=(7, 8))
    whole = tokens[one.train[0]]
    assert one.batch(2, len(whole) + 2, (0, 0, 0)).tolist() == [[7, 8, *whole]] * 2
    drawn = {tuple(row) for row in one.batch(40, len(whole) + 1, (0, 0, 0)).tolist()}
    assert drawn == {(7, 8, *whole[:-1]), (7, 8, *whole[1:])}
    assert one.held_out_rows(LENGTH)[0].tolist() == [7, 8, *held[0][:-2]]


def test_too_few_long_documents_and_unknown_tokens(tiny, tokens):
    held = (
        r"^held_out: .* has 18 documents of more than 96 tokens among 25, and 18 of .*; a smaller "
        r"seq_len takes"
    )
    with refused(held):
        prepared(tiny, held_out=18)
    largest = max(map(max, tokens))
    prepared(tiny, vocabulary=largest + 1)
    with refused(rf"^model: the tokenizer has tokens that the model of {largest} does not"):
        prepared(tiny, vocabulary=largest)


def test_tokens_are_kept_for_the_same_tokenizer_alone(tiny, checkpoint):
    first = prepared(tiny)
    other = prepared(replace(tiny, model=checkpoint), vocabulary=320)
    assert (first.lengths != other.lengths).any()
    again = prepared(tiny, on_progress=lambda *_: pytest.fail("tokenised twice"))
    assert again.summary() == first.summary()
