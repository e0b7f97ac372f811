"""Where a model's heads come from, and heads installed for a model's weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tswift.errors import DecodeError
from tswift.models.checkpoint import checkpoint_hash, find_source
from tswift.models.config import NO_HEADS, SHAPE_PREFIX
from tswift.native_build import cache_folder
from tswift.speculators.heads import HEAD_TYPES, carries_heads, heads_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ON_HUB = "on the hub"  # heads among a model's weights, which may not be here yet


def heads_source(
    model: str, config: PreTrainedConfig, heads: str | os.PathLike[str] | None
) -> Path | str | None:
    """Where a model's heads come from: a file or folder, ``ON_HUB``, or a kind for random ones;
    None for no heads.
    """
    if model.startswith(SHAPE_PREFIX):
        kind = "chained" if heads is None else str(heads)
        return kind if kind in HEAD_TYPES else heads_path(kind, None)
    if heads == NO_HEADS:
        return None
    _, folder = find_source(model)
    path = heads_path(heads, folder)
    if path is None and carries_heads(config):
        return folder or ON_HUB
    return found_heads(model) if path is None else path


def found_heads(model: str) -> Path | None:
    """Heads that were installed for a model's weights; None if there are none."""
    name = _file_name(model)
    folder = cache_folder()
    path = None if name is None or folder is None else folder / name
    return path if path is not None and path.is_file() else None


def installed(heads: Path) -> bool:
    """Whether a file of heads is one that was installed."""
    return heads.parent == cache_folder()


def install_heads(model: str, heads: Path) -> Path:
    """Copy a heads file to where it is found for a model from now on.

    Raises:
        DecodeError: that cannot be done.
    """
    name = _file_name(model)
    folder = cache_folder()
    if name is None or folder is None:
        reason = (
            f"the weights of {model} are not in files here"
            if name is None
            else "there is no folder for them"
        )
        raise DecodeError(f"the heads cannot be installed: {reason}")
    beside = folder / f"{name}.{os.getpid()}"
    try:
        shutil.copyfile(heads, beside)
        beside.replace(folder / name)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise DecodeError(f"the heads cannot be installed in {folder} ({error.strerror})") from None
    return folder / name


def _file_name(model: str) -> str | None:
    """Name of the file of heads for the weights of a model; None where those cannot be told."""
    known = checkpoint_hash(model)
    return None if known is None else f"heads-{known[:20]}.safetensors"
