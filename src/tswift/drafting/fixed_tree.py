"""The text's own n-grams, and a draft tree of a fixed shape that the device fills with them and with heads' candidates.

Which node carries which candidate is known in advance, so the tree's parents are constants, and no candidate has to be
seen by the host before it is verified. N-grams are kept by first token in a table on the device (paper, section 3.4),
whose rows the host updates while the device drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tswift.decoding.device_step import DeviceState
from tswift.decoding.drafter import REUSE, Context, DeviceDraft, Drafter, DraftTree, Source
from tswift.drafting.dynamic_tree import CandidateTree, PartialDraftModel
from tswift.drafting.heads import HeadSource
from tswift.kv import KVBuffer
from tswift.models.passes import sizes


class NgramTable:
    """Counts of n-grams by first token, with the k most frequent continuations always at hand.

    When it is full it forgets the rarest, and of equally rare ones those not counted for longest, until half are left.

    Args:
        n: tokens of an n-gram, the first one included; at least 2.
        k: continuations kept ready for each first token. Of equally frequent ones the one counted last wins.
        most: n-grams that are counted at a time; at least 2. The default takes 45 to 56 MB, and 75 while it forgets
            (measured, n-grams of four tokens).
    """

    def __init__(self, n: int = 4, k: int = 20, most: int = 1 << 18) -> None:
        self.n, self.k, self.most = n, k, most
        self._counts: dict[tuple[int, ...], int] = {}  # those counted last come last
        self._best: dict[int, list[tuple[int, ...]]] = {}
        self.changed: set[int] = set()  # first tokens whose continuations changed since somebody cleared this

    def __len__(self) -> int:
        """How many n-grams are counted."""
        return len(self._counts)

    def count(self, ngram: Sequence[int]) -> None:
        """Count one n-gram once more."""
        gram = tuple(ngram)
        self.changed.add(gram[0])
        count = self._counts.pop(gram, 0) + 1
        self._counts[gram] = count
        best = self._best.setdefault(gram[0], [])
        if gram in best:
            best.remove(gram)
        # a count grows by one, so whatever is not among the best now can only enter by this call
        place = len(best)
        while place > 0 and self._counts[best[place - 1]] <= count:
            place -= 1
        best.insert(place, gram)
        del best[self.k :]
        if len(self._counts) > self.most:
            self._forget()

    def _forget(self) -> None:
        """Halve the table."""
        self.changed.update(self._best)
        # sorting keeps the order of equals. Whatever is not among the best ranks below them, and goes before them
        rarest = sorted(self._counts, key=self._counts.__getitem__)
        for gram in rarest[: len(rarest) - self.most // 2]:
            del self._counts[gram]
        best = ((first, [gram for gram in grams if gram in self._counts]) for first, grams in self._best.items())
        self._best = {first: grams for first, grams in best if grams}

    def continuations(self, first: int) -> list[tuple[int, ...]]:
        """The k most frequent continuations of a token, each of n - 1 tokens, most frequent first."""
        return [gram[1:] for gram in self._best.get(first, ())]


class ReuseSource(Source):
    """Continuations of a token the text has had before.

    Args:
        table: an empty table, filled from the text as it grows.
        below: depth of the nodes whose token is continued: 0 for the root, 1 for what another source put below it.
        recent: also reuse what is still in the penalty window (the reference does not).
    """

    name = REUSE

    def __init__(self, table: NgramTable, below: int, recent: bool) -> None:
        self.table, self._below, self._recent = table, below, recent
        self._counted = 0  # tokens whose n-grams are in the table

    def start(self, context: Context) -> None:
        """Count the n-grams that have become complete, or have left the penalty window."""
        params = context.sampler.params
        hidden = params.window if params.penalises and not self._recent else 0
        n = self.table.n
        for end in range(max(self._counted, n - 1) + 1, len(context.text) - hidden + 1):
            self.table.count(context.text[end - n : end])
            self._counted = end

    def propose(self, tree: DraftTree | CandidateTree, context: Context) -> None:
        """Hang the continuations below every node of the chosen depth."""
        for node in [n for n in range(len(tree.tokens)) if tree.depths[n] == self._below]:
            head = [tree.tokens[node]] if self._below else []
            for tail in self.table.continuations(tree.tokens[node]):
                tree.add([*head, *tail], self.name)


_SHARE = 4  # of the nodes that heads and n-grams have in common, n-grams get one in so many


class NgramRows:
    """A device table of n-grams: one row of so many nodes per first token, with its most frequent continuations.

    Up to ``updates`` rows are updated in a step; more are copied apart from the block.

    Attributes:
        trees: ``[2, V + 1, nodes]`` int64; the last row stands for no token. Tokens: -1 where a row has fewer nodes.
            Parents: 0 for the first token, i + 1 for the row's node i.
    """

    def __init__(self, source: ReuseSource, vocab_size: int, nodes: int, updates: int, device: torch.device) -> None:
        self._source, self.nothing, self._nodes, self._updates = source, vocab_size, nodes, updates
        self.sections = {"rows": updates, "trees": 2 * updates * nodes}  # its part of the block that the host sends
        self.trees = torch.zeros(2, vocab_size + 1, nodes, dtype=torch.int64, device=device)
        self.trees[0] = -1

    def prepare(self, context: Context, host: dict[str, np.ndarray]) -> None:
        """Count new n-grams, and put the rows that changed into the block."""
        self._source.start(context)
        table = self._source.table
        firsts, table.changed = [*table.changed], set()
        if len(firsts) > self._updates:  # a prompt, or the table has forgotten the rarest
            self.trees[:, firsts] = torch.from_numpy(self._made(firsts)).to(self.trees.device)
            firsts = []
        firsts += [self.nothing] * (self._updates - len(firsts))
        host["rows"][:], host["trees"][:] = firsts, self._made(firsts).reshape(-1)

    def _made(self, firsts: Sequence[int]) -> np.ndarray:
        """``[2, n, nodes]``: the rows of first tokens."""
        made = np.zeros((2, len(firsts), self._nodes), np.int64)
        made[0] = -1
        for row, first in enumerate(firsts):
            tree = DraftTree(first, self._nodes + 1)
            for tail in self._source.table.continuations(first):
                tree.add(tail, REUSE)
            made[:, row, : len(tree) - 1] = tree.tokens[1:], tree.parents[1:]
        return made

    def update(self, device: dict[str, Tensor]) -> None:
        """Take the changed rows from the block."""
        self.trees.index_copy_(1, device["rows"], device["trees"].view(2, self._updates, self._nodes))


@dataclass
class FixedTreeDrafter(Drafter):
    """Heads in a tree of fixed shape, and n-grams of the text in what is left of its nodes.

    Attributes:
        fewer: how many nodes to verify with so many tokens in the cache; None for always all.
    """

    fewer: Callable[[int], int] | None = None

    def on_device(self, state: DeviceState) -> DeviceDraft | None:
        """As :meth:`Drafter.on_device`."""
        heads = self.sources[0]
        assert isinstance(heads, HeadSource)
        level = heads.level
        static = not isinstance(level, PartialDraftModel) or level.target.serves(level.kv)
        return FixedTree(self, heads, state) if static else None


class FixedTree:
    """The tree of a :class:`FixedTreeDrafter`, drafted on the device; see :class:`DeviceDraft`.

    Nodes are in order of promise, so that the first n of them are a tree, too. N-grams continue the best candidate of
    the first level only; a tree made by the host has them below every candidate of that level.
    """

    def __init__(self, drafter: FixedTreeDrafter, heads: HeadSource, state: DeviceState) -> None:
        self._drafter, self._heads, self._state, level = drafter, heads, state, heads.level
        self.target = level.target if level else heads.target
        self._partial = level.kv if isinstance(level, PartialDraftModel) else None
        device = state.tokens.device
        ngrams, reserved = next((each for each in drafter.sources if isinstance(each, ReuseSource)), None), 0
        if ngrams is not None:
            room = drafter.limit - 1 - len(heads.nodes)
            reserved = min(max(room, drafter.limit // _SHARE), ngrams.table.k * (ngrams.table.n - 1))
        candidates = heads.nodes[: drafter.limit - reserved - 1]
        order = _interleave(1 + len(candidates), reserved)
        place = {node: index for index, node in enumerate(order)}  # of the heads' nodes: 0 .. ; of n-grams: -1, -2 ..
        self.sources: Sequence[str] = ["" if node == 0 else heads.name if node > 0 else REUSE for node in order]
        self._parents = [0 if node == 0 else place[candidates[node - 1][0]] if node > 0 else place[1] for node in order]
        self._live = torch.tensor([place[1 + index] for index in range(len(candidates))], device=device)
        self._candidates = torch.tensor([heads.width * level + rank for _, level, rank in candidates], device=device)
        self._levels = torch.arange(1, len(heads.tree) + 1, device=device)
        self._rows: NgramRows | None = None
        if reserved and ngrams is not None:
            self._rows = NgramRows(ngrams, heads.target.vocab_size, reserved, drafter.depth + 1, device)
            self._anchors = torch.tensor([place[1], *(place[-1 - index] for index in range(reserved))], device=device)
        state.parents[: len(order)].copy_(torch.tensor(self._parents))
        self.sizes: Sequence[int] = sizes(len(order))
        self._shapes: dict[int, DraftTree] = {}

    def sections(self) -> dict[str, int]:
        """As :meth:`DeviceDraft.sections`."""
        own = {"slots": min(self._drafter.depth + 1, self._drafter.limit)} if self._partial else {}
        return own | (self._rows.sections if self._rows else {})

    def begin(self, context: Context, host: dict[str, np.ndarray], device: dict[str, Tensor]) -> None:
        """As :meth:`DeviceDraft.begin`."""
        self._host, self._device, self._sampler, self._kv = host, device, context.sampler, context.kv
        context.sampler.fuse(self._heads.target.dtype, self._heads.width)
        if self._partial is not None:
            self._partial.track()
        self.prepare(context)

    def _states(self) -> tuple[Tensor, Tensor | None]:
        """``[H]`` last hidden state that the heads start from, and the one before the final norm if there is one.

        They are of the root that the last verification left on the device, or of the node that drew it.
        """
        state, level = self._state, self._heads.level
        if level is None:
            raw = None if state.raw is None else state.raw.index_select(0, state.last)[0]
            return state.hidden.index_select(0, state.last)[0], raw
        length = state.length if self._partial is None else self._partial.device_length
        assert length is not None
        kv = self._partial or self._kv
        forwarded = level.target.compute_static(state.tokens[:1], state.position, kv, length, None)
        return forwarded.hidden[0], None if forwarded.raw is None else forwarded.raw[0]

    def draft(self) -> None:
        """As :meth:`DeviceDraft.draft`."""
        hidden, raw = self._states()
        places = self._state.position + self._levels
        tokens, scores = self._heads.guess(hidden, raw, self._state.tokens[0], places, self._sampler)
        # fewer tokens than the widest level wants are left by the filters, or there are no more
        tokens = torch.where(scores == -torch.inf, -1, tokens).flatten()
        self._state.tokens.index_copy_(0, self._live, tokens[self._candidates])

    def complete(self) -> None:
        """As :meth:`DeviceDraft.complete`."""
        if self._rows is None:
            return
        self._rows.update(self._device)
        first, reserved = self._state.tokens[self._anchors[:1]], self._anchors[1:]
        row = torch.where(first < 0, self._rows.nothing, first)
        tokens, parents = self._rows.trees.index_select(1, row)[:, 0]
        self._state.tokens.index_copy_(0, reserved, tokens)
        self._state.parents.index_copy_(0, reserved, self._anchors[parents])

    def append(self, kv: KVBuffer, slots: Tensor, count: Tensor) -> None:
        """As :meth:`DeviceDraft.append`."""
        if self._partial is not None:
            self._partial.append_rows(kv, slots, count, self._device["slots"][: len(slots)])

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

    def nodes(self, length: int) -> int:
        """As :meth:`DeviceDraft.nodes`."""
        wanted = self._drafter.fewer(length) if self._drafter.fewer else self.sizes[-1]
        return max(size for size in self.sizes if size <= wanted)

    def shape(self, nodes: int) -> DraftTree:
        """As :meth:`DeviceDraft.shape`."""
        if nodes not in self._shapes:
            tree = self._shapes[nodes] = DraftTree(0, nodes)
            for node in range(1, min(nodes, len(self._parents))):
                tree.grow(self._parents[node], node, self.sources[node])
        return self._shapes[nodes]


def _interleave(drafted: int, reserved: int) -> list[int]:
    """The order of a tree's nodes: those of the heads, 0 the root, with n-grams' nodes -1, -2 ... spread among them."""
    after = [-(-index * (drafted - 1) // reserved) for index in range(1, reserved + 1)]
    placed = [(node, 0, node) for node in range(drafted)]
    return [node for *_, node in sorted([*placed, *((at, index, -index) for index, at in enumerate(after, start=1))])]
