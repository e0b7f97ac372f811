"""Draft trees chosen anew in every step, of the candidates that pay; and chains of tokens that a model decodes.

What a node is worth is the probability that the text goes through it; what it costs is measured, as the time that a
pass over more nodes takes on this machine. Timings decide the tree and never the text.

A chain is decoded as any text is, by the same steps with the same sampling rule, by a small model or by the target over
less than its full cache; so what it is drafted from may in turn have been drafted, by a model that is smaller still
(TriForce, Sun et al., 2024). A cascade's chain goes on as long as the target over its newest keys is sure of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Context, Drafter, DraftTree, Source, Step
from tswift.decoding.loop import decode_step
from tswift.decoding.sampling import NoTokenLeft
from tswift.kv import KVBuffer, PartialKV, StreamingKV
from tswift.models.passes import NOMINAL, PassCosts
from tswift.models.target import Target

_WEIGHT = 8.0  # observations that the probability guessed at first counts for
_MEMORY = 2048.0  # observations after which older ones count for half: texts change


class AcceptanceEstimator:
    """Probabilities of candidates by their kind, which is whatever their source knows of them beforehand.

    A source guesses a probability; what is learned replaces it as observations of the kind come in.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[float]] = {}  # of a kind: how many came true, and how many there were

    def chance(self, kind: Hashable, guess: float) -> float:
        """The probability of a candidate, above 0 and below 1; ``guess`` counts as long as little is known."""
        true, count = self._seen.get(kind, (0.0, 0.0))
        return min(max((true + _WEIGHT * guess) / (count + _WEIGHT), 1e-6), 1 - 1e-6)

    def learn(self, kind: Hashable, came_true: bool) -> None:
        """A candidate of the kind was put to the test."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        seen[0] += came_true
        seen[1] += 1
        if seen[1] >= _MEMORY:
            seen[:] = seen[0] / 2, seen[1] / 2


_STEADY = 0.05  # of what is known of late, forgotten in a step


class TreeBudget:
    """Decides by expected tokens per second. It may depend on timings; the text does not depend on it.

    Args:
        costs: what passes cost.
        every: verify all nodes, as in a tree of a given shape.

    Attributes:
        rate: tokens per second of late, by the costs; 0 before the first step.
    """

    def __init__(self, costs: PassCosts = NOMINAL, every: bool = False) -> None:
        self.costs, self._every, self.rate = costs, every, 0.0
        self._seconds = 0.0  # of the step under way
        self._tokens, self._time = 0.0, 0.0  # of late
        self._base = self._per_key = np.zeros(0)  # of passes over 1, 2, ... nodes

    def size(self, path_probs: Sequence[float], context: int, cost_s: float) -> int:
        """How many nodes to verify: of these, root first, over so many keys each, after so long a draft."""
        count = len(path_probs)
        if count > len(self._base):
            self._base, ends = (np.array([self.costs.seconds(n, k) for n in range(1, count + 1)]) for k in (0, 1 << 20))
            self._per_key = (ends - self._base) / (1 << 20)
        seconds = cost_s + self._base[:count] + self._per_key[:count] * context
        best = count - 1 if self._every else int((np.cumsum(path_probs) / seconds).argmax())
        self._seconds = float(seconds[best])
        return best + 1

    def learn(self, tokens: int) -> None:
        """The tree whose size was asked for last brought so many tokens."""
        self._tokens += tokens - _STEADY * self._tokens
        self._time += self._seconds - _STEADY * self._time
        self.rate = self._tokens / self._time

    def pays_off(self, tokens: float, seconds: float) -> bool:
        """Whether so many more expected tokens are worth so many more seconds."""
        return tokens >= self.rate * seconds


GAP, _FAR = 0.5, 8  # gaps between scores are told apart by this much, and up to so many times
# chances by rank and gap, about those of the bundled heads over 2,500 tokens; what is learned soon replaces them
GUESSES = (
    (0.42, 0.62, 0.74, 0.83, 0.88),
    (0.27, 0.16, 0.07, 0.05, 0.03),
    (0.12, 0.08, 0.05, 0.03, 0.02),
    (0.06, 0.05, 0.03, 0.02, 0.01),
)
_PLAIN = 0.5  # probability of a token whose source says nothing of it, until more is known


class CandidateTree:
    """A trie of proposed tokens below the last token of the text.

    Node 0 is the root. A candidate is put to the test when the text turns out to have gone through its parent.

    Args:
        root: the text's last token.
        depth: most tokens along a path below the root.
        acceptance: what is known of the kinds of candidates.

    Attributes:
        tokens, parents, depths: one entry per node; parents come before their children.
        sources: which source gave the node its probability, by name; empty for the root.
        path_prob: the probability that the text goes through the node.
        children: of every node, by token.
    """

    def __init__(self, root: int, depth: int, acceptance: AcceptanceEstimator) -> None:
        self.tokens, self.parents, self.depths, self.sources = [root], [-1], [0], [""]
        self.path_prob = [1.0]
        self.children: list[dict[int, int]] = [{}]
        self.depth = depth
        self._acceptance = acceptance
        self._proposed: list[list[tuple[int, Hashable]]] = [[]]  # below each node: token, kind

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to the node."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def propose(self, node: int, token: int, source: str, about: Hashable, guess: float) -> int | None:
        """Say that ``token`` may follow ``node``. Of several sources' probabilities for it the highest counts.

        Args:
            source: name of who says so.
            about: what the source knows of the candidate, out of few values: its probability is learned by it.
            guess: its probability, given that the text goes through ``node``, until something is learned.

        Returns:
            The child; None if that is too deep.
        """
        if self.depths[node] >= self.depth:
            return None
        kind = (source, about)
        self._proposed[node].append((token, kind))
        path_prob = self.path_prob[node] * self._acceptance.chance(kind, guess)
        known = self.children[node].get(token)
        if known is None:
            known = self.children[node][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.sources.append(source)
            self.path_prob.append(path_prob)
            self.children.append({})
            self._proposed.append([])
        elif path_prob > self.path_prob[known]:
            self.sources[known] = source
            self._scale(known, path_prob / self.path_prob[known])
        return known

    def propose_ranked(
        self, node: int, tokens: Sequence[int], scores: Sequence[float], source: str, about: tuple[Hashable, ...]
    ) -> list[int]:
        """Propose tokens below a node that is not too deep, best first, with chances by their scores; their nodes."""
        children = []
        for rank, (token, score) in enumerate(zip(tokens, scores, strict=True)):
            rival = scores[0] if rank else scores[1] if len(scores) > 1 else -inf
            step = round(min(abs(score - rival) / GAP, _FAR))
            guesses = GUESSES[min(rank, len(GUESSES) - 1)]
            child = self.propose(node, token, source, (*about, rank, step), guesses[min(step, len(guesses) - 1)])
            assert child is not None
            children.append(child)
        return children

    def add(self, path: Iterable[int], source: str) -> None:
        """Propose a path of tokens of which nothing is known but how deep they are."""
        node: int | None = 0
        for token in path:
            if node is None:
                return
            node = self.propose(node, token, source, self.depths[node], _PLAIN)

    def likeliest(self, limit: int) -> list[int]:
        """The root and the nodes with the highest probabilities, at most ``limit``, parents before their children."""
        # a child's is below its parent's, which has a smaller number, too; sorting keeps the order of equals
        return sorted(range(len(self)), key=self.path_prob.__getitem__, reverse=True)[:limit]

    def prune(self, nodes: Sequence[int]) -> DraftTree:
        """The draft tree of some nodes, each of which comes after its parent; the root is the first."""
        tree = DraftTree(self.tokens[0], len(nodes), self.depth)
        places: dict[int, Any] = {0: 0}
        for node in nodes[1:]:
            places[node] = tree.grow(places[self.parents[node]], self.tokens[node], self.sources[node])
        return tree

    def learn(self, came: Sequence[int]) -> None:
        """Learn from what the text went on with, whether it was in the draft tree or not."""
        node: int | None = 0
        for token in came:
            if node is None:
                return
            for proposed, kind in self._proposed[node]:
                self._acceptance.learn(kind, proposed == token)
            node = self.children[node].get(token)

    def _scale(self, node: int, factor: float) -> None:
        """Raise the probability of a node, and of what is below it in proportion."""
        self.path_prob[node] *= factor
        for child in self.children[node].values():
            self._scale(child, factor)


@dataclass
class DynamicTreeDrafter(Drafter):
    """A method's sources of candidates, and the budget by which their tree is pruned.

    Attributes:
        budget: how large a tree pays.
    """

    budget: TreeBudget = field(default_factory=TreeBudget)
    _acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
    _drafted: tuple[CandidateTree, int] | None = None  # and the text's length then

    def propose(self, context: Context, wanted: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        tree = CandidateTree(context.text[-1], min(wanted - 1, self.depth), self._acceptance)
        self._drafted = tree, len(context.text)
        self.fill(tree, context)
        nodes = tree.likeliest(self.limit)
        spent = self.draft_cost(self.budget.costs, context)
        return tree.prune(nodes[: self.budget.size([tree.path_prob[node] for node in nodes], context.kv.length, spent)])

    def learn(self, context: Context) -> None:
        """As :meth:`Drafter.learn`."""
        if self._drafted is not None:
            tree, length = self._drafted
            tree.learn(context.text[length:])
            self.budget.learn(len(context.text) - length)
            self._drafted = None


CHUNK = 128  # tokens that a small model catches up with at a time


class DraftModel:
    """A model that drafts, and its cache: the target over the decode's own full cache.

    Attributes:
        target: the model.
        keys: about how many tokens it reads; 0 for all of the text.
    """

    keys = 0

    def __init__(self, target: Target) -> None:
        self.target = target
        self._held = 0

    def cache(self, context: Context) -> KVBuffer:
        """The cache, holding of the text but the root what it is to hold. More may be committed to it."""
        self._held = context.kv.length
        self.target.prepare(context.kv, 1)
        return context.kv

    def rollback(self, context: Context) -> None:
        """Take back what was committed to the cache since; the text has it still."""
        context.kv.length = self._held

    def committed(self, context: Context, most: int) -> None:
        """Keep up with the text, which will grow by ``most`` tokens at most before the next call."""


class PartialDraftModel(DraftModel):
    """The target over a partial cache, which is filled with the exact keys and values of verification passes.

    A pass over it has at most ``nodes`` nodes.
    """

    def __init__(self, target: Target, kv: PartialKV, nodes: int = 1) -> None:
        super().__init__(target)
        self.kv, self.keys = kv, kv.budget
        self._observed: Tensor | None = None  # [layers, query heads, m, head_dim] of the newest tokens
        target.prepare(kv, nodes)

    def cache(self, context: Context) -> PartialKV:
        """The partial cache."""
        return self.kv

    def rollback(self, context: Context) -> None:
        """Forget what is no copy."""
        self.kv.forget()

    def committed(self, context: Context, most: int) -> None:
        """Copy the new tokens; select anew when they, or the next step's, do not fit."""
        last, count = context.last, self.kv.policy.observes
        if count > 1 and last is not None:
            new = last.queries_of(context.path[-count:])
            seen = new if self._observed is None else torch.cat([self._observed, new], dim=2)
            self._observed = seen[:, :, -count:]

        def queries() -> Tensor:
            assert last is not None
            return last.queries_of([context.node]) if self._observed is None else self._observed

        self.kv.follow(context.kv, None if last is None else queries, most)


