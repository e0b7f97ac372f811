"""Passes that are captured as CUDA graphs, once for each of a few numbers of nodes.

A GPU runs the kernels of a pass faster than a host can launch them. A static pass keeps all that it
reads and writes in place and takes the cache's length from the device, so that one CUDA graph of it
serves a whole decode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tswift.caches import KVBuffer
from tswift.errors import cause_of
from tswift.forward.passes import Forwarded, Nodes, T

# of passes that are captured; on an H200 one over 32 nodes takes 8% longer than one over 16 after
# 4,096 tokens in bfloat16, and half as long again with weights of codes (results/h200)
_CAPTURED_SIZES = (1, 8, 16, 32, 64)
_SPOILED = "; a capture failed, after which this process may be unable to load other models"
Compute = Callable[[Nodes, Tensor], Forwarded]
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
            out = compute(Nodes(tokens, positions, held, ancestors), length)
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

    def __call__(self, nodes: Nodes) -> Forwarded:
        """As :meth:`tswift.forward.target.Target.forward`, over this pass's cache.

        Raises:
            ValueError: there is no room for all ``nodes`` behind the cache's length.
        """
        length = nodes.kv.length
        if length + self.nodes > nodes.kv.capacity:
            raise ValueError(
                f"a pass of {self.nodes} nodes does not fit behind {length} of "
                f"{nodes.kv.capacity} slots"
            )
        count = len(nodes)
        self._tokens[:count].copy_(nodes.tokens)
        self._positions[:count].copy_(nodes.positions)
        self._ancestors.copy_(self._alone)
        if nodes.ancestors is None:
            self._ancestors[:count, :count].fill_(True).tril_()
        else:
            self._ancestors[:count, :count].copy_(nodes.ancestors)
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
