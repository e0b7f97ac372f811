"""Folders of published drafters: which kind, told by the configuration;
every tensor accounted for before any is read.

DeepSpec writes DSpark, and DFlash without its bias (``Qwen3DSparkModel``, of others
``DSparkDraftModel``), z-lab DFlash and DFlash2 (``DFlashDraftModel``), vLLM's library speculators
all of these; SafeAILab, SpecForge and AngelSlim write EAGLE-3 in one layout, that library and
DeepSpec in another.
Gemma 4's assistants are Google's; Muse-Glimmer's, a DFlash, is Meta's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from tswift.caches import LayerKV
from tswift.errors import InputError, renaming
from tswift.forward.cpu.products import library
from tswift.forward.cpu.program import rounded_linear
from tswift.forward.hf import UnsupportedModel
from tswift.forward.target import Target
from tswift.models.checkpoint import (
    CONFIG,
    Checkpoint,
    StoredTensor,
    as_input_error,
    check_tensors,
    hub,
    read_into,
    read_object,
    stored_tensors,
)
from tswift.models.codes import holds_codes
from tswift.models.shapes import fill_randomly
from tswift.native_build import Unbuilt
from tswift.speculators.draft_network import DraftNetwork
from tswift.speculators.heads import lm_head_rows
from tswift.speculators.networks import build, weights_of
from tswift.speculators.spec import ASSISTANT, DFLASH, DFLASH2, DSPARK, EAGLE3, SpeculatorSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OPTION = "drafter"
KINDS = (DSPARK, DFLASH, EAGLE3)  # of which random ones can be made
_LARGEST = 1 << 31
_COUNTS = {
    *("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "block_size"),
    *("num_attention_heads", "num_key_value_heads", "mask_token_id", "markov_rank"),
    *("draft_vocab_size", "target_hidden_size", "num_target_layers", "sliding_window"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}
_ROPES = ("default", "linear", "llama3", "yarn")  # whose rates are the same at every length
_COPIED = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}
_COMPARED = 64  # rows of a copy that are compared with the target's own

_DEEPSPEC, _ZLAB, _SAFEAI = "DeepSpec", "DFlash", "SafeAILab"
_SPECULATORS, _DEEPSPEC_EAGLE = "speculators", "DeepSpec EAGLE-3"
_SPECULATORS_BLOCK = "speculators, blocks"
_GEMMA = "Gemma 4's assistants"
_MUSE = "Muse-Glimmer's assistant"
_SECOND = "DFlash2DraftModel"  # z-lab's DFlash2
# before its parameters
_EAGLE_LAYER = {_SAFEAI: "midlayer.", _SPECULATORS: "layers.0.", _DEEPSPEC_EAGLE: "layers.0."}
_MUSE_NAMES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
_ARCHITECTURES = {
    **{"Qwen3DSparkModel": _DEEPSPEC, "DSparkDraftModel": _DEEPSPEC},
    **dict.fromkeys(("DFlashDraftModel", _SECOND), _ZLAB),
    **{"MuseGlimmerAssistantModel": _MUSE, "Qwen3Eagle3Model": _DEEPSPEC_EAGLE},
    **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), _GEMMA),
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
        embeds = spec.kind == ASSISTANT or (spec.kind == EAGLE3 and spec.embeds)
        own = spec.tap_size if embeds else spec.hidden_size
        taps = spec.tapped(layers)
        reason = ""
        if {spec.tap_size, own} != {hidden_size}:
            wrong = own if spec.tap_size == hidden_size else spec.tap_size
            reason = f"was made for hidden size {wrong:,}, the model has {hidden_size:,}"
        elif spec.vocab_size not in (0, vocab_size):
            reason = (
                f"was made for a vocabulary of {spec.vocab_size:,}, the model has {vocab_size:,}"
            )
        elif spec.mask >= vocab_size:
            reason = f"has mask_token_id {spec.mask}, the vocabulary has {vocab_size:,}"
        elif spec.target_layers not in (None, layers):
            reason = f"was made for a model of {spec.target_layers} layers, this one has {layers}"
        elif spec.reads_hidden:
            return
        elif len(taps) != spec.tap_count or not all(0 <= tap < layers - 1 for tap in taps):
            said = f"reads the states after layers {', '.join(map(str, taps))} (from 0)"
            reason = f"{said}; of the model's {layers} the last one's cannot be had"
        if reason:
            raise _refused(self.path, reason)

    def refuse_other_layers(self, text: PreTrainedConfig) -> None:
        """Refuse an assistant that reads keys and values which the model of a configuration has
        not.
        """
        there = getattr(text, "layer_types", None) or ()
        for kind, kept in zip(self.spec.kinds, self.spec.kept, strict=True):
            own = text.per_layer_config[kind] if kind in there else None
            if own is None or (own.num_key_value_heads, own.head_dim) != kept[:2]:
                reason = f"{kept.heads} KV heads of {kept.head_dim} in a layer of {kind}"
                raise _refused(self.path, f"reads {reason}, which the model has not")

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
                first = torch.arange(_COMPARED, device=target.device)
                ours = lm_head_rows(getattr(target.model, _COPIED[name])(), first, torch.float32)
                if ours is None:
                    continue
                own = ours.weight.cpu()
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
        if not network.spec.reads_hidden:
            target.tap(network.spec.tapped(target.model.config.get_text_config().num_hidden_layers))
    except UnsupportedModel as error:
        raise InputError(f"does not go with this model, which has {error}", OPTION) from None
    target.set_speculator(network.eval().requires_grad_(False))
    if target.device.type == "cpu" and target.dtype == torch.float32:
        with suppress(Unbuilt):  # PyTorch computes them then
            _round_layers(network)
    return network


def _round_layers(network: DraftNetwork) -> None:
    """Have a drafter's layers computed by the C products, in 8 bits, as heads are."""
    library()
    layers = [(name, each) for name, each in network.named_modules() if type(each) is nn.Linear]
    for name, layer in layers:
        network.set_submodule(name, rounded_linear(layer))