class SmallDraftModel(DraftModel):
    """Another, smaller model over its own cache.

    It forwards whatever the text has that it has not seen, so it may be asked at any point of any text that goes on
    from a text it was asked about, but for the newest ``kv.slack`` tokens.
    """

    def __init__(self, target: Target, kv: StreamingKV) -> None:
        super().__init__(target)
        self.kv, self.keys = kv, kv.budget
        self._unsettled: list[int] = []
        target.prepare(kv, 1)

    def cache(self, context: Context) -> StreamingKV:
        """Its cache, caught up with the text."""
        text, end, settled = context.text, len(context.text) - 1, self.kv.settled
        known = [*zip(self._unsettled, text[settled:end], strict=False)]
        same = next((i for i, (ours, theirs) in enumerate(known) if ours != theirs), len(known))
        self.kv.take_back(settled + same)
        for start in range(self.kv.seen, end, CHUNK):
            self.kv.settle()
            places = range(start, min(start + CHUNK, end))
            sent = torch.tensor([text[places.start : places.stop], [*places]]).to(self.target.device, non_blocking=True)
            tokens, positions = sent
            self.target.forward(tokens, positions, self.kv, None)
            self.kv.commit(range(len(places)))
        self.kv.settle()
        return self.kv

    def rollback(self, context: Context) -> None:
        """Remember what was forwarded: what the text comes to have of it need not be forwarded again."""
        self._unsettled = context.text[self.kv.settled : self.kv.seen]

    def committed(self, context: Context, most: int) -> None:
        """Forward the prompt; later tokens can wait until they are needed."""
        if not self.kv.seen:
            self.cache(context)
            self.rollback(context)


