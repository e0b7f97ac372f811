"""Folders of published drafters: which kind, told by the configuration;
every tensor accounted for before any is read.

DeepSpec writes DSpark, and DFlash without its bias (``Qwen3DSparkModel``, of others
``DSparkDraftModel``), z-lab DFlash (``DFlashDraftModel``), speculators both; SafeAILab, SpecForge
and AngelSlim write EAGLE-3 in one layout, speculators and DeepSpec in another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.initialization import no_init_weights

from tswift.errors import InputError, renaming
from tswift.forward.hf import UnsupportedModel
from tswift.forward.integers import holds_codes
from tswift.forward.target import Target
from tswift.models.checkpoint import (
    CONFIG,
    StoredTensor,
    as_input_error,
    check_tensors,
    find_source,
    gguf_of,
    hub,
    is_moe,
    read_into,
    read_object,
    stored_tensors,
)
from tswift.models.config import SHAPE_PREFIX
from tswift.models.shapes import fill_randomly
from tswift.speculators.networks import (
    DFLASH,
    DSPARK,
    EAGLE3,
    MTP,
    DraftNetwork,
    SpeculatorSpec,
    build,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OPTION = "drafter"
KINDS = (DSPARK, DFLASH, EAGLE3)
_LARGEST = 1 << 31
_ROPES = ("default", "linear", "llama3", "yarn")  # whose rates are the same at every length
_COPIED = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}
_COMPARED = 64  # rows of a copy that are compared with the target's own

NATIVE = "the model's own"
_NATIVE_LAYER = "mtp.layers.0."
_DRAFTED = 32_768  # tokens that it drafts from: the first rows of the LM head
# of a rotary embedding; others are text's
_OF_IMAGES = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
_DEEPSPEC, _ZLAB, _SAFEAI = "DeepSpec", "DFlash", "SafeAILab"
_SPECULATORS, _DEEPSPEC_EAGLE = "speculators", "DeepSpec EAGLE-3"
_SPECULATORS_BLOCK = "speculators, blocks"
# before its parameters
_EAGLE_LAYER = {_SAFEAI: "midlayer.", _SPECULATORS: "layers.0.", _DEEPSPEC_EAGLE: "layers.0."}
_ARCHITECTURES = {
    **{"Qwen3DSparkModel": _DEEPSPEC, "DSparkDraftModel": _DEEPSPEC},
    **{"DFlashDraftModel": _ZLAB, "Qwen3Eagle3Model": _DEEPSPEC_EAGLE},
}
# objects within a configuration, from what counts least to what counts most; None is the
# configuration itself
_NESTED = ("eagle_config", "transformer_layer_config", None, "dflash_config")
_TAPS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_CAUSAL = ("is_causal", "causal")
_NORMS = {
    "norm_before_fc": "input_norm",
    **{name: name for name in ("norm_before_residual", "norm_output", "fc_norm")},
}


@dataclass(frozen=True)
class SpeculatorFile:
    """A drafter found in a folder, or one of published sizes and random weights; not yet read."""

    path: Path  # the folder
    layout: str  # who writes drafters so
    spec: SpeculatorSpec
    # by the name of the parameter in the module; empty for random weights
    tensors: Mapping[str, StoredTensor]
    # the target's embeddings and LM head, which some layouts carry along
    copies: Mapping[str, StoredTensor]
    # names of what no decoding reads: a confidence head, the inverse of ``d2t``
    unused: tuple[str, ...]

    def refuse_misfit(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        """Refuse a drafter that was made for another target, by sizes alone."""
        spec = self.spec
        own = spec.tap_size if spec.kind == EAGLE3 and spec.embeds else spec.hidden_size
        taps = spec.tapped(layers)
        reason = ""
        if {spec.tap_size, own} != {hidden_size}:
            wrong = own if spec.tap_size == hidden_size else spec.tap_size
            reason = f"was made for hidden size {wrong:,}, the model has {hidden_size:,}"
        elif spec.vocab_size != vocab_size:
            reason = (
                f"was made for a vocabulary of {spec.vocab_size:,}, the model has {vocab_size:,}"
            )
        elif spec.target_layers not in (None, layers):
            reason = f"was made for a model of {spec.target_layers} layers, this one has {layers}"
        elif len(taps) != spec.tap_count or not all(0 <= tap < layers - 1 for tap in taps):
            said = f"reads the states after layers {', '.join(map(str, taps))} (from 0)"
            reason = f"{said}; of the model's {layers} the last one's cannot be had"
        if reason:
            raise _refused(self.path, reason)

    def load(self, target: Target, any_model: bool = False) -> DraftNetwork:
        """Read the weights, in the target's dtype and on its device;
        its passes give the taps from now on.

        Args:
            target: the model.
            any_model: whether copies of another model's weights will do, as for random ones.

        Raises:
            InputError: some are not finite numbers, or the copies of the target's weights are
                another model's.
        """
        if not self.tensors:
            with torch.device(target.device), no_init_weights():
                network = build(self.spec, target).to(target.dtype)
            fill_randomly(network)
            return attached(network)
        quantised = getattr(target.model.config, "quantization_config", None) or holds_codes(
            target.model
        )
        if not (any_model or quantised):
            for name, stored in self.copies.items():
                layer = getattr(target.model, _COPIED[name])()
                packed = getattr(layer, "packed", None)
                ours = (
                    layer.weight[:_COMPARED]
                    if packed is None
                    else packed.rows(torch.arange(_COMPARED))
                )
                own = ours.detach().float().cpu()
                with safe_open(stored.path, framework="pt") as file:
                    rows = file.get_slice(stored.name)[:_COMPARED].float()
                if not torch.allclose(rows, own, rtol=0.02, atol=1e-5):
                    raise _refused(
                        self.path,
                        f"was made for another model: its {stored.name} is not the model's",
                    )
        with torch.device("meta"):
            network = build(self.spec, target)
        read_into(network, self.tensors, target.dtype, target.device, OPTION)
        if self.layout == NATIVE:
            for part in network.modules():
                if isinstance(part, nn.RMSNorm):
                    part.weight.add_(1)  # stored is what it is more than one
        if "d2t" in self.tensors:
            offsets: Any = network.d2t
            ids = offsets.cpu() + torch.arange(self.spec.draft_vocab)
            if ids.dtype != torch.int64 or ids.min() < 0 or ids.max() >= self.spec.vocab_size:
                raise _refused(self.path, "is broken: d2t leads outside the vocabulary")
        return attached(network)


def attached(network: DraftNetwork) -> DraftNetwork:
    """A drafter at its target, whose passes give its taps from now on."""
    target = network.target
    try:
        if network.spec.kind != MTP:  # which reads what every pass gives
            target.tap(network.spec.tapped(target.model.config.get_text_config().num_hidden_layers))
    except UnsupportedModel as error:
        raise InputError(f"does not go with this model, which has {error}", OPTION) from None
    target.set_speculator(network.eval().requires_grad_(False))
    return network


@renaming(model=OPTION)
def _folder(name: str) -> Path:
    """The folder of a drafter; of a hub id its configuration and safetensors are fetched."""
    source, folder = find_source(name)
    if folder is not None:
        return folder
    from huggingface_hub import constants, snapshot_download

    with hub(), as_input_error(name):
        wanted = [CONFIG, "*.safetensors", "*.safetensors.index.json"]
        return Path(
            snapshot_download(
                source, allow_patterns=wanted, local_files_only=constants.HF_HUB_OFFLINE
            )
        )


def drafter_of(name: str, config: PreTrainedConfig, simulated: bool = False) -> SpeculatorFile:
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
        return SpeculatorFile(Path(name), "random", published_spec(name, text), {}, {}, ())
    found = find_drafter(_folder(name))
    found.refuse_misfit(text.hidden_size, text.vocab_size, text.num_hidden_layers)
    return found


def native_head(model: str, config: PreTrainedConfig) -> SpeculatorFile | None:
    """The head for multi-token prediction in a model's own checkpoint;
    None if it has none that is served.

    Of a hub id, whose weights may not be here yet, and of a shape, the configuration alone says so.
    """
    text = config.get_text_config()
    if not text.model_type.startswith("qwen3_5") or is_moe(config) or gguf_of(model) is not None:
        return None
    rope = dict(text.rope_parameters)
    size = text.head_dim
    spec = SpeculatorSpec(
        kind=MTP,
        hidden_size=text.hidden_size,
        inner_size=text.intermediate_size,
        layers=1,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=size,
        vocab_size=text.vocab_size,
        eps=text.rms_norm_eps,
        rope={name: value for name, value in rope.items() if name not in _OF_IMAGES},
        tap_size=text.hidden_size,
        tap_count=1,
        draft_vocab=min(_DRAFTED, text.vocab_size),
        norm_output=True,
        gated=True,
        rotated=int(size * rope.get("partial_rotary_factor", 1.0)),
    )
    folder = None if model.startswith(SHAPE_PREFIX) else find_source(model)[1]
    if folder is None:
        said = getattr(text, "mtp_num_hidden_layers", 0)
        return SpeculatorFile(Path(model), NATIVE, spec, {}, {}, ()) if said else None
    stored = {
        name: each for name, each in stored_tensors(folder).items() if name.startswith("mtp.")
    }
    if not stored:
        return None
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in build(spec).state_dict().items()}
    published = {name: f"mtp.{name}".replace("mtp.midlayer.", _NATIVE_LAYER) for name in shapes}
    wanted = {published[name]: shape for name, shape in shapes.items()}
    check_tensors(folder, stored, wanted, (), "MTP head of the configuration", "model")
    return SpeculatorFile(
        folder, NATIVE, spec, {name: stored[published[name]] for name in shapes}, {}, ()
    )


def is_drafter(folder: Path) -> bool:
    """Whether a folder's configuration is a drafter's."""
    return (folder / CONFIG).is_file() and _layout(read_object(folder / CONFIG, OPTION)) is not None


def find_drafter(folder: str | os.PathLike[str]) -> SpeculatorFile:
    """The drafter in a folder; no weights are read.

    Raises:
        InputError: there is none, or its tensors are not those of its configuration: the first is
            named.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise _refused(path, f"holds no drafter: there is no {CONFIG} in it")
    config = read_object(path / CONFIG, OPTION)
    layout = _layout(config)
    if layout is None:
        raise _refused(
            path, f"holds no drafter of a known kind ({', '.join(KINDS)}) by its {CONFIG}"
        )
    with renaming(model=OPTION):
        stored = stored_tensors(path)
    spec = _read_spec(path, config, stored, layout)
    try:
        with torch.device("meta"):
            parameters = {
                name: tuple(each.shape) for name, each in build(spec).state_dict().items()
            }
    except Exception as error:  # rotary embeddings of a known type may lack something, in many ways
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise _refused(path, f"makes no drafter of its {CONFIG} ({reason})") from None
    layer = _EAGLE_LAYER.get(layout, "")
    published = {name: name.replace("midlayer.", layer, 1) for name in parameters}
    copies: dict[str, tuple[int, ...]] = {}
    unused: dict[str, tuple[int, ...]] = {}
    if spec.kind == EAGLE3:
        unused = {
            "t2d": (spec.vocab_size,),
            **({} if "d2t" in parameters else {"d2t": (spec.draft_vocab,)}),
        }
    elif layout in (_DEEPSPEC, _SPECULATORS_BLOCK):
        copies = dict.fromkeys(_COPIED, (spec.vocab_size, spec.hidden_size))
        if spec.draft_vocab:
            del copies["lm_head.weight"]
        if layout == _SPECULATORS_BLOCK:
            unused = {
                "t2d": (spec.vocab_size,),
                **({} if spec.draft_vocab else {"d2t": (spec.vocab_size,)}),
            }
        told = spec.rank if config.get("confidence_head_with_markov", True) else 0
        if config.get("enable_confidence_head", layout == _SPECULATORS_BLOCK and spec.rank > 0):
            unused |= {
                "confidence_head.proj.weight": (1, spec.hidden_size + told),
                "confidence_head.proj.bias": (1,),
            }
    shapes = {published[name]: shape for name, shape in parameters.items()} | copies | unused
    optional = {**unused, **copies} if layout != _DEEPSPEC else copies
    owner = f"{spec.kind} drafter of its configuration"
    check_tensors(path, stored, shapes, optional, owner, OPTION)
    return SpeculatorFile(
        path,
        layout,
        spec,
        {name: stored[published[name]] for name in parameters},
        {name: stored[name] for name in copies if name in stored},
        tuple(name for name in unused if name in stored),
    )


