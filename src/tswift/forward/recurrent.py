"""Recurrent layers: short convolutions, gated delta nets and Mamba2, in trees and chains alike.

The modeling code stays in transformers. Its layers call two functions for what goes from token to
token: a convolution and a recurrence. In a pass of ours these are ours; what is before and after
them treats every row alone.

One function steps a state by a row: in prompts, plain decoding, trees, commits, resumed runs and
the audit. So a node has the bits of plain decoding by construction. A chunked form sums in another
order, and there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.attention.sdpa import chain
from tswift.caches import States
from tswift.forward.cpu.recurrence import recurrence_library, step_in_c
from tswift.forward.recurrence import Rows, step_plainly

_EPS = 1e-6  # of the norms of queries and keys
_KERNEL = ("cuda",)  # devices on which a kernel steps states


def step_states(
    rows: Rows,
    state: Tensor,
    nodes: Sequence[int],
    parents: Sequence[int],
    after: Tensor | None = None,
) -> Tensor:
    """Step a layer's state ``[heads, keys, values]`` by nodes, each from its parent's:
    the one way to do so.

    Args:
        rows: of the nodes and perhaps of others.
        state: the committed one.
        nodes: the rows of the nodes.
        parents: of each its parent's place among them, below 0 for the committed state.
        after: where the last one's state is to go; it may be the committed one.

    Returns:
        What each node reads from its state, ``[nodes, heads, values]``.
    """
    on_host = state.is_cpu and state.dtype == torch.float32
    if on_host and (library := recurrence_library()) is not None:
        return step_in_c(library, rows, state, nodes, parents, after)
    if (kernel := device_kernel(state.device, state.dtype)) is not None:
        stepped: Tensor = kernel.step_states(rows, state, nodes, parents, after)
        return stepped
    return step_plainly(rows, state, nodes, parents, after)


def kernel_fault(device: torch.device) -> str | None:
    """Why a device's kernel does not step states; None if it does. It is tried once."""
    try:
        from tswift.forward.cuda import recurrence_check
    except ImportError as error:
        return str(error)
    return recurrence_check.fault(device)


def device_kernel(device: torch.device, wide: torch.dtype) -> ModuleType | None:
    """What steps states ``wide`` by nodes that the device alone knows; None where nothing does."""
    if device.type not in _KERNEL or wide != torch.float32 or kernel_fault(device) is not None:
        return None
    from tswift.forward.cuda import recurrence_triton

    return recurrence_triton


