"""Prompts read and encoded, in the model's chat template if that is asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tswift.errors import InputError
from tswift.reading import read_file, read_stream

BUNDLED = "long-novel.txt"
BUNDLED_PREFILL = 1024  # tokens of the bundled prompt that are used if nothing is said
MOST_BYTES = 32_000_000  # of a prompt: some ten million tokens, which take a minute and gigabytes to be found


def read_prompt(source: str | None, option: str = "prompt") -> str:
    """The text of a prompt: of a file, of standard input (``-``), or of the bundled novel (None).

    InputError, naming ``option``, if it is more than ``MOST_BYTES``, or not text in UTF-8.
    """
    name = "standard input" if source == "-" else str(source)
    if source == "-":
        data = _standard_input(option)
    elif source == "":
        raise InputError("names no file", option)
    else:
        try:
            path = bundled_prompts() / BUNDLED if source is None else Path(source).expanduser()
        except RuntimeError as error:  # a home folder that does not exist
            raise InputError(f"{source} cannot be read ({error})", option) from None
        data = read_file(path, MOST_BYTES, option)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start:,})", option) from None
    return check_prompt(text, option, name)


def _standard_input(option: str) -> bytes:
    if sys.stdin is None:
        raise InputError("there is no standard input", option)
    try:
        return read_stream(sys.stdin.buffer, MOST_BYTES, "standard input", option)
    except OSError as error:  # a closed descriptor, or a folder for standard input
        raise InputError(f"standard input cannot be read ({error.strerror})", option) from None


def bundled_prompts() -> Path:
    """The folder of the bundled prompts: inside the package in a wheel, beside ``src/`` in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "prompts"
    return inside if inside.is_dir() else package.parents[1] / "prompts"


def check_prompt(text: str, option: str, name: str = "the text") -> str:
    """A prompt, checked to be text; ``name`` is what an error calls it."""
    if "\0" in text:
        raise InputError(f"{name} is not text: it has NUL bytes", option)
    if not text:
        raise InputError(f"{name} is empty", option)
    if not text.strip():
        raise InputError(f"{name} has nothing but white space", option)
    return text


def take(tokens: list[int], prefill: int | None, bundled: bool) -> list[int]:
    """The first ``prefill`` tokens of a prompt; None for all of them, or for the bundled prompt's first 1,024."""
    if prefill is None:
        return tokens[:BUNDLED_PREFILL] if bundled else tokens
    if prefill > len(tokens):
        raise InputError(f"asks for {prefill:,} tokens, the prompt has {len(tokens):,}", "prefill")
    return tokens[:prefill]


def fingerprint(tokens: list[int]) -> str:
    """SHA-256 of token ids, taken as little-endian uint32."""
    return sha256(np.asarray(tokens, dtype="<u4").tobytes()).hexdigest()


def render_chat(tokenizer: Any, model: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The template of a chat filled in, up to where the model is to answer.

    Args:
        tokenizer, model: the model's, and its name for errors.
        messages: with a ``role`` and a ``content``. Templates may shorten those of the assistant, and no others.

    Returns:
        Text with all special tokens that the template wants: it is to be encoded without any being added.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"the tokenizer of {model} has no chat template", "chat")
    system = any(message["role"] == "system" for message in messages)
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs, and have their own ways to refuse
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        option = "system" if system else "chat"
        raise InputError(f"the chat template of {model} does not take it ({reason})", option) from None
    for message in messages:
        held = message["content"].strip() in rendered
        if message["role"] == "system" and not held:
            raise InputError(f"the chat template of {model} drops system prompts", "system")
        if message["role"] == "user" and not held:
            raise InputError(f"the chat template of {model} does not hold the prompt as it is", "chat")
    return str(rendered)
