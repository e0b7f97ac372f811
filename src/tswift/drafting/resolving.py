"""What a method makes of the options: what was not said is filled in, and what it cannot do is refused."""

from __future__ import annotations

from dataclasses import replace

import torch

from tswift.drafting.methods import find_method, used
from tswift.drafting.options import AUTO, MEASURED, DraftOptions, refuse_sinks
from tswift.drafting.trees import usual_nodes, usual_tree
from tswift.errors import InputError
from tswift.models.base_heads import Heads
from tswift.models.target import Target

_NGRAMS = DraftOptions().ngrams
_KEPT = 64  # half as many lose 3% of the guesses that come true, and all that there are gain less than 1%
_AUTO_NODES = 32  # no tree that pays is larger, where passes over more were measured


def resolve(name: str, target: Target, heads: Heads | None, options: DraftOptions) -> DraftOptions:
    """The options with the device's defaults filled in: ``tree`` and ``nodes``, where the method uses them.

    Drafts that are wider than the target's passes are cut.

    Raises:
        InputError: no such method, heads that it needs are missing, or a tree that does not fit the heads.
    """
    count = heads.count if heads else 0
    resolved = resolve_for(name, target.device, target.groups, target.most_nodes, count, options)
    if target.width is None:
        return resolved
    nodes, gamma = resolved.nodes, resolved.gamma
    return replace(resolved, nodes=nodes and min(nodes, target.width), gamma=gamma and min(gamma, target.width - 1))


def resolve_for(
    name: str, device: torch.device, groups: int, most_nodes: int | None, heads: int, options: DraftOptions
) -> DraftOptions:
    """As :func:`resolve`, for a model that need not be there.

    Args:
        name: of the method.
        device: where the model will be.
        groups: its query heads per KV head.
        most_nodes: most nodes of a draft tree that its attention can do; None if there is no such limit.
        heads: how many tokens its heads draft one after another.
        options: as asked for.
    """
    method = find_method(name)
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
        usual = usual_tree(name, device, levels)
        tree = options.tree or usual
        if options.gamma is not None:
            least, most = 1 - method.by_lm_head, (levels if tree == AUTO else len(usual)) - method.by_lm_head
            if not least <= options.gamma <= most:
                raise InputError(f"must be between {least} and {most} for {name}, got {options.gamma}", "--gamma")
            if tree == AUTO:
                gamma = options.gamma
            else:
                tree = usual[: options.gamma + method.by_lm_head]
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
    default = min(_AUTO_NODES, most_nodes or _AUTO_NODES) if chooses else usual_nodes(device, groups)
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
