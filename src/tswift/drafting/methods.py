"""The decoding methods by name: what each drafts from, and which KV it reads while drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tswift.decoding.drafter import Drafter
from tswift.drafting import recipes
from tswift.drafting.options import AUTO, FULL, DraftOptions
from tswift.errors import InputError


@dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
        make: its drafter, from the models and resolved options.
        uses: the fields of DraftOptions that it looks at.
        by_lm_head: levels of its tree that the LM head drafts, before those of the heads.
        kv: what it can read while drafting; the first is the default.
        gamma: length of its chain, if not said otherwise; None if it drafts none.
        budget: tokens of its partial cache, if not said otherwise.
        partial: whether passes of the target draft: over a partial cache of it, unless drafting reads the full one.
        heads: whether it needs heads though it has no tree of theirs to choose.
        draft: whether it needs a smaller model.
        reference: it reads the text as reference implementations do, slowly, to be measured beside ``ar``.
    """

    make: Callable[[recipes.Models, DraftOptions], Drafter]
    uses: frozenset[str] = frozenset()
    by_lm_head: int = 0
    kv: tuple[str, ...] = ()
    gamma: int | None = None
    budget: int = 4096
    partial: bool = False
    heads: bool = False
    draft: bool = False
    reference: bool = False

    @property
    def with_heads(self) -> bool:
        """Whether heads draft."""
        return self.heads or "tree" in self.uses


OF_CHOICE = frozenset({"costs", "recall"})  # where it is chosen anew in every step what pays
OF_NGRAMS = frozenset({"ngrams", "reuse_recent"})

_OF_TREES = frozenset({"tree", "nodes", "shared_noise"}) | OF_CHOICE
_OF_REUSE = frozenset({"nodes"}) | OF_NGRAMS
_OF_PARTIAL = frozenset({"budget", "sinks"})
_OF_CHAINS = frozenset({"gamma", "shared_noise"})

_CASCADE = Method(
    recipes.cascade,
    frozenset({"nodes"}) | OF_CHOICE | _OF_CHAINS | _OF_PARTIAL | {"kv"},
    heads=True,
    kv=("streaming", "dynamic", "partial", "snapkv"),
    gamma=24,
    budget=1024,
    partial=True,
)

METHODS: dict[str, Method] = {
    "ar": Method(recipes.ar),
    "medusa": Method(recipes.medusa, _OF_TREES),
    "tokenswift": Method(
        recipes.tokenswift,
        _OF_TREES | _OF_REUSE | _OF_PARTIAL | {"kv"},
        by_lm_head=1,
        kv=("dynamic", FULL, "partial", "streaming", "snapkv"),
        partial=True,
    ),
    "cascade": _CASCADE,
    "recall": Method(recipes.recall, frozenset({"nodes", "shared_noise"}) | OF_CHOICE),
    "reuse": Method(recipes.reuse, _OF_REUSE),
    "magicdec": Method(
        recipes.magicdec,
        _OF_CHAINS | _OF_PARTIAL | {"kv"},
        kv=("snapkv", "streaming", "dynamic", "partial", FULL),
        gamma=4,
        partial=True,
    ),
    "standalone": Method(
        recipes.standalone, _OF_CHAINS | _OF_PARTIAL | {"kv"}, kv=("streaming", FULL), gamma=4, budget=512, draft=True
    ),
    "triforce": Method(recipes.triforce, _OF_CHAINS | _OF_PARTIAL | {"inner_gamma"}, gamma=6, partial=True, draft=True),
    "auto": replace(_CASCADE, make=recipes.auto),
    "ar-reference": Method(recipes.ar, reference=True),
}


def find_method(name: str) -> Method:
    """The method of a name.

    Raises:
        InputError: there is none.
    """
    if name not in METHODS:
        raise InputError(f"no method {name!r}; there are {', '.join(METHODS)}", "--method")
    return METHODS[name]


def used(name: str, options: DraftOptions) -> frozenset[str]:
    """The fields of its options that a method looks at, by their values."""
    uses = find_method(name).uses
    if "kv" in uses and options.kv == FULL:
        uses -= _OF_PARTIAL
    if "tree" in uses and options.tree != AUTO:
        uses -= OF_CHOICE
    elif "tree" in uses and options.recall != 0:  # recalls instead
        uses -= OF_NGRAMS
    return uses
