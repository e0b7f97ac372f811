"""Recurrent layers: short convolutions and gated delta nets, in trees and chains alike.

The modeling code stays in transformers. Its layers call two functions for what goes from token to token: a convolution
and a recurrence. In a pass of ours these are ours; what is before and after them treats every row alone.

One function steps a state by a row: in prompts, plain decoding, trees, commits, resumed runs and the audit. So a node
has the bits of plain decoding by construction. A chunked form sums in another order, and there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.caches import States, StateShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EPS = 1e-6  # of the norms of queries and keys


def state_shape(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> StateShape | None:
    """Shape of the states of a model's recurrent layers; None if it has no such layers."""
    text = config.get_text_config()
    types = list(getattr(text, "layer_types", None) or ())
    kind = partial(StateShape, dtype=dtype, wide=torch.promote_types(dtype, torch.float32), device=device)
    if "conv" in types:
        return kind(types.count("conv"), text.hidden_size, text.conv_L_cache, 0, 0, 0)
    if "linear_attention" in types:
        heads, keys, values = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
        channels = 2 * text.linear_num_key_heads * keys + heads * values
        return kind(types.count("linear_attention"), channels, text.linear_conv_kernel_dim, heads, keys, values)
    return None


@dataclass(frozen=True)
class _Rows:
    """What a gated delta net steps by, node by node: ``[n, heads, ...]``."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    decays: Tensor  # ``[n, heads, 1, 1]``, factors of the state
    rates: Tensor  # ``[n, heads, 1]``, shares of what is new

    def step(self, state: Tensor, node: int) -> Tensor:
        """The state ``[heads, keys, values]`` after a node, from that before it."""
        key = self.keys[node].unsqueeze(-1)
        state = state * self.decays[node]
        change = (self.values[node] - (state * key).sum(1)) * self.rates[node]
        return state + key * change.unsqueeze(1)

    def read(self, state: Tensor, node: int) -> Tensor:
        """What a node draws from the state after it: ``[heads, values]``."""
        return (state * self.queries[node].unsqueeze(-1)).sum(1)


class StatePass:
    """The recurrent layers of one pass, in the order in which they are called.

    Args:
        states: of the committed text; nothing is committed.
        nodes: number of nodes; a layer's rows may be more, which are padding.
        ancestors: as of attention, each node behind its ancestors; None where every node descends from all before it.
    """

    def __init__(self, states: States, nodes: int, ancestors: Tensor | None) -> None:
        self._states, self._nodes, self._layer = states, nodes, -1
        before, device = states.shape.taps - 1, states.rows.device
        if ancestors is None:
            ancestors = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril_()
        # places among the rows before the pass and its nodes' own: of each node the newest ones on its path
        places = torch.arange(before + nodes, device=device)
        seen = F.pad(ancestors, (before, 0), value=True)
        self._paths = torch.where(seen, places, -1).sort(1).values[:, -before - 1 :]
        self._parents: list[int] = (self._paths[:, -2] - before).clamp_min(-1).tolist()

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The convolution of the next layer: ``[1, channels, rows]`` to the same, with weights ``[channels, taps]``."""
        self._layer += 1
        own = rows[0, :, : self._nodes].T
        kept = self._states.rows[self._layer]
        known = torch.cat([kept, own])
        self._states.replays[self._layer] = partial(_shift, kept, own)
        wide, taps = self._states.shape.wide, weight.to(self._states.shape.wide).unbind(1)
        read = [known[places].to(wide) for places in self._paths.unbind(1)]
        # product by product: an operator that adds and multiplies may round otherwise at the end of a row
        out = read[0] * taps[0]
        for row, tap in zip(read[1:], taps[1:], strict=True):
            out = out + row * tap
        if bias is not None:
            out = out + bias.to(wide)
        out = F.pad(out.to(weight.dtype), (0, 0, 0, rows.shape[2] - self._nodes))
        if activation is not None:
            out = F.silu(out)
        return out.to(rows.dtype).T.unsqueeze(0)

    def recur(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule of the layer that was convolved last.

        Args:
            query, key: ``[1, rows, heads, keys]``; perhaps of fewer heads, each for as many that follow each other.
            value: ``[1, rows, heads, values]``.
            g, beta: ``[1, rows, heads]``, the logarithm of what the state keeps, and the share of what is new.
        """
        shape, nodes = self._states.shape, self._nodes
        query, key = (_normalised(each[0].to(shape.wide)) for each in (query, key))
        query = query * shape.keys**-0.5
        query, key = (each.repeat_interleave(shape.heads // each.shape[1], 1) for each in (query, key))
        decays, rates = g[0].to(shape.wide).exp()[..., None, None], beta[0].to(shape.wide)[..., None]
        rows = _Rows(query, key, value[0].to(shape.wide), decays, rates)
        committed, before, out = self._states.matrices[self._layer], dict[int, Tensor](), []
        children = {parent: node for node, parent in enumerate(self._parents)}  # the last one of each
        for node, parent in enumerate(self._parents):
            state = rows.step(committed if parent < 0 else before[parent], node)
            out.append(rows.read(state, node))
            if node in children or node + 1 == nodes:
                before[node] = state
            if children.get(parent) == node:
                before.pop(parent, None)
        # the states after a chain, which often is accepted as it is
        end = before[nodes - 1] if self._parents == list(range(-1, nodes - 1)) else None
        shift = self._states.replays[self._layer]
        self._states.replays[self._layer] = partial(_replay, shift, committed, rows, nodes, end)
        padding = value.new_zeros(value.shape[1] - nodes, *value.shape[2:])
        return torch.cat([torch.stack(out).to(query.dtype).to(value.dtype), padding]).unsqueeze(0)


def _shift(kept: Tensor, own: Tensor, nodes: Sequence[int]) -> None:
    """Let the newest rows before a convolution be those of accepted nodes."""
    kept.copy_(torch.cat([kept, own[list(nodes)]])[-len(kept) :])


def _replay(
    shift: Callable[[Sequence[int]], None],
    state: Tensor,
    rows: _Rows,
    count: int,
    end: Tensor | None,
    nodes: Sequence[int],
) -> None:
    """Step a layer's state by accepted nodes, of so many; ``end`` is what all of them lead to, if that is known."""
    shift(nodes)
    after = state
    if end is not None and len(nodes) == count:
        after = end
    else:
        for node in nodes:
            after = rows.step(after, node)
    state.copy_(after)


def _normalised(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPS)


_running: ContextVar[StatePass | None] = ContextVar("running", default=None)


@contextmanager
def passing(run: StatePass | None) -> Iterator[None]:
    """Let the recurrent layers of a model be those of a pass."""
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)


def _convolve(run: StatePass, rows: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any) -> Any:
    return run.convolve(rows, weight, bias, activation)


def _recur(run: StatePass, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
    return run.recur(query, key, value, g, beta), None


_OURS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _recur}


def serve_states(network: PreTrainedModel) -> None:
    """Let the functions that a model's recurrent layers call be ours in passes of ours, and theirs elsewhere."""
    for name in {type(module).__module__ for module in network.modules()}:
        modeling = sys.modules[name]
        for function, ours in _OURS.items():
            theirs = getattr(modeling, function, None)
            if theirs is not None and not hasattr(theirs, "tswift"):
                setattr(modeling, function, _either(theirs, ours))


def _either(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = _running.get()
        return theirs(*args, **kwargs) if run is None else ours(run, *args, **kwargs)

    call.tswift = True  # type: ignore[attr-defined]
    return call
