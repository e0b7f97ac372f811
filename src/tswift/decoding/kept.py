"""Caches of a model's texts: what a new text has in common with one is not forwarded again.

A text stays, bit for bit, what it would be alone. So those tokens of a kept text serve to which the
new text's own passes would give the same keys and values: all that both have in common where a
row's bits do not depend on the pass that it is in, whole chunks of the prompt where they do, and
none where nothing is known of them. Recurrent states serve at the end of the kept text, and at a
few places where chunks of its prompt ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np

from tswift.caches import FullKV, Mark
from tswift.decoding.loop import Decoding
from tswift.forward.passes import PROMPT_CHUNK
from tswift.forward.target import Target
from tswift.forward.text import with_the_same_bits
from tswift.machine import available_bytes

_LEAST = 64  # tokens that are worth a copy
_SHARE = 4  # of free memory, the part that may be kept where nobody says how much
# of a cache, the part more that a host allocates: the next text, which is longer, often fits then,
# and what is not written takes no memory
_SLACK = 8


@dataclass(eq=False)
class _Text:
    """The tokens that a cache holds, and how many of their text are its prompt."""

    tokens: np.ndarray
    prompt: int
    kv: FullKV

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds."""
        states = sum(mark.states.shape.nbytes for mark in self.kv.marks or () if mark.states)
        return self.kv.length * self.kv.shape.bytes_per_token + states

    def trim(self) -> None:
        """Let go of the room for more."""
        whole = self.kv
        if whole.capacity == whole.length:
            return
        self.kv = FullKV(whole.shape, whole.length)
        self.kv.copy_from(whole)


class KeptCaches:
    """The caches of texts that one model has made; those that were not used for longest go first.

    Args:
        most: GB that they may take; None for a quarter of the memory that is free without them.
        inexact: whether caches of a model whose rows are not exact serve, too: a text may then go
            on otherwise than it would alone.
    """

    def __init__(self, most: float | None = None, inexact: bool = False) -> None:
        self._most = most
        self._inexact = self._serves = inexact
        self._texts: list[_Text] = []  # the one that was used last is the last one
        self.running: WeakSet[Decoding] = WeakSet()  # whose caches serve, too

    @property
    def nbytes(self) -> int:
        """Bytes that a decode can have instead."""
        return sum(text.nbytes for text in self._texts)

    def begin(
        self,
        target: Target,
        text: Sequence[int],
        prompt: int,
        capacity: int,
        back: int,
        needed: int,
    ) -> FullKV:
        """A cache for a text, which holds what is kept of the text's beginning.

        Args:
            target: the model.
            text: the tokens so far.
            prompt: how many of them are the prompt.
            capacity: tokens for which there is to be room, at least.
            back: how many of the last tokens are to be forwarded all the same.
            needed: bytes that the decode takes, which are made free.
        """
        self._serves = self._inexact or target.fixed_rows is not None
        tokens = np.array(text[: -1 - back], np.int64)
        found, mark = None, Mark(_LEAST - 1, None)
        running = [
            _Text(np.array(held, np.int64), own, kv)
            for held, own, kv in (decoding.held for decoding in self.running)
        ]
        for each in (*running, *self._texts):
            place = self._place(target, each, tokens, prompt)
            if place.length > mark.length:
                found, mark = each, place
        taken: _Text | None = None
        if found is not None and found in self._texts:
            self._texts.remove(found)
            lost = found.kv.length - mark.length
            if found.kv.capacity >= capacity and lost < PROMPT_CHUNK:
                taken = found
                needed -= taken.nbytes
            else:
                self._texts.append(found)
        while (
            self._texts and (free := available_bytes(target.device)) is not None and free < needed
        ):
            del self._texts[0]
        if taken is not None:
            taken.kv.rewind(mark)
            return taken.kv
        kv = FullKV(target.kv_shape, capacity + (not target.on_cuda) * capacity // _SLACK)
        kv.marks = []
        if found is not None:
            kv.copy_from(found.kv, mark.length)
            kv.rewind(mark)
        return kv

    def _place(self, target: Target, kept: _Text, tokens: np.ndarray, prompt: int) -> Mark:
        """Up to where a kept text serves one that begins with these tokens."""
        count = min(len(tokens), len(kept.tokens))
        differ = np.flatnonzero(kept.tokens[:count] != tokens[:count])
        alike = int(differ[0]) if len(differ) else count
        if target.fixed_rows is not None or not self._inexact:
            alike = with_the_same_bits(target, alike, (kept.prompt - 1, prompt - 1))
        if kept.kv.states is None:
            return Mark(alike, None)
        marks = (mark for mark in reversed(kept.kv.marks or ()) if mark.length <= alike)
        return next(marks, Mark(0, None))

    def keep(self, decoding: Decoding) -> None:
        """Keep the cache of a text that has ended; :meth:`settle` is to follow."""
        self.running.discard(decoding)
        if self._serves:
            tokens, prompt, kv = decoding.held
            kv.remember()
            # a copy of the object, not of its memory: captured programs and memory that is still to
            # be taken belong to the decode's own
            self._texts.append(_Text(np.array(tokens, np.int64), prompt, copy(kv)))

    def settle(self) -> None:
        """Let go of what is more than may be kept, and on a GPU of the room for more tokens, which
        takes no memory on a host.
        """
        if not self._texts:
            return
        last = self._texts[-1].kv
        free = available_bytes(last.shape.device) or 0
        most = (free + self.nbytes) / _SHARE if self._most is None else self._most * 1e9
        while self.nbytes > most:
            del self._texts[0]
        for text in () if last.rows else self._texts:
            text.trim()