class ChainSource(Source):
    """A chain below the root.

    Args:
        name: of the source.
        level: the model that decodes it, and over what.
        gamma: tokens of the chain.
        drafter: what the chain is drafted from; of nothing it is decoded token by token.
        shared_noise: draw the chain's tokens with the noise the target will draw with; otherwise take the likeliest.
    """

    def __init__(self, name: str, level: DraftModel, gamma: int, drafter: Drafter, shared_noise: bool) -> None:
        self.name, self.level, self.drafter = name, level, drafter
        self._gamma, self._shared_noise = gamma, shared_noise
        self._stepper: DeviceStepper | None = None

    def propose(self, tree: Any, context: Context) -> None:
        """Decode the chain, propose it, and take all of it back."""
        if not tree.depth:
            return
        root, kv = len(context.text), self.level.cache(context)
        try:
            self._decode(tree, context, kv)
        except NoTokenLeft:  # not for a draft to complain of: the target's own pass will tell
            pass
        finally:
            self.level.rollback(context)
            del context.text[root:]

    def _decode(self, tree: Any, context: Context, kv: KVBuffer) -> None:
        """Add the chain to the text, and to the tree."""
        wanted, root, step = min(self._gamma, tree.depth), len(context.text), self._steps(context, kv)
        try:
            while (drafted := len(context.text) - root) < wanted:
                step(wanted - drafted)
        finally:
            tree.add(context.text[root:], self.name)

    def price(self, costs: PassCosts, context: Context) -> float:
        """As if its model were as large as the target: what another one's passes cost is not known."""
        step = costs.seconds(self.drafter.limit, self.level.keys or context.kv.length)
        return self._gamma * (step + self.drafter.draft_cost(costs, context)) / (1 + self.drafter.depth)

    def _steps(self, context: Context, kv: KVBuffer) -> Callable[[int], Step]:
        """A function that decodes one step, of at most the given number of tokens, from the current text."""
        target = self.level.target
        if self._stepper is not None:  # captured programs go on with the tensors that they were captured with
            self._stepper.restart(context.text, context.sampler)
            return self._stepper.step
        aside = replace(self._aside(context, kv), last=None, path=())
        if target.replays and target.serves(kv):
            self._stepper = DeviceStepper(target, aside, self.drafter)
            return self._stepper.step
        return partial(decode_step, target, aside, self.drafter)

    def _aside(self, context: Context, kv: KVBuffer) -> Context:
        """A fork over another cache, with a sampler of its own; the text is the same list."""
        aside = replace(context, sampler=context.sampler.copy(), kv=kv, recorder=None)
        if not self._shared_noise:
            aside.sampler.params = replace(aside.sampler.params, temperature=0.0)
        return aside

    def committed(self, context: Context, most: int) -> None:
        """Keep the level's cache up."""
        self.level.committed(context, most)
        self.drafter.keep_up(context, most)


