"""A decode that several ranks make in step: the first decides how far it goes, and none goes on from other tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from zlib import crc32

import numpy as np

from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.step import Step
from tswift.decoding.tree import DraftTree
from tswift.errors import Fault
from tswift.models.passes import Forwarded
from tswift.models.ranks import Ranks


class AgreedDrafter(Drafter):
    """A drafter whose trees are seen to be the same on all ranks, before they begin a pass over them together."""

    def __init__(self, drafter: Drafter, ranks: Ranks) -> None:
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


def in_step(steps: Iterator[Step], ranks: Ranks) -> Iterator[Step]:
    """The steps of a decode, each begun once all ranks know that all want it and that their texts are the same.

    A rank that stops taking them ends them on all.

    Raises:
        KeyboardInterrupt: another rank wants no more; on the first rank, for the others it is the end.
        Fault: another rank has drawn other tokens.
        Gone: another rank is not there any more.
    """
    drawn = 0
    while True:
        with ranks.together():
            unwilling = _unwilling(ranks, True, drawn)
            step = None if unwilling else next(steps, None)
        if unwilling:
            if ranks.rank == 0:
                raise KeyboardInterrupt(f"rank {unwilling[0]} was asked to stop")
            return
        if step is None:
            if ranks.rank == 0:
                break
            continue  # the first has yet to say so
        drawn = _digest(step.tokens, drawn)
        try:
            yield step
        except GeneratorExit:
            break
    with suppress(RuntimeError):  # one that is gone need not be told
        _unwilling(ranks, False, drawn)


def _unwilling(ranks: Ranks, willing: bool, drawn: int) -> list[int]:
    """The ranks that want no other step, all having drawn the same."""
    words = ranks.gather(int(willing), drawn)
    _refuse_different("tokens", [digest for _, *digest in words])
    return [rank for rank, (theirs, _) in enumerate(words) if not theirs]


def _refuse_different(what: str, found: Sequence[Sequence[int]]) -> None:
    if any(theirs != found[0] for theirs in found):
        raise Fault(f"the {len(found)} ranks have different {what}: they do not compute alike")


def _digest(tokens: Sequence[int], before: int = 0) -> int:
    return crc32(np.asarray(tokens, dtype="<i8").tobytes(), before)
