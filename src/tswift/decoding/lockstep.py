"""Decoding by several ranks in lockstep: rank 0 decides when to stop,
and no rank goes on from other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from zlib import crc32

import numpy as np

from tswift.decoding.drafter import Context, Drafter, DraftTree, Step
from tswift.distributed import Dist, guard
from tswift.errors import DecodeError


def agree(drafter: Drafter, ranks: Dist) -> None:
    """Have a drafter check before each pass that all ranks drafted the same tree;
    DecodeError if they did not.
    """
    own = drafter.propose

    def propose(context: Context, max_new: int) -> DraftTree:
        tree = own(context, max_new)
        if drafter.limit > 1:
            _refuse_different("drafts", ranks.gather(_digest(tree.parents, _digest(tree.tokens))))
        return tree

    drafter.propose = propose  # type: ignore[method-assign]


def lockstep(steps: Iterator[Step], ranks: Dist) -> Iterator[Step]:
    """The steps of a decode, each begun once all ranks want it and have the same text;
    a rank that stops ends all.

    Raises:
        KeyboardInterrupt: another rank wants no more (raised on rank 0; on others the iterator
            ends).
        DecodeError: another rank has drawn other tokens.
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
        raise DecodeError(
            f"the {len(digests)} ranks have different {what}: they do not compute alike"
        )


def _digest(tokens: Sequence[int], before: int = 0) -> int:
    return crc32(np.asarray(tokens, dtype="<i8").tobytes(), before)
