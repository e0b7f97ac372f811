"""Which smaller model a job loads to draft with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tswift.drafting.methods import find_method
from tswift.errors import InputError
from tswift.models.draft import DRAFT_OPTION
from tswift.models.fingerprint import weights_hash
from tswift.models.loaded import LoadedModel
from tswift.models.source import DEMO, DEMO_DRAFT


def draft_for(methods: Sequence[str], model: str, asked: str | None) -> str | None:
    """The draft model to load for methods; None if none of them needs one.

    Args:
        methods: names.
        model: the large model's name.
        asked: what was typed, or None: that is the bundled draft model for the bundled model.

    Raises:
        InputError: no such method, one was typed and none needs it, or none was typed and one is needed.
    """
    needing = [method for method in methods if find_method(method).draft]
    if asked is not None and not needing:
        message = f"{methods[0]} does not use it" if len(methods) == 1 else f"none of {', '.join(methods)} uses it"
        raise InputError(message, DRAFT_OPTION)
    if not needing or asked is not None:
        return asked
    if model != DEMO:
        raise InputError(f"names a smaller model with the tokens of {model}, which {needing[0]} needs", DRAFT_OPTION)
    return DEMO_DRAFT


def about_draft(model: LoadedModel) -> dict[str, Any] | None:
    """For records: a loaded model's draft model, down to every bit of its weights; None if it has none."""
    if model.draft is None:
        return None
    return {"name": model.draft_name, "weights": weights_hash(model.draft.model)}
