"""CUDA graphs without CUDA: a capture records the operators of a function,
a replay runs them into the same memory.

As on a GPU, a capture executes nothing that lasts, Python's numbers are baked in, whatever would
wait for the device is refused, and a replay may destroy what other graphs of its pool hold: here it
always does, by NaN.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tswift.attention.sdpa import Attention, Layout
from tswift.caches import steps_of
from tswift.forward.recurrence import Rows, step_plainly

WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "is_nonzero",
    "equal",
)
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Log:
    """What happened on the way to and on the device, while it is ``on``.

    Attributes:
        waits, sent, fetched: how often the host waited, copied to the device and from it, by place
            in the source.
        kernels: operators, but for views and copies, that no graph ran.
        launches: graphs replayed.
    """

    def __init__(self):
        self.on = False
        self.clear()

    def clear(self):
        """Forget all."""
        self.waits, self.sent, self.fetched = Counter[str](), Counter[str](), Counter[str]()
        self.kernels = self.launches = 0


LOG = Log()
_CARD = SimpleNamespace(name="simulated", major=9, minor=0, multi_processor_count=1)
# by address: page-locked memory, whose copies do not wait for the host
PINNED: dict[int, Tensor] = {}
_UNDER_WAY: list[Callable[[], object]] = []  # copies; each says what is to be done when it is over
_SYNC_DEBUG: list[Any] = [0]  # modes that were set, the present one last


class _Recorder(TorchDispatchMode):
    """Records operators, and what memory they change that is not the graph's own."""

    now: _Recorder | None = None  # the capture under way

    def __init__(self):
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.own: dict[int, Tensor] = {}  # by address: what was allocated
        self.reads: set[int] = set()
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name in WAITS:
            refuse(name)
        given = tensors(args, kwargs)
        self.reads.update(address(tensor) for tensor in given)
        if func._schema.is_mutable:
            for tensor in given:
                if address(tensor) not in self.own and address(tensor) not in self._before:
                    storage = held(tensor).untyped_storage()
                    self._before[address(tensor)] = storage, storage.clone()
        out = func(*args, **kwargs)
        outs = tensors(out)
        known = {address(tensor) for tensor in given}
        self.own |= {
            address(each): each for each in outs if each.numel() and address(each) not in known
        }
        # aliases, as an operator may change the shape of what it is given
        self.operators.append(
            (func, mapped(_plain, args), mapped(_plain, kwargs), [held(x).detach() for x in outs])
        )
        return out

    def trim_to(self):
        """A capture executes nothing: what was there before is there again."""
        for storage, before in self._before.values():
            storage.copy_(before)


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    _pools: dict[object, list[Graph]] = {}  # noqa: RUF012

    def __init__(self, *given, **named):
        self._trace: _Recorder | None = None
        self._valid: dict[int, Tensor] = {}  # of its own memory, what no other graph has destroyed
        self._pool: list[Graph] = []

    def captured(self, trace: _Recorder, pool):
        """Take what was recorded; its memory holds nothing as yet."""
        self._trace = trace
        self._pool = self._pools.setdefault(pool, []) if pool is not None else []
        self._pool.append(self)
        for tensor in trace.own.values():
            poison(tensor)

    def replay(self):
        """Run the operators once more, into the same memory."""
        trace = self._trace
        assert trace is not None
        LOG.launches += LOG.on
        on = LOG.on
        LOG.on = False
        with torch.inference_mode(), _disable_current_modes():
            for other in self._pool:
                if other is not self:
                    # what this one reads of others' memory was alive when it was captured, so it is
                    # not in its way
                    for place in [each for each in other._valid if each not in trace.reads]:
                        poison(other._valid.pop(place))
            for func, args, kwargs, outs in trace.operators:
                fresh = tensors(func(*args, **kwargs))
                for old, new in zip(outs, fresh, strict=True):
                    if address(old) != address(new):
                        if func.overloadpacket.__name__ in _EMPTY:
                            poison(old)
                        else:
                            old.copy_(new)
        self._valid = dict(trace.own)
        LOG.on = on

    def reset(self):
        """Give the memory back."""
        if self in self._pool:
            self._pool.remove(self)


