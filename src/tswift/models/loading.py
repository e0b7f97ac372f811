"""Load a causal language model, its tokenizer and its heads: the bundled one, a local folder or a hub id."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tswift.errors import InputError
from tswift.kv.full import FullKV
from tswift.models.heads import KINDS, Heads, load_heads
from tswift.models.target import Target

DEMO = "demo"
HEADS_FILE = "heads.safetensors"
DTYPES = ("float32", "float64", "bfloat16", "float16")
ATTENTIONS = ("auto", "sdpa")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode.

    Attributes:
        name: as the user named it.
        tokenizer: the transformers tokenizer.
        target: the model, adapted.
        heads: heads that draft for it, if it has any.
        eos_ids: token ids that end a text.
        attention: the attention in use.
    """

    name: str
    tokenizer: Any
    target: Target
    heads: Heads | None
    eos_ids: tuple[int, ...]
    attention: str = "sdpa"

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, with the first token the model wants before any text, if it wants one."""
        return list(self.tokenizer(text)["input_ids"])

    def about(self) -> dict[str, Any]:
        """What was loaded and how, for records."""
        return {
            "name": self.name,
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "attention": self.attention,
            "heads": None if self.heads is None else f"{self.heads.kind}, {self.heads.count}",
            "eos_ids": list(self.eos_ids),
        }


def load(
    model: str = DEMO,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Load a model for decoding.

    Args:
        model: ``demo`` (the bundled model), a folder, or a hub id. Only safetensors weights are read, and no code from
            the checkpoint is run.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on; ``auto`` takes CUDA where there is one.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``; ``auto`` is float32 on the CPU, the checkpoint's
            own on CUDA.
        attention: ``sdpa``, the only one so far, or ``auto``.
        heads: a heads file, or a kind (``chained``, ``conditioned``): that is ``heads-KIND.safetensors`` in the model's
            folder. None takes ``heads.safetensors`` there, if it exists.

    Raises:
        InputError: something named here does not exist, is broken, or cannot be served exactly.
    """
    if attention not in ATTENTIONS:
        raise InputError(f"no attention {attention!r}; there are {', '.join(ATTENTIONS)}", "--attention")
    place = _device(device)
    kind = _dtype(dtype, place)
    source, folder = _source(model)
    heads_path = _heads_path(heads, folder)
    with _silence(), _loading(model):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _refuse_unsupported(config.get_text_config(), model)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise InputError(f"{model} has no tokenizer.json that the tokenizers library reads", "--model")
        network, info = AutoModelForCausalLM.from_pretrained(
            source, dtype=kind, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        # transformers would fill what the file lacks with random numbers and only warn
        lacking = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
        if lacking:
            raise InputError(f"{model} lacks weights for {len(lacking)} tensors, such as {lacking[0]}", "--model")
        if not getattr(network, "_supports_attention_backend", False):
            raise InputError(f"{model} ({config.model_type}) does not let its attention be replaced", "--model")
        target = _adapted(network.to(place), model)
    loaded = None if heads_path is None else load_heads(heads_path, target.hidden_size, target.dtype, target.device)
    return LoadedModel(model, tokenizer, target, loaded, _eos_ids(network, tokenizer, target.vocab_size))


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, ValueError):
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise InputError(f"no device {device!r}; there are auto, cpu, cuda, cuda:0, ...", "--device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InputError(f"PyTorch finds {torch.cuda.device_count()} CUDA devices here, wanted {device}", "--device")
    return place


def _dtype(dtype: str, place: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return "auto" if place.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise InputError(f"no dtype {dtype!r}; there are auto, {', '.join(DTYPES)}", "--dtype")
    return getattr(torch, dtype)


def _source(model: str) -> tuple[str, Path | None]:
    """What transformers is given, and the folder if it is one."""
    if model == DEMO:
        folder = Path(__file__).parent / "demo"
        if not (folder / "model.safetensors").is_file():
            raise InputError(f"the bundled model is not in this installation (looked in {folder})", "--model")
        return str(folder), folder
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return str(path), path
        if path.exists():
            raise InputError(f"{model} is a file; give the folder it is in", "--model")
    except (OSError, RuntimeError) as error:  # RuntimeError: a home folder that does not exist
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{model[:80]} cannot be looked at ({reason})", "--model") from None
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or not model.strip():
        raise InputError(f"there is no folder {model!r}", "--model")
    return model, None


def _heads_path(heads: str | os.PathLike[str] | None, folder: Path | None) -> Path | None:
    if heads is None:
        beside = folder / HEADS_FILE if folder else None
        return beside if beside and beside.is_file() else None
    path = folder / f"heads-{heads}.safetensors" if folder and str(heads) in KINDS else Path(heads)
    try:
        found = path.is_file()
    except OSError as error:
        raise InputError(f"{str(path)[:80]} cannot be looked at ({error.strerror})", "--heads") from None
    if not found:
        raise InputError(f"there is no file {path}", "--heads")
    return path


def _refuse_unsupported(config: Any, model: str) -> None:
    """Refuse what our attention and KV cache would compute wrongly."""
    positions = getattr(config, "max_position_embeddings", None)
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {}
    layers = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    reason = ""
    if positions is None or getattr(config, "num_attention_heads", None) is None:
        reason = f"the architecture {config.model_type}"
    elif layers:
        reason = f"layers of type {', '.join(sorted(layers))}"
    elif window is not None and getattr(config, "use_sliding_window", True) is not False and window < positions:
        reason = f"a sliding window of {window:,} tokens"
    elif getattr(config, "kv_lora_rank", None):
        reason = "latent attention (kv_lora_rank)"
    elif rope.get("rope_type") in ("dynamic", "longrope"):
        reason = f"rotary embeddings of type {rope['rope_type']}"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            reason = f"soft-capped logits ({name})"
    if reason:
        raise InputError(f"{model} has {reason}, which tswift cannot serve exactly yet", "--model")


def _adapted(network: Any, model: str) -> Target:
    """The model with our attention, once both have been seen to give the same logits.

    Whatever an architecture does that ours does not know of (scaled logits, soft caps, sinks) shows here.
    """
    ids = torch.arange(8, device=network.device) % network.config.get_text_config().vocab_size
    with torch.inference_mode():
        wanted = network(ids.unsqueeze(0)).logits[0].double()
    target = Target(network)
    ours = torch.cat([part.hidden for part in target.chunks(ids.tolist(), FullKV(target.kv_shape, len(ids)))])
    apart = (target.logits(ours).double() - wanted).abs().max().item()
    allowed = 1e-3 if target.dtype.itemsize >= 4 else 0.25
    if not apart <= allowed * max(wanted.std().item(), 1e-6):
        raise InputError(f"{model} ({network.config.model_type}) is not served exactly: logits differ", "--model")
    return target


def _eos_ids(network: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    found: set[int] = set()
    for holder in (network.generation_config, network.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else () if ids is None else (ids,))
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers' warnings and bars off stderr; what matters of them is checked here."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _loading(model: str) -> Iterator[None]:
    """Turn every failure to load into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # transformers, the hub client and safetensors have many ways to fail
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "" if Path(model).expanduser().is_dir() or model == DEMO else " from the hub, and is no folder here"
        raise InputError(f"{model} cannot be loaded{where} ({reason[:200]})", "--model") from None