class StatePass:
    """The recurrent layers of one pass, in the order in which they are called.

    Args:
        states: of the committed text; nothing is committed.
        nodes: number of nodes; a layer's rows may be more, which are padding.
        ancestors: as of attention, each node behind its ancestors; None where every node descends
            from all before it.
    """

    def __init__(self, states: States, nodes: int, ancestors: Tensor | None) -> None:
        self._states = states
        self.nodes = nodes
        self._layer = -1
        before = states.shape.taps - 1
        device = states.rows.device
        if ancestors is None:
            ancestors = chain(nodes, device)
        # places among the rows before the pass and its nodes' own: of each node the newest ones on
        # its path
        places = torch.arange(before + nodes, device=device)
        seen = F.pad(ancestors, (before, 0), value=True)
        self._paths = torch.where(seen, places, -1).sort(1).values[:, -before - 1 :]
        states.replays = []
        self._descend((self._paths[:, -2] - before).clamp_min(-1))

    def _descend(self, parents: Tensor) -> None:
        """Know of each node its parent, below 0 for the committed text."""
        self._parents: list[int] = parents.tolist()
        states = self._states
        states.chain = self.nodes if self._parents == [*range(-1, self.nodes - 1)] else 0

    def convolve(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """The convolution of the next layer: ``[1, channels, rows]`` to the same,
        with weights ``[channels, taps]``.
        """
        self._layer += 1
        own = rows[0, :, : self.nodes].T
        states = self._states
        kept = states.rows[self._layer]
        known = torch.cat([kept, own])
        self._passed(known, own)
        wide = states.shape.wide
        taps = weight.to(wide).unbind(1)
        read = [known[places].to(wide) for places in self._paths.unbind(1)]
        # product by product: an operator that adds and multiplies may round otherwise at the end of
        # a row
        out = read[0] * taps[0]
        for row, tap in zip(read[1:], taps[1:], strict=True):
            out = out + row * tap
        if bias is not None:
            out = out + bias.to(wide)
        out = F.pad(out.to(weight.dtype), (0, 0, 0, rows.shape[2] - self.nodes))
        if activation is not None:
            out = F.silu(out)
        return out.to(rows.dtype).T.unsqueeze(0)

    def recur(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule of the layer that was convolved last.

        Args:
            query, key: ``[1, rows, heads, keys]``; perhaps of fewer heads, each for as many that
                follow each other.
            value: ``[1, rows, heads, values]``.
            g, beta: ``[1, rows, heads]``, the logarithm of what the state keeps, and the share of
                what is new.
        """
        wide = self._states.shape.wide
        query, key = (_normalised(each[0].to(wide)) for each in (query, key))
        rows = Rows(
            query * key.shape[-1] ** -0.5,
            key,
            value[0].to(wide),
            g[0].to(wide).exp(),
            beta[0].to(wide),
        )
        return self._stepped(rows).to(value.dtype).unsqueeze(0)

    def scan(
        self, inputs: Tensor, steps: Tensor, key: Tensor, query: Tensor, rates: Tensor, own: Tensor
    ) -> Tensor:
        """Mamba2's state space of the layer that was convolved last, where nothing is corrected.

        Args:
            inputs: ``[1, rows, heads, values]``.
            steps: ``[1, rows, heads]``, how much time passes.
            key, query: ``[1, rows, groups, keys]``.
            rates: ``[heads]``, at which the state decays.
            own: ``[heads]``, what a row passes on of its own input.
        """
        wide = self._states.shape.wide
        key, query, contents, times = (each[0].to(wide) for each in (key, query, inputs, steps))
        rows = Rows(query, key, contents, (times * rates.to(wide)).exp(), times, corrects=False)
        return (self._stepped(rows) + contents * own.to(wide)[:, None]).unsqueeze(0)

    def _passed(self, known: Tensor, own: Tensor) -> None:
        """Keep how the rows before the layer's convolution go on: by its nodes' ``own``, which are
        the last that are ``known``.
        """
        states = self._states
        kept = self._states.rows[self._layer]
        states.ahead[0][self._layer] = known[-len(kept) :]
        states.replays.append(partial(_shift, kept, own))

    def _stepped(self, rows: Rows) -> Tensor:
        """What the nodes read, ``[rows, heads, values]`` with the padding;
        and how to replay what is accepted.
        """
        states = self._states
        layer = self._layer
        committed = states.matrices[layer]
        ahead = states.ahead[1][layer]
        out = step_states(
            rows, committed, range(self.nodes), self._parents, ahead if states.chain else None
        )
        states.replays.append(partial(_replay, committed, rows))
        return F.pad(out, (0, 0, 0, 0, 0, len(rows.contents) - self.nodes))


class StaticStatePass(StatePass):
    """As :class:`StatePass`, of a program that is replayed on the device: nothing waits for the
    host, and states stay where they are.

    ``kernel`` is :func:`device_kernel`'s.
    """

    def __init__(
        self, states: States, nodes: int, ancestors: Tensor | None, kernel: ModuleType
    ) -> None:
        self._kernel = kernel
        self._own: list[Tensor] = []  # of each layer the rows before its convolution
        self._recurred: list[tuple[Rows, Tensor]] = []
        super().__init__(states, nodes, ancestors)
        states.stay = True
        states.replays = [partial(_go_on, kernel, states.rows, self._own, self._recurred)]

    def _descend(self, parents: Tensor) -> None:
        self._plan = self._kernel.tree_plan(parents)
        self._states.chain = 0

    def _passed(self, known: Tensor, own: Tensor) -> None:
        self._own.append(own)

    def _stepped(self, rows: Rows) -> Tensor:
        state = self._states.matrices[self._layer]
        self._recurred.append((rows, state))
        out: Tensor = self._kernel.step_tree(rows, state, self._plan)
        return F.pad(out, (0, 0, 0, 0, 0, len(rows.contents) - self.nodes))


def _go_on(
    kernel: ModuleType,
    before: Tensor,
    own: Sequence[Tensor],
    recurred: Sequence[tuple[Rows, Tensor]],
    nodes: Sequence[int] | Tensor,
    count: Tensor | None = None,
) -> None:
    """Let all layers' states go on by accepted nodes, or the first ``count`` ``[1]`` of them."""
    if not isinstance(nodes, Tensor):
        nodes = torch.tensor([*nodes]).to(before.device, non_blocking=True)
    known = torch.cat([before, torch.stack([*own]).index_select(1, nodes)], 1)
    newest = torch.arange(before.shape[1], device=before.device)
    newest = newest + (len(nodes) if count is None else count)
    before.copy_(known.index_select(1, newest))
    plan = kernel.path_plan(nodes)
    for rows, state in recurred:
        kernel.step_path(rows, state, plan, count)


def _shift(kept: Tensor, own: Tensor, nodes: Sequence[int]) -> None:
    """Let the newest rows before a convolution be those of accepted nodes."""
    kept.copy_(torch.cat([kept, own[list(nodes)]])[-len(kept) :])


def _replay(state: Tensor, rows: Rows, nodes: Sequence[int]) -> None:
    """Step a layer's state by accepted nodes."""
    step_states(rows, state, nodes, range(-1, len(nodes) - 1), state)


def _normalised(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPS)


_running: ContextVar[Sequence[StatePass]] = ContextVar("running", default=())


@contextmanager
def passing(runs: Sequence[StatePass]) -> Iterator[None]:
    """Let the recurrent layers of a model be those of a pass, whose texts are neighbouring rows."""
    token = _running.set(runs)
    try:
        yield
    finally:
        _running.reset(token)


def _joined(
    runs: Sequence[StatePass], dim: int, make: Callable[..., Tensor], *given: Tensor
) -> Tensor:
    """What the texts of a pass make of their rows, which are a dimension.

    Each computes as many rows as there are, its own first: bits may depend on the number.
    """
    if len(runs) == 1:
        return make(runs[0], *given)
    found = []
    start, end = 0, given[0].shape[dim]
    for run in runs:
        made = make(run, *(rows.roll(-start, dim) for rows in given))
        size = end - start if run is runs[-1] else run.nodes
        found.append(made.narrow(dim, 0, size))
        start += size
    return torch.cat(found, dim)


def _convolve(
    runs: Sequence[StatePass],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    def convolved(run: StatePass, own: Tensor) -> Tensor:
        return run.convolve(own, weight, bias, activation)

    return _joined(runs, 2, convolved, rows)


def _recur(
    runs: Sequence[StatePass],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    def recurred(run: StatePass, *own: Tensor) -> Tensor:
        return run.recur(*own)

    return _joined(runs, 1, recurred, query, key, value, g, beta), None


def _scan(
    runs: Sequence[StatePass],
    inputs: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_: object,
) -> Tensor:
    steps = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)

    def scanned(
        run: StatePass, inputs: Tensor, steps: Tensor, key: Tensor, query: Tensor
    ) -> Tensor:
        return run.scan(inputs, steps, key, query, A, D)

    return _joined(runs, 1, scanned, inputs, steps, B, C)


_OURS: dict[str, Callable[..., object]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _recur,
    "mamba2_chunk_scan": _scan,
}


def serve_states(network: PreTrainedModel) -> None:
    """Let the functions that a model's recurrent layers call be ours in passes of ours,
    and theirs elsewhere.
    """
    for name in {type(module).__module__ for module in network.modules()}:
        modeling = sys.modules[name]
        for function, ours in _OURS.items():
            theirs = getattr(modeling, function, None)
            if theirs is not None and not hasattr(theirs, "tswift"):
                setattr(modeling, function, _either(theirs, ours))


def _either(theirs: Callable[..., object], ours: Callable[..., object]) -> Callable[..., object]:
    @wraps(theirs)
    def call(*args: object, **kwargs: object) -> object:
        runs = _running.get()
        return ours(runs, *args, **kwargs) if runs else theirs(*args, **kwargs)

    call.tswift = True  # type: ignore[attr-defined]
    return call
