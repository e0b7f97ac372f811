"""What each method drafts from, made of models and resolved options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tswift.drafting.chain import ChainSource
from tswift.drafting.heads import DraftingPass, HeadSource, LastPass
from tswift.drafting.levels import CHUNK, FullLevel, Level, OwnLevel, PartialLevel
from tswift.drafting.options import FULL, DraftOptions
from tswift.drafting.reuse import NgramTable, ReuseSource
from tswift.drafting.source import Drafter, Source
from tswift.kv.partial import PartialKV
from tswift.kv.policies import POLICIES
from tswift.kv.streaming import StreamingKV
from tswift.models.heads import Heads
from tswift.models.target import Target

NGRAM = 4

_SMALL_BUDGET = 256  # of the small model where the target over retrieved keys stands between (TriForce, section 5.1)


@dataclass(frozen=True)
class Models:
    """What a method drafts with.

    Attributes:
        target: the model whose tokens are wanted.
        heads: its heads, if it has any.
        draft: a smaller model with the same vocabulary, if there is one.
        positions: most tokens of prompt and text together.
    """

    target: Target
    heads: Heads | None
    draft: Target | None
    positions: int


def ar(models: Models, options: DraftOptions) -> Drafter:
    """Of nothing: plain decoding."""
    return Drafter()


def medusa(models: Models, options: DraftOptions) -> Drafter:
    """Heads on the last verification pass."""
    assert models.heads is not None
    assert options.tree is not None
    assert options.nodes is not None
    source = HeadSource(models.target, models.heads, LastPass(), options.tree, options.shared_noise)
    return Drafter([source], len(options.tree), options.nodes)


def tokenswift(models: Models, options: DraftOptions) -> Drafter:
    """A drafting pass of the target, heads on it, and n-grams of the text."""
    assert models.heads is not None
    assert options.tree is not None
    assert options.nodes is not None
    reader = DraftingPass(_self_level(models.target, options))
    own = HeadSource(models.target, models.heads, reader, options.tree, options.shared_noise)
    sources: list[Source] = [own, *_reuse_sources(options, below=1)]
    return Drafter(sources, max(len(options.tree), NGRAM if options.ngrams else 0), options.nodes)


def reuse(models: Models, options: DraftOptions) -> Drafter:
    """N-grams of the text alone."""
    assert options.nodes is not None
    return Drafter(_reuse_sources(options, below=0), NGRAM - 1, options.nodes)


def _reuse_sources(options: DraftOptions, below: int) -> list[ReuseSource]:
    if not options.ngrams:
        return []
    return [ReuseSource(NgramTable(NGRAM, options.ngrams), below, options.reuse_recent)]


def magicdec(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by the target itself over less than its full cache, as a rule."""
    return _chain("self", _self_level(models.target, options, chain=options.gamma), options, Drafter())


def standalone(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by a smaller model."""
    assert options.gamma is not None
    return _chain("model", _own_level(models, options), options, Drafter())


def triforce(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by the target over retrieved keys, itself drafted by a smaller model."""
    assert options.gamma is not None
    small = _own_level(models, options, between=True)
    inner = _chain("model", small, replace(options, gamma=options.inner_gamma), Drafter())
    scratch = options.gamma + inner.limit
    assert options.budget is not None
    retrieved = PartialKV(models.target.kv_shape, options.budget, options.sinks, POLICIES["retrieval"], scratch)
    return _chain("retrieval", PartialLevel(models.target, retrieved, inner.limit), options, inner)


def _self_level(target: Target, options: DraftOptions, chain: int | None = 0) -> Level:
    """The target itself over what ``--kv`` says, with room for a chain."""
    assert options.kv is not None
    if options.kv == FULL:
        return FullLevel(target)
    assert options.budget is not None
    kv = PartialKV(target.kv_shape, options.budget, options.sinks, POLICIES[options.kv], (chain or 0) + 1)
    return PartialLevel(target, kv)


def _own_level(models: Models, options: DraftOptions, between: bool = False) -> Level:
    """The small model over its own cache."""
    assert models.draft is not None
    budget, ahead = own_size(options, models.positions, between)
    kv = StreamingKV(models.draft.kv_shape, budget, min(options.sinks, budget // 4), ahead, ahead + CHUNK)
    return OwnLevel(models.draft, kv)


def own_size(options: DraftOptions, positions: int, between: bool) -> tuple[int, int]:
    """Tokens that a small model's cache holds for good, and how far it can be ahead of the text.

    Args:
        options: resolved ones.
        positions: most tokens of prompt and text together.
        between: whether the target over retrieved keys stands between it and the text.
    """
    assert options.gamma is not None
    assert options.budget is not None
    if between:
        return min(options.budget, _SMALL_BUDGET), options.gamma + options.inner_gamma + 2
    return positions if options.kv == FULL else options.budget, options.gamma + 2


def _chain(name: str, level: Level, options: DraftOptions, inner: Drafter) -> Drafter:
    assert options.gamma is not None
    source = ChainSource(name, level, options.gamma, inner, options.shared_noise)
    return Drafter([source], options.gamma, options.gamma + 1)
