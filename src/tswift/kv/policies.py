"""Which tokens a partial KV cache holds: how much goes to the newest, how others are chosen, and whether once or anew.

A policy's score says how much a key matters, of one layer: ``keys`` ``[kv heads, n, d]`` and ``queries`` ``[kv heads,
group, m, d]`` of the newest ``m`` tokens, rotated both, to ``[kv heads, n]``, the higher the better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

Score = Callable[[Tensor, Tensor], Tensor]

CHUNK = 8  # tokens that are retrieved together (TriForce, section 4.1)
_OBSERVED = 32  # newest queries that SnapKV looks at
_POOL = 7  # neighbours that SnapKV averages over


@dataclass(frozen=True)
class Policy:
    """What a partial cache holds beside the first tokens.

    Attributes:
        recent: share of the budget that the newest tokens take in every selection.
        score: how much keys matter, for what is left of the budget; None where nothing is.
        renews: select anew from everything once new tokens have taken the place of those selected. Otherwise those
            stay, and new tokens take the place of the oldest new ones.
        observes: how many of the newest queries the score looks at.
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
