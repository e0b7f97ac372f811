"""Training text: documents from the hub, a folder or parquet files, as one stream of token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tswift.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PG19 = "emozilla/pg19"


def load_documents(corpus: str) -> list[str]:
    """All documents of a corpus, in a fixed order.

    Args:
        corpus: a folder of ``.parquet`` (column ``text``) or ``.txt`` files, or a hub id such as ``emozilla/pg19``.

    Raises:
        InputError: nothing to read there.
    """
    from datasets import load_dataset

    folder = Path(corpus)
    if folder.is_dir():
        for ending, builder in (("parquet", "parquet"), ("txt", "text")):
            files = sorted(str(path) for path in folder.glob(f"*.{ending}"))
            if files:
                options = {"sample_by": "document"} if builder == "text" else {}
                rows = load_dataset(builder, data_files=files, split="train", **options)
                return [text.replace("\ufeff", "").strip() for text in rows["text"]]
        raise InputError(f"{folder} holds no .parquet or .txt files", "--corpus")
    try:
        rows = load_dataset(corpus, split="train")
    except Exception as error:  # the hub client has many ways to fail; each is "cannot be had"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{corpus} is no folder and cannot be loaded from the hub ({reason})", "--corpus") from None
    return list(rows["text"])


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