class Capture:
    """In place of ``torch.cuda.graph``."""

    def __init__(self, graph: Graph, pool=None, stream=None, **named):
        self._graph, self._pool = graph, pool

    def __enter__(self):
        self._on = LOG.on
        LOG.on = False
        self._recorder = _Recorder.now = _Recorder()
        self._recorder.__enter__()

    def __exit__(self, kind, error, trace):
        self._recorder.__exit__(kind, error, trace)
        _Recorder.now = None
        LOG.on = self._on
        with torch.inference_mode():
            self._recorder.trim_to()
        if error is not None:  # as PyTorch does: ending the capture fails, too
            raise RuntimeError("operation failed due to a previous error during capture")
        with torch.inference_mode():
            self._graph.captured(self._recorder, self._pool)


class Event:
    """In place of ``torch.cuda.Event``; as if the current device were not the model's,
    whose stream has to be named.
    """

    def __init__(self, *given, **named): ...

    def record(self, stream=None):
        if stream is None:
            raise RuntimeError(
                "an event of the current device's stream, which need not be the model's"
            )

    def wait(self, stream=None): ...

    def query(self) -> bool:
        return True

    def synchronize(self):
        waited()


class Stream(Event):
    """In place of ``torch.cuda.Stream``."""

    def wait_stream(self, stream): ...

    def wait_event(self, event): ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


def emulate(put: Callable[[Any, str, object], object]):
    """Replace what PyTorch has for CUDA by what is here.

    Args:
        put: as ``setattr``, or as ``monkeypatch.setattr``, which undoes it.
    """
    stream = Stream()
    for name, value in {
        "CUDAGraph": Graph,
        "graph": Capture,
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "graph_pool_handle": object,
        "synchronize": lambda device=None: waited(),
        "get_sync_debug_mode": lambda: _SYNC_DEBUG[-1],
        "set_sync_debug_mode": _SYNC_DEBUG.append,
        "is_current_stream_capturing": lambda: _Recorder.now is not None,
        "get_device_properties": lambda device=None: _CARD,
    }.items():
        put(torch.cuda, name, value)
    put(torch.Tensor, "pin_memory", _pin)
    # what `torch.device` as a context knows of it remembers; it has to be PyTorch's own
    _device_constructors()
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
        put(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args, pin_memory: bool = False, **kwargs) -> Tensor:
        out = make(*args, **kwargs)
        return _pin(out) if pin_memory else out

    return made


def _pin(tensor: Tensor, device=None) -> Tensor:
    PINNED[address(tensor)] = tensor
    return tensor


def refuse(what: str):
    """Fail as CUDA does if something waits, or copies from the host, while a graph is captured."""
    if _Recorder.now is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def synchronized():
    """An operator waits for the device: fails where PyTorch was asked to find such ones."""
    if _SYNC_DEBUG[-1] == "error":
        raise RuntimeError("called a synchronizing CUDA operation")
    waited()


def waited(place: str = ""):
    """Count a wait for the device, after which all copies are over."""
    refuse("a wait")
    with _disable_current_modes():
        while _UNDER_WAY:
            _UNDER_WAY.pop(0)()
    if LOG.on:
        LOG.waits[place or site()] += 1


def under_way(source: Tensor, destination: Tensor):
    """A copy from or to page-locked memory has begun that nothing has waited for yet.

    Until then the host reads nothing that makes sense from where it goes, and must not write to
    where it comes from.
    """
    place = site()
    source = held(source)
    destination = held(destination)
    with _disable_current_modes(), torch.inference_mode():
        if address(source) in PINNED:
            before = source.clone()

            def finish():
                if not torch.equal(source, before):
                    raise RuntimeError(
                        f"page-locked memory was written while it was copied, in {place}"
                    )

            _UNDER_WAY.append(finish)
        elif address(destination) in PINNED:
            arrives = destination.clone()
            poison(destination)
            _UNDER_WAY.append(lambda: destination.copy_(arrives))


def site() -> str:
    """Where in the package something is done: ``file:function``."""
    frame = sys._getframe(1)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/src/tswift/")
        if found and not frame.f_code.co_name.startswith("<"):
            # a comprehension is part of its function
            return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def mapped(change: Callable[[Any], Any], nest):
    """Arguments or results of an operator with every leaf changed;
    ``tree_map`` takes ten times as long.
    """
    if isinstance(nest, (list, tuple)):
        return type(nest)([mapped(change, each) for each in nest])
    if isinstance(nest, dict):
        return {name: mapped(change, each) for name, each in nest.items()}
    return change(nest)


def leaves(nest) -> list[Any]:
    """All of them."""
    found: list[Any] = []
    mapped(found.append, nest)
    return found


