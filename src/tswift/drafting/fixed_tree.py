"""A draft tree of a fixed shape that the device fills with heads' candidates and with n-grams.

Which node carries which candidate is known in advance, so the tree's parents are constants, and no
candidate has to be seen by the host before it is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tswift.caches import KVBuffer
from tswift.decoding.device_state import DeviceState
from tswift.decoding.drafter import REUSE, Context, DeviceDraft, Drafter, DraftTree
from tswift.drafting.chains import PartialDraftModel
from tswift.drafting.heads import HeadSource
from tswift.drafting.ngrams import NgramRows, ReuseSource
from tswift.forward.passes import Nodes
from tswift.sampling.kernels import use_kernels

_SHARE = 4  # of the nodes that heads and n-grams have in common, n-grams get one in so many


@dataclass
class FixedTreeDrafter(Drafter):
    """Heads in a tree of fixed shape, and n-grams of the text in what is left of its nodes."""

    def on_device(self, state: DeviceState) -> DeviceDraft | None:
        """As :meth:`Drafter.on_device`."""
        heads = self.sources[0]
        assert isinstance(heads, HeadSource)
        draft_model = heads.draft_model
        partial = draft_model if isinstance(draft_model, PartialDraftModel) else None
        static = partial is None or partial.target.serves(partial.kv)
        return FixedTree(self, heads, state) if static else None


class FixedTree:
    """The tree of a :class:`FixedTreeDrafter`, drafted on the device; see :class:`DeviceDraft`.

    Nodes are in order of promise. N-grams continue the
    best candidate of the first level only; a tree made by the host has them below every candidate
    of that level.
    """

    def __init__(self, drafter: FixedTreeDrafter, heads: HeadSource, state: DeviceState) -> None:
        self._drafter = drafter
        self._heads = heads
        self._state = state
        draft_model = heads.draft_model
        self.target = draft_model.target if draft_model else heads.target
        self._partial = draft_model.kv if isinstance(draft_model, PartialDraftModel) else None
        device = state.tokens.device
        ngrams = next((each for each in drafter.sources if isinstance(each, ReuseSource)), None)
        reserved = 0
        if ngrams is not None:
            room = drafter.limit - 1 - len(heads.nodes)
            reserved = min(
                max(room, drafter.limit // _SHARE), ngrams.table.k * (ngrams.table.n - 1)
            )
        candidates = heads.nodes[: drafter.limit - reserved - 1]
        order = _interleave(1 + len(candidates), reserved)
        # of the heads' nodes: 0 .. ; of n-grams: -1, -2 ..
        place = {node: index for index, node in enumerate(order)}
        self.sources: Sequence[str] = [
            "" if node == 0 else heads.name if node > 0 else REUSE for node in order
        ]
        self._parents = [
            0 if node == 0 else place[candidates[node - 1][0]] if node > 0 else place[1]
            for node in order
        ]
        self._live = torch.tensor(
            [place[1 + index] for index in range(len(candidates))], device=device
        )
        self._candidates = torch.tensor(
            [heads.width * level + rank for _, level, rank in candidates], device=device
        )
        self._levels = torch.arange(1, len(heads.tree) + 1, device=device)
        self._rows: NgramRows | None = None
        if reserved and ngrams is not None:
            self._rows = NgramRows(
                ngrams, heads.target.vocab_size, reserved, drafter.depth + 1, device
            )
            self._anchors = torch.tensor(
                [place[1], *(place[-1 - index] for index in range(reserved))], device=device
            )
        self._shape = torch.tensor(self._parents, device=device)
        self.sizes: Sequence[int] = sorted({1, len(order)})
        self._shapes: dict[int, DraftTree] = {}

    def sections(self) -> dict[str, int]:
        """As :meth:`DeviceDraft.sections`."""
        own = {"slots": min(self._drafter.depth + 1, self._drafter.limit)} if self._partial else {}
        return own | (self._rows.sections if self._rows else {})

    def begin(
        self, context: Context, host: dict[str, np.ndarray], device: dict[str, Tensor]
    ) -> None:
        """As :meth:`DeviceDraft.begin`."""
        self._host = host
        self._device = device
        self._sampler = context.sampler
        self._kv = context.kv
        use_kernels(context.sampler, self._heads.target.dtype, self._heads.width)
        if self._partial is not None:
            self._partial.track()
        self.prepare(context)

    def _states(self) -> tuple[Tensor, Tensor | None]:
        """``[H]`` last hidden state that the heads start from,
        and the one before the final norm if there is one.

        They are of the root that the last verification left on the device, or of the node that drew
        it.
        """
        state = self._state
        draft_model = self._heads.draft_model
        if draft_model is None:
            pre_norm = (
                None if state.pre_norm is None else state.pre_norm.index_select(0, state.last)[0]
            )
            return state.hidden.index_select(0, state.last)[0], pre_norm
        length = state.length if self._partial is None else self._partial.device_length
        assert length is not None
        kv = self._partial or self._kv
        root = Nodes(state.tokens[:1], state.position, kv)
        forwarded = draft_model.target.compute_static(root, length)
        return forwarded.hidden[0], None if forwarded.pre_norm is None else forwarded.pre_norm[0]

    def draft(self) -> None:
        """As :meth:`DeviceDraft.draft`."""
        hidden, pre_norm = self._states()
        places = self._state.position + self._levels
        tokens, scores = self._heads.guess(
            hidden, pre_norm, self._state.tokens[0], places, self._sampler
        )
        # fewer tokens than the widest level wants are left by the filters, or there are no more
        tokens = torch.where(scores == -torch.inf, -1, tokens).flatten()
        self._state.tokens.index_copy_(0, self._live, tokens[self._candidates])
        # the host may have proposed the tree before
        self._state.parents[: len(self._shape)].copy_(self._shape)

    def complete(self) -> None:
        """As :meth:`DeviceDraft.complete`."""
        if self._rows is None:
            return
        self._rows.update(self._device)
        first = self._state.tokens[self._anchors[:1]]
        reserved = self._anchors[1:]
        row = torch.where(first < 0, self._rows.nothing, first)
        tokens, parents = self._rows.trees.index_select(1, row)[:, 0]
        self._state.tokens.index_copy_(0, reserved, tokens)
        self._state.parents.index_copy_(0, reserved, self._anchors[parents])

    def append(self, kv: KVBuffer, slots: Tensor, count: Tensor) -> None:
        """As :meth:`DeviceDraft.append`."""
        partial = self._partial
        if partial is not None:
            assert partial.device_length is not None
            to = self._device["slots"][: len(slots)]
            for own, full in zip(partial.pairs, kv.pairs, strict=True):
                self.target.backend.append(own, full, slots, to, count, partial.device_length)

    def ready(self, most: int) -> bool:
        """As :meth:`DeviceDraft.ready`: no selection is due, and no queries are taken from the
        verification.
        """
        kv = self._partial
        return kv is None or (
            kv.policy.observes == 1 and (not kv.policy.renews or kv.room >= 2 * most)
        )

    def prepare(self, context: Context) -> None:
        """As :meth:`DeviceDraft.prepare`."""
        if self._partial is not None:
            self._host["slots"][:] = self._partial.next_slots(len(self._host["slots"]))
        if self._rows is not None:
            self._rows.prepare(context, self._host)

    def committed(self, count: int) -> None:
        """As :meth:`DeviceDraft.committed`."""
        if self._partial is not None:
            self._partial.appended(count)

    def shape(self, nodes: int) -> DraftTree:
        """As :meth:`DeviceDraft.shape`."""
        if nodes not in self._shapes:
            tree = self._shapes[nodes] = DraftTree(0, nodes)
            for node in range(1, min(nodes, len(self._parents))):
                tree.grow(self._parents[node], node, self.sources[node])
        return self._shapes[nodes]


def _interleave(drafted: int, reserved: int) -> list[int]:
    """The order of a tree's nodes: those of the heads, 0 the root, with n-grams' nodes -1,
    -2 ... spread among them.
    """
    after = [-(-index * (drafted - 1) // reserved) for index in range(1, reserved + 1)]
    placed = [(node, 0, node) for node in range(drafted)]
    return [
        node
        for *_, node in sorted(
            [*placed, *((at, index, -index) for index, at in enumerate(after, start=1))]
        )
    ]
