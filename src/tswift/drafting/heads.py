"""Drafting with heads: small layers that read the target's last hidden state."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from tswift.decoding.drafter import Context, DraftTree, Source
from tswift.decoding.pass_costs import WORTH_A_TRIAL, PassCosts
from tswift.drafting.chains import DraftModel
from tswift.drafting.dynamic_tree import CandidateTree, TreeBudget
from tswift.forward.passes import Forwarded, Nodes
from tswift.forward.target import Target
from tswift.sampling.rule import Sampler
from tswift.sampling.sampler_c import MOST
from tswift.speculators.heads import DraftHead, Heads

_CHANCE = 0.8  # that the next head is right, too, in texts where they usually are


class HeadSource(Source):
    """Every level's best candidates, combined into a tree (paper, section 3.2).

    Chained and Medusa heads know no drafted token, so every candidate of a level may follow every
    one of the level before. Conditioned heads are told the best candidate of the level before, and
    theirs may follow that one only.

    Args:
        target: for its LM head and embeddings.
        heads: the heads.
        draft_model: what makes a drafting pass over the root, from whose state they start: the LM
            head on it gives the first level (paper, section 3.3). Its keys and values are not kept:
            a partial cache is filled with the exact ones of verification. None to start from the
            pass that drew the root, whose state knows nothing of the root.
        tree: candidates per level.
        shared_noise: rank candidates by what the target would draw with the noise of their
            position, not by what is likely. The noise is a pure function, so this is no peeking: it
            only makes for better guesses.

    Attributes:
        width: candidates of each level in :meth:`guess`.
        levels: of the tree, that the next draft has.
    """

    name = "heads"

    def __init__(
        self,
        target: Target,
        heads: Heads,
        draft_model: DraftModel | None,
        tree: Sequence[int],
        shared_noise: bool,
    ) -> None:
        self.target = target
        self._heads = heads
        self.draft_model = draft_model
        self.tree = tree
        self._shared_noise = shared_noise
        if target.replays:  # before its programs are captured
            heads.draft_head(target)
        self.width = min(max(tree), target.vocab_size)
        self.levels = len(tree)
        self._guessed: tuple[Any, Any] | None = None

    @cached_property
    def _lm_head(self) -> DraftHead:
        """What drafts by it: made with the first draft, as there may be none."""
        return self._heads.draft_head(self.target)

    @cached_property
    def nodes(self) -> list[tuple[int, int, int]]:
        """The tree's nodes below the root in order of promise: parent (0 the root), level,
        and rank there.
        """
        levels = range(len(self.tree))
        if self._heads.conditioned:
            ranks = [(0,) * level + (rank,) for level in levels for rank in range(self.tree[level])]
            # the path of best candidates first, then side steps from it
            paths = sorted(
                ranks, key=lambda path: (path[-1], -len(path) if path[-1] == 0 else len(path))
            )
        else:
            # few side steps first, and early ones: a late one is reached only if all before it was
            # right
            paths = sorted(
                product(*map(range, self.tree)),
                key=lambda path: (sum(path), [-rank for rank in path]),
            )
        tree = DraftTree(0, 1 + sum(map(len, paths)), len(self.tree))
        for path in paths:
            tree.add(path, self.name)  # ranks in the place of tokens
        return [
            (tree.parents[node], tree.depths[node] - 1, tree.tokens[node])
            for node in range(1, len(tree))
        ]

    def draft_seconds(self, costs: PassCosts, context: Context) -> float:
        """Seconds that a draft takes by these costs."""
        reading = (
            costs.alone.seconds(1, self.draft_model.keys or context.kv.length)
            if self.draft_model
            else 0.0
        )
        return reading + self.levels * costs.level

    def may_pay(self, costs: PassCosts, context: Context) -> bool:
        """Whether some levels would save enough if most heads were right."""
        sizes = range(2, 2 + len(self.tree))
        return costs.saved(context.kv.length, _CHANCE, sizes, costs.level) > WORTH_A_TRIAL

    def read(self, context: Context) -> tuple[Forwarded, int] | None:
        """The pass that the heads start from, and its node; None before the first pass."""
        if self.draft_model is None:
            return None if context.last is None else (context.last, context.node)
        model = self.draft_model.target
        root, position = torch.tensor([context.text[-1:], [context.position]]).to(
            model.device, non_blocking=True
        )
        return model.forward(Nodes(root, position, self.draft_model.cache(context))), 0

    def start(self, context: Context) -> None:
        """Have the device guess every level; nothing is waited for."""
        read = self.read(context)
        if read is None:
            return
        forwarded, node = read
        hidden = forwarded.hidden[node]
        pre_norm = None if forwarded.pre_norm is None else forwarded.pre_norm[node]
        first = context.position + 1
        root = context.text[-1]
        given = hidden, pre_norm, root, range(first, first + self.levels), context.sampler
        self._guessed = self.guess_by_program(*given) or self.guess(*given)

    def _candidates(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and scores of every level, best first: those that can be drawn;
        no levels before the first pass.
        """
        if self._guessed is None:
            return []
        (tokens, scores), self._guessed = self._guessed, None
        if isinstance(tokens, Tensor):  # the one wait for the device
            tokens, scores = torch.stack([tokens.double(), scores]).flatten(1).tolist()
        levels = []
        for level, width in enumerate(self.tree[: self.levels]):
            start = level * self.width
            # what is broken is no guess
            count = sum(map(isfinite, scores[start : start + min(width, self.width)]))
            levels.append(
                ([*map(int, tokens[start : start + count])], scores[start : start + count])
            )
        return levels

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Add the combinations of the levels' best candidates."""
        levels = [tokens for tokens, _ in self._candidates()]
        nodes: list[int | None] = [0]
        for parent, level, rank in self.nodes if levels else ():
            below = nodes[parent]
            tokens = levels[level]
            nodes.append(
                None
                if below is None or rank >= len(tokens)
                else tree.grow(below, tokens[rank], self.name)
            )

    def guess(
        self,
        hidden: Tensor,
        pre_norm: Tensor | None,
        root: int | Tensor,
        places: Sequence[int] | Tensor,
        sampler: Sampler,
    ) -> tuple[Tensor, Tensor]:
        """The best candidates of every level; nothing is waited for,
        and a CUDA graph can be captured of it.

        Args:
            hidden: ``[H]`` last hidden state.
            pre_norm: the same before the final norm; for heads that start there.
            root: the text's last token.
            places: of each level, the position of its tokens in the text; numbers, or ``[levels]``
                on the device.
            sampler: the sampling rule.

        Returns:
            ``[levels, width]`` tokens, best first, and their scores (float64), ``-inf`` for a token
            that is never drawn.
        """
        state = pre_norm if self._heads.pre_norm else hidden
        out = hidden
        levels = self.levels
        assert state is not None
        root_place = (
            places[:1] - 1
            if isinstance(places, Tensor)
            else torch.tensor([places[0] - 1]).to(hidden.device, non_blocking=True)
        )
        seen = sampler.seen(
            root_place, root_place, torch.ones(1, 1, dtype=torch.bool, device=hidden.device)
        )

        def best(logits: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
            noisy = places[start:end] if self._shared_noise else None
            return sampler.candidates(sampler.lowered_draft(logits), seen, noisy, self.width)

        if not self._heads.conditioned:
            first = hidden if self.draft_model else None
            return best(self._heads.levels(state, self._lm_head, first, levels), 0, levels)
        found: list[tuple[Tensor, Tensor]] = []
        for level in range(levels):
            if level or self.draft_model is None:
                index = level - (self.draft_model is not None)
                state, out = self._heads.step(index, state, self.target.embed(root))
            found.append(best(self._lm_head(out.unsqueeze(0)), level, level + 1))
            root = found[-1][0][0, 0]
        tokens, scores = zip(*found, strict=True)
        return torch.cat(tokens), torch.cat(scores)

    def guess_by_program(
        self, hidden: Tensor, pre_norm: Tensor | None, root: int, places: range, sampler: Sampler
    ) -> tuple[list[int], list[float]] | None:
        """As :meth:`guess`, on the host level after level, all by one C function; None where there
        is none.
        """
        heads = getattr(self._heads, "program", None)
        model = self.target.runner.program
        draw = sampler.program(torch.float32)
        lm_head = self._lm_head.c
        if not (
            heads and model and draw and lm_head and self._heads.conditioned and self.width <= MOST
        ):
            return None
        state = pre_norm if self._heads.pre_norm else hidden
        first = hidden if self.draft_model else None
        levels = self.levels

        def run(ranking: ctypes.Structure, rank: int) -> None:
            heads.guess(model, lm_head, state, first, root, levels, ranking, rank, self.width)

        newest = sampler.newest if sampler.needs_positions else None
        counts = sampler.counts if sampler.counting else None
        noisy = places if self._shared_noise else None
        at = root, places[0] - 1
        return draw.rank_levels(
            run, noisy, levels, self.width, at, newest, counts, self._lm_head.ids
        )

    def committed(self, context: Context, most: int) -> None:
        """Keep the drafting pass's cache up."""
        if self.draft_model is not None:
            self.draft_model.committed(context, most)


WIDTH = 4  # candidates of a level
_BRANCHES = 3  # nodes of a level below which the next one's may follow


_DRAFTS_PER_FULL_ONE = 32  # drafts of which one has all levels, whatever they were worth of late
_FORGOTTEN_PER_DRAFT = 0.1  # of what is known of a level's worth, forgotten in a draft that has it


class HeadTreeSource(HeadSource):
    """The same candidates for a tree that is pruned to what pays,
    with chances by their gap to the others.

    Attributes:
        budget: by which levels are left out that did not pay of late; None to draft all.
    """

    budget: TreeBudget | None = None
    _drafts = 0

    @cached_property
    def _worth(self) -> list[float]:
        """Of each level, the probability of its likeliest node of late."""
        return [1.0] * len(self.tree)

    def start(self, context: Context) -> None:
        """As :meth:`HeadSource.start`, of the levels that pay."""
        self._drafts += 1
        self.levels = len(self.tree)
        if self.budget is not None and self._drafts % _DRAFTS_PER_FULL_ONE:
            price = self.budget.costs.level + self.budget.costs.node(context.kv.length)
            while self.levels > 1 and not self.budget.pays_off(self._worth[self.levels - 1], price):
                self.levels -= 1
        super().start(context)

    def propose(self, tree: CandidateTree, context: Context) -> None:  # type: ignore[override]
        """Propose every level's candidates below the likeliest nodes that they may follow."""
        nodes = [0]
        for level, (tokens, scores) in enumerate(self._candidates()[: tree.depth]):
            about = (min(level, 1) if self.draft_model else 1,)
            children = [
                child
                for node in nodes
                for child in tree.propose_ranked(node, tokens, scores, self.name, about)
            ]
            nodes = sorted(children, key=lambda node: -tree.path_prob[node])[:_BRANCHES]
            best = tree.path_prob[nodes[0]] if nodes else 0.0
            self._worth[level] += _FORGOTTEN_PER_DRAFT * (best - self._worth[level])
            if self._heads.conditioned:
                nodes = children[:1]  # the next level has been told this token
