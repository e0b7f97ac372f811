"""Load a causal language model with what drafts for it; or tell its sizes without loading it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import CONFIG_NAME, cached_file

from tswift.attention.backends import BACKENDS, choose, partials_bytes
from tswift.distributed import ALONE, RANKS, Dist, guard
from tswift.errors import InputError, renamed
from tswift.kv import KVShape
from tswift.models.adapting import (
    EAGER,
    Inexact,
    compiled,
    fingerprint,
    heads_of,
    running,
    select_backend,
    set_width,
    wrap_model,
)
from tswift.models.checkpoint import (
    find_source,
    has_tokenizer,
    hub,
    in_one_line,
    read_config,
    refuse_misfit,
    silence,
    stored_tensors,
    weights_hash,
)
from tswift.models.config import DEMO, UNQUANTISED, refuse_shape
from tswift.models.devices import (
    device_for,
    dtype_for,
    dtype_name,
    dtype_note,
    find_device,
    kv_dtype_for,
    own_dtype,
)
from tswift.models.drafters import DrafterSpec
from tswift.models.drafters_io import drafter_of
from tswift.models.heads import (
    HEAD_TYPES,
    Heads,
    attach_heads,
    carries_heads,
    find_heads,
    heads_path,
    random_heads,
)
from tswift.models.hf import max_positions
from tswift.models.linear import cheaper_copy, copied_bytes, copy_bytes, own_quantization, quantizer, weight_only
from tswift.models.program import MODELS
from tswift.models.shapes import HEADS, PREFIX, StandInTokenizer, random_weights, routed, skeleton
from tswift.models.target import Target


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode."""

    name: str  # as the user named it
    tokenizer: Any  # of transformers; a stand-in where the weights are random, None for a draft model without one
    target: Target  # the model, wrapped
    heads: Heads | None  # that draft for it, if it has any
    eos_ids: tuple[int, ...]  # token ids that end a text
    attention: str = "sdpa"  # the backend in use
    prepared: str = EAGER  # or ``compiled``, ``one C program``; and why not what should be in use, as of loading
    simulated: bool = False  # its weights are random: times mean something, texts do not
    exact: str | None = None  # hash of the bits that passes of a fixed width have here; None without a fixed width
    inexact: str | None = None  # why there is none although there should be; None if nothing is amiss
    quantization: str | None = None  # how its weights were quantised; plain decoding is this model's own
    ranks: Dist = ALONE  # those that hold it together
    weights: str | None = None  # hash of all weights, where that took all ranks; None where it can be had at any time
    draft: Target | None = None  # a smaller model that drafts for it; every rank holds the whole of it
    draft_name: str | None = None  # as the user named that
    drafting: Target | None = None  # a copy with weights of fewer bits, for drafting passes; None for ``target`` itself
    drafter_name: str | None = None  # the published drafter at ``target.network``, as the user named it
    draft_weights: str | None = None  # its kind: ``int8``, ``fp8`` or ``int4``
    draft_prepared: str = EAGER  # of ``drafting``, as ``prepared``
    dtype_note: str = ""  # that the dtype is not the checkpoint's; empty if it is

    @property
    def layers(self) -> str:
        """``eager``, ``compiled`` or ``one C program``, and why not what should be in use, by all passes so far."""
        return running(self.target, self.prepared)

    def encode(self, text: str, bare: bool = False) -> list[int]:
        """The token ids of a prompt, with a beginning-of-text token if the model wants one."""
        with silence(), in_one_line(self.name, "its tokenizer: "):
            ids = list(self.tokenizer(text, **({"add_special_tokens": False} if bare else {}))["input_ids"])
        size = self.target.vocab_size
        if ids and max(ids) >= size:
            reason = f"has token id {max(ids):,} by the tokenizer of {self.name}, the model has {size:,}"
            raise InputError(reason, "prompt")
        return ids

    def about(self) -> dict[str, Any]:
        """What was loaded and how, for records."""
        about: dict[str, Any] = {
            "name": self.name,
            "device": str(self.target.device) if self.ranks.count == 1 else self.target.device.type,
            "dtype": dtype_name(self.target.dtype),
            "attention": self.attention,
            "layers": self.layers,
            "exact": None if self.exact is None else {"width": self.target.width, "bits": self.exact},
            **({} if self.inexact is None else {"inexact": self.inexact}),
            "heads": None if self.heads is None else f"{self.heads.kind}, {self.heads.count}",
            "eos_ids": list(self.eos_ids),
            "simulated": self.simulated,
            "quantization": self.quantization,
            "ranks": self.ranks.count,
        }
        if self.target.kv_shape.dtype != self.target.dtype:
            about["kv_dtype"] = dtype_name(self.target.kv_shape.dtype)
        if self.draft is not None:
            about["draft"] = {"name": self.draft_name}
        if self.target.network is not None:
            about["drafter"] = {"name": self.drafter_name, "kind": self.target.network.spec.kind}
        if self.drafting is not None:
            about |= {"draft_weights": self.draft_weights, "draft_layers": running(self.drafting, self.draft_prepared)}
        return about

    def besides(self) -> str:
        """What is out of the ordinary, to be printed after name, device and dtype."""
        width, kv_dtype = self.target.width, self.about().get("kv_dtype")
        notes = [
            self.dtype_note,
            f"KV in {kv_dtype}" if kv_dtype else "",
            "" if self.exact is None else "exact" if self.target.program else f"exact in passes of {width} rows",
            "" if self.inexact is None else f"not exact, as {self.inexact}",
            f"weights quantised ({self.quantization})" if self.quantization else "",
            "" if self.drafting is None else f"drafting passes in {self.draft_weights}",
            f"split over {self.ranks.count} ranks" if self.ranks.count > 1 else "",
        ]
        return "".join(f", {note}" for note in notes if note)


