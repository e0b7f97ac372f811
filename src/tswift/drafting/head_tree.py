"""Draft trees from heads where it is likely to go on: the best few branches, each told its own tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tswift.decoding.drafter import Context
from tswift.drafting.dynamic_tree import CandidateTree, TreeBudget
from tswift.drafting.heads import DraftingPass, LastPass
from tswift.models.heads import Heads
from tswift.models.passes import Forwarded
from tswift.models.target import Target

_WIDTH, _BRANCHES = 4, 3  # candidates offered below a node, and nodes of a level that are gone on with
_STEP, _FAR = 0.5, 8  # gaps between scores are told apart by this much, and up to so many times
# chances by rank and lead, about those of the bundled heads over 2,500 tokens; what is learned soon replaces them
_GUESSES = (
    (0.42, 0.62, 0.74, 0.83, 0.88),
    (0.27, 0.16, 0.07, 0.05, 0.03),
    (0.12, 0.08, 0.05, 0.03, 0.02),
    (0.06, 0.05, 0.03, 0.02, 0.01),
)
_FALL = 0.7  # about how likely a drafted token's best successor is

_Branch = tuple[int, int]  # a node, and the row of its parent among the branches before


class HeadTreeSource:
    """Candidates below the likeliest branches, level by level, with chances by their lead over the others.

    Args:
        target: for its LM head and embeddings.
        heads: the heads. After the last one it goes on with the last one, if they are told the token before.
        reader: where the state they start from comes from.
        levels: most tokens along a path.
        shared_noise: as for :class:`~tswift.drafting.heads.HeadSource`.
        plan: says whether another level pays.
    """

    name = "heads"

    def __init__(
        self,
        target: Target,
        heads: Heads,
        reader: LastPass | DraftingPass,
        levels: int,
        shared_noise: bool,
        plan: TreeBudget,
    ) -> None:
        self._target, self._heads, self.reader, self._shared_noise = target, heads, reader, shared_noise
        self._levels, self._plan = levels, plan
        self._read: tuple[Forwarded, int] | None = None
        self.spent = 0.0

    def start(self, context: Context) -> None:
        """Have the device make the pass that the heads start from."""
        self._read = self.reader.read(context)

    def propose(self, tree: CandidateTree, context: Context) -> None:
        """Offer candidates below the likeliest branches."""
        self.spent = 0.0
        if self._read is None:
            return
        (forwarded, node), self._read = self._read, None
        hidden = forwarded.hidden[node]
        begin = forwarded.before_norm(node) if self._heads.pre_norm else hidden
        self.spent = self.reader.price(self._plan.costs, context)
        place = torch.tensor([context.position]).to(hidden.device, non_blocking=True)
        seen = context.sampler.seen(place, place, torch.ones(1, 1, dtype=torch.bool, device=hidden.device))
        draft = self._told if self._heads.conditioned else self._untold
        draft(tree, context, begin, hidden, seen)

    def _told(self, tree: CandidateTree, context: Context, begin: Tensor, hidden: Tensor, seen: Tensor | None) -> None:
        states, branches = begin.unsqueeze(0), [(0, 0)]
        head = 0
        for level in range(min(self._levels, tree.depth)):
            if level == 0 and self.reader.direct:
                logits, paths = self._target.open_logits(hidden.unsqueeze(0)), None
            else:
                rows, tokens, paths = self._sent(tree, branches)
                if [row for _, row in branches] != list(range(len(states))):
                    states = states.index_select(0, rows)
                embeddings = self._target.embed(tokens)
                states, out = self._heads.step(min(head, self._heads.count - 1), states, embeddings)
                logits = self._target.open_logits(out)
                head += 1
            branches = self._offer(tree, context, branches, logits, _seen(seen, paths), level)
            if not self._worth(tree, branches, context):
                return
            if level == 0 and self.reader.direct:
                branches = [(node, 0) for node, _ in branches]

    def _untold(
        self, tree: CandidateTree, context: Context, begin: Tensor, hidden: Tensor, seen: Tensor | None
    ) -> None:
        first = hidden if self.reader.direct else None
        logits = self._heads.levels(begin, self._target.open_logits, first, self._levels)
        branches: list[_Branch] = [(0, 0)]
        for level in range(min(len(logits), tree.depth)):
            paths = None if seen is None or level == 0 else self._sent(tree, branches)[2]
            branches = self._offer(tree, context, branches, logits[level : level + 1], _seen(seen, paths), level)
            if not branches:
                return

    def _worth(self, tree: CandidateTree, branches: Sequence[_Branch], context: Context) -> bool:
        """Whether it pays to ask the heads once more."""
        expected = _FALL * sum(tree.reach[node] for node, _ in branches)
        costs = self._plan.costs
        return bool(branches) and self._plan.worth(expected, costs.level + costs.node(context.kv.length))

    def _offer(
        self,
        tree: CandidateTree,
        context: Context,
        branches: Sequence[_Branch],
        logits: Tensor,
        seen: Tensor | None,
        level: int,
    ) -> list[_Branch]:
        """Offer the best candidates below every branch; returns the branches to go on with.

        Args:
            branches: nodes to go on from.
            logits: ``[branches, V]``, or one row for all.
            seen: ``[branches, V]`` or one row for all, as for :meth:`~tswift.decoding.sampling.Sampler.candidates`.
            level: of the candidates, 0 for those below the root.
        """
        self.spent += self._plan.costs.level
        sampler, place = context.sampler, context.position + 1 + level
        best = sampler.candidates(logits, seen, [place] if self._shared_noise else None, _WIDTH)
        found = torch.stack([best[0].double(), best[1]], dim=1).tolist()  # the level's one wait for the device
        offered: list[_Branch] = []
        for row, (node, _) in enumerate(branches):
            tokens, values = found[min(row, len(found) - 1)]
            for rank, (token, value) in enumerate(zip(tokens, values, strict=True)):
                if not math.isfinite(value):
                    break
                step = _steps(abs(value - (values[0] if rank else values[1] if len(values) > 1 else -math.inf)))
                about = (min(level, 1) if self.reader.direct else 1, rank, step)
                guess = _GUESSES[rank][min(step, 4)]
                child = tree.offer(node, int(token), self.name, about, guess)
                if child is not None:
                    offered.append((child, row))
        return sorted(offered, key=lambda branch: -tree.reach[branch[0]])[:_BRANCHES]

    def _sent(self, tree: CandidateTree, branches: Sequence[_Branch]) -> tuple[Tensor, Tensor, Tensor]:
        """The branches' rows ``[n]``, tokens ``[n]`` and paths from the root ``[n, depth]``, in one copy."""
        packed = torch.tensor([[row, tree.tokens[node], *tree.path(node)] for node, row in branches])
        sent = packed.to(self._target.device, non_blocking=True)
        return sent[:, 0], sent[:, 1], sent[:, 2:]

    def committed(self, context: Context, most: int) -> None:
        """Keep the reader's cache up."""
        self.reader.committed(context, most)


def _seen(seen: Tensor | None, paths: Tensor | None) -> Tensor | None:
    """What the penalty finds in its window after these drafted paths; ``seen`` is ``[1, V]``, after the root."""
    if seen is None or paths is None:
        return seen
    return seen.repeat(len(paths), 1).scatter_(1, paths, True)


def _steps(lead: float) -> int:
    """A lead in whole steps; what is broken has none."""
    return round(min(lead / _STEP, _FAR)) if lead >= 0 else 0
