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

from tswift.errors import InputError, parse_json, renamed
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
from tswift.models.drafters_io import describe_drafter, is_drafter
from tswift.models.heads import FORMAT, HEAD_TYPES, Heads, MedusaHeads, build, prepare
from tswift.models.hf import UnsupportedModel
from tswift.models.target import Target

HEADS_FILE, MEDUSA_FILE = "heads.safetensors", "medusa_lm_head.safetensors"
PICKLES = (".pt", ".pth", ".bin")
_OWN = "tswift"  # layout, and key of the metadata
_KINDS = (*HEAD_TYPES, MedusaHeads.kind)


@dataclass(frozen=True)
class HeadsFile:
    """Heads in a file or folder, checked and not yet read.

    Attributes:
        path: the folder or the file.
        layout: who writes heads so: ``tswift``, ``TokenSwift`` or ``Medusa``.
        about: as :meth:`~tswift.models.heads.Heads.about`.
        tensors: by the name of the parameter in :class:`~tswift.models.heads.Heads`.

    Raises:
        InputError: there are other tensors than those of the heads that ``about`` describes.
    """

    path: Path
    layout: str
    about: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def __post_init__(self) -> None:
        self._refuse_sizes()
        try:
            with torch.device("meta"):
                shapes = {name: tuple(weight.shape) for name, weight in build(self.about).named_parameters()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise _no_heads(self.path, " ".join(str(error).split())[:200]) from None
        for name in sorted(shapes.keys() | self.tensors.keys()):
            stored = self.tensors.get(name)
            if stored is None:
                raise _refused(self.path, f"lacks {name} of its heads")
            if name not in shapes:
                raise _refused(self.path, f"has {stored.name}, which no head of its kind has")
            if stored.shape != shapes[name]:
                wrong = f"of shape {list(stored.shape)}, where {list(shapes[name])} belongs"
                raise _refused(self.path, f"has {stored.name} {wrong}")

    def _refuse_sizes(self) -> None:
        """Refuse numbers that describe no heads, before anything of the size that they state is made."""
        about, most = self.about, len(self.tensors)
        medusa = about["kind"] == MedusaHeads.kind  # with LM heads of their own, and no norms
        eps, base = about.get("eps", 0 if medusa else None), about.get("base")
        if not (isinstance(eps, (int, float)) and 0 <= eps < 1):
            raise _no_heads(self.path, f"its eps is {eps!r:.40}")
        if not isinstance(base, str | None):
            raise _no_heads(self.path, f"its base model is {base!r:.40}")
        for name, default, least, end in (
            ("hidden_size", None, 1, 1 << 31),
            ("count", None, 1, most + 1),
            ("layers", None if medusa else 0, 0, most + 1),
            ("vocab_size", None if medusa else 1, 1, 1 << 31),
        ):
            value = about.get(name, default)
            if type(value) is not int or not least <= value < end:
                raise _no_heads(self.path, f"its {name} is {value!r:.40}")

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
        return HeadsFile(path, _OWN, _own_about(path, metadata[_OWN]), stored)
    config = read_object(folder / CONFIG, "heads") if (folder / CONFIG).exists() else {}
    for layout, (pattern, read) in _PUBLISHED.items():
        matches = [(match, tensor) for name, tensor in stored.items() if (match := pattern.fullmatch(name))]
        if matches:
            try:
                about, tensors = read(matches, config)
            except ValueError as error:
                raise _refused(path, str(error)) from None
            return HeadsFile(path, layout, about, tensors)
    if path.is_dir() and (path / MEDUSA_FILE).with_suffix(".pt").exists():
        raise _refused(path, f"has its heads in {Path(MEDUSA_FILE).stem}.pt, a pickle, which could run code when read")
    raise InputError(f"there are no heads in {path}", "heads")


def load_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """Read heads for a model of a hidden size, from any known file."""
    file = find_heads(path)
    file.refuse_misfit(hidden_size)
    return file.load(dtype, device)


def attach_heads(path: Path, target: Target, any_model: bool = False) -> Heads:
    """Read heads for a loaded model.

    Args:
        path: as :func:`heads_path` finds it.
        target: the model; if the heads start from the states before its final norm, its passes give those from now on.
        any_model: whether heads of any model will do, as for random weights.
    """
    file = find_heads(path)
    file.refuse_misfit(target.hidden_size, target.vocab_size)
    heads = file.load(target.dtype, target.device)
    # quantised weights cannot be told from others
    known = heads.base is not None and getattr(target.model.config, "quantization_config", None) is None
    if known and not any_model and heads.base != fingerprint_in_any_dtype(target.model):
        raise _refused(path, "was made for another model: the fingerprints differ")
    if heads.pre_norm:
        try:
            target.tap()
        except UnsupportedModel as error:
            raise _refused(path, f"does not go with this model, which has {error}") from None
    prepare(heads)
    return heads


def carries_heads(config: object) -> bool:
    """Whether a configuration says that there are heads among its model's weights."""
    return any(vars(config).get(name) for name in ("medusa_heads", "medusa_num_heads"))


def describe(path: Path) -> dict[str, Any]:
    """What ``tswift heads inspect`` tells of heads, or of a drafter, and its JSON has; no weights are read."""
    try:
        if path.is_dir() and is_drafter(path):
            return describe_drafter(path)
        file = find_heads(heads_path(path, None) or path)
    except InputError as error:
        raise renamed(error, {"heads": "FILE", "drafter": "FILE"}) from None
    about = file.about
    return {
        "path": str(file.path),
        "layout": file.layout,
        "kind": about["kind"],
        "count": about["count"],
        "hidden_size": about["hidden_size"],
        "vocab_size": about.get("vocab_size"),  # of their own LM heads; None where they share the model's
        "raw": about.get("raw", False),  # whether they start from the state before the model's final norm
        "parameters": file.parameters,
        "dtypes": sorted({tensor.dtype for tensor in file.tensors.values()}),
        "base": about.get("base"),  # fingerprint of the model that they were made for; None if unknown
    }


def _own_about(path: Path, metadata: str) -> dict[str, Any]:
    """What :meth:`Heads.save` has written of heads beside their weights."""
    about = parse_json(metadata.encode(errors="replace"), f"the metadata of {path}", "heads")
    if not isinstance(about, dict):
        raise _no_heads(path, "its metadata are no JSON object")
    if about.get("format") != FORMAT or about.get("kind") not in _KINDS:
        has = f"holds heads of format {about.get('format')!s:.40}, kind {about.get('kind')!s:.40}"
        raise _refused(path, f"{has}; known are {FORMAT} and {', '.join(_KINDS)}")
    return about


_Matches = list[tuple[re.Match[str], StoredTensor]]
_Read = tuple[dict[str, Any], dict[str, StoredTensor]]  # as HeadsFile has them


def _tokenswift(matches: _Matches, config: Mapping[str, Any]) -> _Read:
    """TokenSwift's chained heads, among the weights of their model."""
    count = len({match[1] for match, _ in matches})
    stated, eps = config.get("medusa_heads", count), config.get("rms_norm_eps")
    if stated != count:
        raise ValueError(f"has {count} heads, its configuration says {stated}")
    if type(eps) not in (int, float):
        raise ValueError("has no rms_norm_eps in the configuration beside it, which its heads need")
    hidden = next((tensor.shape[0] for match, tensor in matches if match[2] == "linear.weight" and tensor.shape), 1)
    tensors = {f"heads.{match[1]}.{match[2]}": tensor for match, tensor in matches}
    return {"kind": "chained", "count": count, "hidden_size": hidden, "eps": eps, "raw": True}, tensors


def _medusa(matches: _Matches, config: Mapping[str, Any]) -> _Read:
    """Medusa's heads: in a file of their own, or among the weights of their model."""
    count, layers = len({match[1] for match, _ in matches}), max(int(match[2]) for match, _ in matches)
    # the first published configurations name fewer heads than there are, so that more is no mistake
    stated, blocks = config.get("medusa_num_heads", count), config.get("medusa_num_layers", layers)
    if not isinstance(stated, int) or stated > count or blocks != layers:
        raise ValueError(f"has {count} heads with {layers} blocks, its configuration says {stated} with {blocks}")
    tensors, shape = {}, (1, 1)
    for match, tensor in matches:
        head, block, linear, part = match.groups()
        name = f"blocks.{block}.{part}" if linear else f"lm_head.{part}" if int(block) == layers else match[0]
        tensors[f"heads.{head}.{name}"] = tensor
        if name == "lm_head.weight" and len(tensor.shape) == 2:
            shape = tensor.shape
    about = {"kind": "medusa", "count": count, "hidden_size": shape[1], "raw": False}
    return {**about, "vocab_size": shape[0], "layers": layers}, tensors


# Layouts that others publish heads in: names of their tensors, and what reads them; a ValueError says what is wrong.
_PUBLISHED: dict[str, tuple[re.Pattern[str], Callable[[_Matches, Mapping[str, Any]], _Read]]] = {
    "TokenSwift": (
        re.compile(r"(?:model\.)?medusa_layers\.(\d+)\.((?:input_layernorm|linear|post_layernorm)\.weight)"),
        _tokenswift,
    ),
    "Medusa": (re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)"), _medusa),
}


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
