"""The interface of attention backends, and tree attention from stock operators.

The prefix is read without a mask, the tree with a small one, and both are merged by their
log-sum-exps. The query heads that share a KV head are packed into rows, so keys and values are
never expanded. Beside it: the prefix through flash-attn, attention as reference implementations do
it, layers with windows, soft caps or sinks, and exact rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.caches import KVBuffer

# of a KV head in a CUDA pass, for which reading the keys takes as long as multiplying them
ROWS = 128

# Most nodes of a pass with exact rows, and so of a path in its tree. An exact backend sums the
# newest keys of a node in the order of their positions, and a node's result must not depend on how
# many of these are drafted.
MAX_WIDTH = 64


@dataclass(frozen=True)
class Layout:
    """Layers' KV heads, query heads per KV head, dtype and device of queries, keys and values,
    and their width.
    """

    kv_heads: int
    groups: int
    dtype: torch.dtype
    device: torch.device
    width: int = 64


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention has beside softmax over scaled products; all None for nothing.

    Attributes:
        window: number of tokens that a node sees, itself included; None for all.
        softcap: scores are squeezed to between minus and plus this by a hyperbolic tangent.
        sinks: ``[query heads]`` scores that take part in the softmax and stand for no key.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __bool__(self) -> bool:
        return self.window is not None or self.softcap is not None or self.sinks is not None


class Attention(Protocol):
    """Attention of one pass; what its layers share is computed once, when it is made.

    Args:
        layout: the model's.
        prefix: number of keys before the pass's own; every node attends to those.
        nodes: number of nodes.
        ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row
            itself; None where every node descends from all before it.

    Attributes:
        STATIC: whether ``prefix`` may be a tensor on the device, ``[]`` int32, with keys and values
            ``[kv heads, capacity, d]``, so that a pass can be replayed while the text grows.
        SPECS: whether a call also takes an :class:`AttentionSpec`, ``spec``, over a cache whose
            slots are positions.
        MAX_NODES: most nodes of a tree; None for no limit.
        EXACT: whether a node's row has the same bits whatever other nodes are in the pass, wherever
            it stands among them, and whether its ancestors are drafted or committed; in passes of
            up to :data:`MAX_WIDTH` nodes over a cache whose slots are positions.
        STEPS_BEHIND: whether int8 keys and values are ``[kv heads, n, d]``, with their steps as
            :func:`~tswift.caches.steps_of` gives them.
        PADDED: whether a query may have more rows than there are nodes. The result has as many, and
            what is in those that stand for no node may be anything.
    """

    STATIC: ClassVar[bool] = False
    SPECS: ClassVar[bool] = False
    MAX_NODES: ClassVar[int | None] = None
    EXACT: ClassVar[bool] = False
    STEPS_BEHIND: ClassVar[bool] = False
    PADDED: ClassVar[bool] = False

    def __init__(
        self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None
    ) -> None: ...

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend: ``[query heads, n, d]`` from a query of that shape, rotated.

        Keys, rotated, and values are ``[kv heads, prefix + n, d]``, the last n the nodes' own;
        ``scale`` is the factor of the scores.
        """
        ...

    @staticmethod
    def store(
        keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor
    ) -> None:
        """If it is ``STATIC``: write new keys and values ``[kv heads, n, d]`` into the cache's from
        ``length`` on.
        """
        raise RuntimeError("it is not static")

    @staticmethod
    def append(
        own: Sequence[Tensor],
        full: Sequence[Tensor],
        places: Tensor,
        slots: Tensor,
        count: Tensor,
        length: Tensor | None = None,
    ) -> None:
        """Copy accepted keys and values ``[layers, kv heads, slots, d]`` of a text's cache into
        slots of a partial one, or of the same, where no slot is behind the place that it is
        copied from.

        Of the ``places`` ``[m]`` in the ``full`` cache the first ``count`` ``[1]`` go to ``slots``
        ``[m]``; the others' stay as they are. The ``length`` ``[]`` int32 of a partial cache grows
        to hold them.
        """
        kept = torch.arange(len(places), device=places.device) < count
        for ours, theirs in zip(own, full, strict=True):
            rows = theirs.index_select(2, places)
            ours.index_copy_(2, slots, rows.where(kept[:, None], ours.index_select(2, slots)))
        if length is not None:
            length.copy_(torch.maximum(length, torch.where(kept, slots + 1, 0).amax()))


