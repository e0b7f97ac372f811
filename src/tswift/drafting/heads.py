"""Drafting from heads: on the last verification pass (Medusa-style), or on a drafting pass of the target."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from math import isfinite

import torch
from torch import Tensor

from tswift.decoding.device_step import DeviceState
from tswift.decoding.drafter import Context, DraftTree, Source
from tswift.decoding.drawing import MOST
from tswift.decoding.sampling import Sampler
from tswift.drafting.chains import DraftModel, PartialDraftModel
from tswift.drafting.dynamic_tree import CandidateTree
from tswift.kv.partial import PartialKV
from tswift.models.heads import Heads
from tswift.models.passes import Forwarded, PassCosts
from tswift.models.target import Target

_Guess = tuple[Tensor, Tensor]  # [levels, k] tokens and their scores (float64), best first
_Known = tuple[list[int], list[float]]  # the same on the host, level after level
_States = tuple[Tensor, Tensor | None]  # [H] last hidden state, and the one before the final norm where there is one


class LastPass:
    """The state of the pass that drew the root: no pass of its own, but the state knows nothing of the root."""

    direct = False
    partial: PartialKV | None = None
    static = True

    def read(self, context: Context) -> tuple[Forwarded, int] | None:
        """The pass and its node, of the token before the root; None before the first pass."""
        return None if context.last is None else (context.last, context.node)

    def on_device(self, context: Context, state: DeviceState) -> Callable[[], _States]:
        """A program that reads the state from what the last verification left on the device."""

        def read() -> _States:
            raw = None if state.raw is None else state.raw.index_select(0, state.last)[0]
            return state.hidden.index_select(0, state.last)[0], raw

        return read

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds of reading it."""
        return 0.0

    def committed(self, context: Context, most: int) -> None:
        """Nothing to keep up."""


