"""The kinds of heads by name, and heads made anew from what they said of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tswift.models.base_heads import Heads
from tswift.models.medusa_heads import MedusaHeads
from tswift.models.refining_heads import ChainedHeads, ConditionedHeads

# Those that can be made for any model: they need its LM head and nothing of their own.
KINDS: dict[str, type[ChainedHeads] | type[ConditionedHeads]] = {
    kind.kind: kind for kind in (ChainedHeads, ConditionedHeads)
}


def build(about: Mapping[str, Any]) -> Heads:
    """Heads without weights worth having, from what :meth:`Heads.about` said.

    Raises:
        KeyError: something is not said, or there is no such kind.
        TypeError, ValueError, RuntimeError: what is said is no number, or none that could be.
    """
    raw = about.get("raw", False)
    if type(raw) is not bool:
        raise TypeError(f"raw is {raw!r:.40}")
    if about["kind"] == MedusaHeads.kind:
        return MedusaHeads(about["hidden_size"], about["count"], about["vocab_size"], about["layers"])
    return KINDS[about["kind"]](about["hidden_size"], about["count"], about["eps"], raw)
