"""Passes over the model: what they cost, their state, their results,
and static passes that are replayed as CUDA graphs.

A GPU runs the kernels of a pass faster than a host can launch them. A static pass keeps all that it
reads and writes in place and takes the cache's length from the device, so that one CUDA graph of it
serves a whole decode.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.attention.sdpa import (
    Attention,
    AttentionByHeads,
    BlockwiseAttention,
    MaskedAttention,
    PerLayerAttention,
)
from tswift.caches import KVBuffer
from tswift.errors import cause_of
from tswift.forward.recurrent import StatePass

# spread of repeats up to which a machine counts as idle; it was 1.15 to 1.9 beside a busy process
STEADY = 1.18


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a step that drafts nothing: linear in the keys,
    and piecewise linear in the nodes it verifies.
    """

    nodes: tuple[int, ...]  # measured numbers of nodes, rising; the first is 1
    base: tuple[float, ...]  # seconds of a step over each number of nodes without keys
    per_key: tuple[float, ...]  # seconds more for every key
    level: float  # seconds of drafting one level by heads
    # how many times the least of its repeats a figure usually took while these were measured
    spread: float = 1.0

    @property
    def sound(self) -> bool:
        """Whether these are possible costs."""
        return (
            len(self.nodes) == len(self.base) == len(self.per_key) > 1
            and self.nodes[0] == 1
            and list(self.nodes) == sorted(set(self.nodes))
            and all(0 <= figure < math.inf for figure in (*self.base, *self.per_key, self.level))
            and all(figure > 0 for figure in self.base)
        )

    @property
    def busy(self) -> bool:
        """Whether the machine did other work while these were measured."""
        return self.spread > STEADY

    def must_come_true(self, keys: int) -> float:
        """Share of drafted tokens, one in a step, from which on drafting is quicker than plain
        decoding; above 1 it never is.
        """
        return self.seconds(2, keys) / self.seconds(1, keys) - 1

    def seconds(self, nodes: int, keys: int) -> float:
        """Seconds of a step over ``nodes`` nodes that each attend to ``keys`` keys,
        extrapolated beyond the last.
        """
        base, per_key = self.line(nodes)
        return base + per_key * keys

    def line(self, nodes: int) -> tuple[float, float]:
        """Of a step over so many nodes: seconds without keys, and for every key."""
        known = self._lines.get(nodes)
        if known is None:
            right = min(max(bisect_left(self.nodes, nodes), 1), len(self.nodes) - 1)
            lower = self.nodes[right - 1]
            share = (nodes - lower) / (self.nodes[right] - lower)
            base, per_key = (
                figures[right - 1] + share * (figures[right] - figures[right - 1])
                for figures in (self.base, self.per_key)
            )
            known = self._lines[nodes] = base, per_key
        return known

    @cached_property
    def _lines(self) -> dict[int, tuple[float, float]]:
        """Those that were asked for: they are asked for in every step."""
        return {}

    def node(self, keys: int) -> float:
        """Seconds of one node more, in a tree of usual size."""
        return (self.seconds(16, keys) - self.seconds(8, keys)) / 8


# In seconds on 2 cores of an AMD EPYC, with the bundled model (results/demo-cpu-epyc), a level of
# heads as by the program of today (results/auto-cpu): for choices that are to be the same
# everywhere.
NOMINAL = PassCosts(
    nodes=(1, 5, 8, 16, 64),
    base=(2.1e-3, 2.7e-3, 2.8e-3, 3.2e-3, 6.8e-3),
    per_key=(8.6e-8, 9.5e-8, 9.5e-8, 12.9e-8, 39e-8),
    level=0.15e-3,
)


_PRIOR_PASSES = 4.0  # passes that those of all sizes count for, in what is known of one
_KEPT_PER_PASS = 1 - 1 / 200  # of what passes took, after each
_RESCALED_ABOVE = 1e9  # times the weight of an old pass, after which all are made lighter
# one counts as no less and no more of what was expected: the process may have been stopped
_RATIO_BOUNDS = 0.5, 2.0


