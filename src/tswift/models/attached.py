"""Which heads go with a model, and reading them for it."""

from __future__ import annotations

import os
from pathlib import Path

from tswift.errors import InputError
from tswift.models.base_heads import Heads
from tswift.models.fingerprint import fingerprint_in_any_dtype
from tswift.models.heads import is_ours, load_heads
from tswift.models.kinds import KINDS
from tswift.models.layers import Unserved
from tswift.models.linear import quicken
from tswift.models.published import find_published
from tswift.models.target import Target

HEADS_FILE = "heads.safetensors"


def heads_path(heads: str | os.PathLike[str] | None, folder: Path | None) -> Path | None:
    """The file of a model's heads, or a folder that others publish them in.

    Args:
        heads: a file, a folder, or a kind; None for a file of ours beside the model, if there is one.
        folder: the model's.

    Raises:
        InputError: what is named is not there.
    """
    if heads is None:
        own = folder / HEADS_FILE if folder else None
        return own if own and own.is_file() else None
    path = folder / f"heads-{heads}.safetensors" if folder and str(heads) in KINDS else Path(heads)
    try:
        found, inside = path.exists(), (path / HEADS_FILE).is_file()
    except OSError as error:
        raise InputError(f"{str(path)[:80]} cannot be looked at ({error.strerror})", "--heads") from None
    except ValueError:  # a NUL in the name, or half a character
        raise InputError(f"no file can be called {path}", "--heads") from None
    if not found:
        raise InputError(f"there is no file {path}", "--heads")
    if not (path.is_file() or path.is_dir()):  # to open a pipe or a device could take forever
        raise InputError(f"{path} is neither a file nor a folder", "--heads")
    return path / HEADS_FILE if inside else path


def attach(path: Path, target: Target, foreign: bool = False) -> Heads:
    """Read heads for a model, from a file of ours or as others publish them.

    Args:
        path: as :func:`heads_path` finds it.
        target: the model, which learns to give the states that the heads start from.
        foreign: whether heads of any model will do, as for random weights.

    Raises:
        InputError: there are no heads, or they were made for another model.
    """
    published = None if is_ours(path) else find_published(path)
    if published is None and path.is_dir():
        raise InputError(f"there are no heads in {path}", "--heads")
    if published is None:
        heads = load_heads(path, target.hidden_size, target.dtype, target.device)
    else:
        heads = published.load(target.hidden_size, target.dtype, target.device)
    if not foreign:
        _refuse_foreign(heads, target, path)
    vocabulary = heads.about().get("vocab_size", target.vocab_size)
    if vocabulary != target.vocab_size:
        message = f"{path} was made for a vocabulary of {vocabulary:,}, the model has {target.vocab_size:,}"
        raise InputError(message, "--heads")
    if heads.raw:
        try:
            target.tap()
        except Unserved as error:
            raise InputError(f"{path} does not go with this model, which has {error}", "--heads") from None
    quicken(heads)
    return heads


def _refuse_foreign(heads: Heads, target: Target, path: Path) -> None:
    """Refuse heads that remember another base model. A quantised one cannot be told from others."""
    if heads.base is None or getattr(target.model.config, "quantization_config", None) is not None:
        return
    if heads.base != fingerprint_in_any_dtype(target.model):
        raise InputError(f"{path} was made for another model: the fingerprints differ", "--heads")
