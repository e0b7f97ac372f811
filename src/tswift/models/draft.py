"""What a small model must have in common with the model that it drafts for: the meaning of every token id."""

from __future__ import annotations

from typing import Any

from tswift.errors import InputError
from tswift.models.target import Target

DRAFT_OPTION = "--draft-model"


def refuse_other_vocabulary(name: str, draft: Target, tokenizer: Any, model: str, target: Target, known: Any) -> None:
    """Refuse a draft model whose token ids mean something else than the target's.

    Args:
        name: the draft model's.
        draft: it.
        tokenizer: its tokenizer; None if it has none, and sizes alone are compared.
        model: the target's name.
        target: it.
        known: its tokenizer, or None.

    Raises:
        InputError: another number of tokens, or one token that is another.
    """
    refuse_other_size(name, draft.vocab_size, model, target.vocab_size)
    if tokenizer is None or known is None:
        return
    ours, theirs = tokenizer.get_vocab(), known.get_vocab()
    if ours == theirs:
        return
    token = min({*ours.items()} ^ {*theirs.items()}, key=lambda pair: (pair[1], pair[0]))[0]
    found, wanted = (f"id {ids[token]:,}" if token in ids else "no id" for ids in (ours, theirs))
    message = f"{name} has another vocabulary than {model}: {token!r:.40} has {found} there, {wanted} here"
    raise InputError(message, DRAFT_OPTION)


def refuse_other_size(name: str, size: int, model: str, wanted: int) -> None:
    """Refuse a draft model with another number of tokens than the target has.

    Raises:
        InputError: it has.
    """
    if size != wanted:
        raise InputError(f"{name} has a vocabulary of {size:,}, {model} has {wanted:,}", DRAFT_OPTION)
