"""The network of a plan: its weights read from a checkpoint, or random ones."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from tswift.errors import InputError
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
from tswift.models.checkpoint import INDEX, stored_tensors
from tswift.models.codes import UNIT, quantize
from tswift.models.shapes import random_weights


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
    quantised = own_quantization(plan.config) is not None and not plan.simulated
    return quantised and plan.device.type == "cuda"


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
    if checkpoint.on_hub:
        wanted = ["*.safetensors", INDEX]
        stored = stored_tensors(Path(snapshot_download(checkpoint.source, allow_patterns=wanted)))
    else:
        stored = checkpoint.tensors
    by_transformers = partial(_from_safetensors, plan)
    if kind is not None:
        network = load_rounded(checkpoint, stored, kind, by_transformers, plan.dtype, plan.device)
    elif missing_names(checkpoint, stored):  # transformers knows other names for some
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
    network, info = class_of(config).from_pretrained(
        plan.checkpoint.source,
        config=config,
        # a configuration need not state the dtype: the weights do
        dtype="auto"
        if plan.asked.dtype == "auto" and plan.device.type == "cuda"
        else plan.held or plan.dtype,
        use_safetensors=True,
        output_loading_info=True,
        device_map=plan.device if _placed(plan) else None,
    )
    if getattr(config, "quantization_config", None) and not getattr(network, "hf_quantizer", None):
        raise InputError(
            f"{model} is quantised in a way that transformers does not know here", "model"
        )
    # transformers would fill what the file lacks with random numbers and only warn
    missing = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if missing:
        raise InputError(
            f"{model} lacks weights for {len(missing)} tensors, such as {missing[0]}", "model"
        )
    return network