class DraftingPass:
    """A drafting pass of the target, over a partial cache as a rule (paper, section 3.3).

    The pass forwards the root, so its own LM head gives the first token. Its keys and values are not kept: the partial
    cache is filled with the exact ones of the verification pass.

    Args:
        level: the target, and what it reads.
    """

    direct = True

    def __init__(self, level: DraftModel) -> None:
        self._level = level

    def read(self, context: Context) -> tuple[Forwarded, int]:
        """The pass and its node, of the root."""
        target = self._level.target
        root = torch.tensor([context.text[-1]]).to(target.device, non_blocking=True)
        position = torch.tensor([context.position]).to(target.device, non_blocking=True)
        return target.forward(root, position, self._level.cache(context), None), 0

    @property
    def target(self) -> Target:
        """The model, which may be a copy of the one that verifies."""
        return self._level.target

    @property
    def partial(self) -> PartialKV | None:
        """The partial cache that the pass reads; None if it reads the full one."""
        return self._level.kv if isinstance(self._level, PartialDraftModel) else None

    @property
    def static(self) -> bool:
        """Whether the pass can be a program on the device."""
        return self.partial is None or self._level.target.serves(self.partial)

    def on_device(self, context: Context, state: DeviceState) -> Callable[[], _States]:
        """A program that makes the pass over the root that the last verification left on the device."""
        target, kv = self._level.target, self.partial or context.kv
        length = state.length if self.partial is None else self.partial.device_length

        def read() -> _States:
            assert length is not None
            forwarded = target.compute_static(state.tokens[:1], state.position, kv, length, None)
            return forwarded.hidden[0], None if forwarded.raw is None else forwarded.raw[0]

        return read

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds of the pass."""
        return costs.seconds(1, self._level.keys or context.kv.length)

    def committed(self, context: Context, most: int) -> None:
        """Keep the cache up."""
        self._level.committed(context, most)


class HeadSource(Source):
    """Every level's best candidates, combined into a tree (paper, section 3.2).

    Chained and Medusa heads know no drafted token, so every candidate of a level may follow every one of the level
    before. Conditioned heads are told the best candidate of the level before, and theirs may follow that one only.

    Args:
        target: for its LM head and embeddings.
        heads: the heads.
        reader: where the state they start from comes from. If it is ``direct``, the LM head on it gives the first
            level, and the heads the others.
        tree: candidates per level.
        shared_noise: rank candidates by what the target would draw with the noise of their position, not by what is
            likely. The noise is a pure function, so this is no peeking: it only makes for better guesses.
    """

    name = "heads"

    def __init__(
        self, target: Target, heads: Heads, reader: LastPass | DraftingPass, tree: Sequence[int], shared_noise: bool
    ) -> None:
        self._target, self._heads, self.reader, self._shared_noise = target, heads, reader, shared_noise
        self._widths = tuple(tree)
        self._guessed: _Guess | _Known | None = None

    @property
    def _paths(self) -> list[tuple[int, ...]]:
        """The ranks of candidates along each path, the most promising path first: for trees with a limit."""
        tree = self._widths
        if self._heads.conditioned:
            ranks = [(0,) * level + (rank,) for level in range(len(tree)) for rank in range(tree[level])]
            # the path of best candidates first, then side steps from it
            return sorted(ranks, key=lambda path: (path[-1], -len(path) if path[-1] == 0 else len(path)))
        # few side steps first, and early ones: a late one is reached only if all before it was right
        return sorted(product(*map(range, tree)), key=lambda path: (sum(path), [-rank for rank in path]))

    @cached_property
    def nodes(self) -> list[tuple[int, int, int]]:
        """The tree's nodes below the root in order of promise: parent (0 the root), level, and rank there."""
        made: dict[tuple[int, ...], int] = {(): 0}
        nodes = []
        for path in self._paths:
            for end in range(1, len(path) + 1):
                if path[:end] not in made:
                    made[path[:end]] = len(made)
                    nodes.append((made[path[: end - 1]], end - 1, path[end - 1]))
        return nodes

    @property
    def reads(self) -> Target:
        """The model whose pass the heads start from."""
        return self.reader.target if isinstance(self.reader, DraftingPass) else self._target

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self._target.dtype

    @property
    def levels(self) -> int:
        """Tokens drafted along a path."""
        return len(self._widths)

    @property
    def width(self) -> int:
        """Candidates of each level in :meth:`guess`."""
        return min(max(self._widths), self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._target.vocab_size

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds that a draft takes by these costs."""
        return self.reader.price(costs, context) + self.levels * costs.level

    def start(self, context: Context) -> None:
        """Have the device guess every level; nothing is waited for."""
        read = self.reader.read(context)
        if read is None:
            return
        forwarded, node = read
        hidden, raw = forwarded.hidden[node], None if forwarded.raw is None else forwarded.raw[node]
        first, root = context.position + 1, context.text[-1]
        places = range(first, first + len(self._widths))
        known = self.guess_by_program(hidden, raw, root, places, context.sampler)
        self._guessed = known or self.guess(hidden, raw, root, places, context.sampler)

    def _candidates(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and scores of every level, best first: those that can be drawn; no levels before the first pass."""
        if self._guessed is None:
            return []
        tokens, scores = self._guessed
        self._guessed = None
        if isinstance(tokens, Tensor):  # the one wait for the device
            both = torch.stack([tokens.flatten().double(), scores.flatten()]).tolist()  # type: ignore[union-attr]
            tokens, scores = [int(token) for token in both[0]], both[1]
        assert isinstance(scores, list)
        levels, most = [], self.width
        for level, width in enumerate(self._widths):
            start = level * most
            count = sum(map(isfinite, scores[start : start + min(width, most)]))  # what is broken is no guess
            levels.append((tokens[start : start + count], scores[start : start + count]))
        return levels

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Add the combinations of the levels' best candidates."""
        levels = [tokens for tokens, _ in self._candidates()]
        nodes: list[int | None] = [0]
        for parent, level, rank in self.nodes if levels else ():
            below, tokens = nodes[parent], levels[level]
            nodes.append(None if below is None or rank >= len(tokens) else tree.grow(below, tokens[rank], self.name))

    def guess(
        self,
        hidden: Tensor,
        raw: Tensor | None,
        root: int | Tensor,
        places: Sequence[int] | Tensor,
        sampler: Sampler,
    ) -> _Guess:
        """The best candidates of every level; nothing is waited for, and a CUDA graph can be captured of it.

        Args:
            hidden: ``[H]`` last hidden state.
            raw: the same before the final norm; for heads that start there.
            root: the text's last token.
            places: of each level, the position of its tokens in the text; numbers, or ``[levels]`` on the device.
            sampler: the sampling rule.

        Returns:
            ``[levels, width]`` tokens, best first, and their scores, ``-inf`` for a token that is never drawn.
        """
        begin = raw if self._heads.pre_norm else hidden
        assert begin is not None
        root_place = (
            places[:1] - 1
            if isinstance(places, Tensor)
            else torch.tensor([places[0] - 1]).to(hidden.device, non_blocking=True)
        )
        seen = sampler.seen(root_place, root_place, torch.ones(1, 1, dtype=torch.bool, device=hidden.device))
        levels = self.levels

        def best(logits: Tensor, start: int, end: int) -> _Guess:
            return sampler.candidates(logits, seen, places[start:end] if self._shared_noise else None, self.width)

        first = hidden if self.reader.direct else None
        if not self._heads.conditioned:
            return best(self._heads.levels(begin, self._target.open_logits, first, levels), 0, levels)
        found: list[_Guess] = []
        if first is not None:
            found.append(best(self._target.open_logits(first.unsqueeze(0)), 0, 1))
            root = found[0][0][0, 0]
        for index in range(levels - len(found)):
            begin, out = self._heads.step(index, begin, self._target.embed(root))
            found.append(best(self._target.open_logits(out.unsqueeze(0)), len(found), len(found) + 1))
            root = found[-1][0][0, 0]
        tokens, scores = zip(*found, strict=True)
        return torch.cat(tokens), torch.cat(scores)

    def guess_by_program(
        self, hidden: Tensor, raw: Tensor | None, root: int, places: range, sampler: Sampler
    ) -> _Known | None:
        """As :meth:`guess`, all levels by one C function; None where there is none."""
        heads, model = getattr(self._heads, "program", None), self._target.program
        draw = sampler.program(torch.float32)
        if not (heads and model and draw and self._heads.conditioned and self.width <= MOST):
            return None
        begin, first = raw if self._heads.pre_norm else hidden, hidden if self.reader.direct else None

        def run(ranking: ctypes.Structure, rank: int) -> None:
            heads.guess(model, begin, first, root, self.levels, ranking, rank, self.width)

        newest = sampler.newest if sampler.params.penalises else None
        noisy = places if self._shared_noise else None
        return draw.rank_levels(run, noisy, self.levels, self.width, (root, places[0] - 1), newest)

    def committed(self, context: Context, most: int) -> None:
        """Keep the reader's cache up."""
        self.reader.committed(context, most)


WIDTH = 4  # candidates of a level
_BRANCHES = 3  # nodes of a level below which the next one's may follow


class HeadTreeSource(HeadSource):
    """The same candidates for a tree that is pruned to what pays, with chances by their gap to the others."""

    def propose(self, tree: CandidateTree, context: Context) -> None:  # type: ignore[override]
        """Propose every level's candidates below the likeliest nodes that they may follow."""
        nodes = [0]
        for level, (tokens, scores) in enumerate(self._candidates()[: tree.depth]):
            about = (min(level, 1) if self.reader.direct else 1,)
            children = [
                child for node in nodes for child in tree.propose_ranked(node, tokens, scores, self.name, about)
            ]
            nodes = sorted(children, key=lambda node: -tree.path_prob[node])[:_BRANCHES]
            if self._heads.conditioned:
                nodes = children[:1]  # the next level has been told this token
