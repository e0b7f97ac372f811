"""Where a model's heads come from: files of tswift's own and in the layouts that others publish,
and heads installed for a model's weights.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tswift.errors import DecodeError, InputError, close_name, find_path, parse_json, renaming
from tswift.files import cache_folder, put
from tswift.forward.hf import UnsupportedModel
from tswift.forward.target import Target
from tswift.models.checkpoint import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Checkpoint,
    StoredTensor,
    check_tensors,
    read_header,
    read_into,
    read_object,
    stored_tensors,
)
from tswift.models.codes import holds_codes
from tswift.models.config import NO_HEADS
from tswift.models.hashes import fingerprint_in_any_dtype
from tswift.models.shapes import HEADS
from tswift.speculators.drafter_files import describe_drafter, is_drafter
from tswift.speculators.heads import (
    DRAFT_IDS,
    FORMAT,
    HEAD_TYPES,
    KINDS,
    OWN,
    Heads,
    MedusaHeads,
    build,
    prepare,
    random_heads,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OPTION = "heads"
_FILE, _MEDUSA_FILE = "heads.safetensors", "medusa_lm_head.safetensors"
_PICKLES = (".pt", ".pth", ".bin")
_LARGEST = 1 << 31
# heads that come with tswift, named as installed ones are
BUNDLED = Path(__file__).with_name("bundled")
ON_HUB = "on the hub"  # heads among a model's weights, which may not be here yet


def heads_source(checkpoint: Checkpoint, heads: str | os.PathLike[str] | None) -> Path | str | None:
    """Where a model's heads come from: a file or folder, ``ON_HUB``, or a kind for random ones;
    None for no heads.
    """
    if checkpoint.simulated:
        kind = "chained" if heads is None else str(heads)
        return kind if kind in HEAD_TYPES else heads_path(kind, None)
    if heads == NO_HEADS:
        return None
    path = heads_path(heads, checkpoint.folder)
    if path is None and carries_heads(checkpoint.config):
        return checkpoint.folder or ON_HUB
    return found_heads(checkpoint) if path is None else path


def heads_path(heads: str | os.PathLike[str] | None, folder: Path | None) -> Path | None:
    """The file of a model's heads, or a folder that others publish them in; None if there are none.

    Args:
        heads: a file, a folder, or a kind; None for tswift's own file beside the model, if there is
            one.
        folder: the model's.
    """
    if heads is None:
        own = folder / _FILE if folder else None
        return own if own and own.is_file() else None
    path = (
        folder / f"heads-{heads}.safetensors"
        if folder and str(heads) in HEAD_TYPES
        else find_path(heads, OPTION)
    )
    if not path.exists():
        raise InputError(f"there is no file {path}{close_name(path, '*', HEAD_TYPES)}", OPTION)
    if not (path.is_file() or path.is_dir()):  # to open a pipe or a device could take forever
        raise InputError(f"{path} is neither a file nor a folder", OPTION)
    return path / _FILE if (path / _FILE).is_file() else path


def found_heads(checkpoint: Checkpoint) -> Path | None:
    """Heads that were installed for a model's weights, or come with tswift for them;
    None if there are none.
    """
    name = _file_name(checkpoint)
    paths = [folder / name for folder in (cache_folder(), BUNDLED) if folder and name]
    return next((path for path in paths if path.is_file()), None)


def installed(heads: Path) -> bool:
    """Whether a file of heads is one that was installed, or comes with tswift."""
    return heads.parent in (cache_folder(), BUNDLED)


def install_heads(model: str, heads: Path) -> Path:
    """Copy a heads file to where it is found for a model from now on.

    Raises:
        DecodeError: that cannot be done.
    """
    name = _file_name(Checkpoint.find(model))
    folder = cache_folder()
    if name is None or folder is None:
        reason = (
            f"the weights of {model} are not in files here"
            if name is None
            else "there is no folder for them"
        )
        raise DecodeError(f"the heads cannot be installed: {reason}")
    try:
        put(folder / name, partial(shutil.copyfile, heads))
    except OSError as error:
        raise DecodeError(f"the heads cannot be installed in {folder} ({error.strerror})") from None
    return folder / name


def _file_name(checkpoint: Checkpoint) -> str | None:
    """Name of the file of heads for the weights of a model; None where those cannot be told."""
    known = checkpoint.weights_hash
    return None if known is None else f"heads-{known[:20]}.safetensors"


@dataclass(frozen=True)
class HeadsFile:
    """Heads in a file or folder, checked and not yet read.

    Raises:
        InputError: there are other tensors than those of the heads that ``about`` describes.
    """

    path: Path  # the folder or the file
    layout: str  # who writes heads so: ``tswift``, ``TokenSwift`` or ``Medusa``
    about: Mapping[str, Any]  # as Heads.about()
    tensors: Mapping[str, StoredTensor]  # by the name of the parameter

    def __post_init__(self) -> None:
        about = self.about
        most = len(self.tensors) + 1
        medusa = about["kind"] == MedusaHeads.kind  # with LM heads of their own, and no norms
        # numbers that describe no heads are refused before anything of the size that they state is
        # made
        for name, default, least, end in (
            ("hidden_size", None, 1, _LARGEST),
            ("count", None, 1, most),
            ("layers", None if medusa else 0, 0, most),
            ("vocab_size", None if medusa else 1, 1, _LARGEST),
            ("eps", 0 if medusa else None, 0, 1),
            ("draft_vocabulary", 0, 0, 1 if medusa else _LARGEST),
        ):
            value = about.get(name, default)
            kind = (int, float) if name == "eps" else (int,)
            if type(value) not in kind or not least <= value < end:
                raise _no_heads(self.path, f"its {name} is {value!r:.40}")
        for name, unsaid, types in (("base", None, str | None), ("raw", False, bool)):
            if not isinstance(about.get(name, unsaid), types):
                raise _no_heads(self.path, f"its {name} is {about[name]!r:.40}")
        try:
            with torch.device("meta"):
                shapes = {
                    name: tuple(weight.shape) for name, weight in build(about).named_parameters()
                }
        except (TypeError, ValueError, RuntimeError) as error:
            raise _no_heads(self.path, " ".join(str(error).split())[:200]) from None
        if drafted := about.get("draft_vocabulary"):
            shapes[DRAFT_IDS] = (drafted,)
        check_tensors(self.path, self.tensors, shapes, (), "head of its kind", OPTION)

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """The tensors but for the draft vocabulary, by the name of the parameter."""
        return {name: tensor for name, tensor in self.tensors.items() if name != DRAFT_IDS}

    @property
    def parameters(self) -> int:
        """Number of weights of all heads together."""
        return sum(prod(tensor.shape) for tensor in self.weights.values())

    def draft_ids(self) -> Tensor | None:
        """Read the draft vocabulary, as in :class:`Heads`.

        Raises:
            InputError: it is none.
        """
        if DRAFT_IDS not in self.tensors:
            return None
        ids = self.tensors[DRAFT_IDS].read()
        if ids.dtype != torch.int32:
            raise _refused(
                self.path,
                f"has {DRAFT_IDS} of {str(ids.dtype).removeprefix('torch.')}, where int32 belongs",
            )
        if ids[0] < 0 or (ids[1:] <= ids[:-1]).any():
            raise _refused(self.path, f"is broken: its {DRAFT_IDS} are no ascending ids of tokens")
        return ids

    def refuse_misfit(self, hidden_size: int, vocab_size: int | None = None) -> None:
        """Refuse heads made for another hidden size or vocabulary."""
        made = self.about["hidden_size"]
        own = self.about.get("vocab_size", vocab_size)
        if made != hidden_size:
            raise _refused(
                self.path, f"was made for hidden size {made}, the model has {hidden_size}"
            )
        if vocab_size not in (None, own):
            raise _refused(
                self.path, f"was made for a vocabulary of {own:,}, the model has {vocab_size:,}"
            )
        drafted = self.draft_ids()
        if vocab_size is not None and drafted is not None and drafted[-1] >= vocab_size:
            raise _refused(
                self.path, f"drafts token {int(drafted[-1]):,}, the model has {vocab_size:,} tokens"
            )

    def load(self, dtype: torch.dtype, device: torch.device) -> Heads:
        """Read the weights.

        Raises:
            InputError: some are not finite numbers, or the draft vocabulary is none.
        """
        with torch.device("meta"):
            heads = build(self.about)
        read_into(heads, self.weights, dtype, device, OPTION)
        ids = self.draft_ids()
        heads.draft_ids = None if ids is None else ids.to(device)
        heads.base = self.about.get("base")
        return heads


def find_heads(path: Path) -> HeadsFile:
    """The heads in a safetensors file, or in a folder: of heads,
    or of a model that carries some.
    """
    if path.suffix in _PICKLES:
        raise _refused(
            path, "is a pickle, which could run code when it is read; convert it to safetensors"
        )
    folder = path if path.is_dir() else path.parent
    stored, metadata = (_folder_tensors(path), {}) if path.is_dir() else read_header(path, OPTION)
    if OWN in metadata:
        return HeadsFile(path, OWN, _own_about(path, metadata[OWN]), stored)
    config = read_object(folder / CONFIG, OPTION) if (folder / CONFIG).exists() else {}
    for layout, (pattern, read) in _PUBLISHED.items():
        matches = [
            (match, tensor) for name, tensor in stored.items() if (match := pattern.fullmatch(name))
        ]
        if matches:
            try:
                about, tensors = read(matches, config)
            except ValueError as error:
                raise _refused(path, str(error)) from None
            return HeadsFile(path, layout, about, tensors)
    if path.is_dir() and (path / _MEDUSA_FILE).with_suffix(".pt").exists():
        raise _refused(
            path,
            f"has its heads in {Path(_MEDUSA_FILE).stem}.pt, a pickle, which could run code when "
            "read",
        )
    raise InputError(f"there are no heads in {path}", OPTION)


def load_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """Read heads for a model of a hidden size, from any known file."""
    file = find_heads(path)
    file.refuse_misfit(hidden_size)
    return file.load(dtype, device)


def attach_heads(path: Path, target: Target, any_model: bool = False) -> Heads:
    """Read heads for a loaded model.

    Args:
        path: as :func:`heads_path` finds it.
        target: the model; if the heads start from the states before its final norm, its passes give
            those from now on.
        any_model: whether heads of any model will do, as for random weights.
    """
    file = find_heads(path)
    file.refuse_misfit(target.hidden_size, target.vocab_size)
    heads = file.load(target.dtype, target.device)
    # codes cannot be told from others
    known = (
        heads.base is not None and getattr(target.model.config, "quantization_config", None) is None
    )
    known = known and not holds_codes(target.model)
    if known and not any_model and heads.base != fingerprint_in_any_dtype(target.model):
        raise _refused(path, "was made for another model: the fingerprints differ")
    if heads.pre_norm:
        try:
            target.tap()
        except UnsupportedModel as error:
            raise _refused(path, f"does not go with this model, which has {error}") from None
    return prepare(heads)


def heads_of_source(
    source: Path | str | None, target: Target, any_model: bool = False
) -> Heads | None:
    """The heads from where :func:`heads_source` says they come; ``any_model`` as of
    :func:`attach_heads`.
    """
    if source is None:
        return None
    if isinstance(source, Path):
        return attach_heads(source, target, any_model)
    return random_heads(source, target.model.config, target.dtype, target.device)


def heads_and_weights(
    source: Path | str | None, config: PreTrainedConfig
) -> tuple[int | None, int]:
    """How many heads are to come for the model of a configuration, and how many weights;
    None and 0 where that is not known yet.
    """
    text = config.get_text_config()
    if isinstance(source, Path):
        file = find_heads(source)
        file.refuse_misfit(text.hidden_size, text.vocab_size)
        return file.about["count"], file.parameters
    if source is None or source == ON_HUB:
        return (0 if source is None else None), 0
    with torch.device("meta"):
        weights = HEAD_TYPES[source](text.hidden_size, HEADS).parameters()
    return HEADS, sum(weight.numel() for weight in weights)


def carries_heads(config: object) -> bool:
    """Whether a configuration says that there are heads among its model's weights."""
    return any(vars(config).get(name) for name in ("medusa_heads", "medusa_num_heads"))


