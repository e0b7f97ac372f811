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

from tswift.attention.backends import BACKENDS, choose
from tswift.distributed import ALONE, RANKS, Dist, guard
from tswift.errors import InputError, renaming
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
from tswift.models.config import DEMO, UNQUANTISED, ModelConfig, refuse_shape
from tswift.models.devices import device_for, dtype_for, dtype_name, dtype_note, kv_dtype_for
from tswift.models.drafters import DrafterSpec
from tswift.models.drafters_io import DrafterFile, drafter_of
from tswift.models.heads import (
    HEAD_TYPES,
    Heads,
    attach_heads,
    carries_heads,
    find_heads,
    heads_path,
    random_heads,
)
from tswift.models.hf import (
    cheaper_copy,
    copied_bytes,
    copy_bytes,
    max_positions,
    own_quantization,
    quantizer,
    routed,
    weight_only,
)
from tswift.models.program import MODELS
from tswift.models.shapes import HEADS, PREFIX, StandInTokenizer, random_weights, skeleton
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
            model's own, and int16 for the bundled model in float32 with ``native`` attention.
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
    given = locals()
    del given["ranks"]
    asked = _asked(**given)
    with guard():
        plan = _plan(ranks.share(asked), ranks)
        asked, simulated = plan.asked, plan.simulated
        if simulated and (asked.quantize is not None or ranks.count > 1):
            raise InputError(f"{asked.model} has random weights, which are neither quantised nor split", "model")
        loaded, note = _open(plan, ranks)
        target, source = loaded.target, plan.heads
        if plan.drafter is not None:  # before anything is prepared: passes have to give its taps
            plan.drafter.load(target, simulated)
        if source == ON_HUB:
            with hub(), in_one_line(asked.model):  # where its files were put
                source = Path(cached_file(asked.model, CONFIG_NAME)).parent
        loaded = replace(
            loaded,
            heads=_load_heads(source, target, simulated),
            eos_ids=_eos_ids(asked.model, target.model, loaded.tokenizer, target.vocab_size),
            drafter_name=asked.drafter,
            weights=weights_hash(target.model) if ranks.count > 1 else None,
            **_prepare(target, loaded.attention, note, asked.exact),
        )
        if asked.draft_weights is not None:
            loaded = _with_copy(loaded, asked.draft_weights)
        if asked.draft_model is not None:
            draft = _load_draft(asked.draft_model, loaded, asked.attention)
            loaded = replace(loaded, draft=draft, draft_name=asked.draft_model)
        return loaded


@dataclass(frozen=True)
class _LoadPlan:
    """What is to be loaded, as far as it is known before any weights are read; what cannot be had has been refused."""

    asked: ModelConfig
    device: torch.device
    config: Any
    dtype: torch.dtype
    kv_dtype: torch.dtype
    drafter: DrafterFile | None = None
    heads: Path | str | None = None  # as heads_source() returns it

    @property
    def simulated(self) -> bool:
        """Whether the weights are random."""
        return self.asked.model.startswith(PREFIX)

    def cached(self, backend: str) -> torch.dtype | None:
        """Dtype of the KV cache; None for the model's own, as stock operators would convert another in every pass."""
        own = backend != "native" or self.kv_dtype == self.dtype
        return None if self.asked.kv_dtype == "auto" and own else self.kv_dtype


def _asked(**given: Any) -> ModelConfig:
    """The options, of arguments that may be no plain names."""
    for name, value in given.items():
        if isinstance(value, torch.dtype):
            given[name] = dtype_name(value)
        elif isinstance(value, os.PathLike):
            given[name] = os.fspath(value)
    asked = ModelConfig(**given)
    return replace(asked, draft_weights=None) if asked.draft_weights == UNQUANTISED else asked


