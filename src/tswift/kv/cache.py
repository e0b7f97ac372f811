"""KV caches: two preallocated tensors, a length, and scratch slots; of a whole text, or of a window of it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MOST = 2**15 - 1
_BROKEN = -(2**15)  # stands for NaN and infinity


@dataclass(frozen=True)
class KVShape:
    """Shape of one token's keys and values.

    Attributes:
        placed: whether a cache whose slots are in no order has to keep positions.
        rounded: what they are rounded to before they are kept; None for no more than ``dtype`` asks for.
        steps: ``[2, layers, heads, head_dim]`` float32, what 1 stands for in keys and in values that are int16.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    placed: bool = False
    rounded: torch.dtype | None = None
    steps: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def eps(self) -> float:
        """Relative rounding of what is kept, roughly: 16-bit integers are used up to a part of their range."""
        return 2**-10 if self.dtype == torch.int16 else torch.finfo(self.dtype).eps

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    def narrowed(self, numbers: Tensor, part: int, layer: int) -> Tensor:
        """Keys (part 0) or values (1) ``[heads, n, head_dim]`` of a layer as they are kept."""
        kind = self.rounded or self.dtype
        if kind != torch.int16:
            return numbers.to(kind)
        assert self.steps is not None
        counts = (numbers / self.steps[part, layer].unsqueeze(1)).round()
        kept = counts.clamp(-_MOST, _MOST).where(counts.isfinite(), _BROKEN).to(torch.int16)
        return kept if self.dtype == kind else self.widened(kept, part, layer)

    def widened(self, kept: Tensor, part: int, layer: int) -> Tensor:
        """What :meth:`narrowed` made, as numbers."""
        if kept.dtype != torch.int16:
            return kept
        assert self.steps is not None
        return (kept * self.steps[part, layer].unsqueeze(1)).masked_fill_(kept == _BROKEN, torch.nan)

    def broken(self, kept: Tensor) -> Tensor:
        """Where kept numbers are not finite."""
        return kept == _BROKEN if kept.dtype == torch.int16 else ~kept.isfinite()

    def allocate(self, capacity: int) -> Tensor:
        """Uninitialised ``[layers, heads, capacity, head_dim]``."""
        made = torch.empty(self.layers, self.heads, capacity, self.head_dim, dtype=self.dtype, device=self.device)
        ask_for_huge_pages(made)
        return made


def ask_for_huge_pages(buffer: Tensor) -> None:
    """Let Linux map memory in pages of 2 MiB: with those of 4 KiB, reading 98,000 keys and values took 16% longer."""
    if buffer.device.type != "cpu" or sys.platform != "linux":
        return
    start = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = buffer.data_ptr() + buffer.nbytes - start
    if size > 0:  # a kernel without such pages refuses, and nothing is lost
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


class KVBuffer:
    """Preallocated keys and values ``[layers, heads, capacity, head_dim]``, and how many tokens of them count.

    Keys are rotated. Slots from ``length`` on are scratch: to roll back is to lower the length.

    Attributes:
        rows: on the CPU, the keys' and the values' bytes ``[layers, heads, capacity, bytes]``; else empty.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.shape, self.capacity, self.length = shape, capacity, 0
        self.keys, self.values = shape.allocate(capacity), shape.allocate(capacity)
        # NumPy's views of the bytes: to move a few tokens, PyTorch takes four times as long
        on_host = shape.device.type == "cpu"
        self.rows = [each.view(torch.uint8).numpy() for each in (self.keys, self.values)] if on_host else []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes

    def places(self, layer: int) -> Tensor:
        """``[heads or 1, length]`` positions in the text of the tokens held."""
        raise NotImplementedError

    def before(self, window: int) -> int:
        """Number of leading slots outside the attention window of every future token; 0 if slots are in no order."""
        return 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put a pass's keys and values ``[heads, n, d]`` into scratch; returns all the layer's, up to these."""
        end, shape = self.length + keys.shape[1], self.shape
        self.keys[layer, :, self.length : end] = shape.narrowed(keys, 0, layer)
        self.values[layer, :, self.length : end] = shape.narrowed(values, 1, layer)
        return shape.widened(self.keys[layer, :, :end], 0, layer), shape.widened(self.values[layer, :, :end], 1, layer)

    def commit(self, slots: Sequence[int]) -> None:
        """Keep the drafted tokens in these scratch slots, counted from ``length``, in this order."""
        count, start = len(slots), self.length
        if list(slots) != list(range(count)):
            if self.rows:
                places = [start + slot for slot in slots]
                for rows in self.rows:
                    rows[:, :, start : start + count] = rows[:, :, places]
            else:
                chosen = torch.tensor(slots).to(self.keys.device, non_blocking=True) + start
                for buffer in (self.keys, self.values):
                    buffer[:, :, start : start + count] = buffer.index_select(2, chosen)
        self.advance(count)

    def advance(self, count: int) -> None:
        """Keep the first ``count`` scratch slots."""
        self.length += count


class FullKV(KVBuffer):
    """Keys and values of a whole text, a token's slot being its position."""

    def places(self, layer: int) -> Tensor:
        """``[1, length]``: the slots."""
        return torch.arange(self.length, device=self.shape.device).unsqueeze(0)

    def take(self, other: FullKV) -> None:
        """Copy another cache of the same model."""
        self.length = other.length
        self.keys[:, :, : self.length] = other.keys[:, :, : self.length]
        self.values[:, :, : self.length] = other.values[:, :, : self.length]

    def before(self, window: int) -> int:
        """As :meth:`KVBuffer.before`."""
        return max(0, self.length - window + 1)


