"""Training data: the documents of a corpus, tokenised once and kept by ``datasets``,
and random rows of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from tswift.errors import InputError, Object, reason_of
from tswift.models.checkpoint import hub
from tswift.training.config import HeadsConfig, corpus_files

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_FIELD = "corpus"
_HELD_OUT = 4  # documents, or a tenth of them if that is less


def open_corpus(corpus: str) -> Dataset:
    """The documents of a corpus in a fixed order, in the column ``text``; on disk, not in memory.

    A corpus is a folder of ``.parquet`` (column ``text``) or ``.txt`` files, one such file, or a
    hub id such as ``emozilla/pg19``, whose split ``train`` is taken.
    """
    import datasets

    files = corpus_files(corpus)
    reader = corpus
    options = Object()
    if files:
        reader = "parquet"
        options = {"data_files": files}
        if files[0].endswith(".txt"):
            reader = "text"
            options["sample_by"] = "document"
    with _quiet(), hub(not files):
        try:
            rows = datasets.load_dataset(reader, split="train", **options)
        except Exception as error:  # the hub client and the readers fail in many ways
            reason = reason_of(error.__cause__ or error)
            problem = (
                "cannot be read" if files else "is no folder and cannot be loaded from the hub"
            )
            raise InputError(f"{corpus} {problem} ({reason})", _FIELD) from None
    problem = ""
    if "text" not in rows.column_names:
        problem = f"has no column text, but {', '.join(rows.column_names)}"
    elif getattr(rows.features["text"], "dtype", None) not in ("string", "large_string"):
        problem = "has a column text that holds no texts"
    elif not rows.num_rows:
        problem = "holds no documents"
    if problem:
        raise InputError(f"{corpus} {problem}", _FIELD)
    return rows


def clean(text: str | None) -> str:
    """A document without byte-order marks and surrounding white space."""
    return (text or "").replace("\ufeff", "").strip()


@dataclass(frozen=True)
class Documents:
    """The documents of a corpus that are longer than a row,
    split into training and held-out ones.
    """

    rows: Dataset  # all tokenised documents: ``tokens``, ``digest``
    lengths: np.ndarray  # of all, in tokens
    train: np.ndarray  # indices of the documents trained on
    held_out: np.ndarray  # indices of those never trained on
    duplicates: int  # long documents left out because their text is there already
    prefix: tuple[int, ...]  # tokens that the model expects before any text

    def summary(self) -> Object:
        """Counts and a hash of the documents, for ``train.json``."""
        digests = list(self.rows["digest"])
        kept = sorted(digests[int(i)] for i in (*self.train, *self.held_out))
        return {
            "documents": len(self.lengths),
            "kept": len(kept),
            "twice": self.duplicates,
            "held_out": len(self.held_out),
            "train_tokens": int(self.lengths[self.train].sum()),
            "sha256": sha256("".join(kept).encode()).hexdigest(),
        }

    def frequent(self, count: int, vocabulary: int) -> np.ndarray:
        """The tokens that the training documents have most often, int32, ascending;
        of equals the lower ids.

        In a byte-pair vocabulary lower ids were found earlier, so they are frequent in other texts.
        """
        counts = np.zeros(vocabulary, dtype=np.int64)
        for document in self.train:
            counts += np.bincount(self.rows[int(document)]["tokens"], minlength=vocabulary)
        return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)

    def held_out_rows(self, length: int) -> list[np.ndarray]:
        """The first ``length`` tokens of each held-out document, prefix included, int64."""
        return [self._row(document, 0, length) for document in self.held_out]

    def batch(self, rows: int, length: int, key: Sequence[int]) -> np.ndarray:
        """``[rows, length]`` int64 tokens from random places of the training documents,
        every place equally likely.

        ``length`` includes the prefix. The same ``key`` gives the same rows, whatever was drawn
        before.
        """
        ends = np.cumsum(self.lengths[self.train] - (length - len(self.prefix)) + 1)
        drawn = np.random.default_rng(list(key)).integers(0, ends[-1], size=rows)
        chosen = np.searchsorted(ends, drawn, side="right")
        starts = drawn - np.concatenate([[0], ends])[chosen]
        return np.stack(
            [
                self._row(self.train[i], start, length)
                for i, start in zip(chosen, starts, strict=True)
            ]
        )

    def _row(self, document: int, start: int, length: int) -> np.ndarray:
        tokens = self.rows[int(document)]["tokens"]
        taken = tokens[int(start) : int(start) + length - len(self.prefix)]
        return np.concatenate([self.prefix, taken], dtype=np.int64, casting="unsafe")


def prepare(
    config: HeadsConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Documents:
    """Tokenise a corpus for a model with a vocabulary of this size, and split its documents.

    ``on_progress`` is called with the number of documents tokenised so far, and of all.
    """
    rows = open_corpus(config.corpus)
    if config.documents is not None and config.documents < len(rows):
        rows = rows.select(np.linspace(0, len(rows) - 1, config.documents).round().astype(int))
    rows = _tokenised(rows, tokenizer, on_progress)
    if max(rows["largest"]) >= vocabulary:
        raise InputError(
            f"the tokenizer has tokens that the model of {vocabulary:,} does not know", "model"
        )
    lengths = np.asarray(rows["length"])
    digests = list(rows["digest"])
    long = np.flatnonzero(lengths > config.seq_len)
    kept = np.array(sorted({digests[int(i)]: int(i) for i in reversed(long)}.values()), dtype=int)
    count = max(1, min(_HELD_OUT, len(kept) // 10)) if config.held_out is None else config.held_out
    if len(kept) <= count:
        raise InputError(
            f"{config.corpus} has {len(kept):,} documents of more than {config.seq_len:,} tokens "
            f"among {len(rows):,}, and {count:,} of them would be held out; the longest has "
            f"{int(lengths.max()):,}"
            + ("; a smaller `seq_len` takes shorter ones" if len(long) < len(rows) else ""),
            _FIELD if config.held_out is None else "held_out",
        )
    held = kept[((np.arange(count) + 0.5) * len(kept) / count).astype(int)]
    prefix = tuple(tokenizer("")["input_ids"])
    return Documents(rows, lengths, np.setdiff1d(kept, held), held, len(long) - len(kept), prefix)


def _tokenised(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, on_progress: Callable[[int, int], None]
) -> Dataset:
    from datasets import Features, Value
    from datasets import Sequence as List  # before datasets 4, List has this name alone
    from datasets.fingerprint import Hasher

    digest = sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    features = {
        "tokens": List(Value("uint32")),
        "length": Value("int64"),
        "largest": Value("int64"),
    }
    done = 0

    def encode(batch: Mapping[str, Sequence[str | None]]) -> dict[str, list[object]]:
        nonlocal done
        done += len(batch["text"])
        on_progress(done, len(rows))
        texts = [clean(text) for text in batch["text"]]
        tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return {
            "tokens": tokens,
            "length": [len(ids) for ids in tokens],
            "largest": [max(ids, default=0) for ids in tokens],
            "digest": [sha256(text.encode()).hexdigest() for text in texts],
        }

    with _quiet():
        tokenised = rows.map(
            encode,
            batched=True,
            batch_size=16,
            remove_columns=rows.column_names,
            features=Features({**features, "digest": Value("string")}),
            new_fingerprint=Hasher.hash(["tswift", rows._fingerprint, digest]),
        )
    return tokenised.with_format("numpy", columns=["tokens"], output_all_columns=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and warnings of datasets off stderr."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
        datasets.logging.set_verbosity(verbosity)
