"""Linear layers made faster: by oneDNN on the CPU, and as one product for layers with the same input; quantised ones.

A decode pass has one row, or as many as a draft tree has nodes. On the CPU, oneDNN multiplies a few rows faster than
PyTorch's default. Measured on an AMD EPYC with two threads, 256 to 1,024 features in float32: one row 43 us instead of
139, eight rows 54 instead of 255 (162 without a copy of the weights in the order that oneDNN wants for a few rows).
Small layers are better off without. Processors without instructions for bfloat16 or float16 multiply in float32
whatever they are given, and convert the weights in every call: 16 rows, 256 to 1,024 features in bfloat16, took 172 us
on an Intel Xeon, and 50 with weights converted once.

A pass over few rows reads weights and does little else, and a GPU reads one large matrix faster than three small ones:
queries, keys and values are joined, and the two halves of an MLP. The modeling code still calls layer after layer: the
first computes the product of all and hands the others their parts.
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.errors import InputError

_MIN_WEIGHTS = {4: 1 << 17, 2: 1 << 14}  # of a layer, by bytes of one; below, the call costs more than it saves
_ROWS = 8  # of the products that weights are reordered for
_FLOAT = torch.float32.itemsize
_MAX_COPIED = 1 << 30  # bytes of a network's weights; above, memory is worth more than time


class OneDNNLinear(nn.Linear):
    """A linear layer with frozen weights, and perhaps a second copy of them: in float32, in oneDNN's own order."""

    ordered: Tensor | None  # not of the layer's state
    added: Tensor | None  # the bias in float32

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        learns = torch.is_grad_enabled() and input.requires_grad  # the operator below has no gradient
        alone = input.numel() == self.in_features and input.dtype != torch.float32  # one row reads half the bytes so
        if learns or alone:
            return super().forward(input)
        weight = self.weight if self.ordered is None else self.ordered
        return torch.ops.mkldnn._linear_pointwise(input.float(), weight, self.added, "none", [], "").to(input.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """State without the second copy: a copy of this layer may change its weights."""
        return {name: value for name, value in self.__dict__.items() if name not in OneDNNLinear.__annotations__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy in 16 bits is PyTorch's own layer again."""
        super().__setstate__(state)
        if self.weight.dtype == torch.float32:
            self.__dict__.update(ordered=None, added=self.bias)
        else:
            self.__class__ = nn.Linear  # type: ignore[assignment]


def use_onednn(network: nn.Module) -> None:
    """Let oneDNN compute the large linear layers of a network, where it can; the weights must stay as they are.

    Weights that are quantised, or split over ranks, are no plain tensors and are left alone. Of a network whose layers
    take up to 1 GiB in float32 the weights are copied; those in 16 bits are left alone otherwise.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return
    layers = [module for module in network.modules() if type(module) is nn.Linear and _fits(module.weight)]
    copied = sum(layer.weight.numel() for layer in layers) * _FLOAT <= _MAX_COPIED
    for layer in layers:
        if not copied and layer.weight.dtype != torch.float32:
            continue
        ordered = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().float(), _ROWS) if copied else None
        added = None if layer.bias is None else layer.bias.detach().float()
        layer.__class__ = OneDNNLinear
        layer.__dict__.update(ordered=ordered, added=added)  # past nn.Module, for which they would be buffers


def slow(network: nn.Module) -> None:
    """Make linear layers PyTorch's own again, so that their weights can be changed."""
    for module in [module for module in network.modules() if type(module) is OneDNNLinear]:
        module.__class__ = nn.Linear  # type: ignore[assignment]
        del module.__dict__["ordered"], module.__dict__["added"]


def copied_bytes(network: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that :func:`use_onednn` would take for a second copy of a network's weights, at most."""
    if dtype not in _converted() or device.type != "cpu":
        return 0
    sizes = [layer.weight.numel() for layer in network.modules() if type(layer) is nn.Linear]
    size = sum(size for size in sizes if size >= _MIN_WEIGHTS[dtype.itemsize]) * _FLOAT
    return size if size <= _MAX_COPIED else 0


def _converted() -> set[torch.dtype]:
    """Dtypes in which this processor multiplies in float32."""
    native = {torch.bfloat16: torch.cpu._is_avx512_bf16_supported(), torch.float16: _has_float16()}
    return {torch.float32} | {dtype for dtype, has in native.items() if not has}


def _has_float16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _fits(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.dtype in _converted() and weight.device.type == "cpu"
    return plain and weight.numel() >= _MIN_WEIGHTS[weight.dtype.itemsize]


_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in the order in which they are called


class JoinedLinear(nn.Linear):
    """One of several linear layers with the same input; its weights are rows of one matrix that they share."""

    group: Sequence[JoinedLinear]  # the layers, in the order in which they are called
    product: nn.Linear | None  # of all, for the first; None for the others, and where weights have been moved apart
    handed: tuple[Tensor, Tensor] | None  # the first's input, and this one's output for it; None once that was taken

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if self.product is not None:
            own, *rest = self.product(input).split([layer.out_features for layer in self.group], -1)
            for layer, part in zip(self.group[1:], rest, strict=True):
                layer.handed = (input, part)
            return own
        handed, self.handed = self.handed, None
        if handed is not None and handed[0] is input:
            return handed[1]
        return F.linear(input, self.weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert or move the weights, which become each layer's own by that."""
        self.group[0].product = None
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain linear layer with weights of its own, so that these can be changed."""
        state = {name: value for name, value in self.__dict__.items() if name not in JoinedLinear.__annotations__}
        return copyreg.__newobj__, (nn.Linear,), state  # type: ignore[attr-defined]


@torch.no_grad()
def join(network: nn.Module) -> None:
    """Compute linear layers with the same input as one product; weights are frozen.

    No weight is held twice: the layers' own become views of the joined ones. Layers whose weights are quantised, split
    over ranks or shared with others, and those with hooks, are left alone.
    """
    uses = Counter(id(weight) for _, weight in network.named_parameters(remove_duplicate=False))
    for module in list(network.modules()):
        for names in _GROUPS:
            layers = [module._modules.get(name) for name in names]
            plain = [layer for layer in layers if type(layer) is nn.Linear and _plain(layer, uses)]
            if len(plain) == len(names) and len({_kind(layer) for layer in plain}) == 1:
                _join(plain)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the weights were there one by one


def separate(network: nn.Module) -> None:
    """After a trial pass: undo groups in which a layer was not called right after the first one."""
    for layer in network.modules():
        if isinstance(layer, JoinedLinear) and layer.handed is not None:
            layer.group[0].product = layer.handed = None


def _plain(layer: nn.Linear, uses: Counter[int]) -> bool:
    weights = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return not hooked and all(type(weight) is nn.Parameter and uses[id(weight)] == 1 for weight in weights)


def _kind(layer: nn.Linear) -> tuple[object, ...]:
    return layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device


def _join(layers: Sequence[nn.Linear]) -> None:
    product = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), False, device="meta")
    for name in ("weight",) if layers[0].bias is None else ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        joined = torch.cat(parts)
        setattr(product, name, nn.Parameter(joined, requires_grad=False))
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = rows
    for layer in layers:
        layer.__class__ = JoinedLinear
        # past nn.Module, which would take the layers and the product for parts of this one
        layer.__dict__.update(group=layers, product=product if layer is layers[0] else None, handed=None)


_GROUP = 128  # weights of a row that share a scale, in int4
_TILE = 1024, 8  # inputs and outputs of int4 weights are padded to multiples of these


def own_quantization(config: Any) -> str | None:
    """Name of the method by which a checkpoint's weights are quantised; None if they are not."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
    return str(getattr(method, "value", method))


def quantizer(kind: str, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The ``quantization_config`` with which ``from_pretrained`` quantises linear layers, all but the LM head."""
    how = weight_only(kind, config, device, dtype)
    from transformers import TorchAoConfig

    return TorchAoConfig(how)


def cheaper_copy(network: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy of a model in which the weights of the decoder's linear layers are quantised.

    It shares all else with the model, the embeddings and the LM head among them: nothing else takes memory twice.
    """
    device, dtype = network.get_input_embeddings().weight.device, network.dtype
    how = weight_only(kind, network.config, device, dtype, "draft_weights")
    from torchao.quantization import quantize_

    ends = network.get_input_embeddings(), network.get_output_embeddings()
    twin = deepcopy(network, {id(shared): shared for shared in (*network.parameters(), *network.buffers(), *ends)})
    for module in twin.modules():
        module._forward_pre_hooks.clear()  # the model's own taps
        module._forward_hooks.clear()
    slow(twin.get_decoder())
    quantize_(twin.get_decoder(), how)
    return twin


def copy_bytes(network: PreTrainedModel, kind: str) -> int:
    """Bytes that :func:`cheaper_copy` takes beside the model, by the shapes of its weights."""
    count = 0
    for layer in network.get_decoder().modules():
        rows, width = layer.weight.shape if isinstance(layer, nn.Linear) else (0, 0)
        if kind != "int4":
            count += rows * width + rows * 4
        elif width % _GROUP == 0:  # else torchao leaves the layer alone
            rows, width = rows + -rows % _TILE[1], width + -width % _TILE[0]
            count += rows * width // 2 + rows * width // _GROUP * 4
    return count


def weight_only(kind: str, config: Any, device: torch.device, dtype: torch.dtype, field: str = "quantize") -> Any:
    """The torchao configuration of a kind; what cannot be quantised so is refused."""
    own, reason = own_quantization(config), ""
    if own is not None:
        reason = f"the model's weights are quantised already ({own})"
    elif dtype == torch.float64:
        reason = "works in float32, bfloat16 and float16, not in float64"
    elif kind == "int4" and (device.type != "cuda" or dtype != torch.bfloat16):
        reason = "int4 needs a CUDA device and bfloat16"
    if reason:
        raise InputError(reason, field)
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError:
        raise InputError("needs torchao: pip install 'tswift[quantize]'", field) from None
    # settings of the whole process are not torchao's to change: the model's own passes go by them
    alone = {"set_inductor_config": False}
    if kind == "int4":  # the layout of PyTorch's own product; torchao's plain one needs a library more
        return Int4WeightOnlyConfig(group_size=_GROUP, int4_packing_format="tile_packed_to_4d", **alone)
    return Int8WeightOnlyConfig(**alone) if kind == "int8" else Float8WeightOnlyConfig(**alone)
