"""GGUF, the files of llama.cpp: metadata become a transformers configuration,
tensors become codes without loss.

A file begins with a header: values by name, then name, type, shape and place of every tensor. It is
read here and not by the package ``gguf``, which takes seconds for the 100,000 strings of a
tokenizer, and believes all that a damaged file says. The types, their sizes and the names of
tensors are that package's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from torch import Tensor

from tswift.errors import InputError
from tswift.models.codes import Codes
from tswift.models.gguf_blocks import CODED, Bytes, Coded
from tswift.sampling.generation_config import LLAMA_CPPS_VALUES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of tensors in a file, unless it says otherwise
_MAX_DIMENSIONS = 4
_NUMBERS = "BbHhIif?"  # formats of ``struct``, by the type of a value in the metadata
_STRING, _ARRAY = 8, 9
_WIDE = {10: "Q", 11: "q", 12: "d"}

Value = int | float | bool | str


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in a GGUF file: its name, its type, its shape in PyTorch's order,
    and where its bytes begin.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    @property
    def quantised(self) -> bool:
        """Whether it is read as codes."""
        return self.kind in CODED

    @property
    def form(self) -> Coded:
        """How its codes are held."""
        return CODED[self.kind]

    @property
    def bytes(self) -> int:
        """How many there are."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // block * size


