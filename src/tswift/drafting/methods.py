"""The decoding methods by name: what each drafts from, and which KV it reads while drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tswift.drafting import recipes
from tswift.drafting.levels import CHUNK
from tswift.drafting.options import AUTO, FULL, MEASURED, DraftOptions, refuse_sinks
from tswift.drafting.source import Drafter
from tswift.errors import InputError
from tswift.models.costs import NOMINAL, PassCosts
from tswift.models.heads import Heads
from tswift.models.target import Target


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

_OF_TREES = frozenset({"tree", "nodes", "shared_noise"}) | OF_CHOICE
_OF_REUSE = frozenset({"nodes", "ngrams", "reuse_recent"})
_OF_PARTIAL = frozenset({"budget", "sinks"})
_OF_CHAINS = frozenset({"gamma", "shared_noise"})

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
    "cascade": Method(
        recipes.cascade,
        frozenset({"nodes"}) | OF_CHOICE | _OF_CHAINS | _OF_PARTIAL | {"kv"},
        heads=True,
        kv=("streaming", "dynamic", "partial", "snapkv"),
        gamma=24,
        budget=1024,
        partial=True,
    ),
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
    "ar-reference": Method(recipes.ar, reference=True),
}

# Trees that pay. On a GPU a pass over a hundred nodes costs little more than one over a single node, so the paper's
# tree stands. On a CPU every node costs: two more than eight add 2% to a step's tokens and more to its time.
_TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"medusa": (3, 3, 3), "tokenswift": (1, 3, 3, 3)},
    "cpu": {"medusa": (2, 2, 2, 2), "tokenswift": (1, 2, 2, 2, 2)},
}
_NODES = {"cuda": 128, "cpu": 8}
_NGRAMS = DraftOptions().ngrams
_KEPT = 64  # half as many lose 3% of the guesses that come true, and all that there are gain less than 1%
_AUTO_NODES = 32  # no tree that pays is larger, where passes over more were measured


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
    return resolve_for(name, target.device, target.most_nodes, heads.deepest if heads else 0, options)


def resolve_for(
    name: str, device: torch.device, most_nodes: int | None, heads: int, options: DraftOptions
) -> DraftOptions:
    """As :func:`resolve`, for a model that need not be there.

    Args:
        name: of the method.
        device: where the model will be.
        most_nodes: most nodes of a draft tree that its attention can do; None if there is no such limit.
        heads: how many tokens its heads draft one after another.
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
    tree: tuple[int, ...] | str | None = None
    if method.with_heads and not heads:
        raise InputError(f"{name} drafts with heads and the model has none; use ar or reuse", "--method")
    if "tree" in method.uses:
        levels = heads + method.by_lm_head
        usual = _TREES[kind][name][:levels]
        tree = options.tree or usual
        if options.gamma is not None:
            shortened = _gamma_tree(name, usual, levels, options.gamma)
            tree, gamma = (tree, options.gamma) if tree == AUTO else (shortened, None)
        if isinstance(tree, tuple) and len(tree) > levels:
            raise InputError(f"{name} can draft {levels} levels with these heads, got {len(tree)}", "--tree")
    chooses = "costs" in method.uses and tree in (None, AUTO)
    recall = (_KEPT if options.recall is None else options.recall) if chooses else None
    if recall and "ngrams" in method.uses and (options.ngrams not in (0, _NGRAMS) or options.reuse_recent):
        option = "--reuse-recent" if options.reuse_recent else "--ngrams"
        raise InputError(f"goes with a tree of its own or --recall 0: with --tree auto {name} recalls instead", option)
    if name == "recall" and not recall:
        raise InputError("must be at least 1 for recall, which drafts from nothing else", "--recall")
    if name == "reuse" and not options.ngrams:
        raise InputError("must be at least 1 for reuse, which drafts from nothing else", "--ngrams")
    default = min(_AUTO_NODES, most_nodes or _AUTO_NODES) if chooses else _NODES[kind]
    nodes = (options.nodes or default) if "nodes" in method.uses else None
    if nodes and most_nodes and nodes > most_nodes:
        raise InputError(f"must be at most {most_nodes} with this attention, got {nodes}", "--nodes")
    longest = max(gamma or 0, options.inner_gamma if "inner_gamma" in method.uses else 0)
    if most_nodes and longest >= most_nodes:
        raise InputError(f"must be below {most_nodes} with this attention, got {longest}", "--gamma")
    budget = options.budget or method.budget
    if "sinks" in used(name, options):
        refuse_sinks(options.sinks, budget)
    return replace(
        options,
        tree=tree,
        nodes=nodes,
        gamma=gamma,
        kv=kv if "kv" in method.uses else None,
        budget=budget,
        costs=(options.costs or MEASURED) if chooses else None,
        recall=recall,
    )


def make_drafter(
    name: str,
    target: Target,
    heads: Heads | None,
    options: DraftOptions,
    draft: Target | None = None,
    positions: int | None = None,
    costs: PassCosts = NOMINAL,
) -> Drafter:
    """The drafter of a method, for one decode.

    Args:
        name: of the method.
        target: the model.
        heads: its heads, if it has any.
        options: as asked for.
        draft: a smaller model with the same vocabulary, if there is one.
        positions: most tokens of prompt and text together; None for as many as the models can do.
        costs: what passes cost, for methods that choose which ones pay.

    Raises:
        InputError: as :func:`resolve`, or there is no smaller model where one is needed.
    """
    method, options = find_method(name), resolve(name, target, heads, options)
    if method.draft and draft is None:
        raise InputError(f"{name} drafts with a smaller model, and there is none", "--draft-model")
    return method.make(recipes.Models(target, heads, draft, positions or target.max_positions, costs), options)


def partial_slots(name: str, options: DraftOptions) -> int:
    """Tokens that a method's partial cache of the target has room for, by resolved options; 0 if it has none."""
    if not find_method(name).partial or options.kv == FULL:
        return 0
    return (
        (options.budget or find_method(name).budget)
        + (options.gamma or 0)
        + (recipes.INNER_NODES if find_method(name).heads else 1)
        + (options.inner_gamma if find_method(name).draft else 0)
    )


def draft_slots(name: str, options: DraftOptions, positions: int) -> int:
    """Tokens that the cache of a method's smaller model has room for, by resolved options; 0 if it has none."""
    method = find_method(name)
    if not method.draft:
        return 0
    budget, ahead = recipes.own_size(options, positions, between=method.partial)
    return budget + 2 * ahead + CHUNK


def used(name: str, options: DraftOptions) -> frozenset[str]:
    """The fields of its options that a method looks at, by their values."""
    uses = find_method(name).uses
    if "kv" in uses and options.kv == FULL:
        uses -= _OF_PARTIAL
    if "tree" in uses and options.tree != AUTO:
        uses -= OF_CHOICE
    return uses


def _gamma_tree(name: str, tree: tuple[int, ...], levels: int, gamma: int) -> tuple[int, ...]:
    """The levels of the default tree that use ``gamma`` heads."""
    first = find_method(name).by_lm_head
    least, most = 1 - first, min(len(tree), levels) - first
    if not least <= gamma <= most:
        raise InputError(f"must be between {least} and {most} for {name}, got {gamma}", "--gamma")
    return tree[: gamma + first]


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"
