"""The prompts of a benchmark: files, folders of texts, or books of PG-19."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tswift.errors import InputError, renamed
from tswift.jobs.prompt import read_prompt
from tswift.models.loaded import LoadedModel
from tswift.models.source import hub

PG19 = "emozilla/pg19"  # on the hub, as parquet; the test split holds 100 books
_OPTION = "--prompts"


@dataclass(frozen=True)
class Prompt:
    """A prompt by name.

    Attributes:
        name: file name, ``pg19:0`` and so on, or ``bundled``.
        tokens: all of its token ids; at least as many as the longest prefill.
    """

    name: str
    tokens: list[int]


def read_texts(words: Sequence[str]) -> dict[str, str]:
    """The texts that ``--prompts`` names, by name; the bundled novel if nothing is named.

    Args:
        words: files, folders (their ``*.txt``), or ``pg19:N`` for the first N books of PG-19's test split, which needs
            the hub.

    Raises:
        InputError: nothing there, or no text.
    """
    if not words:
        return {"bundled": read_prompt(None)}
    texts: dict[str, str] = {}
    for word in words:
        if word.startswith("pg19:"):
            texts |= _books(word)
            continue
        path = Path(word).expanduser()
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"there is no .txt file in {word}", _OPTION)
        for file in files:
            if file.name in texts:
                raise InputError(f"two prompts are called {file.name}", _OPTION)
            try:
                texts[file.name] = read_prompt(str(file))
            except InputError as error:
                raise renamed(error, {"--prompt": _OPTION}) from None
    return texts


def encode(texts: dict[str, str], model: LoadedModel, longest: int) -> list[Prompt]:
    """Token ids of the texts.

    Raises:
        InputError: one has fewer than ``longest`` tokens.
    """
    prompts = [Prompt(name, model.encode(text)) for name, text in texts.items()]
    for prompt in prompts:
        if len(prompt.tokens) < longest:
            raise InputError(f"asks for {longest:,} tokens, {prompt.name} has {len(prompt.tokens):,}", "--prefill")
    return prompts


def _books(word: str) -> dict[str, str]:
    count = word.removeprefix("pg19:")
    if not count.isdecimal() or int(count) < 1:
        raise InputError(f"wants pg19:N with N books, got {word}", _OPTION)
    try:
        import datasets
    except ImportError:
        raise InputError("pg19 needs the package datasets (pip install datasets)", _OPTION) from None
    try:
        with hub():
            books = datasets.load_dataset(PG19, split="test", streaming=True)
            texts = [book["text"] for book in islice(books, int(count))]
    except Exception as error:  # no network, no such data set, a broken cache: datasets raises all kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{PG19} cannot be loaded from the hub ({reason[:120]})", _OPTION) from None
    if len(texts) < int(count):
        raise InputError(f"asks for {count} books, the test split of {PG19} has {len(texts)}", _OPTION)
    return {f"pg19:{index}": text for index, text in enumerate(texts)}
