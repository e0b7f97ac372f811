"""What a file or a folder of heads holds, without its weights being read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tswift.errors import InputError
from tswift.models.attached import heads_path
from tswift.models.heads import check_about, is_ours
from tswift.models.kinds import build
from tswift.models.published import Stored, find_published, headers


@dataclass(frozen=True)
class Description:
    """What is known of heads before they are read.

    Attributes:
        path: the file or folder.
        layout: who writes them so: ``tswift``, ``TokenSwift`` or ``Medusa``.
        kind: ``chained``, ``conditioned`` or ``medusa``.
        count: heads.
        hidden_size: of the model that they go with.
        vocab_size: of their own LM heads; None where they share the model's.
        raw: whether they start from the state before the model's final norm.
        parameters: of all heads together.
        dtypes: of the tensors, such as ``BF16``.
        base: what tells the model that they were made for; None if nobody said.
    """

    path: str
    layout: str
    kind: str
    count: int
    hidden_size: int
    vocab_size: int | None
    raw: bool
    parameters: int
    dtypes: tuple[str, ...]
    base: str | None


def describe(path: Path) -> Description:
    """Describe the heads in a file, or in a folder: of heads, or of a model that has some.

    Raises:
        InputError: there are none, they are pickled, or something is wrong with them.
    """
    try:
        own = heads_path(path, None) or path
        if is_ours(own):
            return _ours(own)
        published = find_published(path)
    except InputError as error:
        raise InputError(str(error).removeprefix("--heads: "), "FILE") from None
    if published is None:
        raise InputError(f"there are no heads in {path}", "FILE")
    return _of(path, published.layout, published.about, published.tensors)


def _ours(path: Path) -> Description:
    tensors = headers(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["tswift"])
        check_about(about, path, len(tensors))
        with torch.device("meta"):
            wanted = {name: tuple(weight.shape) for name, weight in build(about).named_parameters()}
        description = _of(path, "tswift", about, tensors)
    except InputError:
        raise
    except KeyError as error:
        raise InputError(
            f"{path} is not a tswift heads file (there is no {error} in its metadata)", "--heads"
        ) from None
    except (TypeError, ValueError, RuntimeError, OSError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is not a tswift heads file ({reason})", "--heads") from None
    if wanted != {name: stored.shape for name, stored in tensors.items()}:
        raise InputError(f"{path} has not the tensors of {about['count']} {about['kind']} heads", "--heads")
    return description


def _of(path: Path, layout: str, about: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Description:
    return Description(
        path=str(path),
        layout=layout,
        kind=about["kind"],
        count=about["count"],
        hidden_size=about["hidden_size"],
        vocab_size=about.get("vocab_size"),
        raw=about.get("raw", False),
        parameters=sum(prod(stored.shape) for stored in tensors.values()),
        dtypes=tuple(sorted({stored.dtype for stored in tensors.values()})),
        base=about.get("base"),
    )
