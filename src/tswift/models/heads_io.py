"""Files of heads: tswift's own format and the published ones; which of them go with a model, and what they hold."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from tswift.errors import InputError, renamed
from tswift.models.checkpoint import (
    CONFIG,
    INDEX,
    WEIGHTS,
    StoredTensor,
    close_name,
    fingerprint_in_any_dtype,
    read_header,
    read_object,
)
from tswift.models.heads import FORMAT, HEAD_TYPES, Heads, MedusaHeads, build, prepare
from tswift.models.hf import UnsupportedModel
from tswift.models.target import Target
from tswift.reading import parse_json

HEADS_FILE, MEDUSA_FILE = "heads.safetensors", "medusa_lm_head.safetensors"
PICKLES = (".pt", ".pth", ".bin")
_OWN = "tswift"  # layout, and key of the metadata
_KINDS = (*HEAD_TYPES, MedusaHeads.kind)
_TOKENSWIFT = re.compile(r"(?:model\.)?medusa_layers\.(\d+)\.((?:input_layernorm|linear|post_layernorm)\.weight)")
_MEDUSA = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")


@dataclass(frozen=True)
class HeadsFile:
    """Heads found in a file or folder, not yet read.

    Attributes:
        path: the folder or the file.
        layout: who writes heads so: ``tswift``, ``TokenSwift`` or ``Medusa``.
        about: as :meth:`~tswift.models.heads.Heads.about`.
        tensors: by the name of the parameter in :class:`~tswift.models.heads.Heads`.
    """

    path: Path
    layout: str
    about: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def parameters(self) -> int:
        """Number of weights of all heads together."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    def refuse_misfit(self, hidden_size: int, vocab_size: int | None = None) -> None:
        """Refuse heads made for another hidden size or vocabulary."""
        if self.about["hidden_size"] != hidden_size:
            reason = f"was made for hidden size {self.about['hidden_size']}, the model has {hidden_size}"
            raise _refused(self.path, reason)
        own = self.about.get("vocab_size", vocab_size)
        if vocab_size not in (None, own):
            raise _refused(self.path, f"was made for a vocabulary of {own:,}, the model has {vocab_size:,}")

    def load(self, dtype: torch.dtype, device: torch.device) -> Heads:
        """Read the weights.

        Raises:
            InputError: some are not finite numbers.
        """
        with torch.device("meta"):
            heads = build(self.about)
        state = {}
        for name, stored in self.tensors.items():
            values = stored.read()
            if not (values.is_floating_point() and values.isfinite().all()):
                raise _refused(stored.path, f"is broken: {stored.name} holds something else than finite numbers")
            state[name] = values.to(device, dtype)
        heads.load_state_dict(state, assign=True)
        heads.base = self.about.get("base")
        return heads.eval().requires_grad_(False)


def heads_path(heads: str | os.PathLike[str] | None, folder: Path | None) -> Path | None:
    """The file of a model's heads, or a folder that others publish them in; None if there are none.

    Args:
        heads: a file, a folder, or a kind; None for tswift's own file beside the model, if there is one.
        folder: the model's.
    """
    if heads is None:
        own = folder / HEADS_FILE if folder else None
        return own if own and own.is_file() else None
    path = folder / f"heads-{heads}.safetensors" if folder and str(heads) in HEAD_TYPES else Path(heads)
    try:
        exists, inside = path.exists(), (path / HEADS_FILE).is_file()
    except OSError as error:
        raise InputError(f"cannot access {str(path)[:80]} ({error.strerror})", "heads") from None
    except ValueError:  # a NUL in the name, or an incomplete UTF-8 character
        raise InputError(f"invalid file name {path}", "heads") from None
    if not exists:
        raise InputError(f"there is no file {path}{close_name(path, '*', HEAD_TYPES)}", "heads")
    if not (path.is_file() or path.is_dir()):  # to open a pipe or a device could take forever
        raise InputError(f"{path} is neither a file nor a folder", "heads")
    return path / HEADS_FILE if inside else path


def find_heads(path: Path) -> HeadsFile:
    """The heads in a safetensors file, or in a folder: of heads, or of a model that carries some."""
    if path.suffix in PICKLES:
        raise _refused(path, "is a pickle, which could run code when it is read; convert it to safetensors")
    folder = path if path.is_dir() else path.parent
    stored, metadata = (_folder_tensors(path), {}) if path.is_dir() else read_header(path, "heads")
    if _OWN in metadata:
        return _own_heads(path, metadata[_OWN], stored)
    config = read_object(folder / CONFIG, "heads") if (folder / CONFIG).exists() else {}
    for layout, pattern, read in (("TokenSwift", _TOKENSWIFT, _tokenswift), ("Medusa", _MEDUSA, _medusa)):
        matches = {name: match for name in stored if (match := pattern.fullmatch(name))}
        if matches:
            about, names = read({name: (matches[name], stored[name]) for name in matches}, config, path)
            return HeadsFile(path, layout, about, {new: stored[old] for new, old in names.items()})
    if path.is_dir() and (path / MEDUSA_FILE).with_suffix(".pt").exists():
        raise _refused(path, f"has its heads in {Path(MEDUSA_FILE).stem}.pt, a pickle, which could run code when read")
    raise InputError(f"there are no heads in {path}", "heads")