def _plan(asked: ModelConfig, ranks: Dist = ALONE) -> _LoadPlan:
    reduced = asked.draft_weights
    if reduced is not None and ranks.count > 1:
        raise InputError("quantised weights cannot be split over ranks yet", "draft_weights")
    if reduced is not None and asked.quantize is not None:
        raise InputError(f"the model's weights are quantised already ({asked.quantize})", "draft_weights")
    if asked.drafter is not None and ranks.count > 1:
        raise InputError("ranks that hold the model together cannot serve one yet", "drafter")
    device, config, simulated = (
        device_for(asked.device, ranks),
        read_config(asked.model),
        asked.model.startswith(PREFIX),
    )
    dtype = dtype_for(asked.dtype, device, config, simulated)
    kv_dtype = kv_dtype_for(asked.kv_dtype, dtype, device, asked.model)
    if reduced is not None:  # what cannot be quantised is refused before it is loaded
        weight_only(reduced, config, device, dtype, "draft_weights")
    drafter = None if asked.drafter is None else drafter_of(asked.drafter, config, simulated)
    return _LoadPlan(asked, device, config, dtype, kv_dtype, drafter, heads_source(asked.model, config, asked.heads))


def _draft_plan(name: str, target: Target | ModelSpec, attention: str) -> _LoadPlan:
    """Of a smaller model, which comes as its target does; its own heads, if it has any, are not read."""
    asked = ModelConfig(model=name, dtype=dtype_name(target.dtype), attention=attention)
    return _LoadPlan(asked, target.device, read_config(name), target.dtype, target.dtype)


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
    drafting.features_fault = loaded.target.features_fault
    if loaded.heads is not None and loaded.heads.pre_norm:
        drafting.tap()
    return replace(loaded, drafting=drafting, draft_weights=kind, draft_prepared=compiled(drafting, ""))


@renaming(model="draft_model")
def _load_draft(name: str, loaded: LoadedModel, attention: str) -> Target:
    """The smaller model that drafts for a loaded one."""
    target = loaded.target
    if not loaded.simulated:
        refuse_shape(name)
    draft, note = _open(_draft_plan(name, target, attention), tokenizer_optional=True)
    compiled(draft.target, note)
    _refuse_other_size(name, draft.target.vocab_size, loaded.name, target.vocab_size)
    if not (draft.tokenizer is None or draft.simulated or loaded.simulated):
        _refuse_other_tokens(name, draft.tokenizer.get_vocab(), loaded.name, loaded.tokenizer.get_vocab())
    return draft.target


def _refuse_other_size(name: str, size: int, model: str, model_size: int) -> None:
    """Refuse a draft model with another number of tokens than its target."""
    if size != model_size:
        raise InputError(f"{name} has a vocabulary of {size:,}, {model} has {model_size:,}", "draft_model")


def _refuse_other_tokens(name: str, ours: dict[str, int], model: str, theirs: dict[str, int]) -> None:
    """Refuse a draft model with a token id that means something else than in its target."""
    if ours != theirs:
        token = min({*ours.items()} ^ {*theirs.items()}, key=lambda pair: (pair[1], pair[0]))[0]
        there, here = (f"id {ids[token]:,}" if token in ids else "no id" for ids in (ours, theirs))
        reason = f"has another vocabulary than {model}: {token!r:.40} has {there} there, {here} here"
        raise InputError(f"{name} {reason}", "draft_model")


def _open(plan: _LoadPlan, ranks: Dist = ALONE, tokenizer_optional: bool = False) -> tuple[LoadedModel, str]:
    """Read a checkpoint's weights and tokenizer, or make a shape's random ones.

    Returns:
        The model without heads and ends of text, nothing compiled yet; why its attention is not the one that should
        be.
    """
    asked, model, config, device = plan.asked, plan.asked.model, plan.config, plan.device
    if plan.simulated:
        backend, note = select_backend(asked.attention, plan.dtype, device, config)
        with silence(), in_one_line(model):
            network = random_weights(config, plan.dtype, device, model)
            target = wrap_model(network, model, backend, kv_dtype=plan.cached(backend))
        return LoadedModel(model, StandInTokenizer(), target, None, (), backend, simulated=True), note
    source, folder = find_source(model)
    quantization, options, tokenizer = own_quantization(config), dict[str, Any](), None
    with silence(), hub(folder is None), in_one_line(model):
        if folder is not None:
            refuse_misfit(config, stored_tensors(folder), model)
        if ranks.count > 1:
            if asked.quantize or quantization:
                raise InputError("quantised weights cannot be split over ranks yet", RANKS)
            options["distributed_config"] = _split(config, model, ranks)
        if asked.quantize is not None:
            options["quantization_config"] = quantizer(asked.quantize, config, device, plan.dtype)
            quantization = f"{asked.quantize}, torchao"
        if quantization and device.type == "cuda":
            options["device_map"] = device  # quantised on the way: the whole weights need not fit
        # may compile a kernel: after all refusals
        backend, note = select_backend(asked.attention, plan.dtype, device, config)
        if not tokenizer_optional or folder is None or has_tokenizer(folder):
            tokenizer = _load_tokenizer(source, model)
        other_dtype = dtype_note(config, plan.dtype)  # from_pretrained may overwrite the configuration's
        network, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            # a configuration need not state the dtype: the weights do
            dtype="auto" if asked.dtype == "auto" and device.type == "cuda" else plan.dtype,
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
        target = wrap_model(network if options else network.to(device), model, backend, kv_dtype=plan.cached(backend))
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


