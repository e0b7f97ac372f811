"""Chains of tokens that a model decodes as a draft: a smaller model,
or the target over part of its cache.

A chain is decoded as any text is, by the same steps with the same sampling rule. So what it is
drafted from may in turn have been drafted, by a model that is smaller still (TriForce, Sun et al.,
2024). A cascade's chain goes on as long as the target over its newest keys is sure of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from tswift.caches import KVBuffer, Mark, PartialKV, StreamingKV
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Context, Drafter, DraftTree, Source, Step
from tswift.decoding.loop import HostStepper
from tswift.decoding.pass_costs import PassCosts
from tswift.drafting.dynamic_tree import FAR_GAP, CandidateTree, TreeBudget
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.sampling.kernels import use_kernels
from tswift.sampling.rule import NoTokenLeft

CAUGHT_UP_TOGETHER = 128  # tokens that a small model catches up with at a time


class DraftModel:
    """A model that drafts, and its cache: the target over the decode's own full cache.

    Attributes:
        target: the model.
        keys: about how many tokens it reads; 0 for all of the text.
    """

    keys = 0

    def __init__(self, target: Target) -> None:
        self.target = target
        self._held: Mark | None = None

    def cache(self, context: Context) -> KVBuffer:
        """The cache, holding of the text but the root what it is to hold.

        More may be committed to it.
        """
        self._held = context.kv.mark()
        self.target.prepare(context.kv, 1)
        return context.kv

    def rollback(self, context: Context) -> None:
        """Take back what was committed to the cache since; the text has it still."""
        assert self._held is not None
        context.kv.rewind(self._held)

    def committed(self, context: Context, most: int) -> None:
        """Keep up with the text, which will grow by ``most`` tokens at
        most before the next call.
        """


class PartialDraftModel(DraftModel):
    """The target over a partial cache, which is filled with the exact keys and values of
    verification passes.

    A pass over it has at most ``nodes`` nodes.
    """

    def __init__(self, target: Target, kv: PartialKV, nodes: int = 1) -> None:
        super().__init__(target)
        self.kv = kv
        self.keys = kv.budget
        # [query heads, m, head_dim] of the newest tokens, by layer
        self._observed: list[Tensor] | None = None
        target.prepare(kv, nodes)

    def cache(self, context: Context) -> PartialKV:
        """The partial cache."""
        return self.kv

    def rollback(self, context: Context) -> None:
        """Forget what is no copy."""
        self.kv.clear()

    def committed(self, context: Context, most: int) -> None:
        """Copy the new tokens; select anew when they, or the next step's, do not fit."""
        last = context.last
        count = self.kv.policy.observes
        if count > 1 and last is not None:
            new = last.queries_of(context.path[-count:])
            held = [layer[:, :0] for layer in new] if self._observed is None else self._observed
            self._observed = [
                torch.cat(both, dim=1)[:, -count:] for both in zip(held, new, strict=True)
            ]

        def queries() -> list[Tensor]:
            assert last is not None
            return last.queries_of([context.node]) if self._observed is None else self._observed

        self.kv.follow(context.kv, None if last is None else queries, most)


class SmallDraftModel(DraftModel):
    """Another, smaller model over its own cache.

    It forwards whatever the text has that it has not seen, so it may be asked at any point of any
    text that goes on from a text it was asked about, but for the newest ``kv.slack`` tokens.
    """

    def __init__(self, target: Target, kv: StreamingKV) -> None:
        super().__init__(target)
        self.kv = kv
        self.keys = kv.budget
        self._unsettled: list[int] = []
        target.prepare(kv, 1)

    def cache(self, context: Context) -> StreamingKV:
        """Its cache, caught up with the text."""
        text = context.text
        end = len(context.text) - 1
        settled = self.kv.settled
        known = [*zip(self._unsettled, text[settled:end], strict=False)]
        same = next((i for i, (ours, theirs) in enumerate(known) if ours != theirs), len(known))
        self.kv.trim_to(settled + same)
        for start in range(self.kv.seen, end, CAUGHT_UP_TOGETHER):
            self.kv.settle()
            places = range(start, min(start + CAUGHT_UP_TOGETHER, end))
            sent = torch.tensor([text[places.start : places.stop], [*places]]).to(
                self.target.device, non_blocking=True
            )
            tokens, positions = sent
            self.target.forward(Nodes(tokens, positions, self.kv))
            self.kv.commit(range(len(places)))
        self.kv.settle()
        return self.kv

    def rollback(self, context: Context) -> None:
        """Remember what was forwarded: what the text comes to have of it need not be forwarded
        again.
        """
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
        draft_model: the model that decodes it, and over what.
        gamma: tokens of the chain.
        drafter: what the chain is drafted from; of nothing it is decoded token by token.
        shared_noise: draw the chain's tokens with the noise the target will draw with; otherwise
            take the likeliest.
    """

    def __init__(
        self, name: str, draft_model: DraftModel, gamma: int, drafter: Drafter, shared_noise: bool
    ) -> None:
        self.name = name
        self.draft_model = draft_model
        self.drafter = drafter
        self._gamma = gamma
        self._shared_noise = shared_noise
        self._stepper: DeviceStepper | None = None

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Decode the chain, propose it, and take all of it back."""
        if not tree.depth:
            return
        root = len(context.text)
        kv = self.draft_model.cache(context)
        try:
            self._decode(tree, context, kv)
        except NoTokenLeft:  # not for a draft to complain of: the target's own pass will tell
            pass
        finally:
            self.draft_model.rollback(context)
            del context.text[root:]

    def _decode(self, tree: Any, context: Context, kv: KVBuffer) -> None:
        """Add the chain to the text, and to the tree."""
        max_new = min(self._gamma, tree.depth)
        root = len(context.text)
        step = self._steps(context, kv)
        try:
            while (drafted := len(context.text) - root) < max_new:
                step(max_new - drafted)
        finally:
            tree.add(context.text[root:], self.name)

    def draft_seconds(self, costs: PassCosts, context: Context) -> float:
        """As if its model were as large as the target:
        what another one's passes cost is not known.
        """
        step = costs.alone.seconds(self.drafter.limit, self.draft_model.keys or context.kv.length)
        return (
            self._gamma
            * (step + self.drafter.draft_seconds(costs, context))
            / (1 + self.drafter.depth)
        )

    def _steps(self, context: Context, kv: KVBuffer) -> Callable[[int], Step]:
        """A function that decodes one step, of at most the given number of tokens,
        from the current text.
        """
        target = self.draft_model.target
        if self._stepper is not None:
            # captured programs go on with the tensors that they were captured with
            self._stepper.restart(context.text, context.sampler)
            return self._stepper.step
        aside = replace(self._aside(context, kv), last=None, path=())
        if target.replays and target.serves(kv):
            self._stepper = DeviceStepper(target, aside, self.drafter)
            return self._stepper.step
        return HostStepper(target, aside, self.drafter).step

    def _aside(self, context: Context, kv: KVBuffer) -> Context:
        """A fork over another cache, with a sampler of its own; the text is the same list."""
        aside = replace(context, sampler=context.sampler.copy(), kv=kv, recorder=None)
        if not self._shared_noise:
            own = aside.sampler.params
            # of a penalty that nobody typed, temperature 0 would make none
            aside.sampler.params = replace(own, temperature=0.0, penalty=float(own.penalty))
        return aside

    def committed(self, context: Context, most: int) -> None:
        """Keep the level's cache up."""
        self.draft_model.committed(context, most)
        self.drafter.keep_up(context, most)


