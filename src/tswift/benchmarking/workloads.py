"""Prompts of ``tswift bench``: texts of files, books and workloads, and their tokens.

A workload's prompts are of several kinds, since how much a draft gets right depends on the text:
some are bundled (``KINDS``), and files hold the user's own (see tswift.jobs.prompts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tswift.benchmarking.config import KINDS
from tswift.errors import InputError, did_you_mean, find_path, reason_of
from tswift.jobs.config import Text, bundled_prompts, read_prompt
from tswift.jobs.prompts import SUFFIXES, read_lines

if TYPE_CHECKING:
    from tswift.loading.model import LoadedModel

PG19 = "emozilla/pg19"  # on the hub, as parquet; the test split holds 100 books
OPTION = "workload"
_STRUCTURED = 3  # texts where nothing is said: one of each frame


@dataclass(frozen=True)
class Prompt:
    """A text's token ids."""

    name: str
    tokens: list[int]
    kind: str | None = None


def encode(
    texts: Sequence[Text], model: LoadedModel, longest: int, chat: bool = False
) -> list[Prompt]:
    """Token ids of the texts, of which none may have fewer than ``longest``;
    a workload's have as many as they have.
    """
    prompts = [Prompt(text.name, text.encode(model, chat), text.kind) for text in texts]
    for prompt in prompts:
        if prompt.kind is None and len(prompt.tokens) < longest:
            raise InputError(
                f"asks for {longest:,} tokens, {prompt.name} has {len(prompt.tokens):,}", "prefill"
            )
        if chat and len(prompt.tokens) > longest:
            reason = (
                f"of {longest:,} tokens would cut {prompt.name}, which has {len(prompt.tokens):,} "
                "in its template"
            )
            raise InputError(reason, "prefill")
    return prompts


def _distinct(texts: list[Text], option: str) -> list[Text]:
    names = [text.name for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two prompts are called {name}", option)
    return texts


def read_texts(words: Sequence[str]) -> list[Text]:
    """Texts that ``--prompts`` names; the bundled novel if nothing is named.

    Args:
        words: files, folders (their ``*.txt``), or ``pg19:N`` for the first N books of PG-19's test
            split.
    """
    texts = [] if words else [Text("bundled", read_prompt(None))]
    for word in words:
        if word.startswith("pg19:"):
            texts += _books(word)
            continue
        path = find_path(word, "prompts")
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"there is no .txt file in {word}", "prompts")
        texts += [Text(file.name, read_prompt(str(file), "prompts")) for file in files]
    return _distinct(texts, "prompts")


def _books(word: str) -> list[Text]:
    count = word.removeprefix("pg19:")
    if not count.isdecimal() or int(count) < 1:
        raise InputError(f"wants pg19:N with N books, got {word}", "prompts")
    import datasets

    from tswift.models.checkpoint import hub

    try:
        with hub():
            books = datasets.load_dataset(PG19, split="test", streaming=True)
            texts = [
                Text(f"pg19:{index}", book["text"])
                for index, book in enumerate(islice(books, int(count)))
            ]
    except Exception as error:
        # no network, no such data set, a broken cache: datasets raises all kinds
        raise InputError(
            f"{PG19} cannot be loaded from the hub ({reason_of(error)})", "prompts"
        ) from None
    if len(texts) < int(count):
        raise InputError(
            f"asks for {count} books, the test split of {PG19} has {len(texts)}", "prompts"
        )
    return texts


def read_workloads(words: Sequence[str]) -> list[Text]:
    """Prompts of bundled workloads and of files; ``:N`` behind one takes its first N."""
    texts: list[Text] = []
    for word in words:
        name, colon, number = word.rpartition(":")
        limit = int(number) if colon and number.isdecimal() else None
        name = word if limit is None else name
        if limit == 0:
            raise InputError(f"wants at least one prompt, got {word}", OPTION)
        if name == "prose":
            found = [
                Text(f"prose/{path.stem}", path.read_text(encoding="utf-8"), name)
                for path in sorted(bundled_prompts().glob("*.txt"))
            ]
        elif name in KINDS:
            found = _of_file(bundled_prompts() / f"{name}.jsonl")
        elif name.endswith(SUFFIXES):
            found = _of_file(find_path(name, OPTION))
        else:
            known = f"there are {', '.join(KINDS)} and files, FILE.jsonl or FILE.parquet"
            raise InputError(
                f"no workload {name!r:.60}; {known}{did_you_mean(name, KINDS)}", OPTION
            )
        if limit is not None and len(found) < limit:
            raise InputError(f"asks for {limit} prompts, {name} has {len(found)}", OPTION)
        texts += found[: limit or (_STRUCTURED if name == "structured" else None)]
    return _distinct(texts, OPTION)


def _of_file(path: Path) -> list[Text]:
    """The prompts of a file; their kind is the line's, or the file's name."""
    return [line.text(path.stem, path.stem, OPTION) for line in read_lines(path, OPTION)]