def tensors(*nest) -> list[Tensor]:
    """The tensors among arguments or results of an operator."""
    return [leaf for leaf in leaves(nest) if isinstance(leaf, Tensor)]


def _plain(leaf):
    """An argument as the host's operators take it; an alias, as for results."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return held(leaf).detach() if isinstance(leaf, Tensor) else leaf


def held(tensor: Tensor) -> Tensor:
    """The tensor of the host that stands for one of a device."""
    return getattr(tensor, "elem", tensor)


def address(tensor: Tensor) -> int:
    """Of its storage."""
    return held(tensor).untyped_storage().data_ptr()


def poison(tensor: Tensor):
    """Fill memory that nobody may read."""
    tensor = held(tensor)
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min // 2)


class StaticAttention:
    """Attention over a whole cache, masked by a length that only the device knows;
    in place of Triton's.
    """

    STATIC = True
    MAX_NODES = 128
    EXACT = False
    STEPS_BEHIND = False
    PADDED = False
    append = staticmethod(Attention.append)

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None):
        self._prefix, self._nodes, self._ancestors, self._layout = prefix, nodes, ancestors, layout

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        count = self._nodes
        slots = torch.arange(keys.shape[1], device=keys.device)
        node = slots - self._prefix  # the node whose slot it is
        seen = torch.ones(count, count, dtype=torch.bool, device=keys.device).tril()
        seen = seen if self._ancestors is None else self._ancestors
        drafted = (node >= 0) & (node < count)
        reads = (node < 0) | (drafted & seen.index_select(1, node.clamp(0, count - 1)))
        rows = query.unflatten(0, (self._layout.kv_heads, -1))
        scores = torch.einsum("hgnd,hkd->hgnk", rows, keys) * scale
        shares = scores.masked_fill(~reads, -torch.inf).softmax(-1)
        # what slots hold that are not in use may be anything
        known = values.where(reads.any(0)[:, None], 0)
        return torch.einsum("hgnk,hkd->hgnd", shares, known).flatten(0, 1)

    @staticmethod
    def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor):
        """Write new keys and values from ``length`` on."""
        slots = torch.arange(new_keys.shape[1], device=keys.device) + length
        keys.index_copy_(1, slots, new_keys)
        values.index_copy_(1, slots, new_values)


class CodesAttention(StaticAttention):
    """As :class:`StaticAttention`, over a cache of codes, as Triton's reads it."""

    STEPS_BEHIND = True

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        if keys.dtype == torch.int8:
            keys, values = (each * steps_of(each).unsqueeze(-1) for each in (keys, values))
        return super().__call__(query, keys, values, scale)

    @staticmethod
    def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor):
        """As :meth:`StaticAttention.store`."""
        made = []
        for new in (new_keys, new_values):
            steps = new.abs().amax(-1, keepdim=True) / 127
            made.append(((new / steps).round().to(torch.int8), steps[..., 0]))
        (key_codes, key_steps), (value_codes, value_steps) = made
        StaticAttention.store(keys, values, key_codes, value_codes, length)
        StaticAttention.store(steps_of(keys), steps_of(values), key_steps, value_steps, length)


class StaticStates:
    """What steps states by nodes that only the device knows; in place of Triton's kernel.

    Its plans are the parents, or the nodes of a path.
    """

    @staticmethod
    def tree_plan(parents: Tensor) -> Tensor:
        """The parents."""
        return parents

    @staticmethod
    def path_plan(nodes: Tensor) -> Tensor:
        """The nodes."""
        return nodes

    @staticmethod
    def step_tree(rows: Rows, state: Tensor, plan: Tensor) -> Tensor:
        """Step from parents' states."""
        states, found = [state], []
        for node in range(len(plan)):
            before = torch.stack(states).index_select(0, plan[node : node + 1] + 1)[0]
            states.append(torch.empty_like(state))
            found.append(step_plainly(rows, before, [node], [-1], states[-1]))
        return torch.cat(found)

    @staticmethod
    def step_path(rows: Rows, state: Tensor, plan: Tensor, count: Tensor | None):
        """Step the state by what is accepted."""
        parts = (rows.queries, rows.keys, rows.contents, rows.decays, rows.rates)
        chosen = Rows(*(each.index_select(0, plan) for each in parts), rows.corrects)
        for node in range(len(plan)):
            after = torch.empty_like(state)
            step_plainly(chosen, state, [node], [-1], after)
            state.copy_(after if count is None else torch.where(count > node, after, state))