def load(
    model: str = DEMO,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    kv_dtype: str | torch.dtype = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    draft_model: str | None = None,
    drafter: str | None = None,
    draft_weights: str | None = None,
    exact: bool | None = None,
    ranks: Dist = ALONE,
) -> LoadedModel:
    """Load a model for decoding. Arguments are called as the options of the command line.

    Args:
        model: ``demo`` (the bundled model), a folder, or a hub id. Only safetensors weights are read, and no code from
            the checkpoint is run. ``shape:NAME`` is a published model's shape with random weights, for timing.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on; ``auto`` takes CUDA where there is one.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``, as ``bf16`` or ``torch.bfloat16`` too; ``auto`` is
            float32 on the CPU, the checkpoint's own on CUDA, and bfloat16 for a shape.
        kv_dtype: of the KV cache, which all methods read: a narrower one than the model's, on a CPU. ``auto`` is the
            model's own, and float16 for the bundled model in float32 with ``native`` attention.
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
        draft_model: a smaller model with the same vocabulary, to draft for it: ``demo-draft`` (the bundled one), a
            folder or a hub id. It comes to the model's device, in its dtype, with the same attention.
        drafter: a published drafter of the model, DSpark, DFlash or EAGLE-3: a folder or a hub id; for a shape a kind
            (``dspark``, ``dflash``, ``eagle3``) with random weights.
        draft_weights: ``int8``, ``fp8`` or ``int4``: let drafting passes of the model run on a copy of it whose linear
            layers have weights quantised by torchao, all but the LM head, and which shares all else. What is decoded is
            the model as it is. ``none`` is what None is.
        exact: let a token's bits not depend on how it was forwarded, so that all methods give the same tokens in every
            dtype. None does so in 16 bits, on CUDA, and where whole passes are one C program, if the model bears it;
            ``LoadedModel.inexact`` says why it does not.
        ranks: from :func:`tswift.distributed.join`, to hold the model together with other processes. All of them have
            to call this; what rank 0 asks for counts.

    Raises:
        InputError: something named here does not exist, is broken, or cannot be served exactly.
        Gone: another rank has died.
    """
    dtype, kv_dtype = (dtype_name(kind) if isinstance(kind, torch.dtype) else kind for kind in (dtype, kv_dtype))
    names = {"model": model, "device": device, "dtype": dtype, "kv_dtype": kv_dtype, "attention": attention}
    optional = {"draft_model": draft_model, "drafter": drafter, "draft_weights": draft_weights}
    names.update((field, name) for field, name in optional.items() if name is not None)
    for field, name in names.items():
        if not isinstance(name, str):
            raise InputError(f"wants a name, got {name!r:.40}", field)
    with guard():
        model, device, dtype, kv_dtype, attention, heads, quantize, draft_model, drafter, draft_weights, exact = (
            ranks.share(
                (model, device, dtype, kv_dtype, attention, heads, quantize, draft_model, drafter, draft_weights, exact)
            )
        )
        draft_weights = None if draft_weights == UNQUANTISED else draft_weights
        if draft_weights is not None and ranks.count > 1:
            raise InputError("quantised weights cannot be split over ranks yet", "draft_weights")
        if draft_weights is not None and quantize is not None:
            raise InputError(f"the model's weights are quantised already ({quantize})", "draft_weights")
        where, config, simulated = device_for(device, ranks), read_config(model), model.startswith(PREFIX)
        kind = dtype_for(dtype, where, config, simulated)
        kv_dtype_for(kv_dtype, kind, where, model)  # refused before anything is read
        if draft_weights is not None:  # what cannot be quantised is refused before it is loaded
            weight_only(draft_weights, config, where, kind, "draft_weights")
        if drafter is not None and ranks.count > 1:
            raise InputError("ranks that hold the model together cannot serve one yet", "drafter")
        network = None if drafter is None else drafter_of(drafter, config, simulated)
        source = heads_source(model, config, heads)
        if simulated and (quantize is not None or ranks.count > 1):
            raise InputError(f"{model} has random weights, which are neither quantised nor split", "model")
        # a configuration need not state the dtype: the weights do
        read_as = "auto" if dtype == "auto" and where.type == "cuda" and not simulated else kind
        loaded, note = open_model(model, config, where, read_as, attention, quantize, ranks, kv_dtype=kv_dtype)
        target = loaded.target
        if network is not None:  # before anything is prepared: passes have to give its taps
            network.load(target, simulated)
        if source == ON_HUB:
            with hub(), in_one_line(model):  # where its files were put
                source = Path(cached_file(model, CONFIG_NAME)).parent
        loaded = replace(
            loaded,
            heads=_load_heads(source, target, simulated),
            eos_ids=eos_ids_of(model, target.model, loaded.tokenizer, target.vocab_size),
            drafter_name=drafter,
            weights=weights_hash(target.model) if ranks.count > 1 else None,
            **_prepare(target, loaded.attention, note, exact),
        )
        if draft_weights is not None:
            loaded = _with_copy(loaded, draft_weights)
        if draft_model is not None:
            loaded = replace(loaded, draft=_load_draft(draft_model, loaded, attention), draft_name=draft_model)
        return loaded


