"""The one decode loop: draft a tree, verify it in one target pass, keep what the sampling rule would have drawn.

Plain autoregressive decoding is this loop with a tree of one node. At every node of the tree the rule is applied once,
at the node's own position and with its own penalty window; the walk from the root follows the drawn tokens. So the text
is that of plain decoding whatever is drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tswift.decoding.finite import not_finite
from tswift.decoding.sampling import NOTHING, Sampler, SamplingParams
from tswift.decoding.tree import DraftTree
from tswift.drafting.source import Context, Drafter
from tswift.kv.full import FullKV
from tswift.models.passes import Forwarded
from tswift.models.target import Show, Target

Walk = Callable[[DraftTree, Sequence[int]], list[int]]  # as DraftTree.walk: the nodes accepted, root first


@dataclass(frozen=True)
class Step:
    """What one verification pass added to the text.

    Attributes:
        tokens: the new tokens: the accepted draft and the one drawn after it.
        accepted: drafted tokens accepted by the verification.
        source: the draft source of the last accepted token; empty if none was accepted.
        nodes: nodes of the draft tree, the root included.
        seconds: wall time of the step, drafting included.
    """

    tokens: tuple[int, ...]
    accepted: int
    source: str
    nodes: int
    seconds: float


class Decoding:
    """A decode: a model, a prompt, sampling parameters and a seed, which together fix the text.

    Args:
        target: the model.
        prompt: at least one token id.
        params: the sampling parameters.
        seed: any integer.
        drafter: how to draft; it decides the speed and nothing else. It holds state: a new one for every decode.
        length: most tokens that will be generated, for which the KV cache is allocated; those written count.
        walk: which drafted tokens to accept, to time a given acceptance; the text is not the model's then. None accepts
            what the sampling rule draws.
        written: the tokens that the decode has generated already. It goes on after them as if it had never stopped.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a length that leaves nothing to generate.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        drafter: Drafter,
        length: int,
        walk: Walk | None = None,
        written: Sequence[int] = (),
    ) -> None:
        if not prompt:
            raise ValueError("prompt must have at least one token")
        for name, ids in (("prompt", prompt), ("written", written)):
            if not all(0 <= token < target.vocab_size for token in ids):
                raise ValueError(f"{name} has token ids outside the vocabulary of {target.vocab_size}")
        if length <= len(written):
            raise ValueError(f"length must be at least {len(written) + 1}, got {length}")
        self._target, self._drafter, self._left, self._walk = target, drafter, length - len(written), walk
        sampler = Sampler(params, seed, target.vocab_size, target.device)
        kv = FullKV(target.kv_shape, len(prompt) + length + drafter.limit)
        self._context = Context([*prompt, *written], sampler, kv, None, 0)
        self._last = len(prompt) + length  # positions that may be committed
        self._prefilled = False

    def prefill(self, show: Show | None = None) -> float:
        """Forward the text so far, all but its last token, which is the first draft's root.

        Args:
            show: called after every chunk with the tokens forwarded so far and those to forward in all.

        Returns:
            The seconds it took.
        """
        if self._prefilled:
            raise RuntimeError("this decode has been prefilled already")
        context = self._context
        started = time.perf_counter()
        context.sampler.extend(context.text)
        context.last = self._target.prefill(context.text[:-1], context.kv, show)
        self._target.synchronize()
        prefilled = time.perf_counter() - started
        # not before: the text's keys and values must not depend on the sizes that a method prepares
        self._target.prepare(context.kv, self._drafter.limit)
        started = time.perf_counter() - prefilled
        if context.last is not None:
            context.node = len(context.last.hidden) - 1
        self._drafter.committed(context)
        self._target.synchronize()
        self._prefilled = True
        return time.perf_counter() - started

    def steps(self, stop: Collection[int] = ()) -> Iterator[Step]:
        """Generate exactly what is left of ``length``, less if one of ``stop`` is drawn (it is the last one then).

        Raises:
            NotFinite: the model gave NaN or infinity where a token was to be drawn. That step adds nothing.
        """
        if not self._prefilled:
            self.prefill()
        left, self._left = self._left, 0
        if not left:
            raise RuntimeError("the steps of a decode can be taken once")
        while left > 0:
            step = self._step(self._context, self._drafter, left, stop, self._walk)
            left = 0 if step.tokens[-1] in stop else left - len(step.tokens)
            yield step

    def settle(self) -> float:
        """Wait until the device has done all that the steps so far gave it to do; returns the seconds that took."""
        started = time.perf_counter()
        self._target.synchronize()
        return time.perf_counter() - started

    def plain(self, count: int) -> list[Step]:
        """What plain decoding does and costs from here on: up to ``count`` one-token steps, all taken back.

        Call it between two steps. Text, KV cache and the steps to come are as if it had not been called. It goes no
        further than one token beyond the length asked for.
        """
        own = self._context
        kv = own.kv
        aside = replace(own, text=list(own.text), sampler=own.sampler.copy())
        held = kv.length
        plain = Drafter()
        try:
            return [self._step(aside, plain, 1, (), None) for _ in range(min(count, self._last - held))]
        finally:
            kv.length = held

    def _step(self, context: Context, drafter: Drafter, wanted: int, stop: Collection[int], walk: Walk | None) -> Step:
        started = time.perf_counter()
        with torch.inference_mode():
            tree = drafter.propose(context, wanted)
            forwarded, drawn, path = self._verify(context, tree, walk)
            if len(tree) > 1 and any(drawn[node] == NOTHING for node in path):
                # not yet a fault: a drafted token can be too much for the model, and its NaN spreads in the pass
                tree = DraftTree(context.text[-1], limit=1)
                forwarded, drawn, path = self._verify(context, tree, walk)
            if drawn[path[-1]] == NOTHING:
                logits = self._target.logits(forwarded.hidden)[0]
                raise not_finite(self._target, context.kv, context.text, logits, context.sampler.params)
            new = [tree.tokens[node] for node in path[1:]] + [drawn[path[-1]]]
            context.kv.commit(path)
            context.text += new
            context.sampler.extend(new)
            context.last, context.node = forwarded, path[-1]
            drafter.committed(context)
        ends = [index for index, token in enumerate(new) if token in stop]
        kept = new[: ends[0] + 1] if ends else new
        accepted = min(len(path) - 1, len(kept))
        source = tree.sources[path[accepted]]
        return Step(tuple(kept), accepted, source, len(tree), time.perf_counter() - started)

    def _verify(self, context: Context, tree: DraftTree, walk: Walk | None) -> tuple[Forwarded, list[int], list[int]]:
        """One pass over a tree, the token drawn after each of its nodes, and the nodes accepted."""
        target = self._target
        tokens = torch.tensor(tree.tokens).to(target.device, non_blocking=True)
        positions = torch.tensor(tree.depths).to(target.device, non_blocking=True) + context.position
        ancestors = tree.ancestors().to(target.device, non_blocking=True)
        forwarded = target.forward(tokens, positions, context.kv, ancestors)
        seen = context.sampler.seen(tokens, positions, ancestors)
        places = [context.position + depth + 1 for depth in tree.depths]
        drawn = context.sampler.draw(target.logits(forwarded.hidden), seen, places)
        return forwarded, drawn, walk(tree, drawn) if walk else tree.walk(drawn)
