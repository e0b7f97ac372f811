"""The file format of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tswift.errors import InputError
from tswift.models.base_heads import FORMAT, Heads
from tswift.models.kinds import KINDS, build
from tswift.models.medusa_heads import MedusaHeads

_KINDS = (*KINDS, MedusaHeads.kind)
PICKLES = (".pt", ".pth", ".bin")


def is_ours(path: Path) -> bool:
    """Whether a file has our metadata, or cannot be opened, so that :func:`load_heads` is to say why.

    Raises:
        InputError: it is something that could be waited for, such as a pipe.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} cannot be read (it is no regular file)", "--heads")
    try:
        with safe_open(path, framework="pt") as file:
            return "tswift" in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError):
        return path.is_file() and path.suffix not in PICKLES


def load_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """Read a heads file written by :meth:`Heads.save`.

    Raises:
        InputError: the file is no such file, holds numbers that are none, or its heads were made for another hidden
            size.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["tswift"])
            names = file.keys()
            check_about(about, path, len(names))
            if about["hidden_size"] != hidden_size:
                reason = f"was made for hidden size {about['hidden_size']}, the model has {hidden_size}"
                raise InputError(f"{path} {reason}", "--heads")
            tensors = {name: file.get_tensor(name) for name in names}
        with torch.device("meta"):
            heads = build(about)
        heads.load_state_dict(tensors, assign=True)
        heads.base = about.get("base")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", "--heads") from None
    except KeyError as error:
        raise _no_heads(path, f"there is no {error} in its metadata") from None
    except (SafetensorError, TypeError, ValueError, RuntimeError, OSError, MemoryError) as error:
        raise _no_heads(path, " ".join(str(error).split())[:200]) from None
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and tensor.isfinite().all()):
            raise InputError(f"{path} is broken: {name} holds something else than finite numbers", "--heads")
    return heads.to(dtype=dtype, device=device).eval().requires_grad_(False)


def check_about(about: Any, path: Path, tensors: int) -> None:
    """Refuse metadata that describe no heads, before anything of the size that they tell is made.

    Args:
        about: as parsed from the file.
        path: the file.
        tensors: how many it holds.

    Raises:
        InputError: they do not.
        KeyError: something is not said.
    """
    if not isinstance(about, dict):
        raise _no_heads(path, "its metadata are no JSON object")
    if about["format"] != FORMAT or not isinstance(about["kind"], str) or about["kind"] not in _KINDS:
        held = f"holds heads of format {about['format']!s:.40}, kind {about['kind']!s:.40}"
        raise InputError(f"{path} {held}; known are {FORMAT} and {', '.join(_KINDS)}", "--heads")
    size, count, base = about["hidden_size"], about["count"], about.get("base")
    eps, layers, vocab = about.get("eps"), about.get("layers", 0), about.get("vocab_size", 1)  # each kind has its own
    if type(size) is not int or not 0 < size < 1 << 31 or type(count) is not int or not 0 < count <= tensors:
        raise _no_heads(path, f"it says it has {count!r:.40} heads for hidden size {size!r:.40}")
    if about["kind"] in KINDS and not (isinstance(eps, (int, float)) and 0 <= eps < 1):
        raise _no_heads(path, f"its eps is {eps!r:.40}")
    if type(layers) is not int or not 0 <= layers <= tensors or type(vocab) is not int or not 0 < vocab < 1 << 31:
        raise _no_heads(path, f"it says it has {layers!r:.40} layers and a vocabulary of {vocab!r:.40}")
    if not (base is None or isinstance(base, str)):
        raise _no_heads(path, f"its base model is {base!r:.40}")


def _no_heads(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is not a tswift heads file ({reason})", "--heads")
