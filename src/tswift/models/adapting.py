"""A network of transformers with our attention in it, seen to give the logits that it gave before."""

from __future__ import annotations

from typing import Any

import torch

from tswift.attention.backends import BACKENDS, fails
from tswift.errors import InputError
from tswift.kv.full import FullKV
from tswift.models.dtypes import dtype_name
from tswift.models.joined import join, separate
from tswift.models.layers import Unserved
from tswift.models.linear import quicken
from tswift.models.shapes import PREFIX
from tswift.models.target import Target

_TRIED = 24  # tokens that a model is tried with
_DOUBTED = ("cuda",)  # devices on which nobody may have run a backend's kernels before


def adapted(network: Any, model: str, backend: str, joined: bool | None = None) -> Target:
    """The model with our attention, once both have been seen to give the same logits.

    Whatever an architecture does that ours does not know of shows here.

    Args:
        network: a causal language model of transformers.
        model: its name.
        backend: a key of :data:`~tswift.attention.backends.BACKENDS`.
        joined: whether linear layers with the same input become one product; None for on CUDA only.

    Raises:
        InputError: they do not, or there are no finite ones; or its layers want what we cannot do.
    """
    config = network.config.get_text_config()
    count = min(_TRIED, config.max_position_embeddings)
    ids = (torch.arange(count, device=network.device) * 7919 + 13) % config.vocab_size
    network.set_attn_implementation("eager")  # the one that does all a model asks for; sdpa passes over soft caps
    with torch.inference_mode():
        wanted = network(ids.unsqueeze(0), use_cache=False).logits[0].double()
    if joined or (joined is None and network.device.type == "cuda"):
        join(network)
    quicken(network)
    try:
        target = Target(network, BACKENDS[backend]())
        if target.device.type in _DOUBTED:
            try_special(target, backend)
        if not (wanted.amax(-1) < torch.inf).all():
            raise _not_finite(target, model, ids.tolist())
        ours = _tried(target, ids)
        separate(network)
    except Unserved as error:
        reason = f"{model} ({network.config.model_type}) has {error}, which tswift cannot serve exactly yet"
        raise InputError(reason, "--model") from None
    apart = (target.logits(ours).double() - wanted).abs().max().item()
    # random weights in 16 bits round worse than trained ones: 0.15 was seen, with the same architecture on both sides
    allowed = 1e-3 if target.dtype.itemsize >= 4 else 0.5 if model.startswith(PREFIX) else 0.25
    if not apart <= allowed * max(wanted.std().item(), 1e-6):
        raise InputError(f"{model} ({network.config.model_type}) is not served exactly: logits differ", "--model")
    return target


@torch.inference_mode()
def try_special(target: Target, backend: str) -> None:
    """Check a backend's windows, soft caps and sinks against plain products, which take over if it differs.

    Every kind of layer is tried, on random rows; why the backend is not trusted is left in ``target.special_fault``.
    """
    if not (target.special and BACKENDS[backend]().WANTS):
        return
    kinds = {(each.window, each.softcap, each.sinks is None): each for each in target.wants if each}
    shape = target.kv_shape
    heads = shape.heads, target.groups
    reason = fails(backend, target.dtype, target.device, shape.head_dim, heads, kinds.values())
    target.special_fault = reason and f"{reason} with {target.special}"


def _not_finite(target: Target, model: str, ids: list[int]) -> InputError:
    found = target.first_broken(ids, FullKV(target.kv_shape, len(ids)))
    where = f"; the first output that is not finite is that of {found[0]}" if found else ""
    reason = f"its weights are broken, or {dtype_name(target.dtype)} is too narrow for it"
    return InputError(f"{model} gives logits that are NaN or infinite{where}: {reason}", "--model")


def _tried(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """``[n, H]`` hidden states of a text: of a chunk first, then of a tree in which wrong tokens stand beside it."""
    kv, half = FullKV(target.kv_shape, 2 * len(ids)), len(ids) // 2
    before = [chunk.hidden for chunk in target.chunks(ids[:half].tolist(), kv)]
    nodes = torch.arange(2 * (len(ids) - half), device=ids.device)
    right = nodes % 2 == 0  # the text; an odd node stands beside the next one
    tokens = torch.where(right, ids[half + nodes // 2], ids[nodes // 4])
    ancestors = (nodes <= nodes[:, None]) & right | (nodes == nodes[:, None])
    hidden = target.forward(tokens, half + (nodes + 1) // 2, kv, ancestors).hidden
    return torch.cat([*before, hidden[right]])
