"""Where a model comes from: the bundled one, a folder, a hub id or a published shape; and its configuration."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from tswift.errors import InputError
from tswift.models.checkpoint import refuse_broken, refuse_numbers
from tswift.models.hub import hub
from tswift.models.shapes import PREFIX, shape_config

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
