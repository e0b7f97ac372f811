"""The decoding methods by name: what each drafts from, and which KV it reads while drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch

from tswift.drafting.chain import ChainSource
from tswift.drafting.heads import DraftingPass, HeadSource, LastPass
from tswift.drafting.levels import CHUNK, FullLevel, Level, OwnLevel, PartialLevel
from tswift.drafting.reuse import NgramTable, ReuseSource
from tswift.drafting.source import Drafter, Source
from tswift.errors import InputError
from tswift.kv.partial import PartialKV
from tswift.kv.policies import POLICIES
from tswift.kv.streaming import StreamingKV
from tswift.models.heads import Heads
from tswift.models.target import Target

_MOST_PATHS = 10_000
_LONGEST = 1000  # chain
_LARGEST = 1 << 31  # of any number here; what a machine has room for is a matter of its memory


FULL = "full"
KV = (FULL, "partial", "dynamic", "streaming", "snapkv")  # what drafting can read


@dataclass(frozen=True)
class DraftOptions:
    """How a method drafts. The defaults are the paper's, except where the device makes another tree pay.

    Attributes:
        tree: candidates per drafted level; None for the device's default. Its length is the paper's gamma + 1 where the
            LM head drafts the first level (tokenswift), and gamma where only heads draft (medusa).
        nodes: most nodes of a draft tree, root included; None for the device's default.
        ngrams: continuations of one token that are reused (the paper's k).
        reuse_recent: also reuse what is still in the penalty window.
        gamma: tokens drafted along a path, where it is a chain; heads to use of the default tree, where it is one of
            heads. None for the method's default, or all.
        inner_gamma: tokens that the small model drafts for the draft, where there are two.
        kv: what drafting reads: ``full``, or which tokens a partial cache holds, ``partial`` (selected once),
            ``dynamic``, ``streaming`` or ``snapkv``; None for the method's default.
        budget: tokens of the partial KV cache; None for the method's default.
        sinks: first tokens that the partial cache always holds.
        shared_noise: rank candidates with the noise the target will draw with.

    Raises:
        InputError: a value outside its range, or of another type.
    """

    tree: tuple[int, ...] | None = None
    nodes: int | None = None
    ngrams: int = 20
    reuse_recent: bool = False
    gamma: int | None = None
    inner_gamma: int = 2
    kv: str | None = None
    budget: int | None = None
    sinks: int = 16
    shared_noise: bool = True

    def __post_init__(self) -> None:
        widths = (1,) if self.tree is None else self.tree
        if not (isinstance(widths, tuple) and widths and all(type(width) is int and width > 0 for width in widths)):
            raise InputError(f"wants numbers above 0, such as 1,3,3,3, got {self.tree!r:.80}", "--tree")
        if self.tree is not None and prod(self.tree) > _MOST_PATHS:
            raise InputError(f"has {prod(self.tree):,} paths, at most {_MOST_PATHS:,} are possible", "--tree")
        if self.tree is not None and self.gamma is not None:
            raise InputError("cannot be given together with --tree", "--gamma")
        if self.kv not in (None, *KV):
            raise InputError(f"is one of {', '.join(KV)}, got {self.kv!r:.40}", "--kv")
        for option, value, least in (
            ("--nodes", self.nodes, 2),
            ("--ngrams", self.ngrams, 0),
            ("--gamma", self.gamma, 0),
            ("--inner-gamma", self.inner_gamma, 1),
            ("--budget", self.budget, 64),
            ("--sinks", self.sinks, 0),
        ):
            if type(value) is not int and not (value is None and option in ("--nodes", "--gamma", "--budget")):
                raise InputError(f"wants an integer, got {value!r:.40}", option)
            if value is not None and value < least:
                raise InputError(f"must be at least {least}, got {value}", option)
            most = _LONGEST if option in ("--gamma", "--inner-gamma") else _LARGEST
            if value is not None and value > most:
                raise InputError(f"must be at most {most:,}, got {value:,}", option)
        if self.budget is not None:
            _refuse_sinks(self.sinks, self.budget)
        for option, flag in (("--reuse-recent", self.reuse_recent), ("--shared-noise", self.shared_noise)):
            if type(flag) is not bool:
                raise InputError(f"is yes or no, got {flag!r:.40}", option)


NGRAM = 4


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
        partial: whether it keeps a partial cache of the target, unless drafting reads the full one.
        draft: whether it needs a smaller model.
        reference: it reads the text as reference implementations do, slowly, to be measured beside ``ar``.
    """

    make: Callable[[Models, DraftOptions], Drafter]
    uses: frozenset[str] = frozenset()
    by_lm_head: int = 0
    kv: tuple[str, ...] = ()
    gamma: int | None = None
    budget: int = 4096
    partial: bool = False
    draft: bool = False
    reference: bool = False


def _ar(models: Models, options: DraftOptions) -> Drafter:
    return Drafter()


def _medusa(models: Models, options: DraftOptions) -> Drafter:
    assert models.heads is not None
    assert options.tree is not None
    assert options.nodes is not None
    source = HeadSource(models.target, models.heads, LastPass(), options.tree, options.shared_noise)
    return Drafter([source], len(options.tree), options.nodes)


def _tokenswift(models: Models, options: DraftOptions) -> Drafter:
    assert models.heads is not None
    assert options.tree is not None
    assert options.nodes is not None
    reader = DraftingPass(_self_level(models.target, options))
    own = HeadSource(models.target, models.heads, reader, options.tree, options.shared_noise)
    sources: list[Source] = [own, *_reuse_sources(options, below=1)]
    return Drafter(sources, max(len(options.tree), NGRAM if options.ngrams else 0), options.nodes)


def _reuse(models: Models, options: DraftOptions) -> Drafter:
    assert options.nodes is not None
    return Drafter(_reuse_sources(options, below=0), NGRAM - 1, options.nodes)


def _reuse_sources(options: DraftOptions, below: int) -> list[ReuseSource]:
    if not options.ngrams:
        return []
    return [ReuseSource(NgramTable(NGRAM, options.ngrams), below, options.reuse_recent)]


def _magicdec(models: Models, options: DraftOptions) -> Drafter:
    return _chain("self", _self_level(models.target, options, chain=options.gamma), options, Drafter())


def _standalone(models: Models, options: DraftOptions) -> Drafter:
    assert options.gamma is not None
    return _chain("model", _own_level("standalone", models, options), options, Drafter())


def _triforce(models: Models, options: DraftOptions) -> Drafter:
    assert options.gamma is not None
    inner = _chain(
        "model", _own_level("triforce", models, options), replace(options, gamma=options.inner_gamma), Drafter()
    )
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


def _own_level(name: str, models: Models, options: DraftOptions) -> Level:
    """The small model over its own cache."""
    assert models.draft is not None
    budget, ahead = _own_size(name, options, models.positions)
    kv = StreamingKV(models.draft.kv_shape, budget, min(options.sinks, budget // 4), ahead, ahead + CHUNK)
    return OwnLevel(models.draft, kv)


def _own_size(name: str, options: DraftOptions, positions: int) -> tuple[int, int]:
    """Tokens that a small model's cache holds for good, and how far it can be ahead of the text."""
    assert options.gamma is not None
    assert options.budget is not None
    if "inner_gamma" in find_method(name).uses:
        return min(options.budget, _SMALL_BUDGET), options.gamma + options.inner_gamma + 2
    return positions if options.kv == FULL else options.budget, options.gamma + 2


def _chain(name: str, level: Level, options: DraftOptions, inner: Drafter) -> Drafter:
    assert options.gamma is not None
    source = ChainSource(name, level, options.gamma, inner, options.shared_noise)
    return Drafter([source], options.gamma, options.gamma + 1)


_OF_TREES = frozenset({"tree", "nodes", "shared_noise"})
_OF_REUSE = frozenset({"nodes", "ngrams", "reuse_recent"})
_OF_PARTIAL = frozenset({"budget", "sinks"})
_OF_CHAINS = frozenset({"gamma", "shared_noise"})
_SMALL_BUDGET = 256  # of the small model where the target over retrieved keys stands between (TriForce, section 5.1)

METHODS: dict[str, Method] = {
    "ar": Method(_ar),
    "medusa": Method(_medusa, _OF_TREES),
    "tokenswift": Method(
        _tokenswift,
        _OF_TREES | _OF_REUSE | _OF_PARTIAL | {"kv"},
        by_lm_head=1,
        kv=("dynamic", FULL, "partial", "streaming", "snapkv"),
        partial=True,
    ),
    "reuse": Method(_reuse, _OF_REUSE),
    "magicdec": Method(
        _magicdec,
        _OF_CHAINS | _OF_PARTIAL | {"kv"},
        kv=("snapkv", "streaming", "dynamic", "partial", FULL),
        gamma=4,
        partial=True,
    ),
    "standalone": Method(
        _standalone, _OF_CHAINS | _OF_PARTIAL | {"kv"}, kv=("streaming", FULL), gamma=4, budget=512, draft=True
    ),
    "triforce": Method(_triforce, _OF_CHAINS | _OF_PARTIAL | {"inner_gamma"}, gamma=6, partial=True, draft=True),
    "ar-reference": Method(_ar, reference=True),
}

# Trees that pay. On a GPU a pass over a hundred nodes costs little more than one over a single node, so the paper's
# tree stands. On a CPU every node costs: two more than eight add 2% to a step's tokens and more to its time.
_TREES = {
    "cuda": {"medusa": (3, 3, 3), "tokenswift": (1, 3, 3, 3)},
    "cpu": {"medusa": (2, 2, 2, 2), "tokenswift": (1, 2, 2, 2, 2)},
}
_NODES = {"cuda": 128, "cpu": 8}


def find_method(name: str) -> Method:
    """The method of a name.

    Raises:
        InputError: there is none.
    """
    if name not in METHODS:
        raise InputError(f"no method {name!r}; there are {', '.join(METHODS)}", "--method")
    return METHODS[name]


def resolve(name: str, target: Target, heads: Heads | None, options: DraftOptions) -> DraftOptions:
    """The options with the device's defaults filled in: ``tree`` and ``nodes``, where the method uses them.

    Raises:
        InputError: no such method, heads that it needs are missing, or a tree that does not fit the heads.
    """
    return resolve_for(name, target.device, target.most_nodes, heads.count if heads else 0, options)


def resolve_for(
    name: str, device: torch.device, most_nodes: int | None, heads: int, options: DraftOptions
) -> DraftOptions:
    """As :func:`resolve`, for a model that need not be there.

    Args:
        name: of the method.
        device: where the model will be.
        most_nodes: most nodes of a draft tree that its attention can do; None if there is no such limit.
        heads: how many it has.
        options: as asked for.
    """
    method, kind = find_method(name), _kind(device)
    gamma, kv = None, options.kv or next(iter(method.kv), None)
    if "kv" in method.uses and kv not in method.kv:
        raise InputError(f"{name} can read {', '.join(method.kv)}, not {kv}", "--kv")
    if method.gamma is not None:
        gamma = method.gamma if options.gamma is None else options.gamma
        if not gamma:
            raise InputError(f"must be at least 1 for {name}", "--gamma")
    tree = None
    if "tree" in method.uses:
        if not heads:
            raise InputError(f"{name} drafts with heads and the model has none; use ar or reuse", "--method")
        levels = heads + method.by_lm_head
        tree = options.tree or _TREES[kind][name][:levels]
        if options.gamma is not None:
            tree = _gamma_tree(name, tree, levels, options.gamma)
        if len(tree) > levels:
            raise InputError(f"{name} can draft {levels} levels with these heads, got {len(tree)}", "--tree")
    if name == "reuse" and not options.ngrams:
        raise InputError("must be at least 1 for reuse, which drafts from nothing else", "--ngrams")
    nodes = (options.nodes or _NODES[kind]) if "nodes" in method.uses else None
    if nodes and most_nodes and nodes > most_nodes:
        raise InputError(f"must be at most {most_nodes} with this attention, got {nodes}", "--nodes")
    longest = max(gamma or 0, options.inner_gamma if "inner_gamma" in method.uses else 0)
    if most_nodes and longest >= most_nodes:
        raise InputError(f"must be below {most_nodes} with this attention, got {longest}", "--gamma")
    budget = options.budget or method.budget
    if "sinks" in used(name, options):
        _refuse_sinks(options.sinks, budget)
    return replace(options, tree=tree, nodes=nodes, gamma=gamma, kv=kv if "kv" in method.uses else None, budget=budget)


def _refuse_sinks(sinks: int, budget: int) -> None:
    if sinks > budget // 4:
        raise InputError(f"must be at most a quarter of --budget {budget}, got {sinks}", "--sinks")


def make_drafter(
    name: str,
    target: Target,
    heads: Heads | None,
    options: DraftOptions,
    draft: Target | None = None,
    positions: int | None = None,
) -> Drafter:
    """The drafter of a method, for one decode.

    Args:
        name: of the method.
        target: the model.
        heads: its heads, if it has any.
        options: as asked for.
        draft: a smaller model with the same vocabulary, if there is one.
        positions: most tokens of prompt and text together; None for as many as the models can do.

    Raises:
        InputError: as :func:`resolve`, or there is no smaller model where one is needed.
    """
    method, options = find_method(name), resolve(name, target, heads, options)
    if method.draft and draft is None:
        raise InputError(f"{name} drafts with a smaller model, and there is none", "--draft-model")
    return method.make(Models(target, heads, draft, positions or target.max_positions), options)


def partial_slots(name: str, options: DraftOptions) -> int:
    """Tokens that a method's partial cache of the target has room for, by resolved options; 0 if it has none."""
    if not find_method(name).partial or options.kv == FULL:
        return 0
    return (
        (options.budget or find_method(name).budget)
        + (options.gamma or 0)
        + 1
        + (options.inner_gamma if find_method(name).draft else 0)
    )


def draft_slots(name: str, options: DraftOptions, positions: int) -> int:
    """Tokens that the cache of a method's smaller model has room for, by resolved options; 0 if it has none."""
    if not find_method(name).draft:
        return 0
    budget, ahead = _own_size(name, options, positions)
    return budget + 2 * ahead + CHUNK


def used(name: str, options: DraftOptions) -> frozenset[str]:
    """The fields of its options that a method looks at, by their values."""
    uses = find_method(name).uses
    return uses - _OF_PARTIAL if "kv" in uses and options.kv == FULL else uses


def _gamma_tree(name: str, tree: tuple[int, ...], levels: int, gamma: int) -> tuple[int, ...]:
    """The levels of the default tree that use ``gamma`` heads."""
    first = find_method(name).by_lm_head
    least, most = 1 - first, min(len(tree), levels) - first
    if not least <= gamma <= most:
        raise InputError(f"must be between {least} and {most} for {name}, got {gamma}", "--gamma")
    return tree[: gamma + first]


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"