def of_heads(name: str, config: object) -> bool:
    """Whether a tensor among the weights of a model is one of heads that it carries."""
    return carries_heads(config) and any(
        pattern.fullmatch(name) for pattern, _ in _PUBLISHED.values()
    )


@renaming(heads="FILE", drafter="FILE")
def describe(path: Path) -> dict[str, Any]:
    """What ``tswift heads inspect`` tells of heads, or of a drafter, and its JSON has;
    no weights are read.
    """
    if path.is_dir() and is_drafter(path):
        return describe_drafter(path)
    file = find_heads(heads_path(path, None) or path)
    about = file.about
    return {
        "path": str(file.path),
        "layout": file.layout,
        "kind": about["kind"],
        "count": about["count"],
        "hidden_size": about["hidden_size"],
        # of their own LM heads; None where they share the model's
        "vocab_size": about.get("vocab_size"),
        # whether they start from the state before the model's final norm
        "raw": about.get("raw", False),
        # how many tokens they draft; None for all
        "draft_vocabulary": about.get("draft_vocabulary"),
        "parameters": file.parameters,
        "dtypes": sorted({tensor.dtype for tensor in file.weights.values()}),
        # fingerprint of the model that they were made for; None if unknown
        "base": about.get("base"),
    }


def _own_about(path: Path, metadata: str) -> dict[str, object]:
    """What :meth:`Heads.save` has written of heads beside their weights."""
    about = parse_json(metadata.encode(errors="replace"), f"the metadata of {path}", OPTION)
    if not isinstance(about, dict):
        raise _no_heads(path, "its metadata are no JSON object")
    if about.get("format") != FORMAT or about.get("kind") not in (*KINDS,):
        has = f"holds heads of format {about.get('format')!s:.40}, kind {about.get('kind')!s:.40}"
        raise _refused(path, f"{has}; known are {FORMAT} and {', '.join(KINDS)}")
    return about