ON_HUB = "on the hub"  # heads among a model's weights, which may not be here yet


def heads_source(model: str, config: Any, heads: str | os.PathLike[str] | None) -> Path | str | None:
    """Where a model's heads come from: a file or folder, ``ON_HUB``, or a kind for random ones; None for no heads."""
    if model.startswith(PREFIX):
        kind = "chained" if heads is None else str(heads)
        return kind if kind in HEAD_TYPES else heads_path(kind, None)
    _, folder = find_source(model)
    path = heads_path(heads, folder)
    return (folder or ON_HUB) if path is None and carries_heads(config) else path


def _load_heads(source: Path | str | None, target: Target, simulated: bool) -> Heads | None:
    if isinstance(source, Path):
        return attach_heads(source, target, any_model=simulated)
    return None if source is None else random_heads(source, target.model.config, target.dtype, target.device)


def _prepare(target: Target, attention: str, note: str, exact: bool | None) -> dict[str, Any]:
    """Compile a model's layers and try its exact passes; returns the fields of ``LoadedModel`` that tell how."""
    inexact, bits = set_width(target, attention, exact), None
    prepared = compiled(target, note)
    if target.width is not None:
        try:
            bits = fingerprint(target)
        except Inexact as error:
            inexact, target.width = str(error), None
    if inexact is not None and exact:
        raise InputError(f"cannot be had here: {inexact}", "exact")
    return {"prepared": prepared, "exact": bits, "inexact": inexact}


