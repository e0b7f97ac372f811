"""Caches of texts that have ended: what a new text has in common with one is not forwarded again.

A text stays, bit for bit, what it would be alone. So those tokens of a kept text serve to which the
new text's own passes would give the same keys and values: all that both have in common where a
row's bits do not depend on the pass that it is in, whole chunks of the prompt where they do, and
none where nothing is known of them. Recurrent states serve at the end of the kept text, and at a
few places where chunks of its prompt ended.

The last text keeps its buffers as they are, as the next one most often goes on with it and takes
them over; the others are cut to what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tswift.caches import FullKV, Mark
from tswift.decoding.loop import Decoding
from tswift.forward.passes import PROMPT_CHUNK
from tswift.forward.target import Target
from tswift.forward.text import with_the_same_bits
from tswift.machine import available_bytes

_LEAST = 64  # tokens that are worth a copy
_SHARE = 4  # of free memory, the part that may be kept where nobody says how much


@dataclass(eq=False)
class _Text:
    """The first tokens of a text, which a cache holds, and how many of the text are its prompt."""

    tokens: NDArray[np.int64]
    prompt: int
    kv: FullKV

    @property
    def nbytes(self) -> int:
        """Bytes that are free without it: a processor's memory is taken by what is written."""
        kv = self.kv
        states = 0 if kv.states is None else (2 + len(kv.marks or ())) * kv.states.shape.nbytes
        used = kv.length * kv.shape.bytes_per_token if kv.rows else kv.nbytes
        return used + states

    def alike(self, tokens: NDArray[np.int64]) -> int:
        """With how many of these tokens it begins."""
        count = min(len(tokens), len(self.tokens))
        differ = self.tokens[:count] != tokens[:count]
        return int(differ.argmax()) if differ.any() else count

    def trim(self) -> None:
        """Let go of the room for more tokens."""
        whole = self.kv
        if whole.capacity > whole.length:
            self.kv = FullKV(whole.shape, whole.length)
            self.kv.copy_from(whole)
            self.kv.marks = whole.marks


class KeptCaches:
    """The caches of texts that one model has made; those that have not been used for longest go
    first.

    Args:
        most: bytes that they may take; None for a quarter of the memory that is free without them.
        inexact: whether caches of a model whose rows are not exact serve, too: a text may then go
            on otherwise than it would alone.
    """

    def __init__(self, most: int | None = None, inexact: bool = False) -> None:
        self._most = most
        self._inexact = inexact
        self._texts: list[_Text] = []  # the one that was used last is the last

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
        tokens = np.array(text[: max(0, len(text) - 1 - back)], np.int64)
        found, mark = None, Mark(_LEAST - 1, None)
        for each in self._texts:
            place = self._place(target, each, tokens, prompt)
            if place.length > mark.length:
                found, mark = each, place
        taken = False
        if found is not None:
            self._texts.remove(found)
            lost = len(found.tokens) - found.alike(tokens)
            taken = found.kv.capacity >= capacity and lost < back + PROMPT_CHUNK
            if taken:
                needed -= found.nbytes
            else:
                self._texts.append(found)
        while self._texts and (free := available_bytes(target.device)) is not None:
            if free >= needed:
                break
            del self._texts[0]
        # a copied object even so: captured programs are known by the cache that they were made for
        kv = copy(found.kv) if found and taken else FullKV(target.kv_shape, capacity)
        kv.marks = []
        if found and (taken or found in self._texts):
            if not taken:
                kv.copy_from(found.kv, mark.length)
            kv.rewind(mark)
            kv.marks += [each for each in found.kv.marks or () if each.length <= mark.length]
        return kv

    def _place(self, target: Target, kept: _Text, tokens: NDArray[np.int64], prompt: int) -> Mark:
        """Up to where a kept text serves one that begins with these tokens."""
        held = kept.alike(tokens)
        if target.fixed_rows is not None or not self._inexact:
            held = with_the_same_bits(target, held, (kept.prompt - 1, prompt - 1))
        kv = kept.kv
        if kv.states is None or held == kv.length:
            return Mark(held, None)
        places = (mark for mark in reversed(kv.marks or ()) if mark.length <= held)
        return next(places, Mark(0, None))

    def keep(self, decoding: Decoding) -> None:
        """Keep the cache of a text that has ended; :meth:`settle` is to follow."""
        tokens, prompt, kv = decoding.held
        made = _Text(np.array(tokens, np.int64), prompt, kv)
        if kv.states is None:
            # it serves wherever those serve that it goes on from
            self._texts = [each for each in self._texts if each.alike(made.tokens) < each.kv.length]
        self._texts.append(made)

    def settle(self) -> None:
        """Cut what is kept to what it holds, and to the memory that it may take."""
        if not self._texts:
            return
        last = self._texts[-1]
        most = self._most
        if most is None:
            free = available_bytes(last.kv.shape.device)
            most = last.nbytes if free is None else (free + self.nbytes) // _SHARE
        while self._texts and self.nbytes > most:
            del self._texts[0]
        for each in self._texts[:-1]:
            each.trim()
