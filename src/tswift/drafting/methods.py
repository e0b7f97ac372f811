"""The decoding methods by name: what each drafts from, and which KV it reads while drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tswift.drafting.heads import HeadSource, LastPass, PartialPass
from tswift.drafting.reuse import NgramTable, ReuseSource
from tswift.drafting.source import Drafter, Source
from tswift.errors import InputError
from tswift.kv.partial import PartialKV
from tswift.models.heads import ChainedHeads
from tswift.models.target import Target


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
        InputError: a value outside its range.
    """

    tree: tuple[int, ...] | None = None
    nodes: int | None = None
    ngrams: int = 20
    reuse_recent: bool = False
    budget: int = 4096
    sinks: int = 16
    shared_noise: bool = True

    def __post_init__(self) -> None:
        if self.tree is not None and (not self.tree or any(width < 1 for width in self.tree)):
            raise InputError(f"wants numbers above 0, such as 1,3,3,3, got {self.tree}", "--tree")
        for option, value, least in (
            ("--nodes", self.nodes, 2),
            ("--ngrams", self.ngrams, 0),
            ("--budget", self.budget, 64),
            ("--sinks", self.sinks, 0),
        ):
            if value is not None and value < least:
                raise InputError(f"must be at least {least}, got {value}", option)


Method = Callable[[Target, ChainedHeads | None, DraftOptions], Drafter]
NGRAM = 4


def _ar(target: Target, heads: ChainedHeads | None, options: DraftOptions) -> Drafter:
    return Drafter()


def _medusa(target: Target, heads: ChainedHeads | None, options: DraftOptions) -> Drafter:
    heads = _needed(heads, "medusa")
    tree = _tree(options, target, "medusa", heads.count)
    source = HeadSource(target, LastPass(heads, len(tree)), tree, options.shared_noise)
    return Drafter([source], len(tree), _nodes(options, target))


def _tokenswift(target: Target, heads: ChainedHeads | None, options: DraftOptions) -> Drafter:
    heads = _needed(heads, "tokenswift")
    tree = _tree(options, target, "tokenswift", heads.count + 1)
    reader = PartialPass(target, heads, len(tree) - 1, PartialKV(target.kv_shape, options.budget, options.sinks))
    sources: list[Source] = [HeadSource(target, reader, tree, options.shared_noise), *_reuse_sources(options, below=1)]
    return Drafter(sources, max(len(tree), NGRAM if options.ngrams else 0), _nodes(options, target))


def _reuse(target: Target, heads: ChainedHeads | None, options: DraftOptions) -> Drafter:
    return Drafter(_reuse_sources(options, below=0), NGRAM - 1, _nodes(options, target))


METHODS: dict[str, Method] = {"ar": _ar, "medusa": _medusa, "tokenswift": _tokenswift, "reuse": _reuse}

# The fields of DraftOptions that change how a method drafts. The others it does not look at.
OPTIONS_OF: dict[str, frozenset[str]] = {
    "ar": frozenset(),
    "medusa": frozenset({"tree", "nodes", "shared_noise"}),
    "tokenswift": frozenset({"tree", "nodes", "ngrams", "reuse_recent", "budget", "sinks", "shared_noise"}),
    "reuse": frozenset({"nodes", "ngrams", "reuse_recent"}),
}

# Trees that pay. On a GPU a pass over a hundred nodes costs little more than one over a single node, so the paper's
# tree stands. On a CPU every node costs; see results/ for the measurement behind these.
_TREES = {
    "cuda": {"medusa": (3, 3, 3), "tokenswift": (1, 3, 3, 3)},
    "cpu": {"medusa": (2, 1, 1), "tokenswift": (1, 2, 1, 1)},
}
_NODES = {"cuda": 128, "cpu": 8}


def check_method(method: str) -> None:
    """Refuse an unknown method.

    Raises:
        InputError: no such method.
    """
    if method not in METHODS:
        raise InputError(f"no method {method!r}; there are {', '.join(METHODS)}", "--method")


def gamma_tree(method: str, target: Target, gamma: int) -> tuple[int, ...]:
    """The first levels of a method's default tree: gamma + 1 where the LM head drafts the first one, else gamma.

    Raises:
        InputError: fewer levels than one, or more than the default tree has.
    """
    tree = _TREES[_by_device(target)][method]
    by_lm_head = 1 if method == "tokenswift" else 0
    if not 1 - by_lm_head <= gamma <= len(tree) - by_lm_head:
        most = len(tree) - by_lm_head
        raise InputError(f"must be between {1 - by_lm_head} and {most} for {method}, got {gamma}", "--gamma")
    return tree[: gamma + by_lm_head]


def resolve(method: str, target: Target, heads: ChainedHeads | None, options: DraftOptions) -> DraftOptions:
    """The options with the device's defaults filled in: ``tree`` and ``nodes``, where the method uses them.

    Raises:
        InputError: as :func:`make_drafter`.
    """
    check_method(method)
    used = OPTIONS_OF[method]
    tree = None
    if "tree" in used:
        levels = _needed(heads, method).count + (1 if method == "tokenswift" else 0)
        tree = _tree(options, target, method, levels)
    return replace(options, tree=tree, nodes=_nodes(options, target) if "nodes" in used else None)


def make_drafter(method: str, target: Target, heads: ChainedHeads | None, options: DraftOptions) -> Drafter:
    """The drafter of a method.

    Raises:
        InputError: no such method, heads that it needs are missing, or a tree that does not fit the heads.
    """
    check_method(method)
    return METHODS[method](target, heads, options)


def _needed(heads: ChainedHeads | None, method: str) -> ChainedHeads:
    if heads is None:
        raise InputError(f"{method} drafts with heads and the model has none; use ar or reuse", "--method")
    return heads


def _reuse_sources(options: DraftOptions, below: int) -> list[ReuseSource]:
    if not options.ngrams:
        return []
    return [ReuseSource(NgramTable(NGRAM, options.ngrams), below, options.reuse_recent)]


def _by_device(target: Target) -> str:
    return "cpu" if target.device.type == "cpu" else "cuda"


def _tree(options: DraftOptions, target: Target, method: str, levels: int) -> tuple[int, ...]:
    tree = options.tree or _TREES[_by_device(target)][method][:levels]
    if len(tree) > levels:
        raise InputError(f"{method} can draft {levels} levels with these heads, got {len(tree)}", "--tree")
    return tree


def _nodes(options: DraftOptions, target: Target) -> int:
    return options.nodes or _NODES[_by_device(target)]
