"""KV caches: preallocated tensors, a length, and scratch slots; of a whole text, of a window,
or partial.

Layers whose heads are of one number and size share two tensors, one for keys and one for values: in
most models all do. Layers that read another's keys and values keep none of their own.

A recurrent layer keeps no keys and values but a state of fixed size. The cache of a whole text has
both.

The partial cache that drafting reads holds a budget of what the full one does (paper, section 3.3,
and its rivals): the first tokens (sinks), those that a policy's score finds to matter most
(selected) and the newest ones (recent). Keys are cached rotated, so their order in the buffer is
free: a new token overwrites another in place. A policy's score says how
much a key matters, of one layer: ``keys`` ``[kv heads, n, d]`` and ``queries`` ``[kv heads, group,
m, d]`` of the newest ``m`` tokens, rotated both, to ``[kv heads, n]``, the higher the better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from tswift.machine import ask_for_huge_pages

_MOST = 2**15 - 1
_BROKEN = -(2**15)  # stands for NaN and infinity
_MOST_8 = 2**7 - 1
_STEP = torch.float32.itemsize  # bytes
_ALIGNED = 16  # slots of a head whose steps are apart: a multiple, so that all begins at 16 bytes
# of a norm, by bytes of an element, for models of up to _SHALLOW layers
_ROUNDING = {1: 0.1, 2: 0.1, 4: 1e-3, 8: 1e-9}
_SHALLOW = 8


class LayerKV(NamedTuple):
    """What a layer keeps of a token: KV heads, their size, and whose keys and values it reads,
    most often its own.
    """

    heads: int
    head_dim: int
    source: int


@dataclass(frozen=True)
class StateShape:
    """Shape of the states of a model's recurrent layers: rows before a convolution,
    and a matrix per head.

    Attributes:
        taps: of the convolution; the state has one row less.
        heads: 0 where the convolution is all that goes from token to token.
        wide: dtype of the matrices.
    """

    layers: int
    channels: int
    taps: int
    heads: int
    keys: int
    values: int
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        rows = (self.taps - 1) * self.channels * self.dtype.itemsize
        return self.layers * (rows + self.heads * self.keys * self.values * self.wide.itemsize)


class States:
    """States of a text's recurrent layers, after all that was committed.

    A pass changes none of them. It leaves functions which take the nodes that are accepted and
    replay them, as no state is kept of a node: a matrix is as large as the keys and values of a
    hundred tokens. Only the end of a chain is kept, which often is accepted as it is, in prompts
    and in plain decoding always.

    Attributes:
        rows: ``[layers, taps - 1, channels]``, the newest one last.
        matrices: ``[layers, heads, keys, values]``.
        ahead: both at the end of the last pass, if its nodes were a chain.
        chain: how many nodes that had; 0 if they were none.
        replays: of the last pass, given the nodes that are accepted.
        stay: whether programs on the device go on reading and writing these tensors.
    """

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        rows = shape.layers, shape.taps - 1, shape.channels
        self.rows = torch.zeros(rows, dtype=shape.dtype, device=shape.device)
        sizes = shape.layers, shape.heads, shape.keys, shape.values
        self.matrices = torch.zeros(sizes, dtype=shape.wide, device=shape.device)
        self.ahead = torch.zeros_like(self.rows), torch.zeros_like(self.matrices)
        self.chain = 0
        self.replays: list[Callable[..., None]] = []
        self.stay = False

    def commit(self, nodes: Sequence[int]) -> None:
        """Go on by these nodes of the last pass, a path from its root."""
        if len(nodes) != self.chain:
            for replay in self.replays:
                replay(nodes)
        elif self.stay:
            self.rows.copy_(self.ahead[0])
            self.matrices.copy_(self.ahead[1])
        else:
            kept = self.rows, self.matrices
            self.rows, self.matrices = self.ahead
            self.ahead = kept
        self.replays = []

    def commit_path(self, nodes: Tensor, count: Tensor) -> None:
        """As :meth:`commit`, in the program of a pass: by the first ``count`` ``[1]`` nodes, which
        the device alone knows.
        """
        for replay in self.replays:
            replay(nodes, count)
        self.replays = []

    def copy_from(self, other: States) -> None:
        """Copy another text's."""
        self.rows.copy_(other.rows)
        self.matrices.copy_(other.matrices)
        self.replays = []

    def copy(self) -> States:
        """The same states, which stay as they are."""
        made = States(self.shape)
        made.copy_from(self)
        return made