@dataclass(frozen=True)
class GGUFFile:
    """What the header of a file says."""

    path: Path
    metadata: Mapping[str, Value]
    arrays: Mapping[str, list[Any]]  # those among the metadata
    tensors: Mapping[str, StoredWeight]
    # where something else is served than it seems to say, in a line each, by key
    told: dict[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> Architecture:
        """The family of models."""
        return ARCHITECTURES[self._architecture_name]

    @property
    def _architecture_name(self) -> str:
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise self.refusal(
                f"has the architecture {name!r:.40}; tswift reads {', '.join(ARCHITECTURES)}"
            )
        return str(name)

    @property
    def kinds(self) -> str:
        """The types of the quantised tensors, the most frequent ones first;
        empty if none is quantised.
        """
        kinds = [tensor.kind for tensor in self.tensors.values() if tensor.quantised]
        return " and ".join(
            kind.name for kind in sorted({*kinds}, key=lambda kind: (-kinds.count(kind), kind))
        )

    def refusal(self, reason: str) -> InputError:
        """An error about this file."""
        return InputError(f"{self.path} {reason}", "model")

    def own_values(self) -> dict[str, object]:
        """What transformers' configuration is to say by what is no key of the architecture."""
        values: dict[str, Any] = {"dtype": self._number_type()}
        if _EMBEDDINGS in self.tensors:  # there may be fewer tokens
            values["vocab_size"] = self.tensors[_EMBEDDINGS].shape[0]
        tied = self.architecture.tied
        values["tie_word_embeddings"] = (
            "output.weight" not in self.tensors if tied is None else tied
        )
        for name in ("bos", "eos", "pad"):
            values[f"{name}_token_id"] = self._token(name.replace("pad", "padding"))
        turn = self._token("eot")  # what ends an answer, where that is another token
        if turn not in (None, values["eos_token_id"]):
            values["eos_token_id"] = [
                token for token in (values["eos_token_id"], turn) if token is not None
            ]
        return values

    @property
    def _mtp_layers(self) -> int:
        """How many of the last layers are an MTP head, which is not read."""
        return int(self.metadata.get(f"{self._architecture_name}.nextn_predict_layers", 0))

    def _token(self, name: str) -> Value | None:
        return self.metadata.get(f"tokenizer.ggml.{name}_token_id")

    def sampling(self) -> dict[str, object]:
        """The sampling that its authors recommend, by the names of a ``GenerationConfig``;
        what they leave open is llama.cpp's. Empty if they recommend none.
        """
        prefix = "general.sampling."
        named = {
            name: self.metadata[prefix + key]
            for name, key in _SAMPLING.items()
            if prefix + key in self.metadata
        }
        return {"do_sample": True, **LLAMA_CPPS_VALUES, **named} if named else {}

    def _number_type(self) -> str:
        """The type of numbers that most matrices are stored in;
        float32 where those are quantised.
        """
        kinds = [tensor.kind for tensor in self.tensors.values() if len(tensor.shape) > 1]
        most = max({*kinds}, key=kinds.count, default=GGMLQuantizationType.F32)
        return str(_NUMBER_TYPES.get(most, torch.float32)).removeprefix("torch.")

    def names(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredWeight]:
        """The tensor of each of a model's parameters, by its name in transformers;
        none of biases that it lacks, which are 0 then, as in llama.cpp.

        Raises:
            InputError: one is missing, left over, or of another shape or of a type that is not
                read.
        """
        architecture = next(
            (key for key, name in MODEL_ARCH_NAMES.items() if name == self._architecture_name), None
        )
        if architecture is None:
            raise self.refusal(
                f"is a {self._architecture_name}, which the installed package gguf does not know"
            )
        layers = int(self.metadata[f"{self._architecture_name}.block_count"])
        known = get_tensor_name_map(architecture, layers)
        found: dict[str, StoredWeight] = {}
        for name, parameter in parameters.items():
            module, _, kind = name.rpartition(".")
            own = f"{known.get_name(module)}.{kind}"
            if kind == "A_log":
                own = f"{known.get_name(name)}"
            elif kind == "dt_bias":
                own = f"{known.get_name(f'{module}.dt_proj')}.bias"
            stored = self.tensors.get(own)
            if stored is None and kind == "bias":
                continue
            if stored is None:
                raise self.refusal(f"lacks {own}, the weights of {name}")
            shape = parameter.squeeze(1).shape if parameter.dim() == 3 else parameter.shape
            if stored.shape != tuple(shape):
                wanted = f"its metadata make it {list(shape)}"
                raise self.refusal(f"has {own} of shape {list(stored.shape)}, {wanted}")
            found[name] = stored
        heads = tuple(f"blk.{layers - 1 - head}." for head in range(self._mtp_layers))
        if heads and f"{heads[0]}nextn.eh_proj.weight" not in self.tensors:
            key = f"{self._architecture_name}.nextn_predict_layers"
            raise self.refusal(f"lacks {heads[0]}nextn.eh_proj.weight, of the head of its {key}")
        left = {name for name in self.tensors if not name.startswith(heads)}
        left -= {stored.name for stored in found.values()} | {*FACTORS}
        if left:
            raise self.refusal(
                f"has {min(left)}, which no {self.architecture.model_type} of transformers has"
            )
        return found

    def read(self, stored: StoredWeight, heads: int | None = None) -> Codes | Tensor:
        """A tensor: codes of a quantised matrix, else numbers in the type that they are stored in.

        Args:
            stored: which.
            heads: of the rows of queries or keys, which some architectures store in another order;
                None for others.
        """
        weight: Codes | Tensor = (
            self._codes(stored) if stored.kind in CODED else self.numbers(stored)
        )
        if self.architecture.delta and any(part in stored.name for part in _MIXED):
            return self._of_delta(stored.name, weight)
        norm = stored.name.endswith("norm.weight")
        if self.architecture.centred and norm and isinstance(weight, Tensor):
            weight = weight - 1
        if heads is not None and self.architecture.permuted:
            weight = _rows(weight, _order(stored.shape[0], heads))
        return weight

    def _of_delta(self, name: str, weight: Codes | Tensor) -> Codes | Tensor:
        """A tensor of a gated delta net, whose value heads lie in another order: those that share a
        key follow each other in transformers, and have a key of each between in llama.cpp.
        """
        keys, heads, size, inner = (
            int(self.metadata[f"{self._architecture_name}.{field}"])
            for field in (
                "ssm.group_count",
                "ssm.time_step_rank",
                "ssm.state_size",
                "ssm.inner_size",
            )
        )
        part = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        if part == "ssm_norm":
            return weight
        wide = inner // heads if part in ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out") else 1
        order = torch.arange(heads * wide).view(heads // keys, keys, wide).transpose(0, 1).flatten()
        if part in ("attn_qkv", "ssm_conv1d"):
            before = 2 * keys * size
            order = torch.cat([torch.arange(before), before + order])
        if part == "ssm_out":
            return self._columns(name, weight, order)
        rows = _rows(weight, order)
        if part == "ssm_conv1d":
            return rows.unsqueeze(1)
        return (-rows).log() if part == "ssm_a" else rows

    def _columns(self, name: str, weight: Codes | Tensor, order: Tensor) -> Codes | Tensor:
        """Columns in another order, in which blocks of codes stay together."""
        if not isinstance(weight, Codes):
            return weight[:, order]
        blocks = order.view(-1, weight.block)
        if not torch.equal(blocks - blocks[:, :1], torch.arange(weight.block).expand_as(blocks)):
            raise self.refusal(f"has {name} in blocks of several heads")
        whole = blocks[:, 0] // weight.block
        return Codes(
            weight.codes[:, order], weight.scale[:, whole], weight.minimum[:, whole], weight.bits
        )

    def beginning(self, stored: StoredWeight, most: int) -> bytes:
        """The first bytes of a tensor."""
        return np.fromfile(
            self.path, np.uint8, min(stored.bytes, most), offset=stored.start
        ).tobytes()

    def _bytes(self, stored: StoredWeight) -> Bytes:
        """The bytes of a tensor: read, not mapped, so that they do not stay in memory."""
        data = np.fromfile(self.path, np.uint8, stored.bytes, offset=stored.start)
        if len(data) != stored.bytes:
            raise self.refusal(f"is truncated: {stored.name} is not whole")
        return data

    def numbers(self, stored: StoredWeight) -> Tensor:
        """A tensor that is not quantised."""
        numbers = (
            torch.from_numpy(self._bytes(stored))
            .view(_NUMBER_TYPES[stored.kind])
            .view(stored.shape)
        )
        if not numbers.isfinite().all():
            raise self.refusal(f"is broken: {stored.name} holds something else than finite numbers")
        return numbers

    def _codes(self, stored: StoredWeight) -> Codes:
        if len(stored.shape) != 2:
            raise self.refusal(
                f"has {stored.name} with {len(stored.shape)} dimensions, and quantised"
            )
        coded = stored.form
        blocks = self._bytes(stored).reshape(-1, GGML_QUANT_SIZES[stored.kind][1])
        with np.errstate(all="ignore"):  # what is not finite is refused below
            codes, scale, minimum = (
                torch.from_numpy(np.ascontiguousarray(part)) for part in coded.decode(blocks)
            )
        if not (scale.isfinite().all() and minimum.isfinite().all()):
            raise self.refusal(f"is broken: {stored.name} has scales that are no finite numbers")
        rows = stored.shape[0]
        return Codes(codes.view(rows, -1), scale.view(rows, -1), minimum.view(rows, -1), coded.bits)


def _rows(weight: Any, order: Tensor) -> Any:
    """Rows in another order."""
    if not isinstance(weight, Codes):
        return weight[order]
    return Codes(weight.codes[order], weight.scale[order], weight.minimum[order], weight.bits)


def _order(rows: int, heads: int) -> Tensor:
    """Where the rows of queries or keys are: llama.cpp rotates neighbours,
    transformers the halves of a head.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


@dataclass(frozen=True)
class Architecture:
    """How models of a family are found in GGUF."""

    model_type: str  # of transformers
    permuted: bool = False  # rows of queries and keys are in another order
    # norms multiply by one more than their weights, and files hold what they multiply by
    centred: bool = False
    partial: bool = False  # a share of each head may be turned
    delta: bool = False  # it has gated delta nets
    tied: bool | None = None  # whether embeddings are the LM head; None where files differ
    period: int = 0  # each so many-th layer sees all, others have windows; 0 for no such rule
    window: int = 0  # tokens of a window, where a file does not say; 0 for all
    two_rotaries: bool = False  # layers with windows have rotary embeddings of their own
    windowed: str = ""  # the type of transformers of models with windows, if it is another one
    # layers of the model whose queries are scaled by another size than a head's; 0 for no such rule
    halved: int = 0
    divided: bool = False  # frequencies may be, each by a number
    by_length: bool = False  # by other numbers for long texts; and transformers knows no other type
    # of the configuration, beside those that all have: what a file calls them
    fields: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, object] = field(default_factory=dict)  # the one value that is served


_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
# Mistral's files say that they are of Llama, OLMo 3's of OLMo 2. What an architecture is comes from
# llama.cpp's converter: those whose neighbouring pairs are rotated there are permuted.
ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True, divided=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture(
        "qwen3_5_text",
        centred=True,
        partial=True,
        delta=True,
        fields={
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_key_head_dim": "ssm.state_size",
            "linear_num_key_heads": "ssm.group_count",
            "linear_num_value_heads": "ssm.time_step_rank",
            "inner": "ssm.inner_size",
            "full_attention_interval": "full_attention_interval",
        },
        only={"ssm.v_head_reordered": True},
    ),
    "smollm3": Architecture("smollm3", permuted=True),
    "olmo2": Architecture("olmo2", tied=False, period=4, two_rotaries=True, windowed="olmo3"),
    "phi3": Architecture(
        "phi3", partial=True, by_length=True, fields={"sliding_window": "attention.sliding_window"}
    ),
    "gemma2": Architecture(
        "gemma2",
        centred=True,
        tied=True,
        period=2,
        window=4096,
        halved=46,
        fields={**_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    "gemma3": Architecture(
        "gemma3_text", centred=True, period=6, two_rotaries=True, halved=62, fields=_CAP
    ),
    "granite": Architecture(
        "granite",
        permuted=True,
        divided=True,
        fields={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        only={"rope.scaling.finetuned": True},  # else it turns nothing
    ),
}
_SAMPLING = {
    "temperature": "temp",
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "repetition_penalty": "penalty_repeat",
}
_MIXED = ("attn_qkv", "attn_gate", "ssm_")  # what tensors of gated delta nets have in their names
_EMBEDDINGS = "token_embd.weight"
# what frequencies of rotary embeddings are divided by: of any text, of long ones, and of short ones
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NUMBER_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class _Header:
    """The header of a file, read from its beginning on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = len(_MAGIC)

    def broken(self, reason: str) -> InputError:
        """An error about the file."""
        return InputError(f"{self.path} is damaged, or no GGUF file: {reason}", "model")

    def skip(self, count: int) -> int:
        """Go on by so many bytes; returns where they begin."""
        start = self.at
        if count > len(self.data) - start:
            raise self.broken(f"it ends within its header, at byte {len(self.data):,}")
        self.at += count
        return start

    def number(self, kind: str) -> Any:
        """A number of a format of ``struct``."""
        start = self.skip(struct.calcsize(f"<{kind}"))
        return struct.unpack_from(f"<{kind}", self.data, start)[0]

    def text(self) -> str:
        """A string."""
        length = self.number("Q")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.broken(f"a name at byte {start:,} is no UTF-8") from None

    def value(self, kind: int) -> Value:
        """A value of a type of the metadata, no array."""
        if kind == _STRING:
            return self.text()
        if kind in _WIDE or kind < len(_NUMBERS):
            value: Value = self.number(_WIDE.get(kind) or _NUMBERS[kind])
            return value
        raise self.broken(f"it has a value of the unknown type {kind}")

    def array(self) -> list[Any]:
        """The elements of an array: strings or numbers."""
        kind = self.number("I")
        count = self.number("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind in _WIDE or kind < len(_NUMBERS):
            form = _WIDE.get(kind) or _NUMBERS[kind]
            start = self.skip(count * struct.calcsize(f"<{form}"))
            return list(struct.unpack_from(f"<{count}{form}", self.data, start))
        raise self.broken(f"it has an array of the unknown type {kind}")

    def _strings(self, count: int) -> list[str]:
        """So many strings, in a loop of its own: a tokenizer has hundreds of thousands."""
        data = self.data
        size = len(data)
        length = struct.Struct("<Q").unpack_from
        found = []
        at = self.at
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0] if start <= size else start
            if at > size:
                self.skip(size)  # to raise
            found.append(data[start:at])
        self.at = at
        try:
            return [each.decode() for each in found]
        except UnicodeDecodeError:
            raise self.broken("it has a string that is no UTF-8") from None

    def tensor(self) -> StoredWeight:
        """Name, type, shape and place of a tensor;
        the place counts from where the first one begins.
        """
        name = self.text()
        dimensions = self.number("I")
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            raise self.broken(f"{name!r:.60} has {dimensions:,} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        kind = self.number("I")
        start = self.number("Q")
        known = [each for each in (*_NUMBER_TYPES, *CODED) if each == kind]
        if not known:
            named = (
                GGMLQuantizationType(kind).name
                if kind in [*GGMLQuantizationType]
                else f"number {kind}"
            )
            readable = ", ".join(each.name for each in (*_NUMBER_TYPES, *CODED))
            reason = (
                f"has {name:.60} of type {named}, which tswift does not read; it reads {readable}"
            )
            raise InputError(f"{self.path} {reason}", "model")
        if shape[-1] % GGML_QUANT_SIZES[known[0]][0] or 0 in shape:
            raise self.broken(f"{name!r:.60} of type {known[0].name} has the shape {list(shape)}")
        return StoredWeight(name, known[0], shape, start)


def read_gguf(path: Path) -> GGUFFile:
    """What the header of a file says; its tensors are not read.

    Raises:
        InputError: the file is damaged, truncated, of another version, or has tensors of a type
            that is not read.
    """
    try:
        status = path.stat()
        return _read_header(path.resolve(), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})", "model") from None


@cache
def _read_header(path: Path, size: int, changed: int) -> GGUFFile:
    """As above; ``changed`` is when the file was, as loading asks several times."""
    del changed
    if size < 24:
        raise InputError(f"{path} is damaged, or no GGUF file: it has {size:,} bytes", "model")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(path, data)
        if data[: len(_MAGIC)] != _MAGIC:
            raise header.broken(f"it does not begin with {_MAGIC.decode()}")
        version = header.number("I")
        tensor_count = header.number("Q")
        value_count = header.number("Q")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise InputError(f"{path} is GGUF of version {version}; tswift reads {known}", "model")
        metadata: dict[str, Value] = {}
        arrays: dict[str, list[Any]] = {}
        for _ in range(value_count):
            name = header.text()
            kind = header.number("I")
            if name in metadata or name in arrays:
                raise header.broken(f"it has {name!r:.60} twice")
            if kind == _ARRAY:
                arrays[name] = header.array()
            else:
                metadata[name] = header.value(kind)
        parts = metadata.get("split.count", 1)
        if parts != 1:
            raise InputError(
                f"{path} is one of {parts} parts; llama-gguf-split --merge makes one file of them",
                "model",
            )
        tensors = _placed(header, [header.tensor() for _ in range(tensor_count)], metadata)
    return GGUFFile(path, metadata, arrays, tensors)


def _placed(
    header: _Header, tensors: list[StoredWeight], metadata: Mapping[str, Value]
) -> dict[str, StoredWeight]:
    """Tensors by name with their places in the file, all of them within it."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise header.broken(f"its alignment is {alignment!r:.40}")
    first = -(-header.at // alignment) * alignment
    placed: dict[str, StoredWeight] = {}
    for tensor in tensors:
        there = StoredWeight(tensor.name, tensor.kind, tensor.shape, first + tensor.start)
        if there.start + there.bytes > len(header.data):
            ends = (
                f"{tensor.name} ends at byte {there.start + there.bytes:,}, the file at "
                f"{len(header.data):,}"
            )
            raise InputError(f"{header.path} is truncated: {ends}", "model")
        if tensor.name in placed:
            raise header.broken(f"it has {tensor.name!r:.60} twice")
        placed[tensor.name] = there
    return placed
