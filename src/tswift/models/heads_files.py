"""Files of heads: our format and the published ones, which of them go with a model, and what they hold."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tswift.errors import InputError
from tswift.models.fingerprint import fingerprint_in_any_dtype
from tswift.models.heads import FORMAT, KINDS, Heads, MedusaHeads, build
from tswift.models.hf import UnsupportedModel
from tswift.models.linear import use_onednn
from tswift.models.target import Target
from tswift.reading import MOST_RECORD, parse_json, read_file

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


MEDUSA_FILE = "medusa_lm_head.safetensors"
_TOKENSWIFT = re.compile(r"(?:model\.)?medusa_layers\.(\d+)\.((?:input_layernorm|linear|post_layernorm)\.weight)")
_MEDUSA = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: the file.
        name: its name there.
        shape: of the tensor.
        dtype: such as ``BF16``.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Published:
    """Heads that were found, not yet read.

    Attributes:
        path: the folder or the file.
        layout: whose: ``TokenSwift`` or ``Medusa``.
        about: as :meth:`~tswift.models.heads.Heads.about` says it of heads.
        tensors: by the name that the parameter has in :class:`~tswift.models.heads.Heads`.
    """

    path: Path
    layout: str
    about: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    def load(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Heads:
        """Read them.

        Raises:
            InputError: they were made for another hidden size, or hold numbers that are none.
        """
        if self.about["hidden_size"] != hidden_size:
            reason = f"was made for hidden size {self.about['hidden_size']}, the model has {hidden_size}"
            raise _refused(self.path, reason)
        with torch.device("meta"):
            heads = build(self.about)
        tensors = {name: _tensor(stored).to(device, dtype) for name, stored in self.tensors.items()}
        heads.load_state_dict(tensors, assign=True)
        return heads.eval().requires_grad_(False)


def find_published(path: Path) -> Published | None:
    """The heads in a folder or a safetensors file; None if there are none of a layout that is known.

    Raises:
        InputError: they are pickled, not whole, or not what the configuration beside them says; a broken file.
    """
    if path.suffix in PICKLES:
        raise _refused(path, "is a pickle, which could run code when it is read; convert it to safetensors")
    folder = path if path.is_dir() else path.parent
    stored = _stored_in(folder) if path.is_dir() else headers(path)
    config = read_json(folder / "config.json")
    for layout, pattern, read in (("TokenSwift", _TOKENSWIFT, _tokenswift), ("Medusa", _MEDUSA, _medusa)):
        found = {name: match for name in stored if (match := pattern.fullmatch(name))}
        if found:
            about, names = read({name: (found[name], stored[name]) for name in found}, config, path)
            return Published(path, layout, about, {new: stored[old] for new, old in names.items()})
    if path.is_dir() and (path / MEDUSA_FILE).with_suffix(".pt").exists():
        raise _refused(path, f"has its heads in {Path(MEDUSA_FILE).stem}.pt, a pickle, which could run code when read")
    return None


def carries_heads(config: object) -> bool:
    """Whether a configuration, as an object or as a dict, says that there are heads among its model's weights."""
    said = config if isinstance(config, dict) else vars(config)
    return any(said.get(name) for name in ("medusa_heads", "medusa_num_heads"))


