"""Drafting by the target itself over a few keys, as far as it is sure of itself, itself drafted by heads.

The target over the newest keys alone draws nearly what it draws over all of them, and says by the lead of each token
how sure that is. Its own passes are cheap where the text is long, and heads make few of them do.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from tswift.decoding.drafter import Context
from tswift.decoding.step import Undrawn, advance
from tswift.drafting.levels import Level
from tswift.drafting.plan import Plan
from tswift.drafting.planned import PlannedDrafter
from tswift.drafting.sketch import Sketch

_INNER, _LEVELS = 8, 3  # nodes of a step on the level, and levels of heads, for judging whether another one pays
_AGREES = 0.9  # about how many of its tokens are those that the target draws over everything
_STEP, _FAR = 0.25, 8  # leads are told apart by this much, and up to so many times
_GUESSES = (0.6, 0.75, 0.85, 0.9, 0.95)  # chances by lead at first
_OTHERS = (0.35, 0.2, 0.1, 0.06, 0.03)  # of the runner-up


class CascadeSource:
    """A chain below the root with the runners-up beside it, as long as it pays.

    Args:
        level: the target and what it reads.
        drafter: what the chain is drafted from; it plans by what passes on the level cost.
        shared_noise: draw the chain's tokens with the noise the target will draw with; otherwise take the likeliest.
        plan: of the tree that it is verified in.

    Attributes:
        drafter: what the chain is drafted from.
    """

    name = "self"

    def __init__(self, level: Level, drafter: PlannedDrafter, shared_noise: bool, plan: Plan) -> None:
        self._level, self.drafter, self._shared_noise, self._plan = level, drafter, shared_noise, plan
        self.spent = 0.0
        self._usual = 1.0  # tokens of a step on the level, of late

    def start(self, context: Context) -> None:
        """Nothing: the host has to see each token before the next is decoded."""

    def propose(self, sketch: Sketch, context: Context) -> None:
        """Decode the chain, offer it, and take all of it back."""
        self.spent = 0.0
        root, held = len(context.text), context.kv.length
        aside = context.aside(self._level.cache(context))
        if not self._shared_noise:
            aside.sampler.params = replace(aside.sampler.params, temperature=0.0)
        try:
            self._decode(sketch, aside, held)
        except Undrawn:  # not for a draft to complain of: the target's own pass will tell
            pass
        finally:
            self._level.leave(context)
            del context.text[root:]

    def _decode(self, sketch: Sketch, aside: Context, held: int) -> None:
        """Decode the chain and offer it, as long as that pays; ``held`` keys are what it is verified over."""
        node, keys, costs = 0, self._level.keys or held, self.drafter.plan.costs
        while sketch.depths[node] < sketch.depth and self._worth(sketch.reach[node], keys, held):
            step = advance(self._level.target, aside, self.drafter, sketch.depth - sketch.depths[node], leads=True)
            self.spent += self.drafter.spent + costs.seconds(step.nodes, keys)
            self._usual += 0.05 * (len(step.tokens) - self._usual)
            for token, (other, lead) in zip(step.tokens, step.leads, strict=True):
                steps = round(min(lead / _STEP, _FAR))
                sure = min(steps, len(_GUESSES) - 1)
                if lead < inf:  # else nothing but the token was left to be drawn
                    sketch.offer(node, other, self.name, (1, steps), _OTHERS[sure])
                below = sketch.offer(node, token, self.name, (0, steps), _GUESSES[sure])
                assert below is not None  # no step goes deeper than was wanted
                node = below

    def _worth(self, reach: float, keys: int, held: int) -> bool:
        """Whether another step over ``keys`` keys pays, to be verified over ``held``."""
        if reach == 1:
            return True
        costs = self.drafter.plan.costs
        step = costs.seconds(_INNER, keys) + _LEVELS * costs.level
        return self._plan.worth(_AGREES * self._usual * reach, step + self._usual * self._plan.costs.node(held))

    def committed(self, context: Context, most: int) -> None:
        """Keep the level's cache up."""
        self._level.committed(context, most)
        self.drafter.keep_up(context, most)
