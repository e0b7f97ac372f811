"""The decoding methods by name: what each drafts from, and which KV it reads while drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch

from tswift.drafting.heads import HeadSource, LastPass, PartialPass
from tswift.drafting.reuse import NgramTable, ReuseSource
from tswift.drafting.source import Drafter, Source
from tswift.errors import InputError
from tswift.kv.partial import PartialKV
from tswift.models.heads import Heads
from tswift.models.target import Target

_MOST_PATHS = 10_000
_LARGEST = 1 << 31  # of any number here; what a machine has room for is a matter of its memory


@dataclass(frozen=True)
class DraftOptions:
    """How a method drafts. The defaults are the paper's, except where the device makes another tree pay.

    Attributes:
        tree: candidates per drafted level; None for the device's default. Its length is the paper's gamma + 1 where the
            LM head drafts the first level (tokenswift), and gamma where only heads draft (medusa).
        nodes: most nodes of a draft tree, root included; None for the device's default.
        ngrams: continuations of one token that are reused (the paper's k).
        reuse_recent: also reuse what is still in the penalty window.
        budget: tokens of the partial KV cache.
        sinks: first tokens that the partial cache always holds.
        shared_noise: rank candidates with the noise the target will draw with.

    Raises:
        InputError: a value outside its range, or of another type.
    """

    tree: tuple[int, ...] | None = None
    nodes: int | None = None
    ngrams: int = 20
    reuse_recent: bool = False
    budget: int = 4096
    sinks: int = 16
    shared_noise: bool = True

    def __post_init__(self) -> None:
        widths = (1,) if self.tree is None else self.tree
        if not (isinstance(widths, tuple) and widths and all(type(width) is int and width > 0 for width in widths)):
            raise InputError(f"wants numbers above 0, such as 1,3,3,3, got {self.tree!r:.80}", "--tree")
        if self.tree is not None and prod(self.tree) > _MOST_PATHS:
            raise InputError(f"has {prod(self.tree):,} paths, at most {_MOST_PATHS:,} are possible", "--tree")
        for option, value, least in (
            ("--nodes", self.nodes, 2),
            ("--ngrams", self.ngrams, 0),
            ("--budget", self.budget, 64),
            ("--sinks", self.sinks, 0),
        ):
            if type(value) is not int and not (value is None and option == "--nodes"):
                raise InputError(f"wants an integer, got {value!r:.40}", option)
            if value is not None and value < least:
                raise InputError(f"must be at least {least}, got {value}", option)
            if value is not None and value > _LARGEST:
                raise InputError(f"must be at most {_LARGEST:,}, got {value:,}", option)
        if self.sinks > self.budget // 4:
            raise InputError(f"must be at most a quarter of --budget {self.budget}, got {self.sinks}", "--sinks")
        for option, flag in (("--reuse-recent", self.reuse_recent), ("--shared-noise", self.shared_noise)):
            if type(flag) is not bool:
                raise InputError(f"is yes or no, got {flag!r:.40}", option)


NGRAM = 4


@dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
        make: its drafter, from the model, its heads and resolved options.
        uses: the fields of DraftOptions that it looks at.
        by_lm_head: levels of its tree that the LM head drafts, before those of the heads.
        reference: it reads the text as reference implementations do, slowly, to be measured beside ``ar``.
    """

    make: Callable[[Target, Heads | None, DraftOptions], Drafter]
    uses: frozenset[str] = frozenset()
    by_lm_head: int = 0
    reference: bool = False


def _ar(target: Target, heads: Heads | None, options: DraftOptions) -> Drafter:
    return Drafter()


def _medusa(target: Target, heads: Heads | None, options: DraftOptions) -> Drafter:
    assert heads is not None
    assert options.tree is not None
    assert options.nodes is not None
    source = HeadSource(target, heads, LastPass(), options.tree, options.shared_noise)
    return Drafter([source], len(options.tree), options.nodes)


def _tokenswift(target: Target, heads: Heads | None, options: DraftOptions) -> Drafter:
    assert heads is not None
    assert options.tree is not None
    assert options.nodes is not None
    reader = PartialPass(target, PartialKV(target.kv_shape, options.budget, options.sinks))
    own = HeadSource(target, heads, reader, options.tree, options.shared_noise)
    sources: list[Source] = [own, *_reuse_sources(options, below=1)]
    return Drafter(sources, max(len(options.tree), NGRAM if options.ngrams else 0), options.nodes)


def _reuse(target: Target, heads: Heads | None, options: DraftOptions) -> Drafter:
    assert options.nodes is not None
    return Drafter(_reuse_sources(options, below=0), NGRAM - 1, options.nodes)


def _reuse_sources(options: DraftOptions, below: int) -> list[ReuseSource]:
    if not options.ngrams:
        return []
    return [ReuseSource(NgramTable(NGRAM, options.ngrams), below, options.reuse_recent)]


_OF_TREES = frozenset({"tree", "nodes", "shared_noise"})
_OF_REUSE = frozenset({"nodes", "ngrams", "reuse_recent"})

METHODS: dict[str, Method] = {
    "ar": Method(_ar),
    "medusa": Method(_medusa, _OF_TREES),
    "tokenswift": Method(_tokenswift, _OF_TREES | _OF_REUSE | {"budget", "sinks"}, by_lm_head=1),
    "reuse": Method(_reuse, _OF_REUSE),
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


def gamma_tree(name: str, device: torch.device, heads: int, gamma: int) -> tuple[int, ...]:
    """The levels of a method's default tree that use ``gamma`` heads, of which the model has so many.

    Raises:
        InputError: fewer levels than one, or more than there are heads or the default tree has.
    """
    tree, first = _TREES[_kind(device)][name], find_method(name).by_lm_head
    least, most = 1 - first, min(len(tree) - first, heads or len(tree))
    if not least <= gamma <= most:
        raise InputError(f"must be between {least} and {most} for {name}, got {gamma}", "--gamma")
    return tree[: gamma + first]


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
    tree = None
    if "tree" in method.uses:
        if not heads:
            raise InputError(f"{name} drafts with heads and the model has none; use ar or reuse", "--method")
        levels = heads + method.by_lm_head
        tree = options.tree or _TREES[kind][name][:levels]
        if len(tree) > levels:
            raise InputError(f"{name} can draft {levels} levels with these heads, got {len(tree)}", "--tree")
    if name == "reuse" and not options.ngrams:
        raise InputError("must be at least 1 for reuse, which drafts from nothing else", "--ngrams")
    nodes = (options.nodes or _NODES[kind]) if "nodes" in method.uses else None
    if nodes and most_nodes and nodes > most_nodes:
        raise InputError(f"must be at most {most_nodes} with this attention, got {nodes}", "--nodes")
    return replace(options, tree=tree, nodes=nodes)


def make_drafter(name: str, target: Target, heads: Heads | None, options: DraftOptions) -> Drafter:
    """The drafter of a method, for one decode.

    Raises:
        InputError: as :func:`resolve`.
    """
    return find_method(name).make(target, heads, resolve(name, target, heads, options))


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"