@dataclass(frozen=True)
class KVShape:
    """Shape of one token's keys and values.

    Attributes:
        states: of the model's recurrent layers; None where all layers have keys and values.
        heads, head_dim: of all layers; of the first where they differ.
        by_layer: what each layer keeps, where they differ; empty where all keep the same.
        keeps_positions: whether a cache whose slots are in no order has to keep positions.
        rounds_to: what they are rounded to before they are kept; None for no more than ``dtype``
            asks for.
        steps: ``[2, layers, heads, head_dim]`` float32, what 1 stands for in keys and in values
            that are int16.
        steps_behind: of int8, where the steps of a head's rows are: behind all of its codes, of
            which kernels on a GPU read 16 at a time, or each behind the codes of its row.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    keeps_positions: bool = False
    rounds_to: torch.dtype | None = None
    steps: Tensor | None = field(default=None, compare=False, repr=False)
    steps_behind: bool = False
    states: StateShape | None = None
    by_layer: tuple[LayerKV, ...] = ()

    @cached_property
    def kept(self) -> Sequence[LayerKV]:
        """What each layer keeps."""
        return self.by_layer or [
            LayerKV(self.heads, self.head_dim, layer) for layer in range(self.layers)
        ]

    @cached_property
    def layers_by_size(self) -> dict[tuple[int, int], list[int]]:
        """The layers with keys and values of their own, by the number and size of their heads."""
        found: dict[tuple[int, int], list[int]] = {}
        for layer, own in enumerate(self.kept):
            if own.source == layer:
                found.setdefault((own.heads, own.head_dim), []).append(layer)
        return found

    @property
    def eps(self) -> float:
        """Relative rounding of what is kept, roughly:
        integers are used up to a part of their range.
        """
        return {torch.int16: 2**-10, torch.int8: 2**-5}.get(self.dtype) or torch.finfo(
            self.dtype
        ).eps

    @property
    def rounding(self) -> float:
        """Relative difference that rounding may make between two passes:
        it grows over the layers as a random walk.

        Layers that were summed otherwise gave 0.085 with 32 layers of random weights in bfloat16,
        and 0.11 with 48.
        """
        return _ROUNDING[self.dtype.itemsize] * max(1.0, self.layers / _SHALLOW) ** 0.5

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        numbers = sum(
            heads * self.row(size) * len(layers)
            for (heads, size), layers in self.layers_by_size.items()
        )
        return 2 * numbers * self.dtype.itemsize

    def row(self, head_dim: int) -> int:
        """Elements in which a head's key or value is kept: of int8, bytes, with its step behind."""
        return head_dim + (_STEP if self.dtype == torch.int8 else 0)

    def narrowed(self, numbers: Tensor, part: int, layer: int) -> Tensor:
        """Keys (part 0) or values (1) ``[heads, n, head_dim]`` of a layer as they are kept:
        ``[heads, n, row]``.
        """
        kind = self.rounds_to or self.dtype
        if kind == torch.int8:
            kept = _narrowed_8(numbers)
            return kept if self.dtype == kind else _widened_8(kept)
        if kind != torch.int16:
            return numbers.to(kind)
        assert self.steps is not None
        counts = (numbers / self.steps[part, layer].unsqueeze(1)).round()
        kept = counts.clamp(-_MOST, _MOST).where(counts.isfinite(), _BROKEN).to(torch.int16)
        return kept if self.dtype == kind else self.widened(kept, part, layer)

    def widened(self, kept: Tensor, part: int, layer: int) -> Tensor:
        """What :meth:`narrowed` made, as numbers."""
        if kept.dtype == torch.int8:
            return _widened_8(kept)
        if kept.dtype != torch.int16:
            return kept
        assert self.steps is not None
        return (kept * self.steps[part, layer].unsqueeze(1)).masked_fill_(
            kept == _BROKEN, torch.nan
        )

    def broken(self, kept: Tensor) -> Tensor:
        """Where kept numbers are not finite; of int8, the numbers that they stand for, or steps
        that are apart.
        """
        if kept.dtype == torch.int8:
            return kept > _MOST_8 if self.steps_behind else _widened_8(kept).isnan()
        return kept == _BROKEN if kept.dtype == torch.int16 else ~kept.isfinite()

    def allocate(self, capacity: int) -> list[Tensor]:
        """Uninitialised ``[layers, heads, capacity, row]``,
        for keys and values of each kind of layers; where steps are apart, ``[..., head_dim]`` and
        behind both their steps, ``[..., 1]``.
        """
        made = []
        slots = -(-capacity // _ALIGNED) * _ALIGNED if self.steps_behind else capacity
        for (heads, size), layers in self.layers_by_size.items():
            sizes = len(layers), heads, slots, self.row(size)
            pair = [torch.empty(sizes, dtype=self.dtype, device=self.device) for _ in range(2)]
            for each in pair:
                ask_for_huge_pages(each)
            if self.steps_behind:
                # strides as told, also of dimensions of 1, which a view may give any
                strides = *pair[0].stride()[:2], size, 1
                shape = *sizes[:2], capacity, size
                codes = [each.as_strided(shape, strides) for each in pair]
                pair = [*codes, *(steps_of(each).unsqueeze(-1) for each in codes)]
            made += pair
        return made


def _counted_8(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Each row ``[..., head_dim]`` in steps of its own, int8, and the steps ``[..., 1]``: the
    largest number is 127 of them.

    A row that is not finite has NaN for a step.
    """
    numbers = numbers.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    # by a tensor of the device: PyTorch would multiply by the reciprocal of one of the host, which
    # is not the kernels' quotient in some rows (an H200 said so)
    step = largest / torch.full_like(largest, _MOST_8)
    step = step.where(step.isfinite(), torch.nan)
    counts = (numbers / step).round().clamp(-_MOST_8 - 1, _MOST_8).where(step > 0, 0)
    return counts.to(torch.int8), step


def _narrowed_8(numbers: Tensor) -> Tensor:
    """As :func:`_counted_8`, each row as bytes, 128 for 0, and its step behind it."""
    counts, step = _counted_8(numbers)
    behind = step.clone(memory_format=torch.contiguous_format).view(torch.int8)
    return torch.cat([counts ^ (-_MOST_8 - 1), behind], -1)


def steps_of(codes: Tensor) -> Tensor:
    """The steps ``[..., heads, n]`` float32 of codes ``[..., heads, n, head_dim]``, where these are
    apart: of a head's first ``n`` slots.
    """
    *sizes, slots, size = codes.shape
    *strides, head = codes.stride()[:-2]
    start = codes.storage_offset() + head // (size + _STEP) * size
    behind = codes.as_strided((*sizes, slots * _STEP), (*strides, head, 1), start)
    return behind.view(torch.float32)


def _widened_8(kept: Tensor) -> Tensor:
    counts = kept[..., :-_STEP].view(torch.uint8)
    step = kept[..., -_STEP:].contiguous().view(torch.float32)
    return (counts.float() - (_MOST_8 + 1)) * step


class KVBuffer:
    """Preallocated keys and values, and how many tokens of them count.

    Keys are rotated. Slots from ``length`` on are scratch: to roll back is to lower the length.

    Attributes:
        buffers: keys and values ``[layers, heads, capacity, row]`` of layers that are alike, and
            their steps if these are apart, then of others.
        parts: of each layer, ``[heads, capacity, row]`` each: its part of these.
        keys, values: the first two parts of each layer.
        rows: on the CPU, the buffers' bytes ``[layers, heads, capacity, bytes]``; else empty.
        states: of recurrent layers; None without any, and in caches of a part of a text.
    """

    states: States | None = None

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.length = 0
        self.buffers = shape.allocate(capacity)
        own: dict[int, list[Tensor]] = {}
        count = 4 if shape.steps_behind else 2
        for index, layers in enumerate(shape.layers_by_size.values()):
            alike = self.buffers[count * index :][:count]
            own |= {layer: [each[at] for each in alike] for at, layer in enumerate(layers)}
        self.parts = [own[kept.source] for kept in shape.kept]
        self.keys = [parts[0] for parts in self.parts]
        self.values = [parts[1] for parts in self.parts]
        # NumPy's views of the bytes: to move a few tokens, PyTorch takes four times as long
        self.rows = [each.view(torch.uint8).numpy() for each in self.buffers if each.is_cpu]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers, of keys and of values; steps that are apart are a pair of their own."""
        return list(zip(self.buffers[::2], self.buffers[1::2], strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(each.nbytes for each in self.buffers)

    def positions(self, layer: int) -> Tensor:
        """``[heads or 1, length]`` positions in the text of the tokens held."""
        raise NotImplementedError

    def first_visible_slot(self, window: int) -> int:
        """Number of leading slots outside the attention window of every future token;
        0 if slots are in no order.
        """
        return 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put a pass's keys and values ``[heads, n, d]`` into scratch; returns all the layer's,
        up to these.
        """
        end = self.length + keys.shape[1]
        self.keep(0, layer, self.length, keys)
        self.keep(1, layer, self.length, values)
        return self.numbers(0, layer, slice(end)), self.numbers(1, layer, slice(end))

    def keep(self, part: int, layer: int, start: int, numbers: Tensor) -> None:
        """Put keys (part 0) or values (1) ``[heads, n, head_dim]`` into slots from ``start`` on."""
        slots = slice(start, start + numbers.shape[1])
        own = [each[:, slots] for each in self.parts[layer][part::2]]
        rows = (
            _counted_8(numbers)
            if self.shape.steps_behind
            else [self.shape.narrowed(numbers, part, layer)]
        )
        for to, kept in zip(own, rows, strict=True):
            to.copy_(kept)

    def numbers(
        self, part: int, layer: int, slots: slice | Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Keys (part 0) or values (1) ``[heads, n, head_dim]`` of a layer in some slots, or of
        :attr:`KVShape.dtype`'s numbers in a ``dtype`` that may round them again.
        """
        kept = self.parts[layer][part][:, slots]
        if self.shape.steps_behind:
            dtype = dtype or torch.float32
            return kept.to(dtype).mul_(self.parts[layer][part + 2][:, slots].to(dtype))
        wide = self.shape.widened(kept, part, layer)
        return wide if dtype is None else wide.to(dtype)

    def commit(self, slots: Sequence[int]) -> None:
        """Keep the drafted tokens in these scratch slots, counted from ``length``,
        in this order.
        """
        count = len(slots)
        start = self.length
        if list(slots) != list(range(count)):
            if self.rows:
                places = [start + slot for slot in slots]
                for rows in self.rows:
                    rows[:, :, start : start + count] = rows[:, :, places]
            else:
                chosen = torch.tensor(slots).to(self.shape.device, non_blocking=True) + start
                for buffer in self.buffers:
                    buffer[:, :, start : start + count] = buffer.index_select(2, chosen)
        self.advance(count)

    def advance(self, count: int) -> None:
        """Keep the first ``count`` scratch slots."""
        self.length += count

    def mark(self) -> Mark:
        """What :meth:`rewind` takes to come back to here."""
        return Mark(self.length, None if self.states is None else self.states.copy())

    def rewind(self, mark: Mark) -> None:
        """Take back what was committed since; keys and values of a token before that must not have
        been changed.
        """
        self.length = mark.length
        if self.states is not None and mark.states is not None:
            self.states.copy_from(mark.states)


class Mark(NamedTuple):
    """How far a text had come."""

    length: int
    states: States | None


_MOST_MARKS = 8  # a state is as large as the keys and values of about a hundred tokens


class FullKV(KVBuffer):
    """Keys and values of a whole text, a token's slot being its position;
    and the states of its recurrent layers.

    Attributes:
        marks: places to which recurrent states can go back, in order; None where nobody wants to.
        sound: tokens whose keys and values are known to be finite.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        super().__init__(shape, capacity)
        self.wanted = capacity  # tokens that a decode has asked for
        self.states = None if shape.states is None else States(shape.states)
        self.marks: list[Mark] | None = None
        self.sound = 0

    def remember(self) -> None:
        """Let recurrent states come back to here, if that is wanted; of many such places every
        other one is forgotten.
        """
        if self.states is not None and self.marks is not None:
            self.marks.append(self.mark())
            if len(self.marks) > _MOST_MARKS:
                del self.marks[:-1:2]

    def commit(self, slots: Sequence[int]) -> None:
        """As for any cache."""
        super().commit(slots)
        if self.states is not None:
            self.states.commit(slots)

    def positions(self, layer: int) -> Tensor:
        """``[1, length]``: the slots."""
        return torch.arange(self.length, device=self.shape.device).unsqueeze(0)

    def rewind(self, mark: Mark) -> None:
        """As for any cache."""
        super().rewind(mark)
        self.sound = min(self.sound, mark.length)
        if self.marks is not None:
            self.marks = [each for each in self.marks if each.length <= mark.length]

    def copy_from(self, other: FullKV, length: int | None = None) -> None:
        """Copy another cache of the same model, or its first ``length`` tokens."""
        self.length = other.length if length is None else length
        self.marks, self.sound = other.marks, other.sound
        pairs = zip(self.rows or self.buffers, other.rows or other.buffers, strict=True)
        for own, theirs in pairs:
            own[:, :, : self.length] = theirs[:, :, : self.length]  # type: ignore[index]
        if self.states is not None and other.states is not None:
            self.states.copy_from(other.states)

    def first_visible_slot(self, window: int) -> int:
        """As :meth:`KVBuffer.first_visible_slot`."""
        return max(0, self.length - window + 1)


class RecentKV(KVBuffer):
    """A cache of a text's first and newest tokens: ``budget`` of them,
    of which the ``sinks`` first always stay.
    """

    def __init__(self, shape: KVShape, budget: int, sinks: int, more: int) -> None:
        super().__init__(shape, budget + more)
        self.budget = budget
        self.sinks = sinks

    def slot(self, place: int) -> int:
        """Where the token at a place in the text goes; it takes the place of the oldest."""
        ring = self.budget - self.sinks
        return place if place < self.budget else self.sinks + (place - self.sinks) % ring

    def staying(self, places: range) -> list[int]:
        """Of tokens that enter the budget together, those that none of the others replaces."""
        newest = places.stop - (self.budget - self.sinks)
        return [place for place in places if place < self.sinks or place >= newest]


class StreamingKV(RecentKV):
    """A small model's own cache: a text's first and newest tokens (StreamingLLM, Xiao et al.,
    2024).

    Tokens are committed behind those held, where the ``slack`` newest can always be taken back;
    :meth:`settle` lets the others take the place of the oldest. At most ``scratch`` tokens are
    forwarded before that.

    Attributes:
        seen: tokens of the text that were committed, held still or not.
        settled: those of them that cannot be taken back.
    """

    def __init__(self, shape: KVShape, budget: int, sinks: int, slack: int, scratch: int) -> None:
        super().__init__(shape, budget, sinks, slack + scratch)
        self.slack = slack
        self.seen = self.settled = 0
        self._positions = torch.zeros(budget, dtype=torch.int64, device=shape.device)

    def positions(self, layer: int) -> Tensor:
        """``[1, length]``."""
        newer = torch.arange(self.settled, self.seen, device=self._positions.device)
        return torch.cat([self._positions[: self._held], newer]).unsqueeze(0)

    @property
    def _held(self) -> int:
        return min(self.settled, self.budget)

    def advance(self, count: int) -> None:
        """As for any cache; the tokens can be taken back until they are settled."""
        super().advance(count)
        self.seen += count

    def trim_to(self, seen: int) -> None:
        """Forget all tokens of the text but the first ``seen``;
        ValueError if one is settled that would go.
        """
        if not self.settled <= seen <= self.seen:
            raise ValueError(
                f"between {self.settled} and {self.seen} tokens can be kept, not {seen}"
            )
        self.length -= self.seen - seen
        self.seen = seen

    def settle(self) -> None:
        """Let all but the newest ``slack`` tokens take their place in the budget."""
        before = self.settled
        after = max(self.settled, self.seen - self.slack)
        if after == before:
            return
        offset = self._held - before  # from a token's position in the text to its slot
        kept = {self.slot(position): position for position in self.staying(range(before, after))}
        self.settled = after
        newer = range(after, self.seen)
        moves = kept | {self._held + position - after: position for position in newer}
        moves = {
            slot: position + offset for slot, position in moves.items() if slot != position + offset
        }
        parts: list[list[int]] = [
            [*kept.keys()],
            [*kept.values()],
            [*moves.keys()],
            [*moves.values()],
        ]
        packed = torch.tensor([each for part in parts for each in part])  # one copy to the device
        sent = packed.to(self.shape.device, non_blocking=True).split([*map(len, parts)])
        self._positions.index_copy_(0, sent[0], sent[1])
        if moves:
            for buffer in self.buffers:
                buffer.index_copy_(2, sent[2], buffer.index_select(2, sent[3]))
        self.length = self._held + self.seen - after


class WindowKV(RecentKV):
    """Keys and values that are made from committed tokens alone,
    and of no more than a budget of them.

    A token's slot follows from its place in the text, so that nothing is ever moved. Behind the
    budget are a slot for rows that stand for no token, and scratch slots for a round of drafting,
    which the next round overwrites.

    Attributes:
        scratch: the first of them.
        held: ``[capacity]`` bool on the device: the slots of committed tokens.
    """

    def __init__(self, shape: KVShape, budget: int, sinks: int, scratch: int) -> None:
        super().__init__(shape, budget, sinks, 1 + scratch)
        self.scratch = budget + 1
        for buffer in self.buffers:
            # what nothing attends to is multiplied by 0, which it has to bear
            buffer.zero_()
        self.held = torch.zeros(self.capacity, dtype=torch.bool, device=shape.device)

    def put(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values ``[heads, n, head_dim]`` into slots ``[n]``,
        none of them twice but the spare.
        """
        self.keys[layer].index_copy_(1, slots, keys.to(self.shape.dtype))
        self.values[layer].index_copy_(1, slots, values.to(self.shape.dtype))

    def hold(self, slots: Tensor) -> None:
        """Committed tokens are in these slots now."""
        self.held.index_fill_(0, slots, True)
        # not `held[budget] = False`: PyTorch copies the number from the host for that, which no
        # CUDA graph may contain
        self.held[self.budget : self.budget + 1].fill_(False)


Score = Callable[[Tensor, Tensor], Tensor]

RETRIEVED_TOGETHER = 8  # tokens that are retrieved together (TriForce, section 4.1)
_OBSERVED = 32  # newest queries that SnapKV looks at
_POOL = 7  # neighbours that SnapKV averages over


@dataclass(frozen=True)
class Policy:
    """What a partial cache holds beside the first tokens.

    Attributes:
        recent: share of the budget that the newest tokens take in every selection.
        score: importance of keys, for the rest of the budget; None where there is no rest.
        renews: select anew from everything once new tokens have taken the place of those selected.
            Otherwise those stay, and new tokens take the place of the oldest new ones.
        observes: number of newest queries that the score looks at.
    """

    recent: float
    score: Score | None
    renews: bool
    observes: int = 1


def by_query(keys: Tensor, queries: Tensor) -> Tensor:
    """Dot products with the newest query, summed over the query heads of a KV head (TokenSwift,
    section 3.3).
    """
    return (keys @ queries[:, :, -1].sum(1).unsqueeze(-1)).squeeze(-1)


def by_attention(keys: Tensor, queries: Tensor) -> Tensor:
    """The attention that the newest tokens pay, averaged over neighbours (SnapKV, Li et al., 2024).

    The softmax is over these keys alone; the products are scaled by the root of the head's size.
    """
    rows = queries.flatten(1, 2) * keys.shape[-1] ** -0.5
    paid = (rows @ keys.transpose(1, 2)).float().softmax(-1).sum(1)
    return avg_pool1d(
        paid.unsqueeze(1), _POOL, stride=1, padding=_POOL // 2, count_include_pad=False
    ).squeeze(1)


def by_chunk(keys: Tensor, queries: Tensor) -> Tensor:
    """Dot products of the newest query with the mean key of every chunk,
    the same for all of its tokens (TriForce).
    """
    count = keys.shape[1]
    spare = -count % RETRIEVED_TOGETHER
    sums = pad(keys, (0, 0, 0, spare)).unflatten(1, (-1, RETRIEVED_TOGETHER)).sum(2)
    sizes = keys.new_full((sums.shape[1], 1), RETRIEVED_TOGETHER)
    sizes[-1:] -= spare
    scores = by_query(sums / sizes, queries)
    return scores.repeat_interleave(RETRIEVED_TOGETHER, dim=1)[:, :count]


POLICIES: dict[str, Policy] = {
    "dynamic": Policy(0.25, by_query, renews=True),
    "partial": Policy(0.25, by_query, renews=False),
    "streaming": Policy(1.0, None, renews=False),
    "snapkv": Policy(0.25, by_attention, renews=True, observes=_OBSERVED),
    "retrieval": Policy(0.25, by_chunk, renews=True),
}


class PartialKV(KVBuffer):
    """A budget of at least 8 keys and values copied from a full cache,
    at most a quarter of them sinks.

    At most ``scratch`` tokens are forwarded over what is held.

    Attributes:
        copied: tokens of the full cache seen so far: held, or passed over by a selection.
        selections: number of selections from everything.
    """

    def __init__(
        self,
        shape: KVShape,
        budget: int = 4096,
        sinks: int = 16,
        policy: Policy = POLICIES["dynamic"],
        scratch: int = 1,
    ) -> None:
        super().__init__(shape, budget + scratch)
        self.budget = budget
        self.sinks = sinks
        self.policy = policy
        # newest tokens that every selection takes
        self.recent = int((budget - sinks) * policy.recent)
        self.selections = 0
        self.copied = 0
        self._held = 0  # slots that hold copies; what is behind them was drafted
        self._free = list(range(budget))[::-1]  # slots for new tokens, the next one last
        # slots that new tokens take when none is free, the oldest first
        self._aging: deque[int] = deque()
        slots = self.capacity if shape.keeps_positions else 0
        self._positions = [
            torch.zeros(kept.heads, slots, dtype=torch.int64, device=shape.device)
            for kept in shape.kept
        ]
        self.device_length: Tensor | None = None  # [] int32, where programs on the device append

    @property
    def room(self) -> int:
        """New tokens that fit before a selection is due."""
        return len(self._free)

    def positions(self, layer: int) -> Tensor:
        """``[heads, length]``: every KV head has selected for itself."""
        own = self._positions[self.shape.kept[layer].source]
        drafted = torch.arange(self.length - self._held, device=own.device)
        own[:, self._held : self.length] = self.copied + drafted
        return own[:, : self.length]

    def clear(self) -> None:
        """Take back what was forwarded over what is held, and committed."""
        self.length = self._held

    def follow(
        self, full: KVBuffer, queries: Callable[[], Sequence[Tensor]] | None, most: int
    ) -> None:
        """Keep up with a full cache that has grown; nothing may be committed over what is held.

        ``queries`` gives those that :meth:`select` takes; None before the first pass. Room is made
        for ``most`` tokens, by which the full cache grows at most until the next call.
        """
        new = full.length - self.copied
        stays = self.copied > 0 and not self.policy.renews
        if queries is not None and not stays and (new + most > self.room or not self.policy.renews):
            self.select(full, queries())
        else:
            self.append(full)

    def append(self, full: KVBuffer) -> None:
        """Copy the tokens that the full cache has committed since the last call.

        Where the policy renews, there are at most ``room`` of them.
        """
        before = self.copied
        new = full.length - self.copied
        if not new:
            return
        kept = self.appended(new)
        where = list(kept.keys())
        source = list(kept.values())
        if self.rows:
            for own, theirs in zip(self.rows, full.rows, strict=True):
                own[:, :, where] = theirs[:, :, source]
        else:
            sent = torch.tensor([where, source]).to(self.shape.device, non_blocking=True)
            for to, other in zip(self.buffers, full.buffers, strict=True):
                whole = (
                    other[:, :, before : full.length]
                    if len(kept) == new
                    else other.index_select(2, sent[1])
                )
                to.index_copy_(2, sent[0], whole)
        if self.shape.keeps_positions:
            places = torch.tensor(source).to(self.shape.device, non_blocking=True)
            for held in self._positions:
                held[:, where] = places

    def track(self) -> None:
        """Keep the length on the device from now on, where :meth:`Attention.append` moves it.

        The host learns of what was appended by :meth:`appended`.
        """
        self.device_length = torch.full(
            (), self.length, dtype=torch.int32, device=self.shape.device
        )

    def next_slots(self, count: int) -> list[int]:
        """The slots that the next ``count`` tokens go to; scratch where a selection comes first."""
        slots = [*self._free[-count:][::-1], *self._aging][:count]
        return slots + [self.capacity - 1] * (count - len(slots))

    def appended(self, count: int) -> dict[int, int]:
        """So many tokens are appended, as by the device; their places by the slots that they go to.

        Of many at once the oldest may be overwritten already.
        """
        places: dict[int, int] = {}
        for place in range(self.copied, self.copied + count):
            slot = self._free.pop() if self._free else self._aging.popleft()
            if not self.policy.renews and place >= self.sinks:
                self._aging.append(slot)
            places[slot] = place
        self._held = self.length = max(self._held, max(places, default=-1) + 1)
        self.copied += count
        return places

    def select(self, full: KVBuffer, queries: Sequence[Tensor]) -> None:
        """Fill the budget anew: sinks, the newest tokens, and the keys that score highest,
        by each KV head for itself.

        ``queries`` are each layer's ``[query heads, m, head_dim]``, rotated, of the newest tokens.
        Keys that several layers read are looked at by the queries of all of them.
        """
        text = full.length
        shape = self.shape
        held = min(text, self.budget)
        sinks = min(self.sinks, text)
        recent = min(self.recent, text - sinks)
        chosen = held - sinks - recent
        always = [*range(sinks), *range(text - recent, text)]
        fixed = torch.tensor(always, dtype=torch.int64).to(shape.device, non_blocking=True)
        for layer, kept in enumerate(shape.kept):
            if kept.source != layer:
                continue
            places = fixed.expand(kept.heads, -1)
            if chosen and self.policy.score is not None:
                readers = [each for each, other in enumerate(shape.kept) if other.source == layer]
                asking = torch.cat(
                    [queries[each].unflatten(0, (kept.heads, -1)) for each in readers], 1
                )
                keys = full.numbers(0, layer, slice(sinks, text - recent), asking.dtype)
                best = self.policy.score(keys, asking).topk(chosen).indices
                places = torch.cat([places, best + sinks], dim=-1)
            if shape.keeps_positions:
                self._positions[layer][:, :held] = places
            for own, theirs in zip(self.parts[layer], full.parts[layer], strict=True):
                order = places.unsqueeze(-1).expand(-1, -1, own.shape[-1])
                own[:, :held] = theirs.gather(1, order)
        self._held = self.length = held
        if self.device_length is not None:
            self.device_length.fill_(held)
        self.copied = text
        empty = [*range(held, self.budget)[::-1]]
        if self.policy.renews:
            # new tokens take empty slots first, then those of the selected, the last ones first
            self._free = [*range(len(always), held), *empty]
        else:
            self._free = empty
            self._aging = deque(range(sinks, len(always)))
        self.selections += 1
