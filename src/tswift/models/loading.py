"""Load a causal language model with what drafts for it: the bundled one, a folder, a hub id or a random one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from transformers.utils import CONFIG_NAME, cached_file

from tswift.attention.backends import BACKENDS
from tswift.errors import InputError, renamed
from tswift.models import quantizing
from tswift.models.adapting import Inexact, backend_for, compiled, fingerprint, set_width, wrap_model
from tswift.models.devices import dtype_for, dtype_name, own_dtype, place_for
from tswift.models.draft import DRAFT_OPTION, refuse_other_vocabulary
from tswift.models.fingerprint import weights_hash
from tswift.models.heads import KINDS
from tswift.models.heads_files import attach, carries_heads, heads_path
from tswift.models.linear import use_onednn
from tswift.models.loaded import LoadedModel
from tswift.models.prospect import inspect_model
from tswift.models.quantizing import cheaper_copy, own_quantization, quantizer
from tswift.models.ranks import ALONE, OPTION, Ranks
from tswift.models.shapes import PREFIX, StandInTokenizer, random_heads, random_network, refuse_shape, routed, skeleton
from tswift.models.source import (
    DEMO,
    find_source,
    has_tokenizer,
    hub,
    in_one_line,
    read_config,
    refuse_misfit,
    silence,
    stored_tensors,
)
from tswift.models.target import Target


def plan(config: Any, model: str, ranks: Ranks) -> dict[str, Any]:
    """What ``from_pretrained`` has to be told so that every rank reads its part.

    Args:
        config: the model's.
        model: as the user named it.
        ranks: those that are to hold it.

    Raises:
        InputError: transformers does not know how to split it, or its heads cannot be dealt out.
    """
    rules = skeleton(config).tp_plan or {}
    if not any("*" in name for name in rules):  # it may have one for the LM head alone
        raise InputError(f"transformers has no plan to split {model} ({config.model_type}) over ranks", "--model")
    text = config.get_text_config()
    # some plans leave attention whole: every rank has all heads then
    if any(name.endswith(("k_proj", "qkv_proj", "query_key_value")) and rules[name] == "colwise" for name in rules):
        queries = text.num_attention_heads
        for name, heads in (("KV", getattr(text, "num_key_value_heads", None) or queries), ("query", queries)):
            if heads % ranks.count:
                counted = f"{heads} {name} head{'s' if heads > 1 else ''}"
                raise InputError(f"{model} has {counted}, which {ranks.count} ranks cannot share evenly", OPTION)
    return {"distributed_config": DistributedConfig(tp_size=ranks.count)}


@dataclass(frozen=True)
class Opened:
    """A checkpoint's model, wrap_model, and what came with it.

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
        target = wrap_model(network if how else network.to(place), model, backend)
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