def load_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """Read heads for a model of a hidden size, from any known file."""
    found = find_heads(path)
    found.refuse_misfit(hidden_size)
    return found.load(dtype, device)


def attach_heads(path: Path, target: Target, any_model: bool = False) -> Heads:
    """Read heads for a loaded model.

    Args:
        path: as :func:`heads_path` finds it.
        target: the model; if the heads start from the states before its final norm, its passes give those from now on.
        any_model: whether heads of any model will do, as for random weights.
    """
    found = find_heads(path)
    found.refuse_misfit(target.hidden_size, target.vocab_size)
    heads = found.load(target.dtype, target.device)
    # quantised weights cannot be told from others
    known = heads.base is not None and getattr(target.model.config, "quantization_config", None) is None
    if known and not any_model and heads.base != fingerprint_in_any_dtype(target.model):
        raise _refused(path, "was made for another model: the fingerprints differ")
    if heads.raw:
        try:
            target.tap()
        except UnsupportedModel as error:
            raise _refused(path, f"does not go with this model, which has {error}") from None
    prepare(heads)
    return heads


def carries_heads(config: object) -> bool:
    """Whether a configuration says that there are heads among its model's weights."""
    return any(vars(config).get(name) for name in ("medusa_heads", "medusa_num_heads"))