_STEP, _SURE = 0.25, (0.6, 0.75, 0.85, 0.9, 0.95)  # leads are told apart by this much; probabilities by them at first
_OTHERS = (0.35, 0.2, 0.1, 0.06, 0.03)  # of the runner-up


class CascadeSource(ChainSource):
    """A chain of the target with the runners-up beside it, as long as it pays.

    By the budget of the tree that it is verified in, and what passes on its level cost.
    """

    def __init__(
        self, level: DraftModel, drafter: Drafter, shared_noise: bool, budget: TreeBudget, costs: PassCosts
    ) -> None:
        super().__init__("self", level, 0, drafter, shared_noise)
        self._budget, self._costs = budget, costs
        self._tokens = 1.0  # of a step on the level, of late
        self._seconds = self._spent = 0.0  # of the last one by the costs, and of all the last draft

    def start(self, context: Context) -> None:
        """Nothing: the host has to see each token before the next is decoded."""
        self._spent = 0.0

    def _decode(self, tree: CandidateTree, context: Context, kv: KVBuffer) -> None:
        held, aside = context.kv.length, self._aside(context, kv)  # keys that it is verified over
        node, keys, target = 0, self.level.keys or held, self.level.target
        while tree.depths[node] < tree.depth and self._pays_off(tree.path_prob[node], held):
            step = decode_step(target, aside, self.drafter, tree.depth - tree.depths[node], leads=True)
            self._seconds = self.drafter.draft_cost(self._costs, aside) + self._costs.seconds(step.nodes, keys)
            self._spent += self._seconds
            self._tokens += 0.05 * (len(step.tokens) - self._tokens)
            for token, (other, lead) in zip(step.tokens, step.leads, strict=True):
                steps = round(min(lead / _STEP, _FAR))
                sure = min(steps, len(_SURE) - 1)
                if lead < inf:  # else nothing but the token was left to be drawn
                    tree.propose(node, other, self.name, (1, steps), _OTHERS[sure])
                below = tree.propose(node, token, self.name, (0, steps), _SURE[sure])
                assert below is not None  # no step goes deeper than was wanted
                node = below

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds of the steps of the last draft."""
        return self._spent

    def _pays_off(self, path_prob: float, held: int) -> bool:
        """Whether another step pays, to be verified over ``held`` keys."""
        if path_prob == 1:
            return True
        seconds = self._seconds + self._tokens * self._budget.costs.node(held)
        return self._budget.pays_off(self._tokens * path_prob, seconds)