# a chain that can pay is so many times as fast as plain decoding if all of it comes true, for some
# length
_AHEAD = 1.2
_CHAINS = (2, 4, 8, 16)
# leads are told apart by this much; probabilities by them at first
_STEP = 0.25
_CHANCES_BY_LEAD = (0.6, 0.75, 0.85, 0.9, 0.95)


_OTHERS = (0.35, 0.2, 0.1, 0.06, 0.03)  # of the runner-up


class CascadeSource(ChainSource):
    """A chain of the target with the runners-up beside it, as long as it pays.

    By the budget of the tree that it is verified in, and what passes on its level cost.
    """

    def __init__(
        self,
        draft_model: DraftModel,
        drafter: Drafter,
        shared_noise: bool,
        budget: TreeBudget,
        costs: PassCosts,
    ) -> None:
        super().__init__("self", draft_model, 0, drafter, shared_noise)
        self._budget = budget
        self._costs = costs
        self._tokens = 1.0  # of a step on the level, of late
        self._seconds = self._spent = 0.0  # of the last one by the costs, and of all the last draft

    def may_pay(self, costs: PassCosts, context: Context) -> bool:
        """Whether a chain all of which came true would be well ahead of the steps on its level,
        were these taken over the whole text.
        """
        keys = context.kv.length
        seconds = self._costs.seconds(1, min(self.draft_model.keys or keys, keys)) / self._tokens
        plain = costs.seconds(1, keys) / self._tokens
        return any(
            (1 + count) * plain > _AHEAD * (count * seconds + costs.seconds(1 + count, keys))
            for count in _CHAINS
        )

    def start(self, context: Context) -> None:
        """Nothing: the host has to see each token before the next is decoded."""
        self._spent = 0.0

    def _decode(self, tree: CandidateTree, context: Context, kv: KVBuffer) -> None:
        held = context.kv.length  # keys that it is verified over
        aside = self._aside(context, kv)
        node = 0
        keys = self.draft_model.keys or held
        target = self.draft_model.target
        stepper = HostStepper(target, aside, self.drafter, with_runner_up=True)
        use_kernels(aside.sampler, target.dtype, 2)
        while tree.depths[node] < tree.depth and self._pays_off(tree.path_prob[node], held):
            step = stepper.step(tree.depth - tree.depths[node])
            self._seconds = self.drafter.draft_seconds(self._costs, aside) + self._costs.seconds(
                step.nodes, keys
            )
            self._spent += self._seconds
            self._tokens += 0.05 * (len(step.tokens) - self._tokens)
            for token, (other, lead) in zip(step.tokens, step.leads, strict=True):
                steps = round(min(lead / _STEP, FAR_GAP))
                sure = min(steps, len(_CHANCES_BY_LEAD) - 1)
                if lead < inf:  # else nothing but the token was left to be drawn
                    tree.propose(node, other, self.name, (1, steps), _OTHERS[sure])
                below = tree.propose(node, token, self.name, (0, steps), _CHANCES_BY_LEAD[sure])
                assert below is not None  # no step goes deeper than was wanted
                node = below

    def draft_seconds(self, costs: PassCosts, context: Context) -> float:
        """Seconds of the steps of the last draft."""
        return self._spent

    def _pays_off(self, path_prob: float, held: int) -> bool:
        """Whether another step pays, to be verified over ``held`` keys."""
        if path_prob == 1:
            return True
        seconds = self._seconds + self._tokens * self._budget.costs.node(held)
        return self._budget.pays_off(self._tokens * path_prob, seconds)
