"""Documents that heads are trained on: tokenised, longer than the sequence, some of them held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from tswift.errors import InputError
from tswift.training.corpus import OPTION, open_corpus, silence, tidy

if TYPE_CHECKING:
    from datasets import Dataset

Tick = Callable[[int, int], None]

_HELD_OUT = 4  # documents, or a tenth of them if that is less


@dataclass(frozen=True)
class Documents:
    """The documents of a corpus that are longer than a sequence.

    Attributes:
        rows: all that were tokenised: ``tokens``, ``digest``.
        lengths: of all of them, in tokens.
        train: which of them are trained on.
        held_out: which of them never are.
        twice: how many were left out since the same text is there already.
        prefix: the tokens that the model wants before any text.
    """

    rows: Dataset
    lengths: np.ndarray
    train: np.ndarray
    held_out: np.ndarray
    twice: int
    prefix: tuple[int, ...]

    def about(self) -> dict[str, Any]:
        """What is trained on, for records."""
        digests = list(self.rows["digest"])
        chosen = sorted(digests[int(i)] for i in (*self.train, *self.held_out))
        return {
            "documents": len(self.lengths),
            "kept": len(chosen),
            "twice": self.twice,
            "held_out": len(self.held_out),
            "train_tokens": int(self.lengths[self.train].sum()),
            "sha256": sha256("".join(chosen).encode()).hexdigest(),
        }

    def beginning(self, document: int, length: int) -> np.ndarray:
        """``[length]`` int64: the first tokens of a document, the prefix before them."""
        return self._crop(document, 0, length)

    def batch(self, rows: int, length: int, key: Sequence[int]) -> np.ndarray:
        """Crops of documents at random places, each place as likely as any other.

        Args:
            rows: how many.
            length: tokens of each, the prefix included; no document is shorter.
            key: numbers that say which crops; the same ones give the same crops, whatever was drawn before.

        Returns:
            ``[rows, length]`` int64.
        """
        rng = np.random.default_rng(list(key))
        places = np.cumsum(self.lengths[self.train] - (length - len(self.prefix)) + 1)
        drawn = rng.integers(0, places[-1], size=rows)
        chosen = np.searchsorted(places, drawn, side="right")
        starts = drawn - np.concatenate([[0], places])[chosen]
        return np.stack([self._crop(self.train[i], at, length) for i, at in zip(chosen, starts, strict=True)])

    def _crop(self, document: int, start: int, length: int) -> np.ndarray:
        tokens = self.rows[int(document)]["tokens"]
        own = np.asarray(tokens[int(start) : int(start) + length - len(self.prefix)], dtype=np.int64)
        return np.concatenate([np.asarray(self.prefix, dtype=np.int64), own])


def prepare(
    corpus: str,
    tokenizer: Any,
    vocabulary: int,
    longer_than: int,
    held_out: int | None = None,
    most: int | None = None,
    tick: Tick | None = None,
) -> Documents:
    """Tokenise a corpus and choose its documents. The tokens are kept on disk by ``datasets``, and found there again.

    Args:
        corpus: see :func:`tswift.training.corpus.open_corpus`.
        tokenizer: the model's.
        vocabulary: tokens that the model knows.
        longer_than: documents of so many tokens or fewer are left out.
        held_out: how many of the others are held out, spread evenly; None for four, or a tenth if that is less.
        most: how many of the corpus's documents are looked at, spread evenly; None for all.
        tick: called with how many documents are tokenised, and how many there are.

    Raises:
        InputError: nothing to read, or too few documents are long enough.
    """
    rows = open_corpus(corpus)
    if most is not None and most < len(rows):
        rows = rows.select(np.linspace(0, len(rows) - 1, most).round().astype(int))
    rows = _tokenised(rows, tokenizer, tick or (lambda done, of: None))
    if max(rows["largest"]) >= vocabulary:
        raise InputError(f"the tokenizer has tokens that the model of {vocabulary:,} does not know", "--model")
    prefix = tuple(tokenizer("")["input_ids"])
    lengths, digests = np.asarray(rows["length"]), list(rows["digest"])
    long = np.flatnonzero(lengths > longer_than)
    first = {digests[int(i)]: int(i) for i in reversed(long)}
    kept = np.array(sorted(first.values()), dtype=int)
    wanted = max(1, min(_HELD_OUT, len(kept) // 10)) if held_out is None else held_out
    if len(kept) <= wanted:
        raise InputError(
            f"{corpus} has {len(kept):,} documents of more than {longer_than:,} tokens among {len(rows):,}, "
            f"and {wanted:,} of them would be held out; the longest has {int(lengths.max()):,}",
            OPTION if held_out is None else "--held-out",
        )
    held = kept[((np.arange(wanted) + 0.5) * len(kept) / wanted).astype(int)]
    return Documents(rows, lengths, np.setdiff1d(kept, held), held, len(long) - len(kept), prefix)


def _tokenised(rows: Dataset, tokenizer: Any, tick: Tick) -> Dataset:
    from datasets import Features, Value
    from datasets import Sequence as List  # before datasets 4, List has this name alone
    from datasets.fingerprint import Hasher

    digest = sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    features = {"tokens": List(Value("uint32")), "length": Value("int64"), "largest": Value("int64")}
    done = 0

    def encode(batch: Mapping[str, Sequence[str | None]]) -> dict[str, list[Any]]:
        nonlocal done
        done += len(batch["text"])
        tick(done, len(rows))
        return _encode(tokenizer, batch)

    with silence():
        tokenised = rows.map(
            encode,
            batched=True,
            batch_size=16,
            remove_columns=rows.column_names,
            features=Features({**features, "digest": Value("string")}),
            new_fingerprint=Hasher.hash(["tswift", rows._fingerprint, digest]),
        )
    return tokenised.with_format("numpy", columns=["tokens"], output_all_columns=True)


def _encode(tokenizer: Any, batch: Mapping[str, Sequence[str | None]]) -> dict[str, list[Any]]:
    texts = [tidy(text) for text in batch["text"]]
    tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return {
        "tokens": tokens,
        "length": [len(ids) for ids in tokens],
        "largest": [max(ids, default=0) for ids in tokens],
        "digest": [sha256(text.encode()).hexdigest() for text in texts],
    }