def _with_copy(loaded: LoadedModel, kind: str) -> LoadedModel:
    """A loaded model with a copy of fewer bits for its drafting passes."""
    with silence():
        drafting = Target(cheaper_copy(loaded.target.model, kind), BACKENDS[loaded.attention]())
    drafting.kv_shape = loaded.target.kv_shape  # it reads the same caches
    drafting.special_fault = loaded.target.special_fault
    if loaded.heads is not None and loaded.heads.pre_norm:
        drafting.tap()
    return replace(loaded, drafting=drafting, draft_weights=kind, draft_prepared=compiled(drafting, ""))


def _load_draft(name: str, loaded: LoadedModel, attention: str) -> Target:
    """The smaller model that drafts for a loaded one; its own heads, if it has any, are not read."""
    target = loaded.target
    try:
        if not loaded.simulated:
            refuse_shape(name)
        draft, note = open_model(
            name, read_config(name), target.device, target.dtype, attention, tokenizer_optional=True
        )
        compiled(draft.target, note)
        _refuse_other_size(name, draft.target.vocab_size, loaded.name, target.vocab_size)
        if not (draft.tokenizer is None or draft.simulated or loaded.simulated):
            _refuse_other_tokens(name, draft.tokenizer.get_vocab(), loaded.name, loaded.tokenizer.get_vocab())
    except InputError as error:
        raise renamed(error, {"model": "draft_model"}) from None
    return draft.target


def _refuse_other_size(name: str, size: int, model: str, model_size: int) -> None:
    """Refuse a draft model with another number of tokens than its target."""
    if size != model_size:
        raise InputError(f"{name} has a vocabulary of {size:,}, {model} has {model_size:,}", "draft_model")


def _refuse_other_tokens(name: str, ours: dict[str, int], model: str, theirs: dict[str, int]) -> None:
    """Refuse a draft model with a token id that means something else than in its target."""
    if ours == theirs:
        return
    token = min({*ours.items()} ^ {*theirs.items()}, key=lambda pair: (pair[1], pair[0]))[0]
    there, here = (f"id {ids[token]:,}" if token in ids else "no id" for ids in (ours, theirs))
    reason = f"has another vocabulary than {model}: {token!r:.40} has {there} there, {here} here"
    raise InputError(f"{name} {reason}", "draft_model")


def open_model(
    model: str,
    config: Any,
    device: torch.device,
    dtype: torch.dtype | str,
    attention: str,
    quantize: str | None = None,
    ranks: Dist = ALONE,
    tokenizer_optional: bool = False,
    kv_dtype: str = "",
) -> tuple[LoadedModel, str]:
    """Read a checkpoint's weights and tokenizer, or make a shape's random ones.

    Args:
        model: a folder, a hub id, a bundled model's name or ``shape:NAME``.
        config: its configuration.
        device: where the weights go.
        dtype: of the weights, or ``auto`` for the checkpoint's own.
        attention, quantize, ranks: as for :func:`load`.
        tokenizer_optional: whether a folder without a tokenizer will do.
        kv_dtype: of the KV cache, as for :func:`load`; empty for the model's own.

    Returns:
        The model without heads and ends of text, nothing compiled yet; why its attention is not the one that should
        be.
    """
    kind = own_dtype(config) if isinstance(dtype, str) else dtype
    typed = None if kv_dtype in ("", "auto") else kv_dtype_for(kv_dtype, kind, device, model)
    if model.startswith(PREFIX):
        backend, note = select_backend(attention, kind, device, config)
        with silence(), in_one_line(model):
            target = wrap_model(random_weights(config, kind, device, model), model, backend, kv_dtype=typed)
        return LoadedModel(model, StandInTokenizer(), target, None, (), backend, simulated=True), note
    source, folder = find_source(model)
    quantization, options, tokenizer = own_quantization(config), dict[str, Any](), None
    with silence(), hub(folder is None), in_one_line(model):
        if folder is not None:
            refuse_misfit(config, stored_tensors(folder), model)
        if ranks.count > 1:
            if quantize or quantization:
                raise InputError("quantised weights cannot be split over ranks yet", RANKS)
            options.update(_split_plan(config, model, ranks))
        if quantize is not None:
            options["quantization_config"] = quantizer(quantize, config, device, kind)
            quantization = f"{quantize}, torchao"
        if quantization and device.type == "cuda":
            options["device_map"] = device  # quantised on the way: the whole weights need not fit
        backend, note = select_backend(attention, kind, device, config)  # may compile a kernel: after all refusals
        if not tokenizer_optional or folder is None or has_tokenizer(folder):
            tokenizer = _load_tokenizer(source, model)
        other_dtype = dtype_note(config, kind)  # from_pretrained may overwrite the configuration's
        network, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
        if getattr(config, "quantization_config", None) and not getattr(network, "hf_quantizer", None):
            raise InputError(f"{model} is quantised in a way that transformers does not know here", "model")
        # transformers would fill what the file lacks with random numbers and only warn
        missing = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
        if missing:
            raise InputError(f"{model} lacks weights for {len(missing)} tensors, such as {missing[0]}", "model")
        if network.dtype == torch.float64 and routed(config):
            network.set_experts_implementation("eager")  # the others multiply no float64
        if kv_dtype == "auto" and backend == "native" and kv_dtype_for("auto", kind, device, model) != kind:
            typed = kv_dtype_for("auto", kind, device, model)  # stock operators would convert it in every pass
        target = wrap_model(network if options else network.to(device), model, backend, kv_dtype=typed)
    loaded = LoadedModel(
        model, tokenizer, target, None, (), backend, quantization=quantization, ranks=ranks, dtype_note=other_dtype
    )
    return loaded, note


