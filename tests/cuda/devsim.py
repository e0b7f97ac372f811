"""Tensors that say they are on CUDA and hold data of the host: a mix of devices fails,
waits and copies are counted.

It patches PyTorch for the whole process, so it is run in one of its own: ``python -m
tests.cuda.table``. Import it before the package, whose decorators take up ``torch.inference_mode``
as it is then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.capture import (
    _EMPTY,
    LOG,
    WAITS,
    emulate,
    leaves,
    mapped,
    refuse,
    site,
    synchronized,
    under_way,
)

CUDA = torch.device("cuda", 0)
_VIEWS = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "slice",
        "select",
        "transpose",
        "t",
        "permute",
        "unsqueeze",
    ),
    *(
        "squeeze",
        "detach",
        "alias",
        "unbind",
        "split",
        "split_with_sizes",
        "as_strided",
        "unfold",
        "_reshape_alias",
    ),
    *("diagonal", "narrow", "lift_fresh", "resolve_conj", "unflatten"),
}
_PRODUCTS = (torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class Device(Tensor):
    """A tensor of the simulated device; ``elem`` holds its data."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Device:
        made = Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=torch.device("meta"),
            requires_grad=False,
        )
        made.elem = elem
        return made

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    def tolist(self):
        fetched()
        return self.elem.tolist()

    def item(self):
        fetched()
        return self.elem.item()

    def __bool__(self) -> bool:
        fetched()
        return bool(self.elem)

    def numpy(self, *given, **named):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self) -> str:
        return f"Device({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__setitem__ and _copies_a_number(*args):
                sent(blocking=True)
            if func in _PRODUCTS and args[0].dim() == 1:
                # done with squeeze_, of which a wrapper's shape hears nothing
                return func(args[0].unsqueeze(0), *args[1:], **(kwargs or {})).squeeze(0)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class Simulator(TorchDispatchMode):
    """Within it tensors made for CUDA are made as :class:`Device`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _copies_a_number(tensor: Tensor, index, value) -> bool:
    """Whether ``tensor[index] = value`` copies a number from the host,
    as PyTorch does where one element is set.

    Python's numbers become tensors on the CPU, and ``copy_to`` in TensorIndexing.h copies what has
    the size of the place. A slice or a row is filled, without a copy.
    """
    if isinstance(value, Device):
        return False
    return Tensor.__getitem__(tensor, index).dim() == 0


def fetched(blocking: bool = True):
    """Count a copy from the device."""
    refuse("a copy to the host")
    if LOG.on:
        LOG.fetched[site()] += 1
    if blocking:
        synchronized()


def sent(blocking: bool):
    """Count a copy to the device."""
    refuse("a copy from the host")
    if LOG.on:
        LOG.sent[site()] += 1
    if blocking:
        synchronized()


def _there(device) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _run(func, args, kwargs):
    name = func.overloadpacket.__name__
    parts = leaves((args, kwargs))
    given = [leaf for leaf in parts if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in given if isinstance(tensor, Device)]
    hosts = [tensor for tensor in given if not isinstance(tensor, Device)]
    device = kwargs.get("device") or next(
        (leaf for leaf in parts if isinstance(leaf, torch.device)), None
    )
    if name in _INDEXING and ours:
        index = [each for each in args[1] if each is not None]
        if any(not isinstance(each, Device) or each.dtype == torch.bool for each in index):
            synchronized()  # PyTorch copies an index to the device, and a mask has to be counted
    elif name not in ("_to_copy", "copy_") and ours and any(tensor.dim() for tensor in hosts):
        raise RuntimeError(
            f"{name} of tensors on cuda and cpu, in {site()}: "
            f"{[tuple(each.shape) for each in given]}"
        )
    if name in WAITS and ours:
        synchronized()

    def plain(leaf):
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return leaf.elem if isinstance(leaf, Device) else leaf

    if name == "_pin_memory":
        return args[0]
    if name in ("div", "div_") and ours and not (isinstance(args[1], Tensor) or kwargs):
        # PyTorch multiplies by the reciprocal of a number of the host
        func = getattr(torch.ops.aten, name.replace("div", "mul")).Tensor
        args = (args[0], 1 / args[1])
    out = func(*mapped(plain, args), **mapped(plain, kwargs))
    if name == "copy_":
        there = isinstance(args[0], Device)
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        crosses = there != isinstance(args[1], Device)
    else:
        there = _there(device) if device is not None else bool(ours)
        crosses = name == "_to_copy" and there != bool(ours)
        blocking = not kwargs.get("non_blocking")
    if crosses:
        (sent if there else fetched)(blocking)
        if not blocking:
            under_way(args[1] if name == "copy_" else args[0], out)
    elif LOG.on and there and name not in _VIEWS and name not in _EMPTY:
        LOG.kernels += 1
    if func._schema.is_mutable:
        same = {id(tensor.elem): tensor for tensor in ours}
        return mapped(
            lambda leaf: same[id(leaf)] if id(leaf) in same else _wrapped(leaf) if there else leaf,
            out,
        )
    return mapped(_wrapped, out) if there else out


def _wrapped(leaf):
    return Device(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, Device) else leaf


def moved(module: torch.nn.Module):
    """A module with its parameters and buffers on the device, as some may be already."""
    for each in module.modules():
        for name, weight in list(each._parameters.items()):
            if weight is not None and not isinstance(weight.data, Device):
                each._parameters[name] = torch.nn.Parameter(
                    Device(weight.data), requires_grad=False
                )
        for name, buffer in list(each._buffers.items()):
            if buffer is not None and not isinstance(buffer, Device):
                each._buffers[name] = Device(buffer)
    return module


def _making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As ``torch.tensor``, of which a dispatch mode sees no device."""

    def made(data, *args, device=None, **kwargs) -> Tensor:
        if isinstance(data, Device):
            return data
        out = make(data, *args, **kwargs)
        if not _there(device):
            return out
        sent(blocking=True)
        return Device(out)

    return made


def install():
    """Patch PyTorch."""
    # within inference mode a wrapped tensor's views are none
    torch.inference_mode = lambda mode=True: torch.no_grad()
    torch.cuda._lazy_init = lambda: None
    emulate(setattr)
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _making(getattr(torch, name)))


install()
