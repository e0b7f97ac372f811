"""The network of a plan: its weights read from a checkpoint, or random ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from tswift.errors import InputError, notice
from tswift.forward.cpu.products import hold_floats, multiplies_integers, pack
from tswift.forward.cuda import coded
from tswift.forward.cuda.layers_check import codes_fault
from tswift.loading.packing import (
    load_floats,
    load_gguf,
    load_rounded,
    missing_names,
    random_rounded,
)
from tswift.loading.plan import ModelPlan
from tswift.models.architecture import class_of, is_moe, own_quantization
from tswift.models.codes import UNIT, quantize
from tswift.models.shapes import random_weights
from tswift.speculators.heads_files import of_heads
from tswift.speculators.mtp_files import of_own_head

# what older versions of transformers have saved, though it is computed
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\bposition_ids$|(attn|attention)\.(masked_)?bias$")


def read_network(plan: ModelPlan) -> PreTrainedModel:
    """The network of a plan with its weights, on its device."""
    kernels = plan.coded and coded.by_kernels(plan.device)
    if kernels:  # what fails on any machine is told before a long load
        _try_codes(coded.CodedLinear(quantize(torch.eye(UNIT, device=plan.device), 4)), plan)
    network = _random_network(plan) if plan.simulated else _stored_network(plan)
    if kernels:
        _try_codes(network, plan)
    if plan.coded and not (kernels or multiplies_integers(network)):
        hold_floats(network)
    return network if _placed(plan) else network.to(plan.device)


def _placed(plan: ModelPlan) -> bool:
    """Whether transformers quantises weights on the way to the device: all of them need not fit."""
    return plan.quantization is not None and not plan.on_cpu


def _try_codes(network: nn.Module, plan: ModelPlan) -> None:
    """Refuse a model whose products of codes are wrong."""
    if fault := codes_fault(network.to(plan.device), plan.dtype):
        option = "model" if plan.asked.weights is None else "weights"
        raise InputError(f"{plan.name}: {fault}", option)


def _random_network(plan: ModelPlan) -> PreTrainedModel:
    """A model of a shape with random weights."""
    if plan.asked.weights is not None:
        kind = plan.asked.weights
        return random_rounded(plan.checkpoint, kind, plan.dtype, plan.device)
    network = random_weights(plan.config, plan.held or plan.dtype, plan.device, plan.name)
    if plan.packed:
        pack(network)
    return network


def _stored_network(plan: ModelPlan) -> PreTrainedModel:
    """The model of a checkpoint."""
    checkpoint = plan.checkpoint
    if checkpoint.gguf is not None:
        network = load_gguf(checkpoint, plan.held or plan.dtype, plan.device)
        network.generation_config.update(**checkpoint.gguf.sampling())
    elif plan.asked.weights is not None or plan.packed:
        network = _packed_network(plan)
    else:
        network = _from_safetensors(plan)
    if network.dtype == torch.float64 and is_moe(plan.config):
        network.set_experts_implementation("eager")  # the others multiply no float64
    return network


def _packed_network(plan: ModelPlan) -> PreTrainedModel:
    """The model of a checkpoint whose matrices are packed, as codes or as floats."""
    checkpoint, kind = plan.checkpoint, plan.asked.weights
    stored = checkpoint.tensors
    by_transformers = partial(_from_safetensors, plan)
    # transformers knows other names for some, or what makes weights of several tensors
    converted = own_quantization(plan.config) or missing_names(checkpoint, stored)
    if not converted:
        _tell_left(plan, stored.keys() - checkpoint.skeleton.state_dict().keys())
    if kind is not None:
        network = load_rounded(checkpoint, stored, kind, by_transformers, plan.dtype, plan.device)
    elif converted:
        network = by_transformers()
        pack(network)
    else:
        network = load_floats(checkpoint, stored, plan.held or torch.float32)
    with suppress(OSError):  # a checkpoint need not have one
        network.generation_config = GenerationConfig.from_pretrained(checkpoint.source)
    return network


def _from_safetensors(plan: ModelPlan) -> PreTrainedModel:
    """The model that transformers reads."""
    config = plan.config
    model = plan.name
    own, kept = own_quantization(config), plan.quantization
    # on a machine with a GPU transformers leaves a model on the CPU in FP8, unless it is told
    if own and not kept:
        config.quantization_config |= {"dequantize": True}
    network, info = class_of(config).from_pretrained(
        plan.checkpoint.source,
        config=config,
        # a configuration need not state the dtype: the weights do
        dtype="auto" if plan.asked.dtype == "auto" and not plan.on_cpu else plan.held or plan.dtype,
        use_safetensors=True,
        output_loading_info=True,
        device_map=plan.device if _placed(plan) else None,
    )
    if own and bool(kept) != bool(getattr(network, "hf_quantizer", None)):
        raise InputError(
            f"{model} is quantised in a way that transformers does not know here", "model"
        )
    # transformers would fill what the file lacks with random numbers and only warn
    missing = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if missing:
        raise InputError(
            f"{model} lacks weights for {len(missing)} tensors, such as {missing[0]}", "model"
        )
    ignored = network._keys_to_ignore_on_load_unexpected or ()
    silently = {
        name for name in plan.checkpoint.tensors if any(re.search(each, name) for each in ignored)
    }
    _tell_left(plan, silently | info["unexpected_keys"])
    if own and not kept:
        for weight in network.parameters():  # 5.23 leaves what it dequantises in another dtype
            weight.data = weight.data.to(plan.held or plan.dtype)
    return network


def _tell_left(plan: ModelPlan, names: Iterable[str]) -> None:
    """Tell of tensors that neither the network nor what drafts for it reads."""
    config = plan.config
    left = [
        name
        for name in names
        if not (_COMPUTED.search(name) or of_heads(name, config) or of_own_head(name, config))
    ]
    if left:
        notice(f"{plan.name}: nothing reads {len(left):,} of its tensors, such as {min(left)}")
