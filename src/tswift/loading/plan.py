"""What is to be loaded, decided once: device, dtypes, heads, drafter, and how weights are held."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tswift.attention.backends import BACKENDS, HALVES, choose, why_not
from tswift.caches import KVShape
from tswift.errors import InputError, renaming
from tswift.forward.cpu.products import library
from tswift.forward.cpu.program import may_serve
from tswift.forward.cuda import coded as coded_layers
from tswift.loading.packing import gguf_bytes, rounded_bytes
from tswift.models.architecture import (
    attention_layers,
    by_layer,
    has_mtp_head,
    heads_of,
    is_moe,
    is_recurrent,
    max_positions,
    own_quantization,
    state_shape,
)
from tswift.models.checkpoint import Checkpoint
from tswift.models.codes import UNIT
from tswift.models.config import ModelConfig, refuse_shape
from tswift.models.devices import dtype_for, dtype_name, find_device, kv_dtype_for
from tswift.native_build import Unbuilt
from tswift.speculators.drafter_files import SpeculatorFile, drafter_of
from tswift.speculators.heads_files import ON_HUB, heads_and_weights, heads_source, installed
from tswift.speculators.mtp_files import OWN_HEAD, native_head
from tswift.speculators.networks import count_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tswift.speculators.spec import SpeculatorSpec


@dataclass(frozen=True)
class ModelPlan:
    """What is to be loaded, as far as it is known before any weights are read; what cannot be had
    has been refused.

    Sizes have the names that :class:`~tswift.forward.target.Target` has for them.
    """

    asked: ModelConfig
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype  # that passes compute in
    kv_dtype: torch.dtype
    kv_reader: str | None = None  # the one attention that reads this dtype; None for all of them
    drafter: SpeculatorFile | None = None
    heads_source: Path | str | None = None  # as of heads_source()
    held: torch.dtype | None = None  # as of LoadedModel; ``dtype`` is float32 then
    # whether matrices are held as a C program reads them, and not as PyTorch does
    packed: bool = False
    # whether a C program should make the passes, as far as modules tell: who is told without one
    program_expected: bool = False

    @property
    def name(self) -> str:
        """The model's, as the user named it."""
        return self.checkpoint.name

    @property
    def config(self) -> PreTrainedConfig:
        """The model's transformers configuration."""
        return self.checkpoint.config

    @property
    def simulated(self) -> bool:
        """Whether the weights are random."""
        return self.checkpoint.simulated

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU makes the passes."""
        return self.device.type == "cpu"

    @property
    def coded(self) -> str:
        """What kind of codes the matrices will be; empty for floats."""
        return _coded(self.asked, self.checkpoint)

    @property
    def quantization(self) -> str | None:
        """How its weights stay quantised by another library; None for numbers and codes of ours."""
        return _quantised(self.config, self.on_cpu)

    @property
    def heads_found(self) -> Path | None:
        """The file of heads that nobody named."""
        source = self.heads_source
        if self.asked.heads is not None or not isinstance(source, Path):
            return None
        return source if installed(source) else None

    def kv_dtype_with(self, backend: str) -> torch.dtype | None:
        """Dtype of the KV cache; None for the model's own,
        as stock operators would convert another in every pass.

        Raises:
            InputError: the device has no attention that reads the dtype that was asked for.
        """
        if self.kv_reader not in (None, backend):
            words = f"{dtype_name(self.kv_dtype)} is read by {self.kv_reader} attention alone"
            raise InputError(f"{words} on {self.device.type}; here it is {backend}", "kv_dtype")
        own = backend != "native" or self.kv_dtype == self.dtype
        return None if self.asked.kv_dtype == "auto" and own else self.kv_dtype

    def fetched(self) -> ModelPlan:
        """The same, with all files here: those of a hub id are fetched."""
        if not self.checkpoint.on_hub:
            return self
        checkpoint, drafter, source = self.checkpoint.fetched(), self.drafter, self.heads_source
        if drafter is not None and drafter.layout == OWN_HEAD:
            drafter = native_head(checkpoint)
        source = checkpoint.folder if source == ON_HUB else source
        return replace(self, checkpoint=checkpoint, drafter=drafter, heads_source=source)

    @cached_property
    def draft(self) -> ModelPlan | None:
        """The plan of the draft model, if one is named."""
        name = self.asked.draft_model
        return None if name is None else plan_draft_model(name, self)

    # --- sizes

    @property
    def max_positions(self) -> int:
        """Most tokens, prompt included."""
        return max_positions(self.config)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.get_text_config().vocab_size

    @cached_property
    def kv_shape(self) -> KVShape:
        """Of its keys and values, at least: one KV head where the configuration does not say."""
        config = self.config
        kv_heads, _, size = heads_of(config)
        return KVShape(
            len(attention_layers(config)),
            kv_heads,
            size,
            self.kv_dtype,
            self.device,
            states=state_shape(config, self.dtype, self.device),
            by_layer=by_layer(config),
        )

    @property
    def groups(self) -> int:
        """Query heads per KV head; 1 where the configuration does not say."""
        return heads_of(self.config)[1]

    @cached_property
    def most_nodes(self) -> int | None:
        """Maximum nodes of a draft tree; None where there is no limit, or it is not known yet."""
        asked = self.asked.attention
        if asked == "auto":  # what that chooses may give way to another
            return None
        width = heads_of(self.config)[2]
        return BACKENDS[choose(asked, self.dtype, self.device, width)]().MAX_NODES

    @cached_property
    def _heads(self) -> tuple[int | None, int]:
        return heads_and_weights(self.heads_source, self.config)

    @property
    def heads_count(self) -> int | None:
        """Tokens that its heads draft in a row; None where it is not known yet."""
        return self._heads[0]

    @property
    def speculator_spec(self) -> SpeculatorSpec | None:
        """Of its published drafter; None for none."""
        return None if self.drafter is None else self.drafter.spec

    @cached_property
    def loaded_bytes(self) -> dict[str, int]:
        """Bytes by what is to be loaded; 0 where it is not known."""
        size = self.dtype.itemsize
        loaded = {"weights": self._weight_bytes, "heads": self._heads[1] * size}
        if self.drafter is not None:
            loaded["drafter"] = count_weights(self.drafter.spec) * size
        return loaded

    @property
    def _weight_bytes(self) -> int:
        """Bytes of the model's weights in memory; 0 for those of a quantised checkpoint."""
        network, file = self.checkpoint.skeleton, self.checkpoint.gguf
        if self.asked.weights is not None:
            return rounded_bytes(network, self.asked.weights, self.dtype)
        if file is not None and self.coded:
            return gguf_bytes(file, self.dtype)
        if self.quantization:
            return 0
        return (
            sum(each.numel() for each in network.parameters()) * (self.held or self.dtype).itemsize
        )


