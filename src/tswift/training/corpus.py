"""Training text: documents from the hub, a folder or parquet files, as one stream of token ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tswift.errors import InputError
from tswift.models.hub import hub

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

PG19 = "emozilla/pg19"
OPTION = "--corpus"
ENDINGS = (".parquet", ".txt")


def open_corpus(corpus: str) -> Dataset:
    """The documents of a corpus in a fixed order, in the column ``text``; on disk, not in memory.

    Args:
        corpus: a folder of ``.parquet`` (column ``text``) or ``.txt`` files, one such file, or a hub id such as
            ``emozilla/pg19``, of which the split ``train`` is taken.

    Raises:
        InputError: nothing to read there.
    """
    import datasets

    files = corpus_files(corpus)
    with silence(), hub(not files):
        try:
            if files and files[0].endswith(".txt"):
                rows = datasets.load_dataset("text", data_files=files, split="train", sample_by="document")
            elif files:
                rows = datasets.load_dataset("parquet", data_files=files, split="train")
            else:
                rows = datasets.load_dataset(corpus, split="train")
        except Exception as error:  # the hub client and the readers have many ways to fail; each is "cannot be had"
            reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0][:200]
            where = "cannot be read" if files else "is no folder and cannot be loaded from the hub"
            raise InputError(f"{corpus} {where} ({reason})", OPTION) from None
    if "text" not in rows.column_names:
        raise InputError(f"{corpus} has no column text, but {', '.join(rows.column_names)}", OPTION)
    if getattr(rows.features["text"], "dtype", None) not in ("string", "large_string"):
        raise InputError(f"{corpus} has a column text that holds no texts", OPTION)
    if not rows.num_rows:
        raise InputError(f"{corpus} holds no documents", OPTION)
    return rows


def load_documents(corpus: str) -> list[str]:
    """All documents of a corpus, in memory; see :func:`open_corpus`."""
    return [tidy(text) for text in open_corpus(corpus)["text"]]


def tidy(text: str | None) -> str:
    """A document without byte-order marks and without white space around it."""
    return (text or "").replace("\ufeff", "").strip()


def corpus_files(corpus: str) -> list[str]:
    """The files that a path names; none if it is no path that exists.

    Raises:
        InputError: none of them can be read.
    """
    if not corpus.strip():
        raise InputError("is empty", OPTION)
    try:
        path = Path(corpus).expanduser()
        if path.is_dir():
            for ending in ENDINGS:
                files = sorted(str(file) for file in path.glob(f"*{ending}") if file.is_file())
                if files:
                    return files
            raise InputError(f"{corpus} holds no .parquet or .txt files", OPTION)
        if path.exists():
            if path.suffix not in ENDINGS or not path.is_file():
                raise InputError(f"{corpus} is no folder, and no .parquet or .txt file", OPTION)
            return [str(path)]
    except InputError:
        raise
    except ValueError:  # a NUL in the name, or half a character
        raise InputError(f"no file can be called {corpus[:80]}", OPTION) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a home folder that does not exist
        raise InputError(f"{corpus[:80]} cannot be read ({getattr(error, 'strerror', error)})", OPTION) from None
    if path.is_absolute() or corpus.startswith((".", "~")) or not corpus.isprintable():  # no hub id
        raise InputError(f"there is no file or folder {corpus}", OPTION)
    return []


@contextmanager
def silence() -> Iterator[None]:
    """Keep bars and warnings of datasets off stderr."""
    import datasets

    shown, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
        datasets.logging.set_verbosity(verbosity)


def token_stream(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Token ids of all documents, each closed by the end-of-text token; uint16 or uint32, shape ``[n]``."""
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = np.array([tokenizer.eos_token_id], dtype=dtype)
    pieces: list[np.ndarray] = []
    for start in range(0, len(documents), 16):
        encoded = tokenizer(documents[start : start + 16], add_special_tokens=False)["input_ids"]
        for ids in encoded:
            pieces += [np.array(ids, dtype=dtype), end]
    return np.concatenate(pieces)


def random_rows(stream: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """``[rows, length]`` int64 crops of the stream at random places."""
    starts = rng.integers(0, len(stream) - length + 1, size=rows)
    return np.stack([stream[start : start + length] for start in starts]).astype(np.int64)


def jumping_positions(rows: int, length: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Positions that teach far distances on short rows: ``[rows, length]`` int64.

    A random tail of each row is moved forward by a jump drawn log-uniformly up to ``limit``, so every relative
    distance up to the limit is seen although no row is that long.
    """
    positions = np.tile(np.arange(length), (rows, 1))
    jumps = np.exp(rng.uniform(0, np.log(limit - length), size=rows)).astype(np.int64)
    for row, (cut, jump) in enumerate(zip(rng.integers(1, length, size=rows), jumps, strict=True)):
        positions[row, cut:] += jump
    return positions
