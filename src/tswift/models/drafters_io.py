"""Folders of published drafters: which kind, told by the configuration; every tensor accounted for before any is read.

DeepSpec writes DSpark, and DFlash without its bias (``Qwen3DSparkModel``), z-lab DFlash (``DFlashDraftModel``);
SafeAILab, SpecForge and AngelSlim write EAGLE-3 in one layout, speculators and DeepSpec in another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tswift.errors import InputError, renamed
from tswift.models.checkpoint import CONFIG, StoredTensor, find_source, hub, in_one_line, read_object, stored_tensors
from tswift.models.drafters import DFLASH, DSPARK, EAGLE3, BlockDrafter, DrafterSpec, EagleDrafter, build
from tswift.models.hf import UnsupportedModel
from tswift.models.shapes import random_drafter, shape_drafter
from tswift.models.target import Target

OPTION = "drafter"
KINDS = (DSPARK, DFLASH, EAGLE3)
_LARGEST = 1 << 31
_ROPES = ("default", "linear", "llama3", "yarn")  # whose rates are the same at every length
_COPIED = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}
_COMPARED = 64  # rows of a copy that are compared with the target's own


@dataclass(frozen=True)
class DrafterFile:
    """A drafter found in a folder, not yet read.

    Attributes:
        path: the folder.
        layout: who writes drafters so.
        spec: its sizes.
        tensors: by the name of the parameter in the module.
        copies: the target's embeddings and LM head, which some layouts carry along.
        unused: names of tensors that are read by no decoding: a confidence head, the inverse of ``d2t``.
    """

    path: Path
    layout: str
    spec: DrafterSpec
    tensors: Mapping[str, StoredTensor]
    copies: Mapping[str, StoredTensor]
    unused: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Number of weights that are read."""
        return sum(prod(stored.shape) for name, stored in self.tensors.items() if name != "d2t")

    def refuse_misfit(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        """Refuse a drafter that was made for another target, by sizes alone."""
        spec = self.spec
        size = spec.tap_size if spec.kind == EAGLE3 and spec.embeds else spec.hidden_size
        for own in (spec.tap_size, size):
            if own != hidden_size:
                raise _refused(self.path, f"was made for hidden size {own:,}, the model has {hidden_size:,}")
        if spec.vocab_size != vocab_size:
            reason = f"was made for a vocabulary of {spec.vocab_size:,}, the model has {vocab_size:,}"
            raise _refused(self.path, reason)
        if spec.target_layers not in (None, layers):
            raise _refused(self.path, f"was made for a model of {spec.target_layers} layers, this one has {layers}")
        taps = spec.tapped(layers)
        if len(taps) != spec.tap_count or not all(0 <= tap < layers - 1 for tap in taps):
            reason = f"reads the states after layers {', '.join(map(str, taps))} (from 0)"
            raise _refused(self.path, f"{reason}; of the model's {layers} the last one's cannot be had")

    def load(self, target: Target, any_model: bool = False) -> BlockDrafter | EagleDrafter:
        """Read the weights, in the target's dtype and on its device; its passes give the taps from now on.

        Args:
            target: the model.
            any_model: whether copies of another model's weights will do, as for random ones.

        Raises:
            InputError: some are not finite numbers, or the copies of the target's weights are another model's.
        """
        if not any_model:
            self._refuse_other_target(target)
        with torch.device("meta"):
            network = build(self.spec, target)
        state = {}
        for name, stored in self.tensors.items():
            values = stored.read()
            if name == "d2t":
                ids = values + torch.arange(len(values))
                if not (values.dtype == torch.int64 and ids.min() >= 0 and ids.max() < self.spec.vocab_size):
                    raise _refused(self.path, f"is broken: {stored.name} leads outside the vocabulary")
                state[name] = values.to(target.device)
                continue
            if not (values.is_floating_point() and values.isfinite().all()):
                raise _refused(self.path, f"is broken: {stored.name} holds something else than finite numbers")
            state[name] = values.to(target.device, target.dtype)
        network.load_state_dict(state, assign=True)
        return attached(network)

    def _refuse_other_target(self, target: Target) -> None:
        """Compare the first rows of copied weights with the target's own; quantised ones cannot be compared."""
        if getattr(target.model.config, "quantization_config", None) is not None:
            return
        for name, stored in self.copies.items():
            own = getattr(target.model, _COPIED[name])().weight[:_COMPARED].detach().float().cpu()
            with safe_open(stored.path, framework="pt") as file:
                rows = file.get_slice(stored.name)[:_COMPARED].float()
            if not torch.allclose(rows, own, rtol=0.02, atol=1e-5):
                raise _refused(self.path, f"was made for another model: its {stored.name} is not the model's")


def attached(network: BlockDrafter | EagleDrafter) -> BlockDrafter | EagleDrafter:
    """A drafter at its target, whose passes give its taps from now on."""
    target = network.target
    try:
        target.tap_layers(network.spec.tapped(target.kv_shape.layers))
    except UnsupportedModel as error:
        raise InputError(f"does not go with this model, which has {error}", OPTION) from None
    target.network = network.eval().requires_grad_(False)
    return network


def drafter_folder(name: str) -> Path:
    """The folder of a drafter; of a hub id its configuration and safetensors are fetched.

    Raises:
        InputError: there is none.
    """
    try:
        source, folder = find_source(name)
        if folder is not None:
            return folder
        from huggingface_hub import constants, snapshot_download

        with hub(), in_one_line(name):
            wanted = [CONFIG, "*.safetensors", "*.safetensors.index.json"]
            return Path(snapshot_download(source, allow_patterns=wanted, local_files_only=constants.HF_HUB_OFFLINE))
    except InputError as error:
        raise renamed(error, {"model": OPTION}) from None


@dataclass(frozen=True)
class RandomDrafter:
    """A drafter of published sizes and random weights, as a :class:`DrafterFile` to be loaded."""

    spec: DrafterSpec

    @property
    def parameters(self) -> int:
        """Number of its weights."""
        with torch.device("meta"):
            return sum(weight.numel() for weight in build(self.spec).parameters())

    def load(self, target: Target, any_model: bool) -> BlockDrafter | EagleDrafter:
        """Make the weights."""
        return attached(random_drafter(self.spec, target))


def drafter_of(name: str, config: Any, simulated: bool = False) -> DrafterFile | RandomDrafter:
    """The drafter of a name that goes with a model's configuration; no weights are read.

    Args:
        name: a folder or a hub id; for random weights (``simulated``) a kind, too.
        config: the model's.
        simulated: whether its weights are random.

    Raises:
        InputError: there is none, or it was made for another model.
    """
    text = config.get_text_config()
    if simulated and name in KINDS:
        return RandomDrafter(shape_drafter(name, text))
    found = find_drafter(drafter_folder(name))
    found.refuse_misfit(text.hidden_size, text.vocab_size, text.num_hidden_layers)
    return found


def is_drafter(folder: Path) -> bool:
    """Whether a folder's configuration is a drafter's."""
    return (folder / CONFIG).is_file() and _layout(read_object(folder / CONFIG, OPTION)) is not None


def find_drafter(folder: str | os.PathLike[str]) -> DrafterFile:
    """The drafter in a folder; no weights are read.

    Raises:
        InputError: there is none, or its tensors are not those of its configuration: the first is named.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise _refused(path, f"holds no drafter: there is no {CONFIG} in it")
    config = read_object(path / CONFIG, OPTION)
    layout = _layout(config)
    if layout is None:
        raise _refused(path, f"holds no drafter of a known kind ({', '.join(KINDS)}) by its {CONFIG}")
    try:
        stored = stored_tensors(path)
    except InputError as error:
        raise renamed(error, {"model": OPTION}) from None
    read = _Reader(path, config, stored)
    spec = read.eagle(layout) if layout in _EAGLE_LAYER else read.block(layout)
    names = {_own_name(name, layout): name for name in stored}
    try:
        with torch.device("meta"):
            shapes = {name: tuple(each.shape) for name, each in build(spec).state_dict().items()}
    except Exception as error:  # rotary embeddings of a known type may lack something, in many ways
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise _refused(path, f"makes no drafter of its {CONFIG} ({reason})") from None
    copies, unused = read.extras(spec, layout)
    for name, shape in {**shapes, **copies, **unused}.items():
        if name not in names:
            if name in shapes or (layout == _DEEPSPEC and name in unused):
                raise _refused(path, f"lacks {_published_name(name, layout)}")
        elif stored[names[name]].shape != shape:
            found = list(stored[names[name]].shape)
            raise _refused(path, f"has {names[name]} of shape {found}, where {list(shape)} belongs")
    left = sorted(names.keys() - shapes.keys() - copies.keys() - unused.keys())
    if left:
        raise _refused(path, f"has {names[left[0]]}, which no {spec.kind} drafter of its configuration has")
    return DrafterFile(
        path,
        layout,
        spec,
        {name: stored[names[name]] for name in shapes},
        {name: stored[names[name]] for name in copies if name in names},
        tuple(names[name] for name in unused if name in names),
    )


_DEEPSPEC, _ZLAB, _SAFEAI, _SPECULATORS, _DEEPSPEC_EAGLE = (
    "DeepSpec",
    "DFlash",
    "SafeAILab",
    "speculators",
    "DeepSpec EAGLE-3",
)
_EAGLE_LAYER = {_SAFEAI: "midlayer.", _SPECULATORS: "layers.0.", _DEEPSPEC_EAGLE: "layers.0."}
_ARCHITECTURES = {"Qwen3DSparkModel": _DEEPSPEC, "DFlashDraftModel": _ZLAB, "Qwen3Eagle3Model": _DEEPSPEC_EAGLE}


def _layout(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if config.get("speculators_model_type") is not None:
        return _SPECULATORS if config["speculators_model_type"] == EAGLE3 else None
    if isinstance(named, str) and named in _ARCHITECTURES:
        return _ARCHITECTURES[named]
    return _SAFEAI if "draft_vocab_size" in config else None


def _own_name(name: str, layout: str) -> str:
    """A parameter's name in the module, of its name in the file."""
    prefix = _EAGLE_LAYER.get(layout)
    return "midlayer." + name.removeprefix(prefix) if prefix and name.startswith(prefix) else name


def _published_name(name: str, layout: str) -> str:
    return (
        _EAGLE_LAYER.get(layout, "midlayer.") + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
    )


class _Reader:
    """Reads a drafter's configuration, refusing what is missing or impossible by its name."""

    def __init__(self, path: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
        self.path, self.config, self.stored = path, config, stored

    def block(self, layout: str) -> DrafterSpec:
        """Of DSpark or DFlash."""
        own = {**self.config, **self._object("dflash_config")}
        for name in ("is_causal", "causal", "sliding_window_non_causal"):
            if own.get(name):
                raise _refused(self.path, f"says {name}, which tswift does not serve")
        rank = self._integer(own, "markov_rank", 0, least=0) if layout == _DEEPSPEC else 0
        markov = own.get("markov_head_type", "vanilla") if rank else ""
        if markov not in ("", "vanilla", "gated", "rnn"):
            raise _refused(self.path, f"has markov_head_type {markov!r:.40}; known are vanilla, gated and rnn")
        spec = self._spec(own, DSPARK if rank else DFLASH, "layers.0.", 1)
        own_layers = spec.target_layers or 0
        taps = own.get("target_layer_ids")
        if taps is None and layout == _ZLAB and own_layers:  # evenly spread
            taps = [round(1 + index * (own_layers - 4) / max(1, spec.layers - 1)) for index in range(spec.layers)]
        return replace(
            spec,
            **self._taps(taps, spec.hidden_size),
            block=self._integer(own, "block_size", least=2, most=1024),
            mask=self._integer(own, "mask_token_id", least=0, most=spec.vocab_size - 1),
            in_place=layout == _ZLAB,
            markov=markov,
            rank=rank,
        )

    def eagle(self, layout: str) -> DrafterSpec:
        """Of EAGLE-3."""
        inner = self._object("transformer_layer_config")
        nested = self._object("eagle_config")  # SpecForge's
        own = {**inner, **{name: value for name, value in self.config.items() if value is not None}}
        prefix = _EAGLE_LAYER[layout]
        spec = self._spec(own, EAGLE3, prefix, 2)
        tap_size = self._integer(own, "target_hidden_size", spec.hidden_size)
        names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
        taps = next((said[name] for said in (own, nested) for name in names if said.get(name) is not None), None)
        if isinstance(taps, list) and taps[:1] != [1]:  # what goes into these layers, unless the first is 1 (SGLang)
            taps = [tap - 1 if type(tap) is int else tap for tap in taps]
        if layout == _DEEPSPEC_EAGLE:
            taps = own.get("target_layer_ids")
        spec = replace(spec, **self._taps(taps, tap_size, 3))
        return replace(
            spec,
            layers=1,
            draft_vocab=self._integer(own, "draft_vocab_size", spec.vocab_size, most=spec.vocab_size),
            embeds="embed_tokens.weight" in self.stored,
            qk_norm=f"{prefix}self_attn.q_norm.weight" in self.stored,
            norm_before_residual=own.get("norm_before_residual") is True,
            norm_output=own.get("norm_output") is True,
            input_norm=own.get("norm_before_fc") is True,
            fc_norm=own.get("fc_norm") is True,
        )

    def extras(self, spec: DrafterSpec, layout: str) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Shapes of the target's weights that may be carried along, and of tensors that no decoding reads."""
        if spec.kind == EAGLE3:
            same = {} if spec.draft_vocab < spec.vocab_size else {"d2t": (spec.draft_vocab,)}
            return {}, {"t2d": (spec.vocab_size,), **same}
        if layout == _ZLAB:
            return {}, {}
        told = spec.rank if self.config.get("confidence_head_with_markov", True) else 0
        head = {"confidence_head.proj.weight": (1, spec.hidden_size + told), "confidence_head.proj.bias": (1,)}
        copied: dict[str, tuple[int, ...]] = dict.fromkeys(_COPIED, (spec.vocab_size, spec.hidden_size))
        return copied, head if self.config.get("enable_confidence_head") else {}

    def _spec(self, own: Mapping[str, Any], kind: str, prefix: str, widths: int) -> DrafterSpec:
        hidden, heads = self._integer(own, "hidden_size"), self._integer(own, "num_attention_heads")
        queries = self.stored.get(f"{prefix}self_attn.q_proj.weight")
        if queries is None:
            raise _refused(self.path, f"lacks {prefix}self_attn.q_proj.weight")
        if len(queries.shape) != 2 or queries.shape[0] % (2 * heads) or not queries.shape[0]:
            reason = f"of shape {list(queries.shape)}, which {heads} query heads cannot share"
            raise _refused(self.path, f"has {queries.name} {reason}")
        kinds = own.get("layer_types") or []
        full = isinstance(kinds, list) and all(each == "full_attention" for each in kinds)
        if own.get("use_sliding_window") or not full:
            raise _refused(
                self.path, "has layers of sliding attention, which tswift does not serve; --budget makes windows"
            )
        eps = own.get("rms_norm_eps", 1e-6)
        if type(eps) not in (int, float) or not 0 <= eps < 1:
            raise _refused(self.path, f"has rms_norm_eps {eps!r:.40}")
        kv_heads = self._integer(own, "num_key_value_heads", heads, most=heads)
        if heads % kv_heads:
            raise _refused(self.path, f"has {heads} attention heads, which {kv_heads} KV heads cannot share")
        act = own.get("hidden_act", "silu")
        if act != "silu":
            raise _refused(self.path, f"has hidden_act {act!r:.40}, not silu")
        return DrafterSpec(
            kind=kind,
            hidden_size=hidden,
            inner_size=self._integer(own, "intermediate_size"),
            layers=self._integer(own, "num_hidden_layers", 1, most=1000),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=queries.shape[0] // heads,  # configurations are known to be wrong
            vocab_size=self._integer(own, "vocab_size"),
            eps=float(eps),
            rope=self._rope(own),
            tap_size=hidden,
            tap_count=0,
            target_layers=self._integer(own, "num_target_layers", 0, least=0, most=1000) or None,
        )

    def _taps(self, taps: Any, size: int, usual: int = 0) -> dict[str, Any]:
        """Which layers are read: as the configuration says, or the usual number of them."""
        if taps is None and usual:
            return {"tap_size": size, "tap_count": usual, "taps": None}
        if not (isinstance(taps, list) and taps and all(type(tap) is int and tap >= 0 for tap in taps)):
            raise _refused(self.path, f"has target_layer_ids {taps!r:.60}, which are no layers")
        return {"tap_size": size, "tap_count": len(taps), "taps": tuple(taps)}

    def _rope(self, own: Mapping[str, Any]) -> dict[str, Any]:
        said = own.get("rope_parameters") or own.get("rope_scaling") or {}
        if not isinstance(said, dict):
            raise _refused(self.path, f"has rope_parameters {said!r:.40}")
        rope = {"rope_type": said.get("type", "default"), "rope_theta": own.get("rope_theta", 10_000.0), **said}
        numbers = [value for name, value in rope.items() if name not in ("rope_type", "type")]
        if rope["rope_type"] not in _ROPES:
            raise _refused(self.path, f"has rotary embeddings of type {rope['rope_type']!r:.40}")
        if not all(isinstance(value, (int, float)) for value in numbers if value is not None):
            raise _refused(self.path, f"has rope_parameters {said!r:.60}")
        return rope

    def _object(self, name: str) -> dict[str, Any]:
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            raise _refused(self.path, f"has {name} {value!r:.40}, which is no object")
        return value

    def _integer(
        self, own: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = _LARGEST
    ) -> int:
        value = own.get(name)
        value = default if value is None else value
        if value is None:
            raise _refused(self.path, f"says nothing of {name} in its {CONFIG}")
        if type(value) is not int or not least <= value <= most:
            raise _refused(self.path, f"has {name} {value!r:.40}, which is no integer from {least} to {most:,}")
        return value


def _refused(path: Path, reason: str) -> InputError:
    return InputError(f"{path} {reason}", OPTION)


def published_config(spec: DrafterSpec) -> dict[str, Any]:
    """The configuration of a DSpark drafter, as DeepSpec writes it."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.inner_size,
        "num_hidden_layers": spec.layers,
        "num_target_layers": spec.target_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.eps,
        "rope_parameters": dict(spec.rope),
        "layer_types": ["full_attention"] * spec.layers,
        "target_layer_ids": list(spec.tapped(0)),
        "block_size": spec.block,
        "mask_token_id": spec.mask,
        "markov_rank": spec.rank,
        "markov_head_type": spec.markov,
        "enable_confidence_head": False,
        "torch_dtype": "bfloat16",
    }


def describe_drafter(folder: Path) -> dict[str, Any]:
    """What ``tswift heads inspect`` tells of the drafter in a folder, and its JSON has; no weights are read."""
    found = find_drafter(folder)
    spec = found.spec
    return {
        "path": str(found.path),
        "layout": found.layout,
        "kind": spec.kind,
        "count": spec.count,  # tokens drafted along a path
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "draft_vocab": spec.draft_vocab or spec.vocab_size,  # tokens that it can guess
        "layers": spec.layers,
        "taps": spec.taps,  # layers of the model, from 0, whose states it reads; None for SafeAILab's three
        "block": spec.block or None,
        "mask": spec.mask if spec.block else None,
        "markov": f"{spec.markov}, rank {spec.rank}" if spec.markov else None,
        "parameters": found.parameters,
        "dtypes": sorted({stored.dtype for stored in found.tensors.values()}),
        "unused": list(found.unused),  # tensors that tswift does not read
    }