def headers(path: Path) -> dict[str, Stored]:
    """What a safetensors file says that it holds, by name.

    Raises:
        InputError: it is broken, or no such file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: Stored(path, n, tuple(v.get_shape()), v.get_dtype()) for n, v in views.items()}
    except FileNotFoundError:
        raise _refused(path, "does not exist") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise _refused(path, f"is broken or no safetensors file ({' '.join(str(error).split())[:200]})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    if not path.exists():
        return {}
    found = parse_json(read_file(path, MOST_RECORD, "--heads"), path, "--heads")
    if not isinstance(found, dict):
        raise _refused(path, "holds no JSON object")
    return found


_Found = Mapping[str, tuple["re.Match[str]", Stored]]
_Read = tuple[dict[str, Any], dict[str, str]]


def _tokenswift(found: _Found, config: Mapping[str, Any], path: Path) -> _Read:
    names = {f"heads.{match[1]}.{match[2]}": name for name, (match, _) in found.items()}
    parts = ("input_layernorm.weight", "linear.weight", "post_layernorm.weight")
    count = _count({int(match[1]) for match, _ in found.values()}, path)
    _want({f"heads.{head}.{part}" for head in range(count) for part in parts}, names, path)
    said = config.get("medusa_heads", count)
    if said != count:
        raise _refused(path, f"has {count} heads, its configuration says {said}")
    hidden = next(stored.shape[0] for match, stored in found.values() if match[2] == "linear.weight")
    _fit(found, lambda match: (hidden, hidden) if match[2] == "linear.weight" else (hidden,), path)
    eps = config.get("rms_norm_eps")
    if type(eps) not in (int, float):
        raise _refused(path, "has no rms_norm_eps in the configuration beside it, which its heads need")
    return {"kind": "chained", "count": count, "hidden_size": hidden, "eps": eps, "raw": True}, names


def _medusa(found: _Found, config: Mapping[str, Any], path: Path) -> _Read:
    count = _count({int(match[1]) for match, _ in found.values()}, path)
    layers = max(int(match[2]) for match, _ in found.values())
    names = {}
    for name, (match, _) in found.items():
        last = int(match[2]) == layers
        if last == bool(match[3]):
            raise _refused(path, f"has {name}, which is out of place in Medusa's heads of {layers} blocks")
        part = f"lm_head.{match[4]}" if last else f"blocks.{match[2]}.{match[4]}"
        names[f"heads.{match[1]}.{part}"] = name
    parts = [f"blocks.{block}.{part}" for block in range(layers) for part in ("weight", "bias")]
    _want({f"heads.{head}.{part}" for head in range(count) for part in (*parts, "lm_head.weight")}, names, path)
    # the first published configurations name fewer heads than there are, so that more is no mistake
    said = config.get("medusa_num_heads", count)
    if not isinstance(said, int) or said > count or config.get("medusa_num_layers", layers) != layers:
        wanted = f"{said} with {config.get('medusa_num_layers', layers)}"
        raise _refused(path, f"has {count} heads with {layers} blocks, its configuration says {wanted}")
    vocab, hidden = next(stored.shape for match, stored in found.values() if not match[3] and match[4] == "weight")
    shapes = {"weight": (hidden, hidden), "bias": (hidden,)}
    _fit(found, lambda match: shapes[match[4]] if match[3] else (vocab, hidden), path)
    about = {"kind": "medusa", "count": count, "hidden_size": hidden, "raw": False}
    return {**about, "vocab_size": vocab, "layers": layers}, names


def _count(indices: set[int], path: Path) -> int:
    if indices != set(range(len(indices))):
        raise _refused(path, f"has heads {', '.join(map(str, sorted(indices)))}, not one after the other")
    return len(indices)


def _want(wanted: set[str], names: Mapping[str, str], path: Path) -> None:
    lacking, left = sorted(wanted - names.keys()), sorted(names.keys() - wanted)
    if lacking:
        raise _refused(path, f"lacks {lacking[0]} of its heads")
    if left:
        raise _refused(path, f"has {names[left[0]]}, which no head of its kind has")


def _fit(found: _Found, shape: Callable[[re.Match[str]], tuple[int, ...]], path: Path) -> None:
    for name, (match, stored) in found.items():
        if stored.shape != shape(match):
            raise _refused(path, f"has {name} of shape {list(stored.shape)}, where {list(shape(match))} belongs")


def _stored_in(folder: Path) -> dict[str, Stored]:
    """Of a model's files and a file of Medusa's heads beside them."""
    index = folder / "model.safetensors.index.json"
    places: Any = read_json(index).get("weight_map") if index.exists() else {"": "model.safetensors"}
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise _refused(index, "has no weight_map that says which file a tensor is in")
    # a file of another folder is none of the model's
    names = sorted({name for name in places.values() if Path(name).name == name})
    paths = [folder / name for name in names] + [folder / MEDUSA_FILE]
    return {name: stored for path in paths if path.is_file() for name, stored in headers(path).items()}


def _tensor(stored: Stored) -> Tensor:
    with safe_open(stored.path, framework="pt") as file:
        tensor = file.get_tensor(stored.name)
    if not (tensor.is_floating_point() and tensor.isfinite().all()):
        raise _refused(stored.path, f"is broken: {stored.name} holds something else than finite numbers")
    return tensor


def _refused(path: Path, reason: str) -> InputError:
    return InputError(f"{path} {reason}", "--heads")


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
        except UnsupportedModel as error:
            raise InputError(f"{path} does not go with this model, which has {error}", "--heads") from None
    use_onednn(heads)
    return heads


def _refuse_foreign(heads: Heads, target: Target, path: Path) -> None:
    """Refuse heads that remember another base model. A quantised one cannot be told from others."""
    if heads.base is None or getattr(target.model.config, "quantization_config", None) is not None:
        return
    if heads.base != fingerprint_in_any_dtype(target.model):
        raise InputError(f"{path} was made for another model: the fingerprints differ", "--heads")


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
