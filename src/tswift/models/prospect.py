"""What a model will take and can do, from its configuration and the header of its heads: nothing is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tswift.attention.backends import BACKENDS, choose, partials_bytes
from tswift.errors import InputError, renamed
from tswift.models import quantizing
from tswift.models.adapting import head_size, heads_of
from tswift.models.devices import find_device, find_dtype, own_dtype
from tswift.models.draft import DRAFT_OPTION, refuse_other_size
from tswift.models.heads import KINDS
from tswift.models.heads_files import Description, carries_heads, describe, heads_path
from tswift.models.hf import max_positions
from tswift.models.linear import copied
from tswift.models.quantizing import copied_bytes, weight_only
from tswift.models.shapes import HEADS, PREFIX, skeleton
from tswift.models.source import find_source, in_one_line, read_config, silence


@dataclass(frozen=True)
class ModelSpec:
    """A model that is not loaded yet.

    Attributes:
        name: as the user named it.
        device: where it will be.
        dtype: of its weights.
        positions: most tokens, prompt included.
        vocab_size: number of logits.
        weight_bytes: of its weights, heads apart; 0 where nobody can say.
        token_bytes: of one token's keys and values, at least.
        groups: query heads per KV head; 1 where the configuration does not say.
        kv_heads, head_size: of its keys and values; 1 KV head where the configuration does not say.
        attention: name of the attention; empty where it is not known yet.
        most_nodes: most nodes of a draft tree; None where there is no limit, or it is not known yet.
        heads: how many tokens its heads draft one after another; None where nobody can say.
        heads_bytes: of their weights.
        copy_bytes: of a copy with weights of fewer bits; 0 for none.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    positions: int
    vocab_size: int
    weight_bytes: int
    token_bytes: int
    groups: int
    kv_heads: int
    head_size: int
    attention: str
    most_nodes: int | None
    heads: int | None
    heads_bytes: int
    copy_bytes: int = 0

    def partials_bytes(self, slots: int, nodes: int) -> int:
        """As :func:`tswift.attention.backends.partials_bytes`."""
        return partials_bytes(self.attention, (self.kv_heads, self.groups), self.head_size, slots, nodes)


def inspect_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    draft_weights: str | None = None,
) -> ModelSpec:
    """What :func:`tswift.load` would load; see there for the arguments.

    Raises:
        InputError: something named does not exist or cannot serve here, or the heads are broken or another model's.
    """
    place, config = find_device(device), read_config(model)
    if dtype != "auto":
        kind = find_dtype(dtype)
    else:
        kind = own_dtype(config) if place.type == "cuda" or model.startswith(PREFIX) else torch.float32
    text = config.get_text_config()
    count, parameters = _random(text, heads) if model.startswith(PREFIX) else _heads(model, config, heads)
    return _prospect(model, config, place, kind, attention, count, parameters, draft_weights)


def inspect_draft_model(draft: str, target: ModelSpec, attention: str = "auto") -> ModelSpec:
    """What :func:`tswift.load` would load to draft for a model that is foreseen.

    Raises:
        InputError: there is no such model, it cannot be served exactly, or its vocabulary has another size.
    """
    try:
        seen = _prospect(draft, read_config(draft), target.device, target.dtype, attention, 0, 0)
        refuse_other_size(draft, seen.vocab_size, target.name, target.vocab_size)
    except InputError as error:
        raise renamed(error, {"--model": DRAFT_OPTION}) from None
    return seen


def _prospect(
    model: str,
    config: Any,
    place: torch.device,
    kind: torch.dtype,
    attention: str,
    heads: int | None,
    parameters: int,
    draft_weights: str | None = None,
) -> ModelSpec:
    text, most_nodes, name = config.get_text_config(), None, ""
    if attention != "auto":  # what that chooses may give way to another
        backend = BACKENDS[choose(attention, kind, place, head_size(config))]()
        most_nodes, name = backend.MOST_NODES, backend.__name__
    weight_bytes, copy_bytes = _weights(config, model, kind, place, draft_weights)
    return ModelSpec(
        name=model,
        device=place,
        dtype=kind,
        positions=max_positions(config),
        vocab_size=text.vocab_size,
        weight_bytes=weight_bytes,
        token_bytes=_kv_width(text) * kind.itemsize,
        groups=_groups(text),
        kv_heads=heads_of(config)[0],
        head_size=head_size(config),
        attention=name,
        most_nodes=most_nodes,
        heads=heads,
        heads_bytes=parameters * kind.itemsize,
        copy_bytes=copy_bytes,
    )


def _weights(
    config: Any, model: str, kind: torch.dtype, place: torch.device, draft_weights: str | None
) -> tuple[int, int]:
    """Bytes of a model's weights, those counted twice that will be held in another order too; and of a cheaper copy."""
    if draft_weights is not None:
        weight_only(draft_weights, config, place, kind, quantizing.DRAFT_OPTION)
    if getattr(config, "quantization_config", None) is not None:
        return 0, 0
    with silence(), in_one_line(model):
        network = skeleton(config)
        size = sum(weight.numel() for weight in network.parameters()) * kind.itemsize + copied(network, kind, place)
        return size, 0 if draft_weights is None else copied_bytes(network, draft_weights)


def _kv_width(text: Any) -> int:
    """Elements of one token's keys and values; of one KV head where the configuration does not say how many."""
    return int(2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or 1) * head_size(text))


def _groups(text: Any) -> int:
    heads, kv_heads = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return int(heads) // int(kv_heads or heads) if heads else 1


def _heads(model: str, config: Any, heads: str | os.PathLike[str] | None) -> tuple[int | None, int]:
    """How many tokens the heads draft one after another, and their parameters."""
    _, folder = find_source(model)
    path = heads_path(heads, folder)
    if path is None and carries_heads(config):
        if folder is None:
            return None, 0  # they are with the weights, on the hub
        path = folder
    return (0, 0) if path is None else _described(path, config.get_text_config())


def _random(text: Any, heads: str | os.PathLike[str] | None) -> tuple[int | None, int]:
    """As :func:`_heads`, for a shape."""
    kind = "chained" if heads is None else str(heads)
    if kind not in KINDS:
        path = heads_path(kind, None)
        assert path is not None
        return _described(path, text)
    with torch.device("meta"):
        found = KINDS[kind](text.hidden_size, HEADS)
    return found.count, sum(weight.numel() for weight in found.parameters())


def _described(path: Path, text: Any) -> tuple[int, int]:
    try:
        found: Description = describe(path)
    except InputError as error:
        raise renamed(error, {"FILE": "--heads"}) from None
    if found.hidden_size != text.hidden_size:
        message = f"{path} was made for hidden size {found.hidden_size}, the model has {text.hidden_size}"
        raise InputError(message, "--heads")
    if found.vocab_size not in (None, text.vocab_size):
        message = f"{path} was made for a vocabulary of {found.vocab_size:,}, the model has {text.vocab_size:,}"
        raise InputError(message, "--heads")
    return found.count, found.parameters