def chain(nodes: int, device: torch.device) -> Tensor:
    """The ancestors ``[n, n]`` of nodes each of which descends from all before it."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril_()


def bias(
    layout: Layout, before: int, nodes: int, ancestors: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The mask added to scores: ``[n, before + n]``,
    0 where a node attends and ``-inf`` where it does not.

    Every node attends to the ``before`` keys; ``ancestors`` are as for :class:`Attention`.
    """
    out = torch.zeros(nodes, before + nodes, dtype=dtype, device=layout.device)
    if ancestors is None:
        ancestors = chain(nodes, layout.device)
    out[:, before:].masked_fill_(~ancestors, -torch.inf)
    return out


_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BLOCK = 8192  # keys scored at a time where no operator returns log-sum-exps
_MASKED_BLOCK = 2048  # keys scored at a time in masked attention


class TreeAttention(Attention):
    """Attention by stock operators, for every device and dtype."""

    def __init__(
        self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None
    ) -> None:
        self._on_cpu = layout.device.type == "cpu"
        # a single node attends to itself, too: it needs no mask
        self._seen = int(prefix) + (nodes == 1)
        # bf16 scores would cost two digits
        self._wide = torch.promote_types(layout.dtype, torch.float32)
        if nodes > 1:
            own = bias(layout, 0, nodes, ancestors, self._wide)
            self._bias = own.repeat(layout.groups, 1)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        rows = query.reshape(keys.shape[0], -1, query.shape[-1])
        seen = self._seen
        wide = self._wide
        found = []
        if seen:
            found.append(self._prefix(rows, keys[:, :seen], values[:, :seen], scale))
        if seen < keys.shape[1]:
            own = keys[:, seen:].to(wide), values[:, seen:].to(wide)
            found.append(self._tail(rows.to(wide), *own, scale))
        if len(found) == 1:
            return found[0][0].view_as(query).to(query.dtype)
        outs, lses = (
            torch.stack([each.to(wide) for each in both]) for both in zip(*found, strict=True)
        )
        shares = lses.softmax(0).unsqueeze(-1)
        return (outs * shares).sum(0).view_as(query).to(query.dtype)

    def _tail(
        self, rows: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[kv heads, rows, d]`` and log-sum-exps over the nodes' own keys."""
        if not self._on_cpu:
            return _attended(rows, keys, values, scale, self._bias)
        outs, lses = _OPERATOR(
            rows[None], keys[None], values[None], attn_mask=self._bias[None, None], scale=scale
        )
        return outs[0], lses[0]

    def _prefix(
        self, rows: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output ``[kv heads, rows, d]`` and log-sum-exps over keys that all see."""
        if self._on_cpu:
            read = keys.to(rows.dtype), values.to(rows.dtype)
            outs, lses = _OPERATOR(rows[None], *(x[None] for x in read), scale=scale)
            return outs[0], lses[0]
        blocks = zip(keys.split(_BLOCK, 1), values.split(_BLOCK, 1), strict=True)
        outs, lses = zip(*(_attended(rows, *block, scale) for block in blocks), strict=True)
        shares = torch.stack(lses).softmax(0).unsqueeze(-1)
        return (torch.stack(outs) * shares).sum(0), torch.stack(lses).logsumexp(0)


def _attended(
    rows: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps of rows over keys, from plain products."""
    wide = torch.promote_types(rows.dtype, torch.float32)  # unscaled float16 scores could overflow
    rows, keys, values = (x.to(wide) for x in (rows, keys, values))
    begun = rows.new_empty(()) if bias is None else bias
    scores = torch.baddbmm(
        begun, rows, keys.transpose(1, 2), beta=int(bias is not None), alpha=scale
    )
    lse = scores.logsumexp(-1)
    return torch.bmm(torch.exp(scores - lse.unsqueeze(-1)), values), lse


class FlashAttention(TreeAttention):
    """Attention with the prefix through flash-attn, for CUDA in bfloat16 and float16;
    ImportError without it.
    """

    def __init__(
        self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None
    ) -> None:
        from flash_attn import flash_attn_with_kvcache

        super().__init__(layout, prefix, nodes, ancestors)
        self._flash = flash_attn_with_kvcache

    def _prefix(
        self, rows: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        # Each KV head is a batch entry with one head, and its rows are the positions: nothing is
        # copied or expanded.
        out, lse = self._flash(
            rows.unsqueeze(2),
            keys.unsqueeze(2),
            values.unsqueeze(2),
            softmax_scale=scale,
            causal=False,
            return_softmax_lse=True,
        )
        return out.squeeze(2), lse.squeeze(1)


class ReferenceAttention(Attention):
    """Attention as reference implementations of speculative decoding do it: slow on purpose,
    for comparison.

    At every step keys and values are expanded to all query heads, and a dense mask covers the whole
    text. Published speedups are relative to plain decoding of this kind.
    """

    def __init__(
        self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None
    ) -> None:
        prefix = int(prefix)
        self._groups = layout.groups
        self._mask = bias(layout, prefix, nodes, ancestors, layout.dtype)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        keys, values = (
            x.repeat_interleave(self._groups, dim=0).unsqueeze(0) for x in (keys, values)
        )
        return F.scaled_dot_product_attention(
            query.unsqueeze(0), keys, values, self._mask, scale=scale
        )[0]


class MaskedAttention:
    """Attention of one pass with windows, soft caps and sinks (``spec``, by layer),
    by masked products over blocks.

    For every device and dtype: slower than the backends where a layer sees the whole text, and
    cheap where it sees a window, as keys before the window are not read. The nodes, at
    ``positions`` ``[n]``, attend to a cache.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        spec: Sequence[AttentionSpec],
        kv: KVBuffer,
        positions: Tensor,
        ancestors: Tensor | None,
    ) -> None:
        self.layer_specs = spec
        self._cache = kv
        self._positions = positions
        if ancestors is None:
            ancestors = chain(len(positions), positions.device)
        self._ancestors = ancestors
        self._wide = torch.promote_types(dtype, torch.float32)

    def __call__(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """As :meth:`Attention.__call__`, of one layer."""
        spec = self.layer_specs[layer]
        start = 0 if spec.window is None else self._cache.first_visible_slot(spec.window)
        visible = self._visible(layer, spec.window, start)
        wide = self._wide
        heads = len(keys)
        rows = query.unflatten(0, (heads, -1)).to(wide) * scale  # [kv heads, groups, n, d]
        # stands for minus infinity, which a block without a visible key would give
        lowest = torch.finfo(wide).min
        out = torch.zeros_like(rows)
        total = rows.new_full(rows.shape[:-1], lowest)
        for at in range(start, keys.shape[1], _MASKED_BLOCK):
            block = slice(at, at + _MASKED_BLOCK)
            scores = rows @ keys[:, None, block].to(wide).transpose(2, 3)
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            scores.masked_fill_(
                ~visible[:, None, :, at - start : at - start + _MASKED_BLOCK], -torch.inf
            )
            larger = torch.logaddexp(total, scores.logsumexp(-1)).clamp_min(lowest)
            shares = torch.exp(scores - larger.unsqueeze(-1))
            out = out * torch.exp(total - larger).unsqueeze(-1) + shares @ values[
                :, None, block
            ].to(wide)
            total = larger
        if spec.sinks is not None:
            sinks = spec.sinks.to(wide).view(heads, -1, 1)
            out = out * torch.exp(total - torch.logaddexp(total, sinks)).unsqueeze(-1)
        return out.flatten(0, 1).to(query.dtype)

    def _visible(self, layer: int, window: int | None, start: int) -> Tensor:
        """``[kv heads or 1, n, keys]`` bool: true where a node sees a key,
        from slot ``start`` on.
        """
        held = self._cache.length - start
        nodes = len(self._positions)
        if window is None:
            before = self._ancestors.new_ones(1, nodes, held)
            return torch.cat([before, self._ancestors.unsqueeze(0)], dim=2)
        first = self._positions - window  # the last position that is out of sight
        before = self._cache.positions(layer)[:, None, start:] > first[:, None]
        own = self._ancestors & (self._positions > first[:, None])
        return torch.cat([before, own.expand(len(before), -1, -1)], dim=2)


_LEAST, _MOST = 256, 2048  # keys of a block
# difference of scores; exponentials that are no normal float32 take a CPU 50 times as long
_LOWEST = -80.0
_NOTHING = AttentionSpec()


class BatchInvariantAttention(Attention):
    """Attention with exact rows, for every device and dtype:
    a node's row has the same bits in whatever pass it is.

    A product of matrices in another shape sums in another order, and on some CPUs even a row's
    place within one decides how it is summed. So a product here has the rows of one node, and its
    shape is fixed. What a node at position p sees is cut by p alone:

    - its **tail**, the 64 newest positions up to p, is gathered along the node's own path in the
      order of positions, so that drafted ancestors, which leave gaps between their slots, and
      committed ones give the same bits;
    - all **before it** is committed, as no path in a pass is longer. It is read in blocks with
      fixed borders, with zero weights for the slots that a node does not see. A block of which it
      sees nothing leaves its sums as they are.

    In a tree, nodes come after their ancestors. A chain may be longer than a tree: it is computed
    piece by piece.
    """

    SPECS: ClassVar[bool] = True
    MAX_NODES: ClassVar[int | None] = MAX_WIDTH
    EXACT: ClassVar[bool] = True

    def __init__(
        self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None
    ) -> None:
        self._prefix = int(prefix)
        self._nodes = min(nodes, MAX_WIDTH)
        self._groups = layout.groups
        self._rest = None
        if nodes > MAX_WIDTH:
            if ancestors is not None:
                raise ValueError(f"a tree of {nodes} nodes has more than {MAX_WIDTH}")
            self._rest = BatchInvariantAttention(
                layout, self._prefix + MAX_WIDTH, nodes - MAX_WIDTH, None
            )
        # bf16 scores would cost two digits
        self._wide = torch.promote_types(layout.dtype, torch.float32)
        if ancestors is None:
            ancestors = chain(self._nodes, layout.device)
        self._positions = (self._prefix + ancestors.sum(1) - 1).view(-1, 1, 1, 1)
        # the slots of each path; below 0 where the text begins later
        slots = torch.arange(
            self._prefix - MAX_WIDTH + 1, self._prefix + self._nodes, device=layout.device
        )
        seen = F.pad(ancestors, (MAX_WIDTH - 1, 0), value=True)
        self._path = torch.where(seen, slots, -1).sort(1).values[:, -MAX_WIDTH:]

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        spec: AttentionSpec = _NOTHING,
    ) -> Tensor:
        """As :meth:`Attention.__call__`; every token's slot is its position, the root's too."""
        if self._rest is not None:
            rest = self._rest(query[:, MAX_WIDTH:], keys, values, scale, spec)
        heads = len(keys)
        width = query.shape[-1]
        packed = query[:, : self._nodes].to(self._wide) * scale
        # by node, each in memory of its own: how that is aligned may matter, too
        rows = [
            row.clone(memory_format=torch.contiguous_format)
            for row in packed.view(heads, self._groups, -1, width).permute(2, 0, 1, 3)
        ]
        top, out = self._tail(rows, keys, values, spec)
        top, out = self._before(rows, keys, values, spec, top, out)
        if spec.sinks is not None:
            sinks = spec.sinks.to(self._wide).view(heads, -1, 1)
            higher = torch.maximum(top, sinks)
            out = out * torch.exp(top - higher)
            out[..., width:] += torch.exp(sinks - higher)
        out = (out[..., :width] / out[..., width:]).flatten(1, 2).transpose(0, 1).to(query.dtype)
        return out if self._rest is None else torch.cat([out, rest], dim=1)

    def _tail(
        self, rows: list[Tensor], keys: Tensor, values: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attention to the newest positions, gathered for each node,
        whose rows are ``[kv heads, groups, d]``, scaled.

        Returns the highest score of each row, ``[n, kv heads, groups, 1]``, and ``[..., d + 1]``:
        the weighted sum of values, and behind it the sum of weights.
        """
        hidden = self._path < 0
        if spec.window is not None:
            hidden[:, : -spec.window] = True
        # in place of what is hidden a node reads its own slot, never another's
        path = torch.where(hidden, self._path[:, -1:], self._path)
        near = [x[:, path].transpose(0, 1).to(self._wide).contiguous() for x in (keys, values)]
        hidden = hidden[:, None, None]
        scores = _scores(rows, near[0].transpose(2, 3), spec, hidden)
        top = scores.amax(-1, keepdim=True)
        return top, _products(_weights(scores, top, hidden), F.pad(near[1], (0, 1), value=1.0))

    def _before(
        self,
        rows: list[Tensor],
        keys: Tensor,
        values: Tensor,
        spec: AttentionSpec,
        top: Tensor,
        out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As ``_tail``, with all that was before it added."""
        window = spec.window
        last = self._prefix + self._nodes - 1
        (heads, width) = rows[0].shape[::2]
        begin = 0 if window is None else max(0, self._prefix - window + 1)
        end = last - MAX_WIDTH + 1
        wide = out.new_empty(0), out.new_empty(0)
        for at, size in _borders(begin, end, heads, window):
            if wide[0].numel() != heads * size * width:
                wide = out.new_ones(heads, size, width), out.new_ones(heads, size, width + 1)
            read = slice(max(at, begin), min(at + size, end))
            for block, source in zip(wide, (keys, values), strict=True):
                block[:, read.start - at : read.stop - at, :width] = source[:, read]
            hidden = None
            if at + size > self._prefix - MAX_WIDTH + 1 or (
                window is not None and at <= last - window
            ):
                slots = torch.arange(at, at + size, device=out.device)
                hidden = slots > self._positions - MAX_WIDTH
                if window is not None:
                    hidden |= slots <= self._positions - window
            scores = _scores(rows, repeat(wide[0].transpose(1, 2)), spec, hidden)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            found = _products(_weights(scores, higher, hidden), repeat(wide[1]))
            out = out * torch.exp(top - higher) + found
            top = higher
        return top, out


class BlockwiseAttention:
    """Another attention over a chain of any length,
    in blocks of nodes few enough for that attention's exact rows.

    Args:
        attention: one that is ``STATIC`` and ``EXACT``.
        layout: the model's.
        length: the number of keys before the chain, on the device.
        nodes: of the chain, whose keys and values are in the cache already.
    """

    PADDED: ClassVar[bool] = False

    def __init__(
        self, attention: type[Attention], layout: Layout, length: Tensor, nodes: int
    ) -> None:
        starts = range(0, nodes, MAX_WIDTH)
        self._blocks: list[tuple[slice, Callable[..., Tensor]]] = [
            (
                slice(start, start + MAX_WIDTH),
                attention(layout, length + start, min(MAX_WIDTH, nodes - start), None),
            )
            for start in starts
        ]

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, **wants: AttentionSpec
    ) -> Tensor:
        """As :meth:`Attention.__call__`."""
        found = [
            attend(query[:, own], keys, values, scale, **wants) for own, attend in self._blocks
        ]
        # as the next product reads it
        return torch.cat([rows.transpose(0, 1) for rows in found]).transpose(0, 1)


def _borders(begin: int, end: int, kv_heads: int, window: int | None) -> Iterator[tuple[int, int]]:
    """Where the blocks start that hold the slots from ``begin`` to ``end``, and their sizes.

    Sizes grow with the text, or a short one would have to be filled up to a large block. A window's
    blocks stay small, and those of many heads, which leave a CPU's cache otherwise. All are powers
    of two.
    """
    most = (
        _LEAST
        if window is not None and window < _MOST
        else max(_LEAST, _MOST >> (kv_heads - 1).bit_length())
    )
    at = begin // most * most
    while at < end:
        size = min(max(at, _LEAST), most)
        if at + size > begin:
            yield at, size
        at += size


def _scores(
    rows: list[Tensor], keys: Iterable[Tensor], spec: AttentionSpec, hidden: Tensor | None
) -> Tensor:
    scores = _products(rows, keys)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _weights(scores: Tensor, top: Tensor, hidden: Tensor | None) -> Tensor:
    weights = scores.sub_(top).clamp_min_(_LOWEST).exp_()
    return weights if hidden is None else weights.masked_fill_(hidden, 0.0)


def _products(left: Iterable[Tensor], right: Iterable[Tensor]) -> Tensor:
    """Batched products, node by node: all in one go,
    their number would decide how they are computed.
    """
    return torch.stack([torch.bmm(a, b) for a, b in zip(left, right, strict=False)])
