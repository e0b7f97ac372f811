"""Folders of published drafters: whose layout it is, told by the configuration;
every tensor accounted for before any is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import nn
from transformers.initialization import no_init_weights

from tswift.errors import InputError, renaming
from tswift.forward.cpu.products import library
from tswift.forward.cpu.program import rounded_linear
from tswift.forward.hf import UnsupportedModel
from tswift.forward.target import Target
from tswift.models.checkpoint import (
    CONFIG,
    Checkpoint,
    StoredTensor,
    check_tensors,
    read_into,
    read_object,
    refuse_excess,
    stored_tensors,
)
from tswift.models.codes import holds_codes
from tswift.models.config import refuse_shape
from tswift.models.shapes import fill_randomly
from tswift.native_build import Unbuilt
from tswift.speculators.draft_network import DraftNetwork
from tswift.speculators.heads import lm_head_rows
from tswift.speculators.layouts import deepspec, eagle, gemma, muse, zlab
from tswift.speculators.layouts import library as speculators
from tswift.speculators.layouts.layout import BY_LIBRARY, OPTION, Config, Layout, Said, refused
from tswift.speculators.networks import build, count_weights, shapes_of
from tswift.speculators.spec import DFLASH, DSPARK, EAGLE3, SpeculatorSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYOUTS = (
    *(deepspec.LAYOUT, zlab.LAYOUT, speculators.LAYOUT, muse.LAYOUT, gemma.LAYOUT),
    *(eagle.LIBRARY, eagle.DEEPSPEC),
)
# of which random ones can be made, and what a configuration says of one
_RANDOM: dict[str, tuple[Layout, dict[str, object]]] = {
    DSPARK: (deepspec.LAYOUT, {"block_size": 7, "markov_rank": 256}),
    DFLASH: (zlab.LAYOUT, {"block_size": 16, "architectures": ()}),
    EAGLE3: (eagle.SAFEAI, {"target_layer_ids": None}),
}
_COPIED = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}
_COMPARED = 64  # rows of a copy that are compared with the target's own


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

    def refuse_misfit(self, text: PreTrainedConfig) -> None:
        """Refuse a drafter that was made for another target than that of a configuration."""
        spec = self.spec
        hidden_size, vocab_size, layers = text.hidden_size, text.vocab_size, text.num_hidden_layers
        own = spec.tap_size if spec.embeds else spec.hidden_size
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
        elif not spec.reads_hidden and (
            len(taps) != spec.tap_count or not all(0 <= tap < layers - 1 for tap in taps)
        ):
            said = f"reads the states after layers {', '.join(map(str, taps))} (from 0)"
            reason = f"{said}; of the model's {layers} the last one's cannot be had"
        there = getattr(text, "layer_types", None) or ()
        for kind, kept in zip(spec.kinds, spec.kept, strict=True):  # which an assistant reads
            had = text.per_layer_config[kind] if kind in there else None
            if had is None or (had.num_key_value_heads, had.head_dim) != kept[:2]:
                wanted = f"{kept.heads} KV heads of {kept.head_dim} in a layer of {kind}"
                reason = reason or f"reads {wanted}, which the model has not"
        if reason:
            raise refused(self.path, reason)

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
                    raise refused(
                        self.path,
                        f"was made for another model: its {stored.name} is not the model's",
                    )
        with torch.device("meta"):
            network = build(self.spec, target)
        read_into(network, self.tensors, target.dtype, target.device, OPTION)
        if "d2t" in self.tensors:
            ids = network.d2t.cpu() + torch.arange(self.spec.draft_vocab)
            if ids.dtype != torch.int64 or ids.min() < 0 or ids.max() >= self.spec.vocab_size:
                raise refused(self.path, "is broken: d2t leads outside the vocabulary")
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
    refuse_shape(name)
    folder = Checkpoint.find(name).fetched().folder
    assert folder is not None
    return folder


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
    if simulated and name in _RANDOM:
        return SpeculatorFile(Path(name), "random", published_spec(name, text), {}, {}, ())
    found = find_drafter(_folder(name))
    found.refuse_misfit(text)
    return found


def _layout(config: Config) -> Layout | None:
    other = eagle.SAFEAI if "draft_vocab_size" in config and BY_LIBRARY not in config else None
    return next((layout for layout in LAYOUTS if layout.matches(config)), other)


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
        raise refused(path, f"holds no drafter: there is no {CONFIG} in it")
    config = read_object(path / CONFIG, OPTION)
    layout = _layout(config)
    if layout is None:
        raise refused(
            path, f"holds no drafter of a known kind ({', '.join(_RANDOM)}) by its {CONFIG}"
        )
    with renaming(model=OPTION):
        stored = stored_tensors(path)
        refuse_excess(config, stored, str(path))
    try:
        said = Said(path, config, stored)
        spec = layout.spec(said)
        own = shapes_of(spec)
    except InputError:
        raise
    except Exception as error:  # numbers and rotary embeddings may be wrong in many ways
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise refused(path, f"makes no drafter of its {CONFIG} ({reason})") from None
    published = {}
    for name in own:
        part, point, rest = name.partition(".")
        published[name] = layout.names.get(part, part) + point + rest
    wanted = {published[name]: shape for name, shape in own.items()}
    copies = dict.fromkeys(_COPIED if layout.copies else (), (spec.vocab_size, spec.hidden_size))
    beside = copies | said.beside
    optional = beside.keys() - wanted.keys()
    owner = f"{spec.kind} drafter of its configuration"
    check_tensors(path, stored, beside | wanted, optional, owner, OPTION)
    there = [name for name in beside if name in stored and name in optional]
    return SpeculatorFile(
        path,
        layout.title,
        spec,
        {name: stored[published[name]] for name in own},
        {name: stored[name] for name in there if name in copies},
        tuple(name for name in there if name not in copies),
    )


def head_size(config: PreTrainedConfig) -> int:
    """Numbers of a head's keys, by a model's configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def published_spec(kind: str, config: PreTrainedConfig) -> SpeculatorSpec:
    """The sizes with which a kind of drafter is published, for the model of a configuration."""
    layout, own = _RANDOM[kind]
    said = {
        **config.to_dict(),
        "layer_types": None,
        "rope_parameters": {"rope_theta": config.rope_parameters["rope_theta"]},
        "head_dim": head_size(config),
        "num_hidden_layers": 5,
        "target_layer_ids": zlab.spread(config.num_hidden_layers, 5),
        "mask_token_id": config.vocab_size - 1,
        "draft_vocab_size": min(32_000, config.vocab_size),
        **own,
    }
    return layout.spec(Said(Path(kind), said, {}))


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
        "parameters": count_weights(spec),
        "dtypes": sorted({stored.dtype for stored in found.tensors.values()}),
        "unused": list(found.unused),  # tensors that tswift does not read
    }
