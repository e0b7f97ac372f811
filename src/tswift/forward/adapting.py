"""A transformers model made ready to decode: its attention and layers are replaced and tested.

Logits with and without our attention are compared, which shows whatever an architecture does that
it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tswift.attention.backends import BACKENDS, choose, own_backend, why_not
from tswift.attention.backends_check import fails
from tswift.caches import FullKV
from tswift.errors import InputError, NoFault, cause_of
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.products import multiplies_integers
from tswift.forward.cuda.fused_layers import fuse, is_fused, layers_by_form, separate_layers
from tswift.forward.cuda.layers_check import layer_fault
from tswift.forward.hf import UnsupportedModel
from tswift.forward.passes import Nodes
from tswift.forward.recurrent import kernel_fault
from tswift.forward.target import Target
from tswift.forward.text import first_broken
from tswift.models.architecture import heads_of, max_positions
from tswift.models.config import SHAPE_PREFIX
from tswift.models.devices import dtype_name, keep_precision
from tswift.native_build import Unbuilt
from tswift.remembered import NO_CHECKS, Checks
from tswift.stages import tell

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def select_backend(
    attention: str, dtype: torch.dtype, device: torch.device, config: PreTrainedConfig
) -> tuple[str, str]:
    """The attention backend that a name stands for,
    and a note if it is not the one that should serve here.

    A backend serves if it computes of random rows what sdpa computes.
    """
    kv_heads, groups, width = heads_of(config)
    backend = choose(attention, dtype, device, width)
    own = own_backend(device)
    tried = backend == own or (backend != "sdpa" and device.type == "cuda")
    reason = fails(backend, dtype, device, width, (kv_heads, groups)) if tried else None
    if attention == "auto" and backend == "sdpa":
        reason = why_not(own, dtype, device, width)
        if own == "native":  # that was told before loading, if it costs much
            reason = reason and NoFault(reason)
    if reason is None:
        return backend, ""
    if attention != "auto":
        raise InputError(reason, "attention")
    return "sdpa", reason


def try_graphs(target: Target) -> None:
    """Try whether passes can be captured as CUDA graphs."""
    if target.replays and target.on_cuda:
        kv = FullKV(target.kv_shape, 1)
        target.prepare(kv, 1)
        for static in target.runner.passes[kv]:
            static.capture(kv.length)


_ROUNDED = 1e-2  # most that logits may differ by where inputs are rounded to 16 bits
# Most that logits may differ by: in units of the KV cache's last place, and in units of their own
# spread. A cache of 16 bits came to 7 in a real model, and to 38 with 16 times its
# positions (--yarn), which makes attention sharper. One that is read wrongly comes to the spread.
_CACHED = 128
_MISREAD = 1.0
_TRIED = 24  # tokens that a model is tried with
_DOUBTED = ("cuda",)  # devices on which a backend's kernels may never have run before


def wrap_model(
    network: PreTrainedModel,
    model: str,
    backend: str,
    kv_dtype: torch.dtype | None = None,
    usual: bool = False,
    checks: Checks = NO_CHECKS,
) -> Target:
    """The model with our attention, after a check that it gives the logits of transformers' own.

    Args:
        network: a causal language model of transformers.
        model: its name.
        backend: a key of :data:`~tswift.attention.backends.BACKENDS`.
        kv_dtype: of the KV cache; None for the model's own.
        usual: whether nobody asked for that dtype: where no program serves, the model's own takes
            its place.
        checks: what such a check found before.

    Raises:
        InputError: the model, or a cache in this dtype, cannot be served exactly.
    """
    keep_precision(network.device)
    known = backend == "native" and checks.found("logits") is not None
    target = _as_compared(network, backend, kv_dtype) if known else None
    if target is not None:
        return target
    tell("comparing its logits with those of transformers")
    target = _compared(network, model, backend, kv_dtype, usual)
    if target.runner.program is not None and not target.fallbacks:
        checks.keep("logits", "those of transformers")
    return target


def _as_compared(
    network: PreTrainedModel, backend: str, kv_dtype: torch.dtype | None
) -> Target | None:
    """The model with its C program and its cache, which gave the right logits when they were tried
    here; None if the program is not to be had any more.
    """
    target = Target(network, BACKENDS[backend]())
    try:
        if kv_dtype is not None and kv_dtype != target.dtype:
            target.set_kv_dtype(kv_dtype)
        target.use_program()  # packed for this cache alone
    except (Unfit, Unbuilt):
        return None
    return target


def _try_program(
    target: Target, ids: Tensor, expected: Mapping[int, Tensor], allowed: float
) -> None:
    """Let a C program make the passes of a model, if its logits are those ``expected`` from a
    place in a text on.
    """
    fault: str | None = "a C program gave other logits"
    try:
        target.use_program()
        if all(_apart(target, ids, at, place) <= allowed for place, at in expected.items()):
            fault = None
    except Unfit as error:
        fault = NoFault(error)
    except Unbuilt as error:  # which was told before anything was loaded
        fault = NoFault(f"a C program {error}")
    if fault is not None:
        target.use_program(False)
        target.fallbacks.note("layers", fault)


def _compared(
    network: PreTrainedModel,
    model: str,
    backend: str,
    kv_dtype: torch.dtype | None,
    usual: bool,
) -> Target:
    config = network.config.get_text_config()
    count = min(_TRIED, config.max_position_embeddings)
    ids = (torch.arange(count, device=network.device) * 7919 + 13) % config.vocab_size
    # the one that does all a model asks for; sdpa passes over soft caps
    network.set_attn_implementation("eager")
    with torch.inference_mode(), _reading_text(network, model):
        expected = network(ids.unsqueeze(0), use_cache=False).logits[0].double()
        far = max(0, max_positions(config) - count) if backend == "native" else 0
        places = torch.arange(far, far + count, device=network.device).unsqueeze(0)
        expected_far = (
            network(ids.unsqueeze(0), position_ids=places, use_cache=False).logits[0]
            if far
            else expected
        )
    try:
        target = Target(network, BACKENDS[backend]())
        _doubt_features(target, backend)
        if not (expected.amax(-1) < torch.inf).all():
            raise _not_finite(target, model, ids.tolist())
        if backend == "triton":
            target.fallbacks.note("layers", fuse(network, layer_fault))
            if target.kv_shape.states is not None and _doubted(target):
                target.fallbacks.note("states", kernel_fault(network.device))
        apart = _apart(target, ids, expected)
    except UnsupportedModel as error:
        reason = f"has {error}, which tswift cannot serve exactly yet"
        raise InputError(f"{model} ({network.config.model_type}) {reason}", "model") from None
    # random weights in 16 bits round worse than trained ones: 0.15 was seen, with the same
    # architecture on both sides
    allowed = 0.5 if model.startswith(SHAPE_PREFIX) else 0.25
    if target.dtype.itemsize >= 4:
        allowed = 1e-3
    if multiplies_integers(network):
        allowed = max(allowed, _ROUNDED)
    if not apart <= allowed and is_fused(network):
        separate_layers(network)
        target.fallbacks.note("layers", "kernels in their place gave other logits")
        apart = _apart(target, ids, expected)
    if not apart <= allowed:
        decoder = signature(network.get_decoder().forward).parameters
        why = "" if "position_ids" in decoder else "; its decoder takes no positions"
        reason = f"is not served exactly: logits differ{why}"
        raise InputError(f"{model} ({network.config.model_type}) {reason}", "model")
    if backend == "native":
        _try_program(target, ids, {0: expected, far: expected_far.double()}, allowed)
    served = target.runner.program is not None
    if kv_dtype is not None and kv_dtype != target.dtype and (served or not usual):
        _narrow_cache(target, model, kv_dtype, usual, partial(_apart, target, ids, expected))
    return target


def _doubted(target: Target) -> bool:
    """Whether kernels may never have run on its device before."""
    return target.device.type in _DOUBTED


def _doubt_features(target: Target, backend: str) -> None:
    """Note a kernel that computes what the model's attention has otherwise than PyTorch does,
    on devices where that is doubted.
    """
    if not (_doubted(target) and target.attention_features and BACKENDS[backend]().SPECS):
        return
    kinds = {
        (spec.window, spec.softcap, spec.sinks is None): spec for spec in target.layer_specs if spec
    }
    shape = target.kv_shape
    heads = (shape.heads, target.groups)
    reason = fails(backend, target.dtype, target.device, shape.head_dim, heads, kinds.values())
    target.fallbacks.note("features", reason and f"{reason} with {target.attention_features}")


def _narrow_cache(
    target: Target,
    model: str,
    kv_dtype: torch.dtype,
    usual: bool,
    apart: Callable[[], float],
) -> None:
    """Have a cache in this dtype, where the model bears it.

    Args:
        usual: leave the model's own if it does not, as nobody asked for this one.
        apart: how far the logits are off.
    """
    try:
        target.set_kv_dtype(kv_dtype)
        reason = None
    except Unfit as error:
        reason = f"cannot have a cache in {dtype_name(kv_dtype)}: {error}"
    if reason is None and target.kv_shape.steps_behind and _doubted(target):
        reason = _codes_fault(target)
    if reason is None and not apart() <= min(_CACHED * target.kv_shape.eps, _MISREAD):
        reason = f"does not bear a cache in {dtype_name(target.kv_shape.dtype)}"
    if reason is not None and target.kv_shape.dtype != target.dtype:
        target.set_kv_dtype(target.dtype)
    if reason is not None and not usual:
        raise InputError(f"{model} {reason}", "kv_dtype")
    target.fallbacks.note("cache", reason)


def _codes_fault(target: Target) -> str | None:
    """Why kernels on a device do not serve a cache of codes; None if they do."""
    shape = target.kv_shape
    heads = (shape.heads, target.groups)
    fault = fails("triton", target.dtype, target.device, shape.head_dim, heads, codes=True)
    if is_fused(target.model):
        for layer in layers_by_form(target.model):
            fault = fault or layer_fault(layer, target.dtype, codes=True)
    return fault and f"cannot have a cache in {dtype_name(shape.dtype)}: {fault}"


@contextmanager
def _reading_text(network: PreTrainedModel, model: str) -> Iterator[None]:
    """Refuse a model that asks for more than token ids and positions."""
    try:
        yield
    except Exception as error:  # modeling code says in many ways what it misses
        kind = network.config.model_type
        cause = cause_of(error)
        if isinstance(error, TypeError | AttributeError):  # of arguments and parts that are missing
            cause = "its class asks for more than token ids"
        raise InputError(
            f"{model} ({kind}) does not run on text alone ({cause})", "model"
        ) from None


def _not_finite(target: Target, model: str, ids: list[int]) -> InputError:
    broken = first_broken(target, ids, FullKV(target.kv_shape, len(ids)))
    where = f"; the first output that is not finite is that of {broken[0]}" if broken else ""
    reason = f"its weights are broken, or {dtype_name(target.dtype)} is too narrow for it"
    return InputError(f"{model} gives logits that are NaN or infinite{where}: {reason}", "model")


@torch.inference_mode()
def _apart(target: Target, ids: Tensor, expected: Tensor, far: int = 0) -> float:
    """How far a text's logits are from those expected, at most, in units of their spread.

    What all logits of a row have in common changes no probability, and is left out: in 16 bits it
    was half of SmolLM2's rounding.

    The text's first half is a chunk, the rest a tree with wrong tokens beside it. It begins at the
    position ``far``, where what depends on positions may come to something else than at the
    beginning.
    """
    kv = FullKV(target.kv_shape, 2 * len(ids))
    half = len(ids) // 2
    start = torch.arange(far, far + half, device=ids.device)
    before = [target.forward(Nodes(ids[:half], start, kv)).hidden]
    kv.commit(range(half))
    nodes = torch.arange(2 * (len(ids) - half), device=ids.device)
    right = nodes % 2 == 0  # the text; an odd node stands beside the next one
    tokens = torch.where(right, ids[half + nodes // 2], ids[nodes // 4])
    ancestors = (nodes <= nodes[:, None]) & right | (nodes == nodes[:, None])
    hidden = target.forward(Nodes(tokens, far + half + (nodes + 1) // 2, kv, ancestors)).hidden
    ours = target.logits(torch.cat([*before, hidden[right]])).double()
    apart = ours - expected
    apart = apart - apart.mean(-1, keepdim=True)
    return apart.abs().max().item() / max(expected.std().item(), 1e-6)