class PassTimes:
    """What passes cost, as measured beforehand and corrected by the time that they take.

    Args:
        costs: as measured.
        timed: correct them; without it, choices are the same everywhere.
    """

    def __init__(self, costs: PassCosts = NOMINAL, timed: bool = False) -> None:
        self.costs = costs
        self._timed = timed
        # of late, by measured number of nodes: what passes over so many nodes or a few more took,
        # relative to the costs, added up, and how many there were; and all of them together
        self._took = [0.0] * len(costs.nodes)
        self._count = [0.0] * len(costs.nodes)
        self._all_took = self._all_count = 0.0
        # a newer pass weighs more, which is less work than to make all older ones weigh less
        self._weight = 1.0

    def place(self, nodes: int) -> int:
        """Which measured number is nearest below."""
        return bisect_right(self.costs.nodes, nodes) - 1

    def factor(self, place: int) -> float:
        """Of the costs of passes over the measured number of nodes at this place."""
        before = _PRIOR_PASSES * self._weight
        whole = before * (self._all_took + before) / (self._all_count + before)
        return (self._took[place] + whole) / (self._count[place] + before)

    def learn(self, nodes: int, expected: float, seconds: float, count: int = 1) -> None:
        """Some passes over so many nodes took so many seconds, where the costs say another number.

        Of sizes that few passes have had, all passes tell.
        """
        if not self._timed:
            return
        least, most = _RATIO_BOUNDS
        place = self.place(nodes)
        self._weight /= _KEPT_PER_PASS**count
        counted = count * self._weight
        took = counted * min(max(seconds / expected, least), most)
        self._took[place] += took
        self._all_took += took
        self._count[place] += counted
        self._all_count += counted
        if self._weight > _RESCALED_ABOVE:
            for sums in (self._took, self._count):
                sums[:] = [each / self._weight for each in sums]
            self._all_took /= self._weight
            self._all_count /= self._weight
            self._weight = 1.0


T = TypeVar("T")
Attending = Attention | BlockwiseAttention | AttentionByHeads
Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]

# of passes that are captured; on an H100 one over 32 nodes costs as much as one over 16 after 4,096
# tokens, and 8% more after 100,000 (results/h100)
_CAPTURED_SIZES = (1, 8, 32, 64)
_SPOILED = "; a capture failed, after which this process may be unable to load other models"


@dataclass
class Pass:
    """A pass in progress."""

    # puts a layer's new keys and values ``[kv heads, n, d]`` into the cache; returns what to attend
    # to
    write: Write
    attend: Attending
    # of layers with windows, soft caps or sinks, if there are any
    special: MaskedAttention | PerLayerAttention | None
    nodes: int
    # number that it is padded to; nothing attends to the padding, and nothing of it is kept
    rows: int
    # the cache and its length on the device, if a kernel may write keys and values there itself
    slots: tuple[KVBuffer, Tensor] | None = None
    # whether a row is to have the bits of a narrow pass, however many there are
    batch_invariant: bool = False
    states: StatePass | None = None  # of recurrent layers, if there are any
    # the last fused layer's output, and its rows' squares as kernels add them up
    squares: tuple[Tensor, Tensor] | None = None
    # of the layers so far, ``[query heads, n, d]``, rotated
    queries: list[Tensor] = field(default_factory=list)

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of one layer after the other: from a rotated query to a result of its shape
        ``[heads, rows, d]``.

        ``key`` and ``value`` ``[kv heads, rows, d]`` are the nodes' own; ``scale`` is a factor of
        the scores.
        """
        keys, values = self.write(index, key[:, : self.nodes], value[:, : self.nodes])
        return self.attended(index, query, keys, values, scale)

    def attended(
        self, index: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """As :meth:`layer`, when the cache, which ``keys`` and ``values`` are of, has the nodes'
        own already.

        What the rows of the padding come to may be anything.
        """
        self.queries.append(query[:, : self.nodes])
        special = (
            self.special if self.special is not None and self.special.layer_specs[index] else None
        )
        padded = self.attend.PADDED if special is None else special.PADDED
        if not padded:
            query = query[:, : self.nodes]
        if special is not None:
            out = special(index, query, keys, values, scale)
        else:
            out = self.attend(query, keys, values, scale)
        missing = self.rows - out.shape[1]
        return F.pad(out, (0, 0, 0, missing)) if missing else out


@dataclass(frozen=True)
class Forwarded:
    """Result of a pass."""

    hidden: Tensor  # ``[n, H]`` last hidden states, after the final norm
    # per layer ``[query heads, >= n, head_dim]``, rotated; good until the next prepared pass over
    # any cache
    queries: list[Tensor]
    # ``[n, H]``, before the final norm; None unless the target has a hook for it
    pre_norm: Tensor | None = None
    # ``[n, M * H]``, after M of its layers; None unless it has hooks for them
    layer_states: Tensor | None = None
    # ``[rows, H]``: ``hidden``, and behind it what the pass was padded with; None where there is no
    # such tensor
    padded: Tensor | None = None

    def queries_of(self, nodes: Sequence[int]) -> list[Tensor]:
        """``[query heads, len(nodes), head_dim]`` of some nodes, for each layer."""
        if list(nodes) == list(range(nodes[0], nodes[-1] + 1)):  # no copy of an index to the device
            return [query[:, nodes[0] : nodes[-1] + 1] for query in self.queries]
        chosen = torch.tensor(nodes).to(self.hidden.device, non_blocking=True)
        return [query.index_select(1, chosen) for query in self.queries]


Compute = Callable[[Tensor, Tensor, KVBuffer, Tensor, "Tensor | None"], Forwarded]
Capture = Callable[[Callable[[], T]], Callable[[], T]]
Replays = list[Callable[..., None]]


def sizes(limit: int) -> list[int]:
    """The numbers of nodes for which static passes are prepared,
    for trees of up to ``limit`` nodes.
    """
    return [size for size in _CAPTURED_SIZES if size < limit] + [limit]


class Graphs:
    """State that the CUDA graphs of a model share.

    Attributes:
        failure: why a program could not be captured; empty if all could.
        spoiled: a capture has failed. PyTorch may then refuse all others of the process, so none is
            tried any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failure = ""
        self.spoiled = False
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()  # of their memory
            # for captures: libraries keep memory for every stream they have seen
            self.stream = torch.cuda.Stream()
        # One graph that stays: PyTorch cannot reuse a pool whose graphs have all been freed. Not
        # made in inference
        # mode: what the first capture makes for random numbers serves all others, which may be
        # outside of it.
        with torch.inference_mode(False):
            self._anchor = self.capture(partial(torch.zeros(1, device=device).add_, 1))

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """A program as a graph that can be replayed; the program itself where that fails,
        for a reason in ``failure``.

        It reads and writes tensors that stay in place. It is run twice before the capture, so what
        that changes must be scratch. What it returns is overwritten by every replay.
        """
        if self.spoiled:
            return run
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            try:
                self._warm_up(run, current)
                return self._captured(run)
            except Exception as error:  # decoding without graphs is slower, not wrong
                torch.cuda.set_stream(current)
                self.failure = self.failure or cause_of(error) + (_SPOILED if self.spoiled else "")
                return run

    def _warm_up(self, run: Callable[[], T], current: torch.cuda.Stream) -> None:
        """Run a program twice: to compile and set up what a capture cannot,
        and to see whether it waits.

        What waits for the device cannot be captured. It raises here, where that does no harm.
        """
        mode = torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            run()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self.stream)

    def _captured(self, run: Callable[[], T]) -> Callable[[], T]:
        graph = torch.cuda.CUDAGraph()
        self.spoiled = True  # unless the capture ends well
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            try:
                out = run()
            except Exception as error:
                # when the capture ends PyTorch raises another error, which hides this one
                self.failure = cause_of(error) + _SPOILED
                raise
        self.spoiled = False

        def replay() -> T:
            graph.replay()
            return out

        return replay