def _slot(place: int, budget: int, sinks: int) -> int:
    """Where the token at a place in the text goes, in a window of the first and the newest: the oldest one's slot."""
    return place if place < budget else sinks + (place - sinks) % (budget - sinks)


def _staying(places: range, budget: int, sinks: int) -> list[int]:
    """Of tokens that enter such a window together, those that none of the others replaces."""
    return [place for place in places if place < sinks or place >= places.stop - (budget - sinks)]


class StreamingKV(KVBuffer):
    """A small model's own cache: a text's first and newest tokens (StreamingLLM, Xiao et al., 2024).

    Tokens are committed behind those held, where they can be taken back; :meth:`settle` lets all but the newest of them
    take the place of the oldest.

    Args:
        shape: of a token.
        budget: most tokens held for good.
        sinks: number of first tokens that always stay; fewer than the budget.
        slack: number of newest tokens that can always be taken back.
        scratch: most tokens that are forwarded before tokens are settled.

    Attributes:
        seen: tokens of the text that were committed, held still or not.
        settled: those of them that cannot be taken back.
    """

    def __init__(self, shape: KVShape, budget: int, sinks: int, slack: int, scratch: int) -> None:
        super().__init__(shape, budget + slack + scratch)
        self.budget, self.sinks, self.slack = budget, sinks, slack
        self.seen = self.settled = 0
        self._places = torch.zeros(budget, dtype=torch.int64, device=shape.device)

    def places(self, layer: int) -> Tensor:
        """``[1, length]``."""
        newer = torch.arange(self.settled, self.seen, device=self._places.device)
        return torch.cat([self._places[: self._held], newer]).unsqueeze(0)

    @property
    def _held(self) -> int:
        return min(self.settled, self.budget)

    def advance(self, count: int) -> None:
        """As for any cache; the tokens can be taken back until they are settled."""
        super().advance(count)
        self.seen += count

    def take_back(self, seen: int) -> None:
        """Forget all tokens of the text but the first ``seen``, of which none is settled that would go.

        Raises:
            ValueError: one is.
        """
        if not self.settled <= seen <= self.seen:
            raise ValueError(f"between {self.settled} and {self.seen} tokens can be kept, not {seen}")
        self.length -= self.seen - seen
        self.seen = seen

    def settle(self) -> None:
        """Let all but the newest ``slack`` tokens take their place in the budget."""
        before, after = self.settled, max(self.settled, self.seen - self.slack)
        if after == before:
            return
        offset = self._held - before  # from a token's place in the text to its slot
        staying = _staying(range(before, after), self.budget, self.sinks)
        kept = {_slot(place, self.budget, self.sinks): place for place in staying}
        self.settled = after
        newer = range(after, self.seen)
        moves = kept | {self._held + place - after: place for place in newer}
        moves = {slot: place + offset for slot, place in moves.items() if slot != place + offset}
        parts: list[list[int]] = [[*kept.keys()], [*kept.values()], [*moves.keys()], [*moves.values()]]
        packed = torch.tensor([each for part in parts for each in part])  # one copy to the device
        sent = packed.to(self.keys.device, non_blocking=True).split([*map(len, parts)])
        self._places.index_copy_(0, sent[0], sent[1])
        if moves:
            for buffer in (self.keys, self.values):
                buffer.index_copy_(2, sent[2], buffer.index_select(2, sent[3]))
        self.length = self._held + self.seen - after


class WindowKV(KVBuffer):
    """Keys and values that are made from committed tokens alone, and of no more than a budget of them.

    A token's slot follows from its place in the text, so that nothing is ever moved. Behind the budget are a slot for
    rows that stand for no token, and scratch slots for a round of drafting, which the next round overwrites.

    Args:
        shape: what one token takes.
        budget: most tokens held.
        sinks: how many of the first tokens always stay; fewer than the budget.
        scratch: scratch slots.

    Attributes:
        scratch: the first of them.
        held: ``[capacity]`` bool on the device: the slots of committed tokens.
    """

    def __init__(self, shape: KVShape, budget: int, sinks: int, scratch: int) -> None:
        super().__init__(shape, budget + 1 + scratch)
        self.budget, self.sinks, self.scratch = budget, sinks, budget + 1
        self.keys.zero_()  # what nothing attends to is multiplied by 0, which it has to bear
        self.values.zero_()
        self.held = torch.zeros(self.capacity, dtype=torch.bool, device=shape.device)

    def slot(self, place: int) -> int:
        """Where the token at a place in the text goes; it takes the place of the oldest."""
        return _slot(place, self.budget, self.sinks)

    def staying(self, places: range) -> Sequence[int]:
        """Of tokens that are committed together, those that none of the others replaces."""
        return _staying(places, self.budget, self.sinks)

    def put(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values ``[heads, n, head_dim]`` into slots ``[n]``, none of them twice but the spare."""
        self.keys[layer].index_copy_(1, slots, keys.to(self.keys.dtype))
        self.values[layer].index_copy_(1, slots, values.to(self.values.dtype))

    def hold(self, slots: Tensor) -> None:
        """Committed tokens are in these slots now."""
        self.held.index_fill_(0, slots, True)
        self.held[self.budget] = False