def _layout(config: Mapping[str, object]) -> str | None:
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if config.get("speculators_model_type") is not None:
        block = config["speculators_model_type"] in (DSPARK, DFLASH)
        return (
            _SPECULATORS_BLOCK
            if block
            else _SPECULATORS
            if config["speculators_model_type"] == EAGLE3
            else None
        )
    if isinstance(named, str) and named in _ARCHITECTURES:
        return _ARCHITECTURES[named]
    return _SAFEAI if "draft_vocab_size" in config else None


def _read_spec(
    path: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], layout: str
) -> SpeculatorSpec:
    """A drafter's sizes; what is missing or impossible is refused by its name."""
    said = dict[str, Any]()
    for nested in _NESTED:
        part = config if nested is None else config.get(nested) or {}
        if not isinstance(part, dict):
            raise _refused(path, f"has {nested} {part!r:.40}, which is no object")
        said |= {name: value for name, value in part.items() if value is not None}

    def integer(name: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        value = said.get(name, default)
        if value is None:
            raise _refused(path, f"says nothing of {name} in its {CONFIG}")
        if type(value) is not int or not least <= value <= most:
            raise _refused(
                path, f"has {name} {value!r:.40}, which is no integer from {least} to {most:,}"
            )
        return value

    eagle = layout in _EAGLE_LAYER
    prefix = _EAGLE_LAYER.get(layout, "layers.0.")
    hidden = integer("hidden_size")
    heads = integer("num_attention_heads")
    vocab = integer("vocab_size")
    kv_heads = integer("num_key_value_heads", heads, most=heads)
    layers = integer("num_hidden_layers", 1, most=1000)
    queries = stored.get(f"{prefix}self_attn.q_proj.weight")
    kinds = said.get("layer_types", [])
    eps = said.get("rms_norm_eps", 1e-6)
    act = said.get("hidden_act", "silu")
    known = ("full_attention",) if eagle else ("full_attention", "sliding_attention")
    listed = isinstance(kinds, list) and all(each in known for each in kinds)
    sliding = (
        tuple(index for index, each in enumerate(kinds) if each == "sliding_attention")
        if listed
        else ()
    )
    listed = listed and (not sliding or len(kinds) == layers)
    if (
        layout == _SPECULATORS_BLOCK
        and said.get("model_type") == "qwen3"
        and not said.get("use_sliding_window")
    ):
        sliding = ()  # as transformers' configuration of Qwen3 drops the window then
    sparks = layout == _DEEPSPEC or said.get("speculators_model_type") == DSPARK
    rank = integer("markov_rank", 0 if layout == _DEEPSPEC else 256, least=0) if sparks else 0
    markov = said.get("markov_head_type", "vanilla") if rank else ""
    all_slide = len(sliding) == layers
    causal = "" if eagle or all_slide else next((name for name in _CAUSAL if said.get(name)), "")
    reason = ""
    if causal:
        reason = f"says {causal}, which tswift does not serve"
    elif markov not in ("", "vanilla", "gated", "rnn"):
        reason = f"has markov_head_type {markov!r:.40}; known are vanilla, gated and rnn"
    elif queries is None:
        reason = f"lacks {prefix}self_attn.q_proj.weight"
    elif len(queries.shape) != 2 or queries.shape[0] % (2 * heads) or not queries.shape[0]:
        reason = (
            f"has {queries.name} of shape {list(queries.shape)}, which {heads} query heads cannot "
            "share"
        )
    elif not listed or (said.get("use_sliding_window") and not kinds):
        reason = (
            "has layers of sliding attention, which tswift does not serve; --budget makes windows"
        )
    elif type(eps) not in (int, float) or not 0 <= eps < 1:
        reason = f"has rms_norm_eps {eps!r:.40}"
    elif heads % kv_heads:
        reason = f"has {heads} attention heads, which {kv_heads} KV heads cannot share"
    elif act != "silu":
        reason = f"has hidden_act {act!r:.40}, not silu"
    if reason:
        raise _refused(path, reason)
    assert queries is not None
    own_layers = integer("num_target_layers", 0, least=0, most=1000)
    taps = said.get("target_layer_ids")
    if taps is None and layout == _ZLAB and own_layers:
        taps = _spread(own_layers, layers)
    if (eagle and layout != _DEEPSPEC_EAGLE) or layout == _SPECULATORS_BLOCK:
        taps = next((said[name] for name in _TAPS if name in said), None)
        if isinstance(taps, list) and (
            taps[:1] != [1] or not eagle
        ):  # what goes into these layers, unless the first is 1 (SGLang)
            taps = [tap - 1 if type(tap) is int else tap for tap in taps]
    fine = isinstance(taps, list) and taps and all(type(tap) is int and tap >= 0 for tap in taps)
    if not fine and not (eagle and taps is None):
        raise _refused(path, f"has target_layer_ids {taps!r:.60}, which are no layers")
    own: dict[str, Any]
    own_vocab = (
        integer("draft_vocab_size", vocab, most=vocab) if layout == _SPECULATORS_BLOCK else vocab
    )
    if eagle:
        own = {
            "kind": EAGLE3,
            "layers": 1,
            "tap_size": integer("target_hidden_size", hidden),
            "draft_vocab": integer("draft_vocab_size", vocab, most=vocab),
            "embeds": "embed_tokens.weight" in stored,
            "qk_norm": f"{prefix}self_attn.q_norm.weight" in stored,
            **{field: said.get(name) is True for name, field in _NORMS.items()},
        }
    else:
        own = {
            "kind": DSPARK if rank else DFLASH,
            "layers": layers,
            "tap_size": hidden,
            "block": integer("block_size", least=2, most=1024),
            "mask": integer("mask_token_id", least=0, most=vocab - 1),
            "in_place": layout == _ZLAB
            or (layout == _SPECULATORS_BLOCK and not said.get("sample_from_anchor", sparks)),
            "sliding": sliding,
            "window": integer("sliding_window") if sliding else 0,
            "causal": not (
                said.get("sliding_window_non_causal")
                or False in (said.get(name) for name in _CAUSAL)
            ),
            "draft_vocab": own_vocab % vocab,
            "markov": markov,
            "rank": rank,
        }
    return SpeculatorSpec(
        hidden_size=hidden,
        inner_size=integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=queries.shape[0] // heads,  # configurations are known to be wrong
        vocab_size=vocab,
        eps=float(eps),
        rope=_rope(path, said),
        tap_count=3 if taps is None else len(taps),
        taps=None if taps is None else tuple(taps),
        target_layers=own_layers or None,
        **own,
    )


def _rope(path: Path, said: Mapping[str, object]) -> dict[str, object]:
    given = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise _refused(path, f"has rope_parameters {given!r:.40}")
    rope = {
        "rope_type": given.get("type", "default"),
        "rope_theta": said.get("rope_theta", 10_000.0),
        **given,
    }
    numbers = [value for name, value in rope.items() if name not in ("rope_type", "type")]
    if rope["rope_type"] not in _ROPES:
        raise _refused(path, f"has rotary embeddings of type {rope['rope_type']!r:.40}")
    if not all(isinstance(value, int | float | None) for value in numbers):
        raise _refused(path, f"has rope_parameters {given!r:.60}")
    return rope


def _refused(path: Path, reason: str) -> InputError:
    return InputError(f"{path} {reason}", OPTION)


def _spread(layers: int, count: int) -> list[int]:
    """z-lab's taps: so many layers of a target, evenly spread."""
    return [round(1 + index * (layers - 4) / max(1, count - 1)) for index in range(count)]


def published_spec(kind: str, config: PreTrainedConfig) -> SpeculatorSpec:
    """The sizes with which a kind of drafter is published, for the model of a configuration."""
    taps = tuple(_spread(config.num_hidden_layers, 5))
    block: dict[str, Any] = {
        "layers": 5,
        "taps": taps,
        "tap_count": 5,
        "mask": config.vocab_size - 1,
    }
    own = {
        EAGLE3: {
            "layers": 1,
            "tap_count": 3,
            "draft_vocab": min(32_000, config.vocab_size),
            "qk_norm": False,
        },
        DFLASH: {**block, "block": 16, "in_place": True},
        DSPARK: {**block, "block": 7, "markov": "vanilla", "rank": 256},
    }
    heads = config.num_attention_heads
    return SpeculatorSpec(
        kind=kind,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        rope={"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]},
        tap_size=config.hidden_size,
        **own[kind],
    )


def describe_drafter(folder: Path) -> dict[str, object]:
    """What ``tswift heads inspect`` tells of the drafter in a folder, and its JSON has;
    no weights are read.
    """
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
        # layers of the model, from 0, whose states it reads; None for SafeAILab's three
        "taps": spec.taps,
        "block": spec.block or None,
        "mask": spec.mask if spec.block else None,
        "markov": f"{spec.markov}, rank {spec.rank}" if spec.markov else None,
        "parameters": sum(spec.weights().values()),
        "dtypes": sorted({stored.dtype for stored in found.tensors.values()}),
        "unused": list(found.unused),  # tensors that tswift does not read
    }