_Matches = list[tuple[re.Match[str], StoredTensor]]
_Read = tuple[dict[str, Any], dict[str, StoredTensor]]  # as HeadsFile has them


def _tokenswift(matches: _Matches, config: Mapping[str, object]) -> _Read:
    """TokenSwift's chained heads, among the weights of their model."""
    count = len({match[1] for match, _ in matches})
    stated = config.get("medusa_heads", count)
    eps = config.get("rms_norm_eps")
    if stated != count:
        raise ValueError(f"has {count} heads, its configuration says {stated}")
    if type(eps) not in (int, float):
        raise ValueError("has no rms_norm_eps in the configuration beside it, which its heads need")
    hidden = next(
        (
            tensor.shape[0]
            for match, tensor in matches
            if match[2] == "linear.weight" and tensor.shape
        ),
        1,
    )
    tensors = {f"heads.{match[1]}.{match[2]}": tensor for match, tensor in matches}
    return {
        "kind": "chained",
        "count": count,
        "hidden_size": hidden,
        "eps": eps,
        "raw": True,
    }, tensors


def _medusa(matches: _Matches, config: Mapping[str, object]) -> _Read:
    """Medusa's heads: in a file of their own, or among the weights of their model."""
    count = len({match[1] for match, _ in matches})
    layers = max(int(match[2]) for match, _ in matches)
    # the first published configurations name fewer heads than there are, so that more is no mistake
    stated = config.get("medusa_num_heads", count)
    blocks = config.get("medusa_num_layers", layers)
    if not isinstance(stated, int) or stated > count or blocks != layers:
        raise ValueError(
            f"has {count} heads with {layers} blocks, its configuration says {stated} with {blocks}"
        )
    tensors = {}
    shape = (1, 1)
    for match, tensor in matches:
        head, block, linear, part = match.groups()
        name = (
            f"blocks.{block}.{part}"
            if linear
            else f"lm_head.{part}"
            if int(block) == layers
            else match[0]
        )
        tensors[f"heads.{head}.{name}"] = tensor
        if name == "lm_head.weight" and len(tensor.shape) == 2:
            shape = tensor.shape
    about = {"kind": "medusa", "count": count, "hidden_size": shape[1], "raw": False}
    return {**about, "vocab_size": shape[0], "layers": layers}, tensors


# Layouts that others publish heads in: names of their tensors, and what reads them; a ValueError
# says what is wrong.
_PUBLISHED: dict[str, tuple[re.Pattern[str], Callable[[_Matches, Mapping[str, object]], _Read]]] = {
    "TokenSwift": (
        re.compile(
            r"(?:model\.)?medusa_layers\.(\d+)\.((?:input_layernorm|linear|post_layernorm)\.weight)"
        ),
        _tokenswift,
    ),
    "Medusa": (
        re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)"),
        _medusa,
    ),
}


def _folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's files and of a file of Medusa's heads beside them."""
    found = {}
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        with renaming(model=OPTION):
            found = stored_tensors(folder)
    own = folder / _MEDUSA_FILE
    return {**found, **(read_header(own, OPTION)[0] if own.is_file() else {})}


def _refused(path: Path, reason: str) -> InputError:
    return InputError(f"{path} {reason}", OPTION)


def _no_heads(path: Path, reason: str) -> InputError:
    return _refused(path, f"is not a tswift heads file ({reason})")
