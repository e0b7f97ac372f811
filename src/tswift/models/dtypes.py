"""The dtypes of weights by name."""

from __future__ import annotations

from typing import Any

import torch

from tswift.errors import InputError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


def find_dtype(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        InputError: there is none that a model could be run in.
    """
    if name not in DTYPES:
        raise InputError(f"no dtype {name!r}; there are auto, {', '.join(DTYPES)}", "--dtype")
    return DTYPES[name]


def own_dtype(config: Any) -> torch.dtype:
    """The dtype that a model was published in; float32 where its configuration does not say.

    Raises:
        InputError: none that a model could be run in.
    """
    own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    return find_dtype(str(own).removeprefix("torch."))


def dtype_for(dtype: str, place: torch.device) -> Any:
    """The dtype of a name on a device; ``auto`` where the checkpoint says which.

    Raises:
        InputError: there is no such dtype.
    """
    if dtype == "auto":
        return "auto" if place.type == "cuda" else torch.float32
    return find_dtype(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")
