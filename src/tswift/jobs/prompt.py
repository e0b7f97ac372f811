"""The prompt of a job: a file, standard input or the bundled novel."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tswift.errors import InputError
from tswift.reading import read_file, read_stream

BUNDLED = "long-novel.txt"
BUNDLED_PREFILL = 1024  # tokens of the bundled prompt that are used if nothing is said
MOST_BYTES = 32_000_000  # of a prompt: some ten million tokens, which take a minute and gigabytes to be found
_OPTION = "--prompt"


def read_prompt(source: str | None) -> str:
    """The text of a prompt.

    Args:
        source: a file, ``-`` for standard input, or None for the bundled novel.

    Raises:
        InputError: nothing there, more than ``MOST_BYTES``, no text in it, or no UTF-8 text.
    """
    name = "standard input" if source == "-" else str(source)
    data = _standard_input() if source == "-" else read_file(_path(source), MOST_BYTES, _OPTION)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start:,})", _OPTION) from None
    if "\0" in text:
        raise InputError(f"{name} is not text: it has NUL bytes", _OPTION)
    if not text:
        raise InputError(f"{name} is empty", _OPTION)
    if not text.strip():
        raise InputError(f"{name} has nothing but white space", _OPTION)
    return text


def take(tokens: list[int], prefill: int | None, bundled: bool) -> list[int]:
    """The first ``prefill`` tokens of a prompt; None for all of them, or for the bundled prompt's first 1,024.

    Raises:
        InputError: the prompt has fewer.
    """
    if prefill is None:
        return tokens[:BUNDLED_PREFILL] if bundled else tokens
    if prefill > len(tokens):
        raise InputError(f"asks for {prefill:,} tokens, the prompt has {len(tokens):,}", "--prefill")
    return tokens[:prefill]


def special_tokens_in(tokenizer: Any, text: str, used: int | None = None) -> tuple[str, ...]:
    """The special tokens that a prompt spells out, such as ``</s>``: they are encoded as control tokens.

    What the tokenizer itself puts before or behind a text is not among them, nor what it is told to take literally.

    Args:
        tokenizer: of the model; a stand-in has none.
        text: the prompt.
        used: how many of its tokens are used; None for all.

    Returns:
        Each once, in the order of their first appearance.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    special = {token_id: token for token_id, token in added.items() if token.special}
    # encoding a long prompt twice takes seconds; what a normalizer changes cannot be looked for in the text
    if not any(token.normalized or token.content in text for token in special.values()):
        return ()
    encoded = tokenizer(text, return_special_tokens_mask=True)
    marked = zip(encoded["input_ids"][:used], encoded["special_tokens_mask"], strict=False)
    return tuple(dict.fromkeys(special[token].content for token, own in marked if token in special and not own))


def fingerprint(tokens: list[int]) -> str:
    """SHA-256 of token ids, taken as little-endian uint32."""
    return sha256(np.asarray(tokens, dtype="<u4").tobytes()).hexdigest()


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise InputError("there is no standard input", _OPTION)
    try:
        return read_stream(sys.stdin.buffer, MOST_BYTES, "standard input", _OPTION)
    except OSError as error:  # a closed descriptor, or a folder for standard input
        raise InputError(f"standard input cannot be read ({error.strerror})", _OPTION) from None


def _path(source: str | None) -> Path:
    if source is None:
        return _bundled()
    if not source:
        raise InputError("names no file", _OPTION)
    try:
        return Path(source).expanduser()
    except RuntimeError as error:  # a home folder that does not exist
        raise InputError(f"{source} cannot be read ({error})", _OPTION) from None


def _bundled() -> Path:
    # a wheel carries the prompts inside the package, a source tree beside src/
    package = Path(__file__).parents[1]
    inside = package / "prompts" / BUNDLED
    return inside if inside.is_file() else package.parents[1] / "prompts" / BUNDLED
