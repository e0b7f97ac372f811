"""Documents, rows and positions of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tswift.errors import InputError
from tswift.training.corpus import jumping_positions, load_documents, random_rows


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 1000))
def test_rows_are_crops_of_the_stream(rows: int, length: int, seed: int) -> None:
    stream = np.arange(100, 130, dtype=np.uint16)
    taken = random_rows(stream, rows, length, np.random.default_rng(seed))
    assert taken.shape == (rows, length)
    assert taken.dtype == np.int64
    assert (np.diff(taken, axis=1) == 1).all()
    assert taken.min() >= 100
    assert taken.max() < 130


def test_every_place_of_the_stream_is_seen() -> None:
    taken = random_rows(np.arange(10), 500, 4, np.random.default_rng(1))
    assert set(taken[:, 0].tolist()) == set(range(7))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(2, 60), st.integers(2, 2000), st.integers(0, 1000))
def test_a_tail_of_each_row_jumps_and_stays_below_the_limit(rows: int, length: int, more: int, seed: int) -> None:
    limit = length + more
    positions = jumping_positions(rows, length, limit, np.random.default_rng(seed))
    assert positions.shape == (rows, length)
    assert positions.min() == 0
    assert positions.max() < limit
    steps = np.diff(positions, axis=1)
    assert ((steps > 1).sum(axis=1) == 1).all()  # one jump
    assert (np.sort(steps, axis=1)[:, :-1] == 1).all()


def test_jumps_are_log_uniform_up_to_the_limit() -> None:
    positions = jumping_positions(4000, 8, 100_008, np.random.default_rng(2))
    jumps = positions[:, -1] - 7
    assert jumps.max() > 90_000
    counts = np.histogram(np.log10(jumps), bins=[1, 2, 3, 4, 5])[0]
    assert (abs(counts / 4000 - 0.2) < 0.03).all()


def parquet(path: Path, **columns: object) -> str:
    from datasets import Dataset

    Dataset.from_dict(columns).to_parquet(str(path))
    return str(path)


def test_documents_of_folders_and_files(tmp_path: Path) -> None:
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
        (lambda folder: parquet(folder / "a.parquet", text=[1]), "has a column text that holds no texts"),
        (lambda folder: (folder / "a.parquet").write_bytes(b"none"), "cannot be read (Parquet"),
        (lambda folder: (folder / "a.txt").write_bytes(b"\xff\xfe\0"), "cannot be read ('utf-8' codec"),
        (lambda folder: (folder / "a.csv").write_text("a"), "holds no .parquet or .txt files"),
    ],
)
def test_a_corpus_that_cannot_be_read(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path)
    with pytest.raises(InputError) as error:
        load_documents(str(tmp_path))
    assert str(error.value).startswith(f"--corpus: {tmp_path} {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("corpus", ["", " ", "a" * 5000, "\0", "~nobody-at-all/x", "../a/b", "x y"])
def test_names_that_are_no_corpus(corpus: str) -> None:
    with pytest.raises(InputError, match=r"^--corpus: "):
        load_documents(corpus)
