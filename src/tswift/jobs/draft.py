"""What a job loads to draft with: a smaller model, or the model itself with weights of fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tswift.drafting.methods import find_method
from tswift.errors import InputError
from tswift.models import quantizing
from tswift.models.draft import DRAFT_OPTION
from tswift.models.fingerprint import weights_hash
from tswift.models.loaded import LoadedModel
from tswift.models.source import DEMO, DEMO_DRAFT

UNQUANTISED = "none"  # drafting passes run on the model as it is


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


def weights_for(methods: Sequence[str], asked: str | None) -> str | None:
    """What the model's own drafting passes are to be quantised by; None for nothing.

    Args:
        methods: names.
        asked: what was typed, ``none`` for nothing; or None.

    Raises:
        InputError: no such method or kind, or one was typed and none of the methods drafts with the model itself.
    """
    kinds = (UNQUANTISED, *quantizing.KINDS)
    if asked is not None and asked not in kinds:
        raise InputError(f"no {asked!r:.40}; there are {', '.join(kinds)}", quantizing.DRAFT_OPTION)
    if asked is not None and not any(find_method(method).partial for method in methods):
        one = f"{methods[0]} does not draft with the model itself"
        message = one if len(methods) == 1 else f"none of {', '.join(methods)} drafts with the model itself"
        raise InputError(message, quantizing.DRAFT_OPTION)
    return None if asked == UNQUANTISED else asked


def about_draft(model: LoadedModel) -> dict[str, Any] | None:
    """For records: a loaded model's draft model, down to every bit of its weights; None if it has none."""
    if model.draft is None:
        return None
    return {"name": model.draft_name, "weights": weights_hash(model.draft.model)}
