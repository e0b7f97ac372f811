"""The prompt of a job: a file, standard input or the bundled novel."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

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