@dataclass(frozen=True)
class Description:
    """What ``tswift heads inspect`` tells of heads, and its JSON has.

    Attributes:
        vocab_size: of their own LM heads; None where they share the model's.
        raw: whether they start from the state before the model's final norm.
        parameters: number of weights of all heads together.
        base: fingerprint of the model that they were made for; None if unknown.
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
    """Describe the heads in a file or folder; no weights are read."""
    try:
        found = find_heads(heads_path(path, None) or path)
    except InputError as error:
        raise renamed(error, {"heads": "FILE"}) from None
    about = found.about
    return Description(
        path=str(found.path),
        layout=found.layout,
        kind=about["kind"],
        count=about["count"],
        hidden_size=about["hidden_size"],
        vocab_size=about.get("vocab_size"),
        raw=about.get("raw", False),
        parameters=found.parameters,
        dtypes=tuple(sorted({tensor.dtype for tensor in found.tensors.values()})),
        base=about.get("base"),
    )


def _own_heads(path: Path, metadata: str, tensors: Mapping[str, StoredTensor]) -> HeadsFile:
    """Heads as :meth:`Heads.save` writes them."""
    about = parse_json(metadata.encode(errors="replace"), f"the metadata of {path}", "heads")
    try:
        _refuse_about(about, path, len(tensors))
        with torch.device("meta"):
            shapes = {name: tuple(weight.shape) for name, weight in build(about).named_parameters()}
    except KeyError as error:
        raise _no_heads(path, f"there is no {error} in its metadata") from None
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise _no_heads(path, " ".join(str(error).split())[:200]) from None
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise _refused(path, f"has not the tensors of {about['count']} {about['kind']} heads")
    return HeadsFile(path, _OWN, about, tensors)


def _refuse_about(about: Any, path: Path, tensors: int) -> None:
    """Refuse metadata that describe no heads, before anything of the size that they state is made.

    Raises:
        KeyError: something is missing.
    """
    if not isinstance(about, dict):
        raise _no_heads(path, "its metadata are no JSON object")
    if about["format"] != FORMAT or not isinstance(about["kind"], str) or about["kind"] not in _KINDS:
        held = f"holds heads of format {about['format']!s:.40}, kind {about['kind']!s:.40}"
        raise _refused(path, f"{held}; known are {FORMAT} and {', '.join(_KINDS)}")
    size, count, base = about["hidden_size"], about["count"], about.get("base")
    eps, layers, vocab = about.get("eps"), about.get("layers", 0), about.get("vocab_size", 1)  # each kind has its own
    if type(size) is not int or not 0 < size < 1 << 31 or type(count) is not int or not 0 < count <= tensors:
        raise _no_heads(path, f"it says it has {count!r:.40} heads for hidden size {size!r:.40}")
    if about["kind"] in HEAD_TYPES and not (isinstance(eps, (int, float)) and 0 <= eps < 1):
        raise _no_heads(path, f"its eps is {eps!r:.40}")
    if type(layers) is not int or not 0 <= layers <= tensors or type(vocab) is not int or not 0 < vocab < 1 << 31:
        raise _no_heads(path, f"it says it has {layers!r:.40} layers and a vocabulary of {vocab!r:.40}")
    if not (base is None or isinstance(base, str)):
        raise _no_heads(path, f"its base model is {base!r:.40}")


_Matches = Mapping[str, tuple["re.Match[str]", StoredTensor]]
_Read = tuple[dict[str, Any], dict[str, str]]  # as of HeadsFile.about; stored names by parameters' names


def _tokenswift(matches: _Matches, config: Mapping[str, Any], path: Path) -> _Read:
    names = {f"heads.{match[1]}.{match[2]}": name for name, (match, _) in matches.items()}
    parts = ("input_layernorm.weight", "linear.weight", "post_layernorm.weight")
    count = _count({int(match[1]) for match, _ in matches.values()}, path)
    _refuse_other_names({f"heads.{head}.{part}" for head in range(count) for part in parts}, names, path)
    stated = config.get("medusa_heads", count)
    if stated != count:
        raise _refused(path, f"has {count} heads, its configuration says {stated}")
    hidden = next(tensor.shape[0] for match, tensor in matches.values() if match[2] == "linear.weight")
    _refuse_other_shapes(matches, lambda m: (hidden, hidden) if m[2] == "linear.weight" else (hidden,), path)
    eps = config.get("rms_norm_eps")
    if type(eps) not in (int, float):
        raise _refused(path, "has no rms_norm_eps in the configuration beside it, which its heads need")
    return {"kind": "chained", "count": count, "hidden_size": hidden, "eps": eps, "raw": True}, names


def _medusa(matches: _Matches, config: Mapping[str, Any], path: Path) -> _Read:
    count = _count({int(match[1]) for match, _ in matches.values()}, path)
    layers = max(int(match[2]) for match, _ in matches.values())
    names = {}
    for name, (match, _) in matches.items():
        last = int(match[2]) == layers
        if last == bool(match[3]):
            raise _refused(path, f"has {name}, which is out of place in Medusa's heads of {layers} blocks")
        part = f"lm_head.{match[4]}" if last else f"blocks.{match[2]}.{match[4]}"
        names[f"heads.{match[1]}.{part}"] = name
    parts = [f"blocks.{block}.{part}" for block in range(layers) for part in ("weight", "bias")]
    needed = {f"heads.{head}.{part}" for head in range(count) for part in (*parts, "lm_head.weight")}
    _refuse_other_names(needed, names, path)
    # the first published configurations name fewer heads than there are, so that more is no mistake
    stated, blocks = config.get("medusa_num_heads", count), config.get("medusa_num_layers", layers)
    if not isinstance(stated, int) or stated > count or blocks != layers:
        raise _refused(path, f"has {count} heads with {layers} blocks, its configuration says {stated} with {blocks}")
    vocab, hidden = next(tensor.shape for match, tensor in matches.values() if not match[3] and match[4] == "weight")
    shapes = {"weight": (hidden, hidden), "bias": (hidden,)}
    _refuse_other_shapes(matches, lambda m: shapes[m[4]] if m[3] else (vocab, hidden), path)
    about = {"kind": "medusa", "count": count, "hidden_size": hidden, "raw": False}
    return {**about, "vocab_size": vocab, "layers": layers}, names


def _count(indices: set[int], path: Path) -> int:
    if indices != set(range(len(indices))):
        raise _refused(path, f"has heads {', '.join(map(str, sorted(indices)))}, not one after the other")
    return len(indices)


def _refuse_other_names(needed: set[str], names: Mapping[str, str], path: Path) -> None:
    missing, unknown = sorted(needed - names.keys()), sorted(names.keys() - needed)
    if missing:
        raise _refused(path, f"lacks {missing[0]} of its heads")
    if unknown:
        raise _refused(path, f"has {names[unknown[0]]}, which no head of its kind has")


def _refuse_other_shapes(matches: _Matches, shape: Callable[[re.Match[str]], tuple[int, ...]], path: Path) -> None:
    for name, (match, tensor) in matches.items():
        if tensor.shape != shape(match):
            raise _refused(path, f"has {name} of shape {list(tensor.shape)}, where {list(shape(match))} belongs")


def _folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's files and of a file of Medusa's heads beside them."""
    index = folder / INDEX
    shards: Any = read_object(index, "heads").get("weight_map") if index.exists() else {"": WEIGHTS}
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise _refused(index, "has no weight_map that says which file a tensor is in")
    # a file of another folder is none of the model's
    names = sorted({name for name in shards.values() if Path(name).name == name})
    paths = [folder / name for name in names] + [folder / MEDUSA_FILE]
    return {n: tensor for path in paths if path.is_file() for n, tensor in read_header(path, "heads")[0].items()}


def _refused(path: Path, reason: str) -> InputError:
    return InputError(f"{path} {reason}", "heads")


def _no_heads(path: Path, reason: str) -> InputError:
    return _refused(path, f"is not a tswift heads file ({reason})")