def _split(config: Any, model: str, ranks: Dist) -> DistributedConfig:
    """How every rank reads its part, by transformers' own plan."""
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
    return DistributedConfig(tp_size=ranks.count)


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


def _eos_ids(model: str, network: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
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
    heads: int | None  # tokens that its heads draft in a row; None where it is not known yet
    heads_bytes: int  # of their weights
    network_spec: DrafterSpec | None  # of its published drafter; None for none
    network_bytes: int  # of that one's weights


def inspect_model(model: str = DEMO, **options: Any) -> ModelSpec:
    """The sizes of what :func:`load` would load: from its configuration, and the headers of heads and drafter."""
    return _sizes(_plan(_asked(model=model, **options)))


@renaming(model="draft_model")
def inspect_draft_model(draft: str, target: ModelSpec, attention: str = "auto") -> ModelSpec:
    """The sizes of the draft model that :func:`load` would load for a target."""
    spec = _sizes(_draft_plan(draft, target, attention))
    _refuse_other_size(draft, spec.vocab_size, target.name, target.vocab_size)
    return spec


def _sizes(plan: _LoadPlan) -> ModelSpec:
    asked, config, dtype, source = plan.asked, plan.config, plan.dtype, plan.heads
    text, most_nodes, name, count, parameters = config.get_text_config(), None, "", 0, 0
    if isinstance(source, Path):
        file = find_heads(source)
        file.refuse_misfit(text.hidden_size, text.vocab_size)
        count, parameters = file.about["count"], file.parameters
    elif source is not None and source != ON_HUB:
        with torch.device("meta"):
            weights = HEAD_TYPES[source](text.hidden_size, HEADS).parameters()
        count, parameters = HEADS, sum(weight.numel() for weight in weights)
    kv_heads, groups, size = heads_of(config)
    if asked.attention != "auto":  # what that chooses may give way to another
        backend = BACKENDS[choose(asked.attention, dtype, plan.device, size)]()
        most_nodes, name = backend.MOST_NODES, backend.__name__
    weight_bytes = reduced = 0
    if getattr(config, "quantization_config", None) is None:
        with silence(), in_one_line(asked.model):
            network = skeleton(config)
            # a C program has a copy of the weights, too
            programmed = asked.attention in ("auto", "native") and type(network).__name__ in MODELS
            weight_bytes = sum(weight.numel() for weight in network.parameters()) * dtype.itemsize
            weight_bytes += copied_bytes(network, dtype, plan.device) * (1 + (programmed and dtype == torch.float32))
            reduced = 0 if asked.draft_weights is None else copy_bytes(network, asked.draft_weights)
    drafter = None if plan.drafter is None else plan.drafter.spec
    return ModelSpec(
        asked.model,
        plan.device,
        dtype,
        max_positions(config),
        text.vocab_size,
        KVShape(text.num_hidden_layers, kv_heads, size, plan.kv_dtype, plan.device),
        groups,
        attention=name,
        most_nodes=most_nodes,
        weight_bytes=weight_bytes,
        copy_bytes=reduced,
        heads=None if source == ON_HUB else count,
        heads_bytes=parameters * dtype.itemsize,
        network_spec=drafter,
        network_bytes=0 if drafter is None else sum(drafter.weights().values()) * dtype.itemsize,
    )
