"""Decoding on several ranks in lockstep: rank 0 decides when to stop, and no rank goes on from other tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from zlib import crc32

import numpy as np

from tswift.decoding.drafter import Context, Drafter, DraftTree, Step
from tswift.distributed import Dist, guard
from tswift.errors import Fault
from tswift.models.passes import Forwarded


class AgreedDrafter(Drafter):
    """A drafter that checks, before each pass, that all ranks have drafted the same tree."""

    def __init__(self, drafter: Drafter, ranks: Dist) -> None:
        super().__init__(drafter.sources, drafter.depth, drafter.limit)
        self._drafter, self._ranks = drafter, ranks

    @property
    def choice(self) -> str:
        """As :attr:`Drafter.choice`."""
        return self._drafter.choice

    def propose(self, context: Context, wanted: int) -> DraftTree:
        """As :meth:`Drafter.propose`.

        Raises:
            Fault: another rank has drafted another tree.
        """
        tree = self._drafter.propose(context, wanted)
        if self.limit > 1:
            _refuse_different("drafts", self._ranks.gather(_digest(tree.parents, _digest(tree.tokens))))
        return tree

    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """As :meth:`Drafter.prefilled`."""
        self._drafter.prefilled(context, forwarded)

    def committed(self, context: Context) -> None:
        """As :meth:`Drafter.committed`."""
        self._drafter.committed(context)


def lockstep(steps: Iterator[Step], ranks: Dist) -> Iterator[Step]:
    """The steps of a decode, each begun once all ranks want it and have the same text; a rank that stops ends all.

    Raises:
        KeyboardInterrupt: another rank wants no more (raised on rank 0; on others the iterator ends).
        Fault: another rank has drawn other tokens.
        Gone: another rank has died.
    """
    drawn = 0
    while True:
        with guard():
            unwilling = _unwilling(ranks, True, drawn)
            step = None if unwilling else next(steps, None)
        if unwilling:
            if ranks.first:
                raise KeyboardInterrupt(f"rank {unwilling[0]} was asked to stop")
            return
        if step is None:
            if ranks.first:
                break
            continue  # rank 0 has yet to say so
        drawn = _digest(step.tokens, drawn)
        try:
            yield step
        except GeneratorExit:
            break
    with suppress(RuntimeError):  # a dead rank need not be told
        _unwilling(ranks, False, drawn)


def _unwilling(ranks: Dist, willing: bool, drawn: int) -> list[int]:
    """The ranks that want no other step; all must have drawn the same."""
    answers = ranks.gather(int(willing), drawn)
    _refuse_different("tokens", [digest for _, *digest in answers])
    return [rank for rank, (theirs, _) in enumerate(answers) if not theirs]


def _refuse_different(what: str, digests: Sequence[Sequence[int]]) -> None:
    if any(theirs != digests[0] for theirs in digests):
        raise Fault(f"the {len(digests)} ranks have different {what}: they do not compute alike")


def _digest(tokens: Sequence[int], before: int = 0) -> int:
    return crc32(np.asarray(tokens, dtype="<i8").tobytes(), before)
