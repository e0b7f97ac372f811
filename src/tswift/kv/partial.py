"""The partial KV cache that drafting reads: a budget of what the full one holds (paper, section 3.3, and its rivals).

The budget holds the first tokens (sinks), those that a policy's score finds to matter most (selected) and the newest
ones (recent). Keys are cached rotated, so their order in the buffer is free: a new token overwrites another in place.
A policy's score says how much a key matters, of one layer: ``keys`` ``[kv heads, n, d]`` and ``queries`` ``[kv heads,
group, m, d]`` of the newest ``m`` tokens, rotated both, to ``[kv heads, n]``, the higher the better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from tswift.kv.cache import KVBuffer, KVShape

Score = Callable[[Tensor, Tensor], Tensor]

CHUNK = 8  # tokens that are retrieved together (TriForce, section 4.1)
_OBSERVED = 32  # newest queries that SnapKV looks at
_POOL = 7  # neighbours that SnapKV averages over


@dataclass(frozen=True)
class Policy:
    """What a partial cache holds beside the first tokens.

    Attributes:
        recent: share of the budget that the newest tokens take in every selection.
        score: importance of keys, for the rest of the budget; None where there is no rest.
        renews: select anew from everything once new tokens have taken the place of those selected. Otherwise those
            stay, and new tokens take the place of the oldest new ones.
        observes: number of newest queries that the score looks at.
    """

    recent: float
    score: Score | None
    renews: bool
    observes: int = 1


def by_query(keys: Tensor, queries: Tensor) -> Tensor:
    """Dot products with the newest query, summed over the query heads of a KV head (TokenSwift, section 3.3)."""
    return (keys @ queries[:, :, -1].sum(1).unsqueeze(-1)).squeeze(-1)


def by_attention(keys: Tensor, queries: Tensor) -> Tensor:
    """The attention that the newest tokens pay, averaged over neighbours (SnapKV, Li et al., 2024).

    The softmax is over these keys alone; the products are scaled by the root of the head's size.
    """
    rows = queries.flatten(1, 2) * keys.shape[-1] ** -0.5
    paid = (rows @ keys.transpose(1, 2)).float().softmax(-1).sum(1)
    return avg_pool1d(paid.unsqueeze(1), _POOL, stride=1, padding=_POOL // 2, count_include_pad=False).squeeze(1)


def by_chunk(keys: Tensor, queries: Tensor) -> Tensor:
    """Dot products of the newest query with the mean key of every chunk, the same for all of its tokens (TriForce)."""
    count = keys.shape[1]
    spare = -count % CHUNK
    sums = pad(keys, (0, 0, 0, spare)).unflatten(1, (-1, CHUNK)).sum(2)
    sizes = keys.new_full((sums.shape[1], 1), CHUNK)
    sizes[-1:] -= spare
    scores = by_query(sums / sizes, queries)
    return scores.repeat_interleave(CHUNK, dim=1)[:, :count]


POLICIES: dict[str, Policy] = {
    "dynamic": Policy(0.25, by_query, renews=True),
    "partial": Policy(0.25, by_query, renews=False),
    "streaming": Policy(1.0, None, renews=False),
    "snapkv": Policy(0.25, by_attention, renews=True, observes=_OBSERVED),
    "retrieval": Policy(0.25, by_chunk, renews=True),
}


class PartialKV(KVBuffer):
    """A budget of keys and values copied from a full cache.

    Args:
        shape: of a token.
        budget: most tokens held; at least 8.
        sinks: number of first tokens that always stay; at most a quarter of the budget.
        policy: what else is held.
        scratch: most tokens that are forwarded over what is held.

    Attributes:
        copied: tokens of the full cache seen so far: held, or passed over by a selection.
        selections: number of selections from everything.
    """

    def __init__(
        self,
        shape: KVShape,
        budget: int = 4096,
        sinks: int = 16,
        policy: Policy = POLICIES["dynamic"],
        scratch: int = 1,
    ) -> None:
        super().__init__(shape, budget + scratch)
        self.budget, self.sinks, self.policy = budget, sinks, policy
        self.recent = int((budget - sinks) * policy.recent)  # newest tokens that every selection takes
        self.selections = 0
        self.copied = 0
        self._held = 0  # slots that hold copies; what is behind them was drafted
        self._free = list(range(budget))[::-1]  # slots for new tokens, the next one last
        self._aging: deque[int] = deque()  # slots that new tokens take when none is free, the oldest first
        slots = self.capacity if shape.placed else 0
        self._places = torch.zeros(shape.layers, shape.heads, slots, dtype=torch.int64, device=shape.device)
        self.device_length: Tensor | None = None  # [] int32, where programs on the device append

    @property
    def room(self) -> int:
        """New tokens that fit before a selection is due."""
        return len(self._free)

    def places(self, layer: int) -> Tensor:
        """``[heads, length]``: every KV head has selected for itself."""
        drafted = self.length - self._held
        self._places[:, :, self._held : self.length] = self.copied + torch.arange(drafted, device=self._places.device)
        return self._places[layer, :, : self.length]

    def forget(self) -> None:
        """Take back what was forwarded over what is held, and committed."""
        self.length = self._held

    def follow(self, full: KVBuffer, queries: Callable[[], Tensor] | None, most: int) -> None:
        """Keep up with a full cache that has grown; nothing may be committed over what is held.

        ``queries`` gives those that :meth:`select` takes; None before the first pass. Room is made for ``most`` tokens,
        by which the full cache grows at most until the next call.
        """
        new = full.length - self.copied
        stays = self.copied > 0 and not self.policy.renews
        if queries is not None and not stays and (new + most > self.room or not self.policy.renews):
            self.select(full, queries())
        else:
            self.append(full)

    def append(self, full: KVBuffer) -> None:
        """Copy the tokens that the full cache has committed since the last call.

        Where the policy renews, there are at most ``room`` of them.
        """
        places = range(self.copied, full.length)
        if not places:
            return
        slots = [self._slot(place) for place in places]
        kept = dict(zip(slots, places, strict=True))  # of many at once the oldest may be overwritten already
        where, source = list(kept.keys()), list(kept.values())
        if self.rows:
            for own, theirs in zip(self.rows, full.rows, strict=True):
                own[:, :, where] = theirs[:, :, source]
        else:
            sent = torch.tensor([where, source]).to(self.keys.device, non_blocking=True)
            whole = len(kept) == len(slots)
            for to, other in ((self.keys, full.keys), (self.values, full.values)):
                new = other[:, :, self.copied : full.length] if whole else other.index_select(2, sent[1])
                to.index_copy_(2, sent[0], new)
        if self.shape.placed:
            self._places[:, :, where] = torch.tensor(source).to(self._places.device, non_blocking=True)
        self._held = self.length = max(self._held, max(slots, default=-1) + 1)
        self.copied = full.length

    def track(self) -> None:
        """Keep the length on the device from now on, where :meth:`append_rows` moves it."""
        self.device_length = torch.full((), self.length, dtype=torch.int32, device=self.shape.device)

    def next_slots(self, count: int) -> list[int]:
        """The slots that the next ``count`` tokens go to; scratch where a selection comes first."""
        slots = [*self._free[-count:][::-1], *self._aging][:count]
        return slots + [self.capacity - 1] * (count - len(slots))

    def append_rows(self, full: KVBuffer, places: Tensor, count: Tensor, slots: Tensor) -> None:
        """On the device, copy the first ``count`` ``[1]`` tokens of ``places`` ``[m]`` in the full cache to ``slots``.

        Nothing is waited for; the host learns of it by :meth:`appended`.
        """
        assert self.device_length is not None
        kept = torch.arange(len(places), device=places.device) < count
        where = torch.where(kept, slots, self.capacity - 1)  # scratch takes what is not kept
        for own, theirs in ((self.keys, full.keys), (self.values, full.values)):
            own.index_copy_(2, where, theirs.index_select(2, places))
        reached = torch.where(kept, slots + 1, 0).amax()
        self.device_length.copy_(torch.maximum(self.device_length, reached))

    def appended(self, count: int) -> None:
        """The device has appended so many tokens."""
        slots = [self._slot(place) for place in range(self.copied, self.copied + count)]
        self._held = self.length = max(self._held, max(slots, default=-1) + 1)
        self.copied += count

    def _slot(self, place: int) -> int:
        """Where a new token goes."""
        slot = self._free.pop() if self._free else self._aging.popleft()
        if not self.policy.renews and place >= self.sinks:
            self._aging.append(slot)
        return slot

    def select(self, full: KVBuffer, queries: Tensor) -> None:
        """Fill the budget anew: sinks, the newest tokens, and the keys that score highest, by each KV head for itself.

        ``queries`` are ``[layers, query heads, m, head_dim]``, rotated, of the newest tokens.
        """
        text, shape = full.length, self.shape
        held = min(text, self.budget)
        sinks = min(self.sinks, text)
        recent = min(self.recent, text - sinks)
        chosen = held - sinks - recent
        grouped = queries.unflatten(1, (shape.heads, -1))
        best = torch.empty(shape.layers, shape.heads, chosen, dtype=torch.int64, device=shape.device)
        if chosen and self.policy.score is not None:
            for layer in range(shape.layers):
                keys = shape.widened(full.keys[layer, :, sinks : text - recent], 0, layer).to(queries.dtype)
                scores = self.policy.score(keys, grouped[layer])
                best[layer] = scores.topk(chosen).indices + sinks
        always = [*range(sinks), *range(text - recent, text)]
        fixed = torch.tensor(always, dtype=torch.int64).to(best.device, non_blocking=True)
        fixed = fixed.expand(shape.layers, shape.heads, -1)
        places = torch.cat([fixed, best], dim=-1)
        if shape.placed:
            self._places[:, :, :held] = places
        order = places.unsqueeze(-1).expand(-1, -1, -1, shape.head_dim)
        self.keys[:, :, :held] = full.keys.gather(2, order)
        self.values[:, :, :held] = full.values.gather(2, order)
        self._held = self.length = held
        if self.device_length is not None:
            self.device_length.fill_(held)
        self.copied = text
        empty = [*range(held, self.budget)[::-1]]
        if self.policy.renews:  # new tokens take empty slots first, then those of the selected, the last ones first
            self._free = [*range(len(always), held), *empty]
        else:
            self._free, self._aging = empty, deque(range(sinks, len(always)))
        self.selections += 1
