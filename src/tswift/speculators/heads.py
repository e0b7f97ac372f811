"""Heads: small networks that draft the tokens after the next one from one hidden state of the
model; and their files.

Chained and conditioned heads refine one state step by step and share the model's LM head;
conditioned ones also read the token drafted before. Medusa's heads are independent, and each has an
LM head of its own. Files are tswift's own, or in the layouts that others publish.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tswift.errors import InputError, close_name, find_path, parse_json, renaming
from tswift.forward.hf import UnsupportedModel
from tswift.forward.integers import holds_codes
from tswift.forward.program import MAX_COPIED, HeadProgram
from tswift.forward.target import Target
from tswift.models.checkpoint import (
    CONFIG,
    INDEX,
    WEIGHTS,
    StoredTensor,
    check_tensors,
    fingerprint_in_any_dtype,
    read_header,
    read_into,
    read_object,
    stored_tensors,
)
from tswift.models.shapes import HEADS, fill_randomly
from tswift.native_build import Unbuilt
from tswift.speculators.draft_head import DraftHead
from tswift.speculators.formats import describe_drafter, is_drafter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FORMAT = "tswift-heads-1"
OPTION = "heads"
_DRAFT_IDS = "draft_ids"  # name of the tensor
_FILE, _MEDUSA_FILE = "heads.safetensors", "medusa_lm_head.safetensors"
_PICKLES = (".pt", ".pth", ".bin")
_OWN = "tswift"  # layout, and key of the metadata
_LARGEST = 1 << 31


class Heads(nn.Module):
    """Heads of one kind for a model; head i (from 0) drafts the token i+2 places after the state's
    own.

    Args:
        hidden_size: width of the model's hidden states.
        heads: their modules.
        pre_norm: whether they start from the state before the model's final norm, not after it;
            ``raw`` in files.
    """

    kind: str  # name in the heads file
    # what else about() says and the class is made from, after hidden size and count
    fields: tuple[str, ...]
    conditioned = False  # whether a head reads the token drafted just before its own
    # int32, ascending: the draft vocabulary, of which all drafted tokens are; None for any
    draft_ids: Tensor | None
    base: str | None = None  # fingerprint of the model that they were made for; None if unknown
    program: HeadProgram | None = None  # C functions of their steps; None if PyTorch computes them
    _draft_head: DraftHead | None = None

    def __init__(
        self, hidden_size: int, heads: Iterable[nn.Module], pre_norm: bool = False
    ) -> None:
        super().__init__()
        self.hidden_size, self.pre_norm = hidden_size, pre_norm
        self.heads: Any = nn.ModuleList(heads)
        self.count = len(self.heads)
        # no weight: state_dict() is what is trained
        self.register_buffer(_DRAFT_IDS, None, persistent=False)

    def __getstate__(self) -> dict[str, object]:
        """Without what was made of weights: a copy's may change."""
        return {**self.__dict__, "program": None, "_draft_head": None}

    def draft_head(self, target: Target) -> DraftHead:
        """The LM head that they draft by for a model, made when it is first asked for."""
        known = self._draft_head
        now = target, self.draft_ids, target.program
        if known is None or any(
            x is not y for x, y in zip((known.target, known.ids, known.program), now, strict=True)
        ):
            self._draft_head = known = DraftHead(target, self.draft_ids)
        return known

    def forward(
        self, hidden: Tensor, embeddings: Tensor | None = None, count: int | None = None
    ) -> Tensor:
        """``[count, ..., H]`` states to feed to the LM head.

        Args:
            hidden: ``[..., H]``.
            embeddings: ``[count, ..., H]`` input embeddings of the tokens before those drafted; for
                conditioned heads.
            count: number of heads to run; None for all.
        """
        states = []
        for index in range(self.count if count is None else count):
            hidden, out = self.step(
                index, hidden, None if embeddings is None else embeddings[index]
            )
            states.append(out)
        return torch.stack(states)

    def step(
        self, index: int, hidden: Tensor, embedding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one head of a chain: from ``[..., H]`` to the refined state and the one to feed to
        the LM head.

        Args:
            index: of the head.
            hidden: state of the head before, or of the model for the first.
            embedding: input embedding of the token drafted before; for conditioned heads only.
        """
        learns = torch.is_grad_enabled() and hidden.requires_grad
        if self.program is not None and hidden.dtype == torch.float32 and not learns:
            return self.program(index, hidden, embedding)
        head = self.heads[index]
        hidden = head(hidden, embedding)
        return hidden, head.post_layernorm(hidden)

    def levels(
        self,
        hidden: Tensor,
        lm_head: Callable[[Tensor], Tensor],
        first: Tensor | None = None,
        levels: int | None = None,
    ) -> Tensor:
        """``[levels, V]`` logits of heads that read no drafted token.

        Args:
            hidden: ``[H]`` state that they start from.
            lm_head: the model's; called once, as it is large and has to be read.
            first: ``[H]`` state whose logits by the model's LM head come before those of the heads;
                None for none.
            levels: how many; None for all.
        """
        before = [] if first is None else [first.unsqueeze(0)]
        count = self.count if levels is None else levels - len(before)
        return lm_head(torch.cat([*before, self(hidden, count=count)]) if count else before[0])

    def about(self) -> dict[str, Any]:
        """What :func:`build` needs to rebuild them, for a file."""
        about = {
            "kind": self.kind,
            "count": self.count,
            "hidden_size": self.hidden_size,
            "raw": self.pre_norm,
        }
        if self.draft_ids is not None:
            about["draft_vocabulary"] = len(self.draft_ids)
        return about | {name: getattr(self, name) for name in self.fields}

    def save(
        self, path: Path, dtype: torch.dtype = torch.bfloat16, base: str | None = None
    ) -> None:
        """Write :meth:`about`, the weights in ``dtype``, and the draft vocabulary into one file.

        ``base`` None keeps what is known.
        """
        base = self.base if base is None else base
        about = {"format": FORMAT, **self.about(), **({} if base is None else {"base": base})}
        tensors = {
            name: value.detach().to(dtype).contiguous() for name, value in self.state_dict().items()
        }
        if self.draft_ids is not None:
            tensors[_DRAFT_IDS] = self.draft_ids.to(torch.int32).contiguous()
        save_file(tensors, path, metadata={_OWN: json.dumps(about)})


class RefiningHead(nn.Module):
    """One residual step from the state for token t+i to the one for t+i+1,
    perhaps by the token drafted before.

    It is ``h <- h + B norm(h)``, or ``h <- h + B silu(A [norm(h); norm(e)])``.
    """

    def __init__(self, hidden_size: int, eps: float, conditioned: bool) -> None:
        super().__init__()
        # hashes of weights, which runs and benchmarks keep, are taken in this order
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        if conditioned:
            self.embedding_layernorm = nn.RMSNorm(hidden_size, eps=eps)
            self.mix = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.linear = nn.Linear((1 + conditioned) * hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor, embedding: Tensor | None = None) -> Tensor:
        """The refined state, same shape as ``hidden``."""
        inner = self.input_layernorm(hidden)
        if embedding is not None:
            inner = nn.functional.silu(
                self.mix(torch.cat([inner, self.embedding_layernorm(embedding)], dim=-1))
            )
        return hidden + self.linear(inner)


class ChainedHeads(Heads):
    """TokenSwift's heads: each refines the state of the one before, and reads no drafted token."""

    kind = "chained"
    fields = ("eps",)

    def __init__(
        self, hidden_size: int, count: int = HEADS, eps: float = 1e-5, pre_norm: bool = False
    ) -> None:
        heads = (RefiningHead(hidden_size, eps, self.conditioned) for _ in range(count))
        super().__init__(hidden_size, heads, pre_norm)
        self.eps = eps


class ConditionedHeads(ChainedHeads):
    """Heads that also read the token drafted before theirs.

    With shared noise a drafter almost always knows that token, and need not average over what it
    might have been.
    """

    kind, conditioned = "conditioned", True


class MedusaHead(nn.Module):
    """Residual blocks ``h <- h + silu(W h + b)``, and an LM head (Cai et al., 2024)."""

    def __init__(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The state for its LM head, same shape as ``hidden``."""
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        return hidden


class MedusaHeads(Heads):
    """Medusa's heads: independent of each other, with LM heads of their own."""

    kind = "medusa"
    fields = ("vocab_size", "layers")

    def __init__(self, hidden_size: int, count: int, vocab_size: int, layers: int = 1) -> None:
        super().__init__(
            hidden_size, (MedusaHead(hidden_size, vocab_size, layers) for _ in range(count))
        )
        self.vocab_size, self.layers = vocab_size, layers

    def forward(
        self, hidden: Tensor, embeddings: Tensor | None = None, count: int | None = None
    ) -> Tensor:
        """As :meth:`Heads.forward`; a state is for its head's own LM head."""
        return torch.stack([head(hidden) for head in self.heads[:count]])

    def levels(
        self,
        hidden: Tensor,
        lm_head: Callable[[Tensor], Tensor],
        first: Tensor | None = None,
        levels: int | None = None,
    ) -> Tensor:
        """As :meth:`Heads.levels`."""
        before = [] if first is None else [lm_head(first)]
        heads = self.heads[: None if levels is None else levels - len(before)]
        return torch.stack([*before, *(head.lm_head(head(hidden)) for head in heads)])


# Those that can be made for any model: they need its LM head and nothing of their own.
HEAD_TYPES: dict[str, type[ChainedHeads]] = {
    heads.kind: heads for heads in (ChainedHeads, ConditionedHeads)
}
_KINDS: dict[str, type[Any]] = {**HEAD_TYPES, MedusaHeads.kind: MedusaHeads}


def build(about: Mapping[str, Any]) -> Heads:
    """Heads with uninitialised weights and draft vocabulary, from :meth:`Heads.about`."""
    kind = _KINDS[about["kind"]]
    heads: Heads = kind(
        about["hidden_size"], about["count"], *(about[name] for name in kind.fields)
    )
    heads.pre_norm = about.get("raw", False)
    if drafted := about.get("draft_vocabulary"):
        heads.draft_ids = torch.empty(drafted, dtype=torch.int32)
    return heads


def prepare(heads: Heads) -> Heads:
    """Have heads that were loaded compute fast; their weights stay as they are from now on."""
    weights = list(heads.parameters())
    plain = all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
    small = sum(weight.numel() for weight in weights) * torch.float32.itemsize <= MAX_COPIED
    if isinstance(heads, ChainedHeads) and plain and small:
        with suppress(Unbuilt):  # PyTorch computes them then
            heads.program = HeadProgram(heads.heads, heads.hidden_size, heads.eps)
    return heads


def random_heads(
    kind: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> Heads:
    """Heads of a kind in ``HEAD_TYPES`` with random weights, for the model of a configuration."""
    with torch.device(device):
        heads = HEAD_TYPES[kind](config.hidden_size, HEADS, config.rms_norm_eps)
    fill_randomly(heads.to(dtype))
    return prepare(heads.eval().requires_grad_(False))


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
            shapes[_DRAFT_IDS] = (drafted,)
        check_tensors(self.path, self.tensors, shapes, (), "head of its kind", OPTION)

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """The tensors but for the draft vocabulary, by the name of the parameter."""
        return {name: tensor for name, tensor in self.tensors.items() if name != _DRAFT_IDS}

    @property
    def parameters(self) -> int:
        """Number of weights of all heads together."""
        return sum(prod(tensor.shape) for tensor in self.weights.values())

    def draft_ids(self) -> Tensor | None:
        """Read the draft vocabulary, as in :class:`Heads`.

        Raises:
            InputError: it is none.
        """
        if _DRAFT_IDS not in self.tensors:
            return None
        ids = self.tensors[_DRAFT_IDS].read()
        if ids.dtype != torch.int32:
            raise _refused(
                self.path,
                f"has {_DRAFT_IDS} of {str(ids.dtype).removeprefix('torch.')}, where int32 belongs",
            )
        if ids[0] < 0 or (ids[1:] <= ids[:-1]).any():
            raise _refused(self.path, f"is broken: its {_DRAFT_IDS} are no ascending ids of tokens")
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
    if _OWN in metadata:
        return HeadsFile(path, _OWN, _own_about(path, metadata[_OWN]), stored)
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


def carries_heads(config: object) -> bool:
    """Whether a configuration says that there are heads among its model's weights."""
    return any(vars(config).get(name) for name in ("medusa_heads", "medusa_num_heads"))


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
    if about.get("format") != FORMAT or about.get("kind") not in (*_KINDS,):
        has = f"holds heads of format {about.get('format')!s:.40}, kind {about.get('kind')!s:.40}"
        raise _refused(path, f"{has}; known are {FORMAT} and {', '.join(_KINDS)}")
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
