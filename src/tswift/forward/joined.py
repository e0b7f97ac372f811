"""Linear layers with the same input, joined.

A pass over few rows reads weights and does little else, and a GPU reads one large matrix faster
than three small ones: queries, keys and values are joined, and the two halves of an MLP. The
modeling code still calls layer after layer: the first computes the product of all and hands the
others their parts.
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# in the order in which they are called
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JoinedLinear(nn.Linear):
    """One of several linear layers with the same input;
    its weights are rows of one matrix that they share.
    """

    group: Sequence[JoinedLinear]  # the layers, in the order in which they are called
    # of all, for the first; None for the others, and where weights have been moved apart
    product: nn.Module | None
    # the first's input, and this one's output for it; None once that was taken
    handed: tuple[Tensor, Tensor] | None

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert or move the weights, which become each layer's own by that."""
        self.group[0].product = None
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain linear layer with weights of its own, so that these can be changed."""
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in JoinedLinear.__annotations__
        }
        return copyreg.__newobj__, (nn.Linear,), state  # type: ignore[attr-defined]


@torch.no_grad()
def join(network: nn.Module) -> None:
    """Compute linear layers with the same input as one product; weights are frozen.

    No weight is held twice: the layers' own become views of the joined ones. Layers whose weights
    are quantised, split over ranks or shared with others, and those with hooks, are left alone.
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
    return not hooked and all(
        type(weight) is nn.Parameter and uses[id(weight)] == 1 for weight in weights
    )


def _kind(layer: nn.Linear) -> tuple[object, ...]:
    return layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device


def _join(layers: Sequence[nn.Linear]) -> None:
    product = nn.Linear(
        layers[0].in_features, sum(layer.out_features for layer in layers), False, device="meta"
    )
    for name in ("weight",) if layers[0].bias is None else ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        joined = torch.cat(parts)
        setattr(product, name, nn.Parameter(joined, requires_grad=False))
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            part.data = rows
    share(layers, product)


def share(layers: Sequence[nn.Linear], product: nn.Module) -> None:
    """Let linear layers with the same input be parts of one product's output, in this order."""
    for layer in layers:
        layer.__class__ = JoinedLinear
        # past nn.Module, which would take the layers and the product for parts of this one
        layer.__dict__.update(
            group=layers, product=product if layer is layers[0] else None, handed=None
        )
