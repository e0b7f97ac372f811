"""What drafting decodes or reads: a model, and the cache that it does so over."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tswift.decoding.drafter import Context
from tswift.kv.buffer import KVBuffer
from tswift.kv.partial import PartialKV
from tswift.kv.streaming import StreamingKV
from tswift.models.target import Target

CHUNK = 128  # tokens that a small model catches up with at a time


class Level(Protocol):
    """A model and its cache.

    Attributes:
        target: the model.
        keys: about how many tokens it reads; 0 for all of the text.
    """

    target: Target
    keys: int

    def cache(self, context: Context) -> KVBuffer:
        """The cache, holding of the text but the root what it is to hold. More may be committed to it."""

    def leave(self, context: Context) -> None:
        """Take back what was committed to the cache since; the text has it still."""

    def committed(self, context: Context, most: int) -> None:
        """Keep up with the text, which will grow by ``most`` tokens at most before the next call."""


class FullLevel:
    """The target over its full cache.

    Args:
        target: the model.
    """

    keys = 0

    def __init__(self, target: Target) -> None:
        self.target = target
        self._held = 0

    def cache(self, context: Context) -> KVBuffer:
        """That of the decode itself."""
        self._held = context.kv.length
        self.target.prepare(context.kv, 1)
        return context.kv

    def leave(self, context: Context) -> None:
        """Forget what was drafted."""
        context.kv.length = self._held

    def committed(self, context: Context, most: int) -> None:
        """Nothing: the decode keeps its own cache up."""


class PartialLevel:
    """The target over a partial cache, which is filled with the exact keys and values of verification passes.

    Args:
        target: the model.
        kv: the cache, empty.
        nodes: most nodes of a pass over it.
    """

    def __init__(self, target: Target, kv: PartialKV, nodes: int = 1) -> None:
        self.target, self.kv, self.keys = target, kv, kv.budget
        self._observed: Tensor | None = None  # [layers, query heads, m, head_dim] of the newest tokens
        target.prepare(kv, nodes)

    def cache(self, context: Context) -> PartialKV:
        """The partial cache."""
        return self.kv

    def leave(self, context: Context) -> None:
        """Forget what is no copy."""
        self.kv.forget()

    def committed(self, context: Context, most: int) -> None:
        """Copy the new tokens; select anew when they, or the next step's, do not fit."""
        if self.kv.policy.observes > 1 and context.last is not None:
            new = context.last.queries_of(context.path[-self.kv.policy.observes :])
            seen = new if self._observed is None else torch.cat([self._observed, new], dim=2)
            self._observed = seen[:, :, -self.kv.policy.observes :]
        self.kv.follow(context.kv, None if context.last is None else lambda: self._queries(context), most)

    def _queries(self, context: Context) -> Tensor:
        assert context.last is not None
        return context.last.queries_of([context.node]) if self._observed is None else self._observed


class OwnLevel:
    """Another, smaller model over its own cache.

    It forwards whatever the text has that it has not seen, so it may be asked at any point of any text that goes on
    from a text it was asked about, but for the newest ``kv.slack`` tokens.

    Args:
        target: the smaller model.
        kv: its cache, empty.
    """

    def __init__(self, target: Target, kv: StreamingKV) -> None:
        self.target, self.kv, self.keys = target, kv, kv.budget
        self._unsettled: list[int] = []
        target.prepare(kv, 1)

    def cache(self, context: Context) -> StreamingKV:
        """Its cache, caught up with the text."""
        text, end = context.text, len(context.text) - 1
        known = zip(self._unsettled, text[self.kv.settled : end], strict=False)
        same = next((i for i, (ours, theirs) in enumerate(known) if ours != theirs), None)
        if same is None:
            same = min(len(self._unsettled), end - self.kv.settled)
        self.kv.take_back(self.kv.settled + same)
        for start in range(self.kv.seen, end, CHUNK):
            self.kv.settle()
            places = range(start, min(start + CHUNK, end))
            sent = torch.tensor([text[places.start : places.stop], [*places]]).to(self.target.device, non_blocking=True)
            tokens, positions = sent
            self.target.forward(tokens, positions, self.kv, None)
            self.kv.commit(range(len(places)))
        self.kv.settle()
        return self.kv

    def leave(self, context: Context) -> None:
        """Remember what was forwarded: what the text comes to have of it need not be forwarded again."""
        self._unsettled = context.text[self.kv.settled : self.kv.seen]

    def committed(self, context: Context, most: int) -> None:
        """Forward the prompt; later tokens can wait until they are needed."""
        if not self.kv.seen:
            self.cache(context)
            self.leave(context)