class StaticPass:
    """A pass over one cache for trees of up to ``nodes`` nodes, captured when it is first used;
    smaller ones are padded with separate nodes.

    ``compute`` and ``capture`` are the target's ``compute_static`` and ``capture``; the cache has
    room for ``nodes``.
    """

    def __init__(
        self,
        compute: Compute,
        capture: Capture[tuple[Forwarded, Replays]],
        kv: KVBuffer,
        nodes: int,
    ) -> None:
        device = kv.shape.device
        self.nodes = nodes
        self._capacity = kv.capacity
        self._tokens = tokens = torch.zeros(nodes, dtype=torch.int64, device=device)
        self._positions = positions = torch.zeros_like(tokens)
        self._alone = torch.eye(nodes, dtype=torch.bool, device=device)
        self._ancestors = ancestors = self._alone.clone()
        # the capture's warm-up writes keys and values: to scratch slots, which are those behind the
        # length
        self._length = length = torch.full((), kv.length, dtype=torch.int32, device=device)
        owner = weakref.ref(kv)  # passes are kept by their cache, which has to be free to go

        def run() -> tuple[Forwarded, Replays]:
            held = owner()
            assert held is not None
            out = compute(tokens, positions, held, length, ancestors)
            return out, [] if held.states is None else held.states.replays

        self._run = run
        self._capture: Capture[tuple[Forwarded, Replays]] | None = capture
        self._states = kv.states

    @torch.inference_mode()
    def capture(self, length: int) -> None:
        """Capture it behind the cache's length, where a warm-up may write, unless it has been."""
        if self._capture is not None:
            self._length.fill_(length)
            self._run, self._capture = self._capture(self._run), None

    def __call__(
        self, tokens: Tensor, positions: Tensor, ancestors: Tensor | None, length: int
    ) -> Forwarded:
        """Forward a tree; arguments as for :meth:`tswift.forward.target.Target.forward`, and the
        cache's length.

        Raises:
            ValueError: there is no room for all ``nodes`` behind the cache's length.
        """
        if length + self.nodes > self._capacity:
            raise ValueError(
                f"a pass of {self.nodes} nodes does not fit behind {length} of {self._capacity} "
                "slots"
            )
        count = len(tokens)
        self._tokens[:count].copy_(tokens)
        self._positions[:count].copy_(positions)
        self._ancestors.copy_(self._alone)
        if ancestors is None:
            self._ancestors[:count, :count].fill_(True).tril_()
        else:
            self._ancestors[:count, :count].copy_(ancestors)
        self._length.fill_(length)
        self.capture(length)
        out, replays = self._run()
        if self._states is not None:
            self._states.replays = replays
            self._states.chain = 0
        pre_norm, layer_states = (
            None if each is None else each[:count].clone()
            for each in (out.pre_norm, out.layer_states)
        )
        return Forwarded(out.hidden[:count].clone(), out.queries, pre_norm, layer_states)