def _load_tokenizer(source: str, model: str) -> Any:
    with in_one_line(model, "its tokenizer: "):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(f"{model} has no tokenizer.json that the tokenizers library reads", "model")
    return tokenizer


def _split_plan(config: Any, model: str, ranks: Dist) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that let every rank read its part."""
    if find_spec("accelerate") is None:
        raise InputError("to split a model, transformers needs accelerate: pip install 'tswift[ranks]'", RANKS)
    if ranks.device is not None and ranks.device.type == "cpu" and torch.cuda.device_count():
        raise InputError("transformers splits over the GPUs that it sees; CUDA_VISIBLE_DEVICES= hides them", "device")
    rules = skeleton(config).tp_plan or {}
    if not any("*" in name for name in rules):  # it may have one for the LM head alone
        raise InputError(f"transformers has no plan to split {model} ({config.model_type}) over ranks", "model")
    text = config.get_text_config()
    # some plans leave attention whole: every rank has all heads then
    if any(name.endswith(("k_proj", "qkv_proj", "query_key_value")) and rules[name] == "colwise" for name in rules):
        queries = text.num_attention_heads
        for name, heads in (("KV", getattr(text, "num_key_value_heads", None) or queries), ("query", queries)):
            if heads % ranks.count:
                counted = f"{heads} {name} head{'s' if heads > 1 else ''}"
                raise InputError(f"{model} has {counted}, which {ranks.count} ranks cannot share evenly", RANKS)
    return {"distributed_config": DistributedConfig(tp_size=ranks.count)}


def adopt(network: PreTrainedModel) -> LoadedModel:
    """A model that transformers has loaded, ready to decode, with the heads in its folder; its modules are changed.

    Raises:
        InputError: it cannot be served exactly.
    """
    name, heads = str(network.config._name_or_path or type(network).__name__), None
    backend, note = select_backend("auto", network.dtype, network.device, network.config)
    with silence(), in_one_line(name):
        target = wrap_model(network, name, backend, joined=False)  # its weights are not ours to move
    with suppress(InputError):  # heads of what the model once was
        source = heads_source(name, network.config, None) if Path(name).is_dir() else None
        heads = _load_heads(source, target, simulated=False)
    return LoadedModel(name, None, target, heads, (), backend, **_prepare(target, backend, note, None))


def eos_ids_of(model: str, network: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The token ids that end a text, by all that a checkpoint says of them."""
    tokens: list[Any] = []
    for holder in (network.generation_config, network.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        tokens += ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            reason = f"has eos_token_id {token!r:.40}, which is no id of its vocabulary of {vocab_size:,}"
            raise InputError(f"{model} {reason}", "model")
    return tuple(sorted(set(tokens)))


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a model that is not loaded, by the names that ``Target`` has for them."""

    name: str  # as the user named it
    device: torch.device  # where it will be
    dtype: torch.dtype  # of its weights
    max_positions: int  # most tokens, prompt included
    vocab_size: int  # number of logits
    kv_shape: KVShape  # of its keys and values, at least: one KV head where the configuration does not say
    groups: int  # query heads per KV head; 1 where the configuration does not say
    attention: str  # its name; empty where it is not known yet
    most_nodes: int | None  # maximum nodes of a draft tree; None where there is no limit, or it is not known yet
    weight_bytes: int  # of its weights without heads; 0 where it is not known
    copy_bytes: int  # of a copy with weights of fewer bits; 0 for none
    heads: int | None = 0  # tokens that its heads draft in a row; None where it is not known yet
    heads_bytes: int = 0  # of their weights
    network_spec: DrafterSpec | None = None  # of its published drafter; None for none
    network_bytes: int = 0  # of that one's weights

    def partials_bytes(self, slots: int, nodes: int) -> int:
        """As :func:`tswift.attention.backends.partials_bytes`."""
        shape = self.kv_shape
        return partials_bytes(self.attention, (shape.heads, self.groups), shape.head_dim, slots, nodes)


def inspect_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    kv_dtype: str | torch.dtype = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    drafter: str | None = None,
    draft_weights: str | None = None,
) -> ModelSpec:
    """The sizes of what :func:`load` would load: from its configuration, and the headers of heads and drafter."""
    where, config = find_device(device), read_config(model)
    kind, text = dtype_for(dtype, where, config, model.startswith(PREFIX)), config.get_text_config()
    source, count, parameters = heads_source(model, config, heads), 0, 0
    if isinstance(source, Path):
        file = find_heads(source)
        file.refuse_misfit(text.hidden_size, text.vocab_size)
        count, parameters = file.about["count"], file.parameters
    elif source is not None and source != ON_HUB:
        with torch.device("meta"):
            weights = HEAD_TYPES[source](text.hidden_size, HEADS).parameters()
        count, parameters = HEADS, sum(weight.numel() for weight in weights)
    kv_kind = kv_dtype_for(kv_dtype, kind, where, model)
    spec = _inspect(model, config, where, kind, attention, draft_weights, kv_kind)
    if drafter is not None:
        network = drafter_of(drafter, config, model.startswith(PREFIX))
        spec = replace(
            spec, network_spec=network.spec, network_bytes=sum(network.spec.weights().values()) * kind.itemsize
        )
    return replace(spec, heads=None if source == ON_HUB else count, heads_bytes=parameters * kind.itemsize)


def inspect_draft_model(draft: str, target: ModelSpec, attention: str = "auto") -> ModelSpec:
    """The sizes of the draft model that :func:`load` would load for a target."""
    try:
        spec = _inspect(draft, read_config(draft), target.device, target.dtype, attention)
        _refuse_other_size(draft, spec.vocab_size, target.name, target.vocab_size)
    except InputError as error:
        raise renamed(error, {"model": "draft_model"}) from None
    return spec


def _inspect(
    model: str,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    draft_weights: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> ModelSpec:
    text, most_nodes, name = config.get_text_config(), None, ""
    kv_heads, groups, size = heads_of(config)
    if attention != "auto":  # what that chooses may give way to another
        backend = BACKENDS[choose(attention, dtype, device, size)]()
        most_nodes, name = backend.MOST_NODES, backend.__name__
    if draft_weights is not None:
        weight_only(draft_weights, config, device, dtype, "draft_weights")
    weight_bytes = reduced = 0
    if getattr(config, "quantization_config", None) is None:
        with silence(), in_one_line(model):
            network = skeleton(config)
            # a C program has a copy of the weights, too
            program = dtype == torch.float32 and attention in ("auto", "native") and type(network).__name__ in MODELS
            weight_bytes = sum(weight.numel() for weight in network.parameters()) * dtype.itemsize
            weight_bytes += copied_bytes(network, dtype, device) * (1 + program)
            reduced = 0 if draft_weights is None else copy_bytes(network, draft_weights)
    kv_shape = KVShape(text.num_hidden_layers, kv_heads, size, kv_dtype or dtype, device)
    positions, vocab_size = max_positions(config), text.vocab_size
    return ModelSpec(
        model, device, dtype, positions, vocab_size, kv_shape, groups, name, most_nodes, weight_bytes, reduced
    )