def plan_model(asked: ModelConfig) -> ModelPlan:
    """Decide what is to be loaded; of files, configurations and headers alone are read.

    Raises:
        InputError: something named does not exist, is broken, or does not go with the rest.
    """
    device = find_device(asked.device)
    checkpoint = Checkpoint.find(asked.model, asked.yarn)
    config = checkpoint.config
    dtype = dtype_for(asked.dtype, device, config, checkpoint.simulated)
    on_cpu = device.type == "cpu"
    if asked.dtype == "auto" and _coded(asked, checkpoint):
        if not coded_layers.by_kernels(device):
            dtype = torch.float32
        elif dtype not in HALVES:
            dtype = torch.bfloat16
    serves = on_cpu and may_serve(checkpoint.skeleton)
    held = None
    packed = False
    if on_cpu and _packs(asked, checkpoint):
        held = dtype if serves and dtype in HALVES else None
        dtype = torch.float32 if held else dtype
        # what learns through a model, whose rows need not be exact, needs its weights as PyTorch
        # has them
        packed = held is not None or (dtype == torch.float32 and asked.exact is not False)
    kv_dtype = kv_dtype_for(asked.kv_dtype, dtype, device, serves)
    plan = ModelPlan(
        asked,
        checkpoint,
        device,
        dtype,
        kv_dtype,
        None if on_cpu or kv_dtype == dtype else "triton",
        held=held,
        packed=packed,
        program_expected=serves,
    )
    _refuse_unfit(plan)
    drafter = None
    if has_mtp_head(config):
        drafter = native_head(checkpoint)
    if asked.drafter is not None:
        drafter = drafter_of(asked.drafter, config, checkpoint.simulated)
    return replace(plan, drafter=drafter, heads_source=heads_source(checkpoint, asked.heads))


