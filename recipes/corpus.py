"""Text for the recipes, whole in memory: documents, their tokenizer, token streams, random rows."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tswift.training.data import clean, open_corpus

PG19 = "emozilla/pg19"
_END = "<|endoftext|>"


def load_documents(corpus: str) -> list[str]:
    """All documents of a corpus; see :func:`tswift.training.data.open_corpus`."""
    return [clean(text) for text in open_corpus(corpus)["text"]]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """The documents that are trained on, and the six that never are."""
    held = range(0, len(documents), 41)[:6]
    return [text for index, text in enumerate(documents) if index not in held], [
        documents[index] for index in held
    ]


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can encode any text; id 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        bos_token=_END,
        clean_up_tokenization_spaces=False,
    )


def token_stream(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """``[n]`` uint16 or uint32 token ids of all documents, each closed by the end-of-text token."""
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = np.array([tokenizer.eos_token_id], dtype=dtype)
    pieces: list[np.ndarray] = []
    for start in range(0, len(documents), 16):
        for ids in tokenizer(documents[start : start + 16], add_special_tokens=False)["input_ids"]:
            pieces += [np.array(ids, dtype=dtype), end]
    return np.concatenate(pieces)


def random_rows(stream: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """``[rows, length]`` int64 crops of a stream at random places."""
    starts = rng.integers(0, len(stream) - length + 1, size=rows)
    return np.stack([stream[start : start + length] for start in starts]).astype(np.int64)


def jumping_positions(rows: int, length: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Positions ``[rows, length]`` int64 that teach far distances on short rows.

    A random tail of each row is moved forward by a jump drawn log-uniformly up to ``limit``, so
    every relative distance up to the limit is seen although no row is that long.
    """
    positions = np.tile(np.arange(length), (rows, 1))
    jumps = np.exp(rng.uniform(0, np.log(limit - length), size=rows)).astype(np.int64)
    for row, (cut, jump) in enumerate(zip(rng.integers(1, length, size=rows), jumps, strict=True)):
        positions[row, cut:] += jump
    return positions