def load(
    model: str = DEMO,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    draft: str | None = None,
    draft_weights: str | None = None,
    exact: bool | None = None,
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Load a model for decoding.

    Args:
        model: ``demo`` (the bundled model), a folder, or a hub id. Only safetensors weights are read, and no code from
            the checkpoint is run. ``shape:NAME`` is a published model's shape with random weights, for timing.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on; ``auto`` takes CUDA where there is one.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``; ``auto`` is float32 on the CPU, the checkpoint's
            own on CUDA, and bfloat16 for a shape.
        attention: ``triton`` (CUDA; float32, bfloat16, float16), ``flash`` (CUDA with flash-attn installed; bfloat16,
            float16), ``native`` (x86 CPUs where there is a C compiler; float32, bfloat16, float16), ``sdpa``
            (everything), or ``auto``: triton or native where they can serve, sdpa elsewhere. With triton the layers are
            compiled, and passes are replayed as CUDA graphs.
        heads: a heads file, of ours or one of Medusa's; a folder with one, or with a whole model that carries heads; or
            a kind (``chained``, ``conditioned``): that is ``heads-KIND.safetensors`` in the model's folder. None takes
            ``heads.safetensors`` there, if it exists, or the heads that the model carries. A shape has random heads of
            either kind, chained if nothing is said.
        quantize: ``int8``, ``fp8`` or ``int4``: have torchao quantise the weights of linear layers. What is decoded is
            the quantised model. None leaves them as they are in the checkpoint.
        draft: a smaller model with the same vocabulary, to draft for it: ``demo-draft`` (the bundled one), a folder or
            a hub id. It comes to the model's device, in its dtype, with the same attention.
        draft_weights: ``int8``, ``fp8`` or ``int4``: let drafting passes of the model run on a copy of it whose linear
            layers have weights quantised by torchao, all but the LM head, and which shares all else. What is decoded is
            the model as it is.
        exact: let every pass over the text have the same number of rows, so that a token's bits do not depend on how it
            was forwarded, and all methods give the same tokens in every dtype. None does so in bfloat16 and float16 and
            on CUDA, where the model bears it; ``LoadedModel.inexact`` says why it does not.
        ranks: from :func:`tswift.models.ranks.join`, to hold the model together with other processes. All of them have
            to call this; what the first asks for counts.

    Raises:
        InputError: something named here does not exist, is broken, or cannot be served exactly.
        Gone: another rank is not there any more.
    """
    named = {"--model": model, "--device": device, "--dtype": dtype, "--attention": attention}
    maybe = {DRAFT_OPTION: draft, quantizing.DRAFT_OPTION: draft_weights}
    named.update((option, name) for option, name in maybe.items() if name is not None)
    for option, name in named.items():
        if not isinstance(name, str):
            raise InputError(f"wants a name, got {name!r:.40}", option)
    with ranks.together():
        asked = ranks.share((model, device, dtype, attention, heads, quantize, draft, draft_weights, exact))
        model, device, dtype, attention, heads, quantize, draft, draft_weights, exact = asked
        if draft_weights is not None:  # what cannot be quantised is refused before it is loaded
            if ranks.count > 1:
                raise InputError("quantised weights cannot be split over ranks yet", quantizing.DRAFT_OPTION)
            if quantize is not None:
                raise InputError(f"the model's weights are quantised already ({quantize})", quantizing.DRAFT_OPTION)
            inspect_model(
                model, device=device, dtype=dtype, attention=attention, heads=heads, draft_weights=draft_weights
            )
        loaded = _load(model, device, dtype, attention, heads, quantize, exact, ranks)
        if draft_weights is not None:
            loaded = _with_copy(loaded, draft_weights)
        return loaded if draft is None else replace(loaded, draft=_draft(draft, loaded, attention), draft_name=draft)


def _load(
    model: str,
    device: str,
    dtype: str,
    attention: str,
    heads: str | os.PathLike[str] | None,
    quantize: str | None,
    exact: bool | None,
    ranks: Ranks,
) -> LoadedModel:
    place = place_for(device, ranks)
    if model.startswith(PREFIX):
        if quantize is not None or ranks.count > 1:
            raise InputError(f"{model} has random weights, which are neither quantised nor split", "--model")
        return _simulated(model, place, "bfloat16" if dtype == "auto" else dtype, attention, heads, exact)
    kind, place_of_heads = dtype_for(dtype, place), heads_path(heads, find_source(model)[1])
    opened = open_checkpoint(model, place, kind, attention, quantize, ranks)
    target, config = opened.target, opened.target.model.config
    if heads is None and place_of_heads is None and carries_heads(config):
        with hub(opened.folder is None), in_one_line(model):  # where the hub's files were put
            place_of_heads = opened.folder or Path(cached_file(opened.source, CONFIG_NAME)).parent
    return LoadedModel(
        model,
        opened.tokenizer,
        target,
        None if place_of_heads is None else attach(place_of_heads, target),
        eos_ids_of(model, target.model, opened.tokenizer, target.vocab_size),
        opened.attention,
        quantization=opened.quantization,
        ranks=ranks,
        weights=weights_hash(target.model) if ranks.count > 1 else None,
        **_prepared(target, opened.attention, opened.note, exact),
    )


def _prepared(target: Target, attention: str, note: str, exact: bool | None) -> dict[str, Any]:
    """Get a model's passes ready; returns the fields of ``LoadedModel`` that tell how.

    Raises:
        InputError: they are to be exact and cannot be.
    """
    inexact, bits = set_width(target, attention, exact), None
    prepared = compiled(target, note)
    if target.width is not None:
        try:
            bits = fingerprint(target)
        except Inexact as error:
            inexact, target.width = str(error), None
    if inexact is not None and exact:
        raise InputError(f"cannot be had here: {inexact}", "--exact")
    return {"prepared": prepared, "exact": bits, "inexact": inexact}


def _with_copy(loaded: LoadedModel, kind: str) -> LoadedModel:
    """A loaded model with a copy of fewer bits for its drafting passes."""
    target = loaded.target
    with silence():
        drafting = Target(cheaper_copy(target.model, kind), BACKENDS[loaded.attention]())
    drafting.special_fault = target.special_fault
    if loaded.heads is not None and loaded.heads.raw:
        drafting.tap()
    layers = compiled(drafting, "")
    return replace(loaded, drafting=drafting, draft_weights=kind, draft_prepared=layers)


def _draft(draft: str, loaded: LoadedModel, attention: str) -> Target:
    """The smaller model that drafts for a loaded one; its own heads, if it has any, are not looked at."""
    target = loaded.target
    try:
        if draft.startswith(PREFIX):
            if not loaded.simulated:
                refuse_shape(draft)
            found = _simulated(draft, target.device, dtype_name(target.dtype), attention, None, exact=False)
            ours, tokenizer = found.target, None
        else:
            opened = open_checkpoint(draft, target.device, target.dtype, attention, bare=True)
            ours, tokenizer = opened.target, opened.tokenizer
            compiled(ours, opened.note)
        known = None if loaded.simulated else loaded.tokenizer
        refuse_other_vocabulary(draft, ours, tokenizer, loaded.name, target, known)
    except InputError as error:
        raise renamed(error, {"--model": DRAFT_OPTION}) from None
    return ours


def _simulated(
    model: str,
    place: torch.device,
    dtype: str,
    attention: str,
    heads: str | os.PathLike[str] | None,
    exact: bool | None,
) -> LoadedModel:
    """A published shape with random weights and random heads; or with the heads of a file, if one is named."""
    config, kind = read_config(model), dtype_for(dtype, place)
    backend, note = backend_for(attention, kind, place, config)
    wanted = "chained" if heads is None else str(heads)
    path = None if wanted in KINDS else heads_path(wanted, None)
    with silence(), in_one_line(model):
        network = random_network(config, kind, place, model)
        target = wrap_model(network, model, backend)
    if path is None:
        drafting = random_heads(wanted, config, target.dtype, target.device)
        use_onednn(drafting)
    else:
        drafting = attach(path, target, foreign=True)
    tokenizer = StandInTokenizer()
    eos_ids = eos_ids_of(model, network, tokenizer, target.vocab_size)
    prepared = _prepared(target, backend, note, exact)
    return LoadedModel(model, tokenizer, target, drafting, eos_ids, backend, simulated=True, **prepared)