@renaming(model="draft_model")
def plan_draft_model(name: str, target: ModelPlan) -> ModelPlan:
    """The plan of a smaller model, which comes to its target's device, in its dtype;
    its own heads, if it has any, are not read.
    """
    if not target.simulated:
        refuse_shape(name)
    attention = target.asked.attention
    typed = target.asked.kv_dtype
    asked = ModelConfig(
        model=name, dtype=dtype_name(target.dtype), kv_dtype=typed, attention=attention
    )
    kv_dtype = target.dtype if typed == "auto" else target.kv_dtype
    plan = ModelPlan(asked, Checkpoint.find(name), target.device, target.dtype, kv_dtype)
    _refuse_unfit(plan)
    if is_recurrent(plan.config):
        raise InputError(
            f"{name} has recurrent layers, and what they have seen cannot be taken back",
            "draft_model",
        )
    _ = plan.checkpoint.skeleton  # what is wrong with it is told of the draft model
    _refuse_other_size(name, plan.vocab_size, target.name, target.vocab_size)
    return plan


def _coded(asked: ModelConfig, checkpoint: Checkpoint) -> str:
    if asked.weights is not None:
        return asked.weights
    return "" if checkpoint.gguf is None else checkpoint.gguf.kinds


def _quantised(config: PreTrainedConfig, on_cpu: bool) -> str | None:
    """Name of the method by which weights stay quantised; FP8 with scales of blocks is
    multiplied by newer cards alone, and transformers makes plain numbers of it elsewhere.
    """
    own = own_quantization(config)
    if own == "fp8" and (on_cpu or torch.cuda.get_device_capability() < (8, 9)):
        return None
    return own


def _packs(asked: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether C products can hold a model's matrices here: they are plain numbers."""
    config = checkpoint.config
    if _coded(asked, checkpoint) or _quantised(config, True):
        return False
    if asked.attention not in ("auto", "native"):
        return False
    if why_not("native", torch.float32, torch.device("cpu"), heads_of(config)[2]) is not None:
        return False
    with suppress(Unbuilt):
        library()
        return True
    return False


def _refuse_unfit(plan: ModelPlan) -> None:
    """Refuse what cannot be had with weights that are codes.

    Raises:
        InputError: it names the option.
    """
    asked, coded, config = plan.asked, plan.coded, plan.config
    own = own_quantization(config)
    odd = 0
    kind = own or ("GGUF" if plan.checkpoint.gguf is not None else "")
    integers = "weights" if asked.weights is not None else "model"
    kernels = coded_layers.by_kernels(plan.device)
    for wrong, option, reason in (
        (
            asked.weights is not None and kind,
            "weights",
            f"is for checkpoints in safetensors with plain weights; {asked.model} is {kind}",
        ),
        (
            coded and kernels and is_moe(config),
            integers,
            f"{asked.model} has experts, whose integers are multiplied on a CPU only",
        ),
        (
            coded and kernels and why_not("triton", torch.bfloat16, plan.device, 64),
            integers,
            "integers are multiplied by Triton's kernels on CUDA: "
            f"{why_not('triton', torch.bfloat16, plan.device, 64)}",
        ),
        (
            coded and kernels and (odd := _odd_inputs(plan.checkpoint.skeleton)),
            integers,
            f"{asked.model} has rows of {odd:,}; kernels of integers take multiples of {UNIT}",
        ),
        (
            coded and plan.dtype not in (HALVES if kernels else (torch.float32,)),
            "dtype",
            f"is {'bfloat16 or float16' if kernels else 'float32'} with weights of integers "
            f"({coded}) on {plan.device.type}; got {dtype_name(plan.dtype)}",
        ),
    ):
        if wrong:
            raise InputError(reason, option)


def _odd_inputs(network: nn.Module) -> int:
    """Inputs of a linear layer that kernels of integers do not take; 0 if they take all."""
    linears = (module for module in network.modules() if isinstance(module, nn.Linear))
    return next((each.in_features for each in linears if each.in_features % UNIT), 0)


def _refuse_other_size(name: str, size: int, model: str, model_size: int) -> None:
    """Refuse a draft model with another number of tokens than its target."""
    if size != model_size:
        raise InputError(
            f"{name} has a vocabulary of {size:,}, {model} has {model_size:,}", "draft_model"
        )
