"""Heads as others publish them: which tensors they are, in files that may hold a whole model, and how to read them.

TokenSwift publishes whole models whose files carry ``model.medusa_layers.{i}`` beside the base weights; the heads start
from the state before the final norm. Medusa publishes ``medusa_lm_head``, or whole models with ``medusa_head.{i}``: the
residual blocks ``{i}.{j}.linear``, and after them the LM head ``{i}.{last}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tswift.errors import InputError
from tswift.models.base_heads import Heads
from tswift.models.heads import PICKLES
from tswift.models.kinds import build
from tswift.reading import MOST_RECORD, parse_json, read_file

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
        about: as :meth:`~tswift.models.base_heads.Heads.about` says it of heads.
        tensors: by the name that the parameter has in :class:`~tswift.models.base_heads.Heads`.
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
