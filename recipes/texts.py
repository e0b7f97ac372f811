"""Texts for a real model's heads: ``python -m recipes.texts --model FILE --books FOLDER --out
TEXTS.parquet``.

Extracts of books, and what the model writes itself: answers to requests like a user's, and how it
goes on with books. ``tswift train --corpus TEXTS.parquet --objective distill`` makes heads of them.
No extract gets into the repository.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset

import tswift
from recipes.corpus import load_documents
from tswift.loading.model import LoadedModel

REQUESTS = (
    *("Write a long story about {}.", "Explain {} to a beginner.", "Give me ten tips about {}."),
    *(
        "What is interesting about {}?",
        "Write an essay on {}.",
        "List the main facts about {} and discuss each.",
    ),
    *(
        "Write a dialogue between two friends about {}.",
        "Write a blog post about {}.",
        "Compare two views of {}.",
    ),
    *(
        "Write a lesson plan about {}.",
        "Write an email to a colleague about {}.",
        "How would you teach {} to children?",
    ),
    *(
        "What are common questions about {}? Answer them.",
        "Write a Python program that has to do with {}.",
    ),
)
TOPICS = (
    *(
        "a lighthouse keeper",
        "the water cycle",
        "a lost dog",
        "Python lists",
        "healthy breakfasts",
        "black holes",
    ),
    *(
        "the French Revolution",
        "a shy dragon",
        "remote work",
        "gardening",
        "the stock market",
        "learning the guitar",
    ),
    *(
        "a robot who paints",
        "climate change",
        "Roman roads",
        "sorting algorithms",
        "the human heart",
        "friendship",
    ),
    *(
        "travel to Japan",
        "electric cars",
        "the history of bread",
        "a school play",
        "insects",
        "public speaking",
    ),
    *(
        "recycling",
        "a ghost ship",
        "photosynthesis",
        "chess",
        "the Moon landing",
        "sleep",
        "machine learning",
    ),
    *(
        "whales",
        "job interviews",
        "a winter storm",
        "ancient Egypt",
        "budgeting",
        "volcanoes",
        "the internet",
    ),
    *(
        "coffee",
        "poetry",
        "probability",
        "antibiotics",
        "a birthday party",
        "SQL databases",
        "democracy",
    ),
    *(
        "time management",
        "the ocean floor",
        "a small business",
        "classical music",
        "the printing press",
        "kindness",
    ),
)
_ANSWER = 700  # most tokens of an answer
_START, _END = 400, 1400  # tokens of a book that the model goes on with, and of both together
_EXTRACT = 9000  # characters of a book


def extracts(books: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """Parts of different books, from random places, each from the beginning of a word."""
    long = [text for text in books if len(text) > _EXTRACT]
    parts = []
    for index in rng.permutation(len(long))[:count]:
        start = rng.integers(len(long[index]) - _EXTRACT)
        part = long[index][start : start + _EXTRACT]
        parts.append(part[part.index(" ") + 1 :])
    return parts


def written(
    model: LoadedModel, books: Sequence[str], least: int, rng: np.random.Generator
) -> Iterator[str]:
    """Texts of the model's own without end, each of at least so many tokens;
    a third goes on with a book.
    """
    chat: list[int] = []
    for number in range(1 << 62):
        if number % 3 == 2:
            start = model.tokenizer(extracts(books, 1, rng)[0], add_special_tokens=False)[
                "input_ids"
            ][:_START]
            yield model.tokenizer.decode(start + _write(model, start, _END - len(start), rng))
            continue
        request = rng.choice(REQUESTS).format(rng.choice(TOPICS))
        asked = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": request}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        chat += [*asked, *_write(model, asked, _ANSWER, rng)]
        if len(chat) >= least:
            yield model.tokenizer.decode(chat)
            chat = []


def _write(
    model: LoadedModel, prompt: Sequence[int], length: int, rng: np.random.Generator
) -> list[int]:
    """What the model writes after a prompt, as it is sampled by default,
    until it ends by itself.
    """
    seed = int(rng.integers(1 << 30))
    steps = tswift.generate(model, list(prompt), length, method="auto", seed=seed, stop_at_eos=True)
    return [token for step in steps for token in step.tokens]


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, a hub id or a GGUF file")
    parser.add_argument(
        "--books", required=True, help="folder of .parquet or .txt files, or a hub id"
    )
    parser.add_argument("--extracts", type=int, default=200, help="parts of books: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="in which the model writes: %(default)s"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = np.random.default_rng(3)
    books = load_documents(args.books)
    if not any(len(text) > _EXTRACT for text in books):
        parser.error(f"--books: {args.books} holds no text of more than {_EXTRACT:,} characters")
    model = tswift.load(args.model)
    texts = extracts(books, args.extracts, rng)
    last = time.monotonic() + 60 * args.minutes
    for number, text in enumerate(written(model, books, 1600, rng)):
        if time.monotonic() >= last:
            break
        texts.append(text)
        print(f"{number + 1} texts of the model's own", flush=True)
    Dataset.from_dict({"text": texts}).shuffle(seed=3).to_parquet(args.out)


if __name__ == "__main__":
    main()