@renaming(model=OPTION)
def _folder(name: str) -> Path:
    """The folder of a drafter; of a hub id its configuration and safetensors are fetched."""
    checkpoint = Checkpoint.find(name)
    if checkpoint.folder is not None:
        return checkpoint.folder
    from huggingface_hub import constants, snapshot_download

    with hub(), as_input_error(name):
        wanted = [CONFIG, "*.safetensors", "*.safetensors.index.json"]
        return Path(
            snapshot_download(
                checkpoint.source, allow_patterns=wanted, local_files_only=constants.HF_HUB_OFFLINE
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
    found.refuse_other_layers(text)
    return found


Shapes = dict[str, tuple[int, ...]]  # by name


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
    try:
        spec = (
            _assistant_spec(config)
            if layout == _GEMMA
            else _read_spec(path, config, stored, layout)
        )
        with torch.device("meta"):
            parameters = {
                name: tuple(each.shape) for name, each in build(spec).state_dict().items()
            }
    except InputError:
        raise
    except Exception as error:  # numbers and rotary embeddings may be wrong in many ways
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise _refused(path, f"makes no drafter of its {CONFIG} ({reason})") from None
    layer = _EAGLE_LAYER.get(layout, "")
    named = _MUSE_NAMES if layout == _MUSE else {}
    published = {name: named.get(name, name.replace("midlayer.", layer, 1)) for name in parameters}
    copies, unused = _beside(config, layout, spec, "d2t" in parameters)
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


def _beside(
    config: Mapping[str, object], layout: str, spec: SpeculatorSpec, maps: bool
) -> tuple[Shapes, Shapes]:
    """Tensors that may be stored beside a drafter's own, with their shapes: copies of the target's,
    and what is not used.

    ``maps``: its own have the target's ids of its draft vocabulary.
    """
    copies: Shapes = {}
    unused: Shapes = {}
    if spec.kind == EAGLE3:
        unused = {
            "t2d": (spec.vocab_size,),
            **({} if maps else {"d2t": (spec.draft_vocab,)}),
        }
    elif layout == _GEMMA:
        unused = {"lm_head.weight": (spec.vocab_size, spec.hidden_size)}  # its embeddings again
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
        if config.get(
            "enable_confidence_head", layout == _SPECULATORS_BLOCK and spec.kind == DSPARK
        ):
            unused |= {
                "confidence_head.proj.weight": (1, spec.hidden_size + told),
                "confidence_head.proj.bias": (1,),
            }
    return copies, unused


def _layout(config: Mapping[str, object]) -> str | None:
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if config.get("speculators_model_type") is not None:
        block = config["speculators_model_type"] in (DSPARK, DFLASH, DFLASH2)
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


class _Said(dict[str, Any]):
    """What a drafter's configuration says, the objects within it laid over it;
    what is asked for and missing is refused.
    """

    def __init__(self, path: Path, config: Mapping[str, object]) -> None:
        super().__init__()
        self.path = path
        for nested in _NESTED:
            part = config if nested is None else config.get(nested) or {}
            if not isinstance(part, dict):
                raise _refused(path, f"has {nested} {part!r:.40}, which is no object")
            self.update({name: value for name, value in part.items() if value is not None})
        for name in _COUNTS & self.keys():
            value = self[name]
            if type(value) is not int or not 0 <= value < _LARGEST:
                raise _refused(path, f"has {name} {value!r:.40}, which is no count")

    def refuse(self, wrong: object, reason: str) -> None:
        """Refuse the drafter if something is wrong with it."""
        if wrong:
            raise _refused(self.path, reason)

    def __missing__(self, name: str) -> Any:
        raise _refused(self.path, f"says nothing of {name} in its {CONFIG}")


def _read_spec(
    path: Path, config: Mapping[str, object], stored: Mapping[str, StoredTensor], layout: str
) -> SpeculatorSpec:
    """A drafter's sizes; what is missing or not served is refused by its name."""
    said = _Said(path, config)
    eagle = layout in _EAGLE_LAYER
    attention = f"{_EAGLE_LAYER.get(layout, 'layers.0.')}self_attn."
    heads = said["num_attention_heads"]
    kv_heads = said.get("num_key_value_heads", heads)
    if layout == _MUSE:
        said.setdefault("vocab_size", 0)  # it has the model's
    queries = stored.get(f"{attention}q_proj.weight")
    said.refuse(queries is None, f"lacks {attention}q_proj.weight")
    assert queries is not None
    sliding = _sliding(said, layout)
    said.refuse(
        sliding is None or (eagle and sliding),
        "has layers of sliding attention, which tswift does not serve; --budget makes windows",
    )
    own: dict[str, Any]
    if eagle:
        own = {
            "kind": EAGLE3,
            "layers": 1,
            "tap_size": said.get("target_hidden_size", said["hidden_size"]),
            "draft_vocab": said.get("draft_vocab_size", said["vocab_size"]),
            "embeds": "embed_tokens.weight" in stored,
            "qk_norm": f"{attention}q_norm.weight" in stored,
            **{field: said.get(name) is True for name, field in _NORMS.items()},
        }
    else:
        own = _block_fields(said, layout, sliding or ())
    act = said.get("hidden_act", "silu")
    said.refuse(act != "silu", f"has hidden_act {act!r:.40}, not silu")
    shape = list(queries.shape)
    said.refuse(
        len(shape) != 2 or shape[0] % (2 * heads),
        f"has {queries.name} of shape {shape}, which {heads} query heads cannot share",
    )
    said.refuse(
        heads % kv_heads, f"has {heads} query heads, which {kv_heads} KV heads cannot share"
    )
    taps = _taps(said, layout, own["layers"])
    return SpeculatorSpec(
        hidden_size=said["hidden_size"],
        inner_size=said["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=queries.shape[0] // heads,  # configurations are known to be wrong
        vocab_size=said["vocab_size"],
        eps=float(said.get("rms_norm_eps", 1e-6)),
        rope=_rope(path, said),
        tap_count=3 if taps is None else len(taps),
        taps=taps,
        target_layers=said.get("num_target_layers") or None,
        **own,
    )


def _assistant_spec(config: Mapping[str, Any]) -> SpeculatorSpec:
    """The sizes of an assistant of Gemma 4's, as transformers reads them."""
    said = {name: value for name, value in config.items() if name != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **said)
    text = made.get_text_config()
    sizes = [text.per_layer_config[kind] for kind in sorted({*text.layer_types})]
    kept = [
        LayerKV(each.num_key_value_heads, each.head_dim, index) for index, each in enumerate(sizes)
    ]
    clusters = made.num_centroids, made.centroid_intermediate_top_k
    return SpeculatorSpec(
        kind=ASSISTANT,
        hidden_size=text.hidden_size,
        inner_size=text.intermediate_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=kept[0].heads,
        head_dim=kept[0].head_dim,
        vocab_size=text.vocab_size,
        eps=text.rms_norm_eps,
        rope={},
        tap_size=made.backbone_hidden_size,
        tap_count=1,
        window=text.sliding_window + 1,  # its reader counts the edge in
        text=text,
        kept=tuple(kept),
        clusters=clusters if made.use_ordered_embeddings else (0, 0),
    )


def _block_fields(said: _Said, layout: str, sliding: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a block drafter's spec that EAGLE-3 has otherwise, or not at all."""
    by_speculators = layout == _SPECULATORS_BLOCK
    by_zlab = layout == _ZLAB
    by_muse = layout == _MUSE
    dflash2 = said.get("speculators_model_type") == DFLASH2 or _SECOND in (
        said.get("architectures") or ()
    )
    dspark = layout == _DEEPSPEC or said.get("speculators_model_type") == DSPARK
    rank = said.get("markov_rank", 0 if layout == _DEEPSPEC else 256) if dspark else 0
    markov = said.get("markov_head_type", "vanilla")
    layers = said["num_hidden_layers"]
    vocab = said["vocab_size"]
    causal = next((name for name in _CAUSAL if said.get(name)), "")
    said.refuse(
        rank and markov != "vanilla",
        f"has markov_head_type {markov!r:.40}, and only vanilla is served",
    )
    said.refuse(causal and len(sliding) < layers, f"says {causal}, which tswift does not serve")
    mask = said["mask_token_id"]
    said.refuse(
        mask >= vocab and not by_muse, f"has mask_token_id {mask}, the vocabulary has {vocab:,}"
    )
    own: dict[str, Any] = {"kind": DSPARK if rank else DFLASH, "rank": rank}
    if dflash2:
        taps = said.get("conv_kernel_size", 2)
        group = said.get("conv_group_size", 16)
        chosen = said.get("selector_top_k", 16)
        said.refuse(
            not 0 < taps <= said["block_size"] or not group or said["hidden_size"] % group,
            f"has convolutions of {taps} taps in groups of {group}",
        )
        said.refuse(not 0 < chosen <= vocab, f"has selector_top_k {chosen}")
        said.refuse(said.get("draft_vocab_size", vocab) != vocab, "has a draft vocabulary")
        own = {"kind": DFLASH2, "rank": said.get("selector_rank", 256), "chosen": chosen}
        own["conv"] = taps, group
    if by_zlab:
        own["embed_scale"] = float(said.get("input_embedding_scale", 1))
        factor, cap = (
            float(said.get(name, 0)) for name in ("output_multiplier", "final_logit_softcapping")
        )
        own["output"] = 0.0 if factor == 1 else factor, max(cap, 0.0)
    elif by_muse:
        own["embed_scale"] = 1.0
    return {
        **own,
        "layers": layers,
        "tap_size": said["hidden_size"],
        "block": said["block_size"],
        "mask": mask,
        "in_place": by_zlab
        or by_muse
        or (by_speculators and not said.get("sample_from_anchor", dspark)),
        "sliding": sliding,
        "window": said["sliding_window"] - by_zlab if sliding else 0,  # z-lab's counts the slot
        "moving": by_zlab or by_muse,
        "causal": not said.get("sliding_window_non_causal", by_muse or (dflash2 and by_speculators))
        and False not in (said.get(name) for name in _CAUSAL),
        "draft_vocab": said.get("draft_vocab_size", vocab) % vocab if by_speculators else 0,
    }


def _sliding(said: _Said, layout: str) -> tuple[int, ...] | None:
    """The layers that see a window; None where the configuration does not say it of each."""
    kinds = said.get("layer_types", [])
    if not isinstance(kinds, list) or {*kinds} - {"full_attention", "sliding_attention"}:
        return None
    sliding = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    if (sliding and len(kinds) != said.get("num_hidden_layers")) or (
        said.get("use_sliding_window") and not kinds
    ):
        return None
    # transformers' configuration of Qwen3 drops the window then
    dropped = said.get("model_type") == "qwen3" and not said.get("use_sliding_window")
    return () if layout in (_SPECULATORS_BLOCK, _ZLAB) and dropped else sliding


def _taps(said: _Said, layout: str, layers: int) -> tuple[int, ...] | None:
    """After which layers of the target the states are read, from 0; None for EAGLE-3's usual."""
    eagle = layout in _EAGLE_LAYER
    taps = said.get("target_layer_ids")
    if layout in (_SAFEAI, _SPECULATORS, _SPECULATORS_BLOCK):
        taps = next((said[name] for name in _TAPS if name in said), None)
        # what goes into these layers, unless the first is 1 (SGLang)
        if taps and not (eagle and taps[0] == 1):
            taps = [tap - 1 for tap in taps]
    elif taps is None and layout == _ZLAB and "num_target_layers" in said:
        taps = _spread(said["num_target_layers"], layers)
    if taps is None and eagle:
        return None
    found = tuple(taps or ())
    fine = found and all(type(tap) is int and tap >= 0 for tap in found)
    said.refuse(not fine, f"has target_layer_ids {taps!r:.60}, which are no layers")
    return found


def _rope(path: Path, said: _Said) -> dict[str, object]:
    given = said.get("rope_parameters") or said.get("rope_scaling") or {}
    rope = {
        "rope_type": given.get("type", "default"),
        "rope_theta": said.get("rope_theta", 10_000.0),
        **given,
    }
    if rope["rope_type"] not in _ROPES:
        raise _refused(path, f"has rotary embeddings of type {rope['rope_type']!r:.40}")
    return rope


def head_size(config: PreTrainedConfig) -> int:
    """Numbers of a head's keys, by a model's configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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
        DSPARK: {**block, "block": 7, "rank": 256},
    }
    heads = config.num_attention_heads
    return SpeculatorSpec(
        kind=kind,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_size(config),
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
        "vocab_size": spec.vocab_size or None,  # None for the model's
        "draft_vocab": spec.draft_vocab or spec.vocab_size or None,  # tokens that it can guess
        "layers": spec.layers,
        # layers of the model, from 0, whose states it reads; None for SafeAILab's three
        "taps": spec.taps,
        "block": spec.block or None,
        "mask": spec.mask if spec.block else None,
        "markov": f"rank {spec.rank}" if spec.kind == DSPARK else None,
        "parameters": sum(weights_of(spec).values()),
        "dtypes": sorted({stored.dtype for stored in found.tensors.values()}),
        "unused": list(found.unused),  # tensors that tswift does not read
    }
