"""A checkpoint read: its weights, its tokenizer and what else came with it, or why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tswift.errors import InputError
from tswift.models.adapting import adapted
from tswift.models.checkpoint import has_tokenizer, refuse_misfit, stored_tensors
from tswift.models.dtypes import own_dtype
from tswift.models.hub import hub
from tswift.models.quantizing import own_quantization, quantizer
from tswift.models.ranks import ALONE, OPTION, Ranks
from tswift.models.serving import backend_for
from tswift.models.shapes import routed
from tswift.models.source import find_source, in_one_line, read_config, silence
from tswift.models.splitting import plan
from tswift.models.target import Target


@dataclass(frozen=True)
class Opened:
    """A checkpoint's model, adapted, and what came with it.

    Attributes:
        tokenizer: None if there is none.
        source: what transformers was given.
        folder: the same, if it is one.
        attention: the backend in use.
        note: why it is not the one that should be.
        quantization: as :class:`~tswift.models.loaded.LoadedModel` has it.
    """

    target: Target
    tokenizer: Any
    source: str
    folder: Path | None
    attention: str
    note: str
    quantization: str | None


def open_checkpoint(
    model: str,
    place: torch.device,
    kind: Any,
    attention: str,
    quantize: str | None = None,
    ranks: Ranks = ALONE,
    bare: bool = False,
) -> Opened:
    """Read a checkpoint's weights and tokenizer.

    Args:
        model: a folder, a hub id or a bundled model's name.
        place: where the weights go.
        kind: their dtype, or ``auto`` for the checkpoint's own.
        attention, quantize, ranks: as for :func:`tswift.load`.
        bare: whether a folder without a tokenizer will do.

    Raises:
        InputError: there is no such model, it is broken, or it cannot be served exactly.
    """
    source, folder = find_source(model)
    config = read_config(model)
    backend, note = backend_for(attention, own_dtype(config) if kind == "auto" else kind, place, config)
    quantization, how, tokenizer = own_quantization(config), dict[str, Any](), None
    with silence(), hub(folder is None), in_one_line(model):
        if folder is not None:
            refuse_misfit(config, stored_tensors(folder), model)
        if ranks.count > 1:
            if quantize or quantization:
                raise InputError("quantised weights cannot be split over ranks yet", OPTION)
            how.update(plan(config, model, ranks))
        if quantize is not None:
            wanted = own_dtype(config) if kind == "auto" else kind
            how["quantization_config"] = quantizer(quantize, config, place, wanted)
            quantization = f"{quantize}, torchao"
        if quantization and place.type == "cuda":
            how["device_map"] = place  # quantised on the way: the whole weights need not fit
        if not bare or folder is None or has_tokenizer(folder):
            tokenizer = _tokenizer(source, model)
        network, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=kind,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **how,
        )
        if getattr(config, "quantization_config", None) and not getattr(network, "hf_quantizer", None):
            raise InputError(f"{model} is quantised in a way that transformers does not know here", "--model")
        # transformers would fill what the file lacks with random numbers and only warn
        lacking = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
        if lacking:
            raise InputError(f"{model} lacks weights for {len(lacking)} tensors, such as {lacking[0]}", "--model")
        if network.dtype == torch.float64 and routed(config):
            network.set_experts_implementation("eager")  # the others multiply no float64
        target = adapted(network if how else network.to(place), model, backend)
    return Opened(target, tokenizer, source, folder, backend, note, quantization)


def _tokenizer(source: str, model: str) -> Any:
    with in_one_line(model, "its tokenizer: "):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(f"{model} has no tokenizer.json that the tokenizers library reads", "--model")
    return tokenizer


def eos_ids_of(model: str, network: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The token ids that end a text, by whatever a checkpoint says of them.

    Raises:
        InputError: one of them is no id of the vocabulary.
    """
    found: list[Any] = []
    for holder in (network.generation_config, network.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found += ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    for token in found:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            message = f"{model} has eos_token_id {token!r:.40}, which is no id of its vocabulary of {vocab_size:,}"
            raise InputError(message, "--model")
    return tuple(sorted(set(found)))
