"""A model's folder, looked at before transformers reads it: what is missing, no file, no JSON, no number, or too much.

Headers and small files are read, weights are not, and no memory is taken by what a broken or hostile folder asks for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING

from tswift.errors import InputError
from tswift.models.shapes import skeleton
from tswift.reading import parse_json, read_file

_OPTION = "--model"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_PARSED = (_CONFIG, _GENERATION, "tokenizer_config.json", _INDEX)
_TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")  # how their files begin
_READ = (".json", ".safetensors", ".model", ".jinja", ".txt")  # what transformers opens
_MOST = 256_000_000  # bytes of such a file, weights apart; tokenizers have tens of millions
_MOST_LAYERS = 1000  # the deepest published models have a bit more than a hundred
_LARGEST = 1 << 31
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_PACKED = 8  # weights in an element of a quantised checkpoint


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file: its type, such as ``BF16``, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def refuse_broken(folder: Path) -> None:
    """Refuse a folder that holds no model, or one that cannot be read.

    Raises:
        InputError: no ``config.json``; a file that is no file, is not JSON, or holds no JSON object; an adapter.
    """
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} holds an adapter; merge it into its model first", _OPTION)
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_READ):
            _refuse_odd(path)
    if not (folder / _CONFIG).exists():
        raise InputError(f"{folder} holds no model: there is no {_CONFIG} in it", _OPTION)
    for name in _PARSED:
        if (folder / name).exists():
            _object(folder / name)


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds anything that a tokenizer could be made of."""
    return any(path.name.startswith(_TOKENIZERS) for path in folder.iterdir())


def refuse_numbers(values: Mapping[str, Any], model: str) -> None:
    """Refuse a configuration whose sizes are none, or that wants code of its own run.

    Args:
        values: as ``config.json`` has them.
        model: as the user named it.

    Raises:
        InputError: it does.
    """
    kind = values.get("model_type")
    if "auto_map" in values and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        raise InputError(f"{model} needs code of its own (auto_map), which tswift never runs", _OPTION)
    if not isinstance(kind, str):
        raise InputError(f"{model} has no model_type in its {_CONFIG}", _OPTION)
    if values.get("transformers_weights") is not None:
        raise InputError(
            f"{model} names its weights itself (transformers_weights), which tswift does not read", _OPTION
        )
    text = values.get("text_config")
    for part in (values, text if isinstance(text, dict) else {}):
        limits = {**dict.fromkeys(_SIZES, _LARGEST), "num_hidden_layers": _MOST_LAYERS}
        for name, most in limits.items():
            value = part.get(name)
            if value is None or isinstance(value, list):  # a list has a value per layer
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
                raise InputError(f"{model} has {name} {value!r:.40}, which is no integer from 1 to {most:,}", _OPTION)
        dtype = part.get("dtype", part.get("torch_dtype"))
        if dtype is not None and not _floating(dtype):
            raise InputError(f"{model} has dtype {dtype!r:.40}, which holds no floating-point numbers", _OPTION)
        heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            raise InputError(f"{model} has {heads} attention heads, which {shared} KV heads cannot share", _OPTION)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """What the weights' files say they hold, by name; the weights themselves are not read.

    Raises:
        InputError: there are no safetensors, only pickles; an index that names files it may not or that are not there;
            a file that is cut short or no safetensors.
    """
    tensors: dict[str, Stored] = {}
    for path in _weights(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    view = file.get_slice(name)
                    tensors[name] = Stored(view.get_dtype(), tuple(view.get_shape()))
        except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
            raise InputError(f"{path} is broken or no safetensors file ({error})", _OPTION) from None
    return tensors


def refuse_misfit(config: Any, tensors: Mapping[str, Stored], model: str) -> None:
    """Refuse weights that are not those of the configuration, before memory is taken for either.

    Args:
        config: the model's configuration.
        tensors: as :func:`stored_tensors` finds them.
        model: as the user named it.

    Raises:
        InputError: a tensor has another shape, or holds no floating-point numbers, or far more are wanted than stored.
    """
    quantised = getattr(config, "quantization_config", None) is not None
    weights = dict(skeleton(config).named_parameters())
    for name, weight in weights.items():
        found = tensors.get(name)
        if found is None or quantised:
            continue
        if found.shape != tuple(weight.shape):
            wanted = f"{_CONFIG} makes it {_shape(tuple(weight.shape))}"
            raise InputError(f"{model} has {name} of shape {_shape(found.shape)}, {wanted}", _OPTION)
        if not found.dtype.startswith(("F", "BF")):
            raise InputError(f"{model} has {name} of type {found.dtype}, and says nothing of quantisation", _OPTION)
    wanted_, held = (sum(prod(each.shape) for each in group.values()) for group in (weights, tensors))
    if wanted_ > 2 * held * (_PACKED if quantised else 1):
        raise InputError(f"{model} has {held:,} weights, {_CONFIG} asks for {wanted_:,}", _OPTION)


def _weights(folder: Path) -> list[Path]:
    """The files that transformers would read, all of them there."""
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).exists():
        pickled = next((path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth")), None)
        reason = f"only {pickled}, a pickle, which could run code" if pickled else f"no {_WEIGHTS}"
        raise InputError(f"{folder} has no weights that tswift reads ({reason})", _OPTION)
    index = _object(folder / _INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(index.get("metadata"), dict):
        raise InputError(f"{folder / _INDEX} is broken: it lacks weight_map or metadata", _OPTION)
    for shard in places.values():
        # a file of another folder is none of the model's
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InputError(f"{folder / _INDEX} names {shard!r:.60}, no safetensors file in the folder", _OPTION)
        if not (folder / shard).is_file():
            raise InputError(f"{folder} lacks {shard}, which its index names", _OPTION)
    return [folder / shard for shard in sorted(set(places.values()))]


def _refuse_odd(path: Path) -> None:
    """Refuse what would hang or fill the memory when it is opened."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise InputError(f"{path} is a link to nothing", _OPTION) from None
    except OSError as error:
        raise InputError(f"{path} cannot be looked at ({error.strerror})", _OPTION) from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is no file", _OPTION)
    if status.st_size > _MOST and path.suffix != ".safetensors":
        raise InputError(f"{path} is too large, more than {_MOST:,} bytes are not read", _OPTION)


def _object(path: Path) -> dict[str, Any]:
    found = parse_json(read_file(path, _MOST, _OPTION), path, _OPTION)
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object", _OPTION)
    return found


def _floating(name: object) -> bool:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
