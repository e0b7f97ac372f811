"""Where a model comes from: a folder, a hub id or a published shape; its files are checked before they are read."""

from __future__ import annotations

import logging
import os
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from tswift.errors import InputError
from tswift.models.shapes import PREFIX, shape_config, skeleton
from tswift.reading import parse_json, read_file

_PATIENCE = 10.0  # seconds


@contextmanager
def hub(wanted: bool = True) -> Iterator[None]:
    """While entered, files come from the hub; from its cache alone, at once, if the hub cannot be reached.

    Left to itself, its client tries a file six times within half a minute, and says so every time.

    Args:
        wanted: whether anything is to come from there; if not, nothing is done.
    """
    if not wanted:
        yield
        return
    offline, verbosity = constants.HF_HUB_OFFLINE, hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        constants.HF_HUB_OFFLINE = offline or not _reached()
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        hub_logging.set_verbosity(verbosity)


def _reached() -> bool:
    with suppress(Exception):  # the library that speaks HTTP differs by version, and its errors with it
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)  # any answer will do
        return True
    return False


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


DEMO = "demo"
DEMO_DRAFT = "demo-draft"
_BUNDLED = {DEMO: ("demo",), DEMO_DRAFT: ("demo", "draft")}  # folders, from this one on


def find_source(model: str) -> tuple[str, Path | None]:
    """What transformers is given, and the folder if it is one.

    Raises:
        InputError: it is no folder, and cannot be a hub id.
    """
    if model in _BUNDLED:
        folder = Path(__file__).parent.joinpath(*_BUNDLED[model])
        if not (folder / "model.safetensors").is_file():
            raise InputError(f"the bundled model is not in this installation (looked in {folder})", "--model")
        return str(folder), folder
    if not model.strip():
        raise InputError(f"there is no folder {model!r}", "--model")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return str(path), path
        if path.exists():
            raise InputError(f"{model} is a file; give the folder it is in", "--model")
    except (OSError, RuntimeError) as error:  # RuntimeError: a home folder that does not exist
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{model[:80]} cannot be looked at ({reason})", "--model") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"no folder can be called {model[:80]}", "--model") from None  # a NUL, or half a character
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise InputError(f"there is no folder {model!r}", "--model")
    return model, None


def read_config(model: str) -> Any:
    """The transformers configuration of a model; its weights are not looked at.

    Args:
        model: ``demo``, ``demo-draft``, ``shape:NAME``, a folder or a hub id.

    Raises:
        InputError: there is none, or none that could be served exactly.
    """
    if model.startswith(PREFIX):
        return shape_config(model)
    source, folder = find_source(model)
    if folder is not None:
        refuse_broken(folder)
    with silence(), hub(folder is None), in_one_line(model):
        values, _ = PreTrainedConfig.get_config_dict(source)
        refuse_numbers(values, model)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        config._attn_implementation = None  # a file's own choice could be a kernel of the hub, which is code
        _refuse_unsupported(config.get_text_config(), model)
    return config


def _refuse_unsupported(config: Any, model: str) -> None:
    """Refuse what our attention and KV cache would compute wrongly, as far as a configuration says it."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # some have one per type of layer
    moving = {str(each.get("rope_type")) for each in ropes} & {"dynamic", "longrope"}
    layers = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    reason = ""
    if getattr(config, "max_position_embeddings", None) is None or getattr(config, "num_attention_heads", None) is None:
        reason = f"the architecture {config.model_type}"
    elif layers:
        reason = f"layers of type {', '.join(sorted(layers))}"
    elif getattr(config, "kv_lora_rank", None):
        reason = "latent attention (kv_lora_rank)"
    elif moving:
        reason = f"rotary embeddings of type {', '.join(moving)}"
    if reason:
        raise InputError(f"{model} has {reason}, which tswift cannot serve exactly yet", "--model")


@contextmanager
def silence() -> Iterator[None]:
    """Keep warnings and transformers' bars off stderr; what matters of them is checked here."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def in_one_line(model: str, what: str = "") -> Iterator[None]:
    """Turn every failure to load into one line.

    Args:
        model: as the user named it.
        what: words before the reason: what of the model it was.

    Raises:
        InputError: whatever went wrong.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # transformers, the hub client and safetensors have many ways to fail
        here = Path(model).expanduser().is_dir() or model in _BUNDLED
        reason = _reason(error, whole=here)
        where = "" if here else " from the hub, and is no folder here"
        raise InputError(f"{model} cannot be loaded{where} ({what}{reason[:200]})", "--model") from None


def _reason(error: Exception, whole: bool) -> str:
    """Why something failed, in a line; with the name of an error that does not explain itself."""
    said = str(error)
    if "trust_remote_code" in said:
        return "it needs code of its own, which tswift never runs"
    text = " ".join((said if whole else said.strip().partition("\n")[0]).split())  # the hub's client adds advice
    return text if isinstance(error, OSError) or text.count(" ") > 2 else f"{type(error).__name__} {text}".strip()
