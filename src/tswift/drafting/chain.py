"""Drafting a chain of tokens by decoding it: by a small model, or by the target over less than its full cache.

The chain is decoded as any text is, by the same steps with the same sampling rule; so what it is drafted from may in
turn have been drafted, by a model that is smaller still (TriForce, Sun et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.step import Step, Undrawn, advance
from tswift.decoding.tree import DraftTree
from tswift.drafting.levels import Level
from tswift.kv.buffer import KVBuffer


class ChainSource:
    """A chain below the root.

    Args:
        name: of the source.
        level: the model that decodes it, and over what.
        gamma: tokens of the chain.
        drafter: what the chain is drafted from; of nothing it is decoded token by token.
        shared_noise: draw the chain's tokens with the noise the target will draw with; otherwise take the likeliest.
    """

    def __init__(self, name: str, level: Level, gamma: int, drafter: Drafter, shared_noise: bool) -> None:
        self.name = name
        self._level, self._gamma, self.drafter, self._shared_noise = level, gamma, drafter, shared_noise
        self._stepper: DeviceStepper | None = None

    def start(self, context: Context) -> None:
        """Nothing: the host has to see each token before the next is decoded."""

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Decode the chain, and take all of it back."""
        wanted = min(self._gamma, tree.depth)
        if not wanted:
            return
        root = len(context.text)
        step = self._steps(context, self._level.cache(context))
        try:
            while (drafted := len(context.text) - root) < wanted:
                step(wanted - drafted)
        except Undrawn:  # not for a draft to complain of: the target's own pass will tell
            pass
        finally:
            self._level.leave(context)
            chain = context.text[root:]
            del context.text[root:]
        tree.add(chain, self.name)

    def _steps(self, context: Context, kv: KVBuffer) -> Callable[[int], Step]:
        """A function that decodes one step, of at most the given number of tokens, from the current text."""
        target = self._level.target
        if self._stepper is not None:  # captured programs go on with the tensors that they were captured with
            self._stepper.restart(context.text, context.sampler)
            return self._stepper.step
        aside = replace(context.aside(kv), last=None, path=())
        if not self._shared_noise:
            aside.sampler.params = replace(aside.sampler.params, temperature=0.0)
        if target.replays and target.serves(kv):
            self._stepper = DeviceStepper(target, aside, self.drafter)
            return self._stepper.step
        return partial(advance, target, aside, self.drafter)

    def committed(self, context: Context, most: int) -> None:
        """Keep the level's cache up."""
        self._level.committed(context, most)
        self.drafter.keep_up(context, most)
