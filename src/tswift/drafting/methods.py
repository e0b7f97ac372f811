"""The methods: what each drafts from, which options it looks at, and its drafter for one decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tswift.attention.sdpa import ROWS
from tswift.decoding.drafter import Drafter, Source
from tswift.drafting.adaptive import AdaptiveDrafter
from tswift.drafting.chains import (
    CHUNK,
    CascadeSource,
    ChainSource,
    DraftModel,
    PartialDraftModel,
    SmallDraftModel,
)
from tswift.drafting.dynamic_tree import DynamicTreeDrafter, TreeBudget
from tswift.drafting.fixed_tree import FixedTreeDrafter, NgramTable, ReuseSource
from tswift.drafting.heads import (
    BEAM,
    WIDTH,
    DraftingPass,
    EveryNode,
    HeadSource,
    HeadTreeSource,
    LastPass,
    NetworkSource,
)
from tswift.drafting.history import HistorySource, LogitHistory, unbuilt
from tswift.drafting.options import (
    AUTO,
    FULL,
    MEASURED,
    METHODS,
    DraftOptions,
    find_method,
    refuse_sinks,
    used,
)
from tswift.errors import InputError
from tswift.kv import POLICIES, PartialKV, StreamingKV
from tswift.models.drafters import DrafterSpec
from tswift.models.heads import Heads
from tswift.models.passes import NOMINAL, PassCosts
from tswift.models.target import Target

NGRAM = 4
_FOLLOWED = 32  # most tokens that are recalled in a row
INNER_NODES = 16  # most nodes of the trees from which a cascade's chain is decoded
_RECORDED = 2.5e-3  # seconds of a pass beside which those of keeping its logits are nothing

_SMALL_BUDGET = 256  # of the small model where the target over retrieved keys stands between (TriForce, section 5.1)


@dataclass(frozen=True)
class Models:
    """What a method drafts with.

    Attributes:
        target: the model whose tokens are wanted.
        drafting: what drafting passes of the target run on: itself, or a copy of it with weights of fewer bits.
        heads: its heads, if it has any.
        draft: a smaller model with the same vocabulary, if there is one.
        positions: most tokens of prompt and text together.
        costs: what passes cost, for methods that choose which ones pay.
        draft_costs: what drafting passes of the target cost.
    """

    target: Target
    drafting: Target
    heads: Heads | None
    draft: Target | None
    positions: int
    costs: PassCosts
    draft_costs: PassCosts


def ar(models: Models, options: DraftOptions) -> Drafter:
    """Of nothing: plain decoding."""
    return Drafter()


def medusa(models: Models, options: DraftOptions) -> Drafter:
    """Heads on the last verification pass."""
    return _of_heads(models, options, LastPass(), [], _memory(models, options))


def tokenswift(models: Models, options: DraftOptions) -> Drafter:
    """A drafting pass of the target, heads on it, and n-grams of the text."""
    reader = DraftingPass(_self_level(models.drafting, options))
    return _of_heads(models, options, reader, _reuse_sources(options, below=1), _memory(models, options))


def _of_heads(
    models: Models,
    options: DraftOptions,
    reader: LastPass | DraftingPass,
    others: list[ReuseSource],
    memory: LogitHistory | None,
) -> Drafter:
    """Heads in the tree of the options, or in one that pays, and other sources beside them."""
    heads, tree = models.heads, options.tree
    assert heads is not None
    assert options.nodes is not None
    longest = NGRAM if others else 0
    if isinstance(tree, tuple):
        source = HeadSource(models.target, heads, reader, tree, options.shared_noise)
        fewer = _fewer(models.target, options.nodes)
        return FixedTreeDrafter([source, *others], max(len(tree), longest), options.nodes, fewer=fewer)
    levels = heads.count + reader.direct
    if options.gamma is not None:
        levels = min(options.gamma + reader.direct, options.nodes - 1)
    beams = HeadTreeSource(models.target, heads, reader, (WIDTH,) * levels, options.shared_noise)
    return _pruned(models, options, max(levels, longest), [beams, *others], memory)


def _fewer(target: Target, nodes: int) -> Callable[[int], int] | None:
    """How many of the nodes to verify with so many tokens in the cache; None where that is not known."""
    if target.device.type != "cuda":
        return None
    weights = sum(weight.nbytes for weight in target.model.parameters()) / target.kv_shape.bytes_per_token
    return lambda length: verify_nodes(length, target.groups, nodes, weights)


def recall(models: Models, options: DraftOptions) -> Drafter:
    """What the target computed where the text stood like this before, and nothing else."""
    return _pruned(models, options, 0, [], _memory(models, options))


def _memory(models: Models, options: DraftOptions) -> LogitHistory | None:
    """Of the text, if it is recalled."""
    return LogitHistory(models.target, options.shared_noise, options.recall) if options.recall else None


def _pruned(
    models: Models,
    options: DraftOptions,
    depth: int,
    sources: Sequence[Source],
    memory: LogitHistory | None,
    budget: TreeBudget | None = None,
) -> DynamicTreeDrafter:
    """A tree of what sources propose, and of what is recalled, which goes as deep as the tree has nodes for."""
    assert options.nodes is not None
    budget = budget or TreeBudget(models.costs)
    if memory is not None:
        sources = [*sources, HistorySource(memory, budget, options.nodes)]
        depth = max(depth, min(options.nodes - 1, _FOLLOWED))
    return DynamicTreeDrafter(sources, depth, options.nodes, [] if memory is None else [memory], budget)


def block(models: Models, options: DraftOptions) -> Drafter:
    """A block drafter, which guesses a whole block in one pass."""
    return _of_network("block", models, options, _memory(models, options))


def eagle(models: Models, options: DraftOptions) -> Drafter:
    """EAGLE-3, which is fed with the tokens that it drafts."""
    return _of_network("eagle", models, options, _memory(models, options))


def _of_network(name: str, models: Models, options: DraftOptions, memory: LogitHistory | None) -> DynamicTreeDrafter:
    """A published drafter in the tree of the options, or in one that pays, and what is recalled beside it."""
    network, nodes = models.target.network, options.nodes
    assert network is not None
    assert nodes is not None
    assert options.budget is not None
    shape = options.tree if isinstance(options.tree, tuple) else None
    levels = min(len(shape) if shape else options.gamma or network.spec.count, nodes - 1)
    budget = TreeBudget(models.costs) if shape is None else EveryNode(models.costs)
    window = options.budget, options.sinks
    source = NetworkSource(name, network, levels, window, options.shared_noise, nodes, shape)
    drafter = _pruned(models, options, levels, [source], memory, budget)
    return replace(drafter, memories=[source, *drafter.memories])


def cascade(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by the target itself over the newest keys, as long as it is sure, itself drafted by heads."""
    return _cascade(models, options, _memory(models, options))


def _cascade(models: Models, options: DraftOptions, memory: LogitHistory | None) -> DynamicTreeDrafter:
    assert options.gamma is not None
    assert options.nodes is not None
    inner, passes = Drafter(), replace(models, costs=models.draft_costs)
    limited = replace(options, tree=AUTO, gamma=None, nodes=min(options.nodes, INNER_NODES))
    if models.heads is not None:
        inner = _of_heads(passes, limited, LastPass(), [], memory)
    elif memory is not None:
        inner = _pruned(passes, limited, 0, [], memory)
    inner.memories = ()  # kept up for the tree that the chain is verified in
    level = _self_level(models.drafting, options, chain=options.gamma, nodes=INNER_NODES)
    budget = TreeBudget(models.costs)
    source = CascadeSource(level, inner, options.shared_noise, budget, models.draft_costs)
    drafter = _pruned(models, options, 0, [source], memory, budget)
    return replace(drafter, depth=min(options.gamma, options.nodes - 1))


def _usual_medusa(models: Models, options: DraftOptions) -> Drafter:
    """Heads in their usual tree, of no more nodes than the options have."""
    assert models.heads is not None
    assert options.nodes is not None
    device, nodes = models.target.device, usual_nodes(models.target.device, models.target.groups)
    tree = usual_tree("medusa", device, models.heads.count)
    usual = replace(options, tree=tree, gamma=None, nodes=min(options.nodes, nodes))
    return _of_heads(models, usual, LastPass(), [], None)


def auto(models: Models, options: DraftOptions) -> Drafter:
    """Whatever is fastest: plain decoding, heads, a cascade, recall, a smaller model, as far as these are there.

    Logits are kept of the whole text where a pass takes so long that keeping them is nothing beside it. Elsewhere they
    are kept while recall drafts.
    """
    memory = _memory(models, options)
    assert options.gamma is not None
    steady = memory is not None and models.costs.seconds(1, 0) > _RECORDED
    arms: dict[str, Drafter] = {"ar": Drafter()}
    if models.heads is not None:
        arms["medusa"] = _usual_medusa(models, options)
        if steady:
            tree = replace(options, tree=AUTO, gamma=None)
            arms["medusa, tree auto"] = _of_heads(models, tree, LastPass(), [], memory)
    if models.target.network is not None:
        name = "block" if models.target.network.spec.block else "eagle"
        chosen = replace(options, tree=AUTO, gamma=None)
        arms[name] = _of_network(name, models, chosen, memory if steady else None)
    arms["cascade"] = _cascade(models, options, memory if steady else None)
    if memory is not None:
        arms["recall"] = _pruned(models, options, 0, [], memory)
    if models.draft is not None:
        arms["standalone"] = standalone(models, _standalone_options(options))
    for drafter in arms.values():
        if isinstance(drafter, DynamicTreeDrafter):
            # not all that may be drafted in its first step, as if time were free
            drafter.budget.rate = 1 / models.costs.seconds(1, 0)
    # the states that a network reads are gone with the next pass
    kept = [each for arm in arms.values() for each in arm.memories if steady or each is not memory]
    for drafter in arms.values():
        drafter.memories = [each for each in drafter.memories if each not in kept]
    depth, limit = (max(getattr(drafter, name) for drafter in arms.values()) for name in ("depth", "limit"))
    costs = None if options.costs == MEASURED else models.costs
    return AdaptiveDrafter(depth=depth, limit=limit, memories=[*dict.fromkeys(kept)], arms=arms, costs=costs)


def _standalone_options(options: DraftOptions) -> DraftOptions:
    """Those of the smaller model's chain among others."""
    alone = METHODS["standalone"]
    assert options.gamma is not None
    assert alone.gamma is not None
    assert options.nodes is not None
    gamma = max(1, min(options.gamma, alone.gamma, options.nodes - 1))  # the root is a node, too
    return replace(options, gamma=gamma, kv=alone.kv[0], budget=alone.budget)


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
    return _chain("self", _self_level(models.drafting, options, chain=options.gamma), options, Drafter())


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
    return _chain("retrieval", PartialDraftModel(models.drafting, retrieved, inner.limit), options, inner)


def _self_level(target: Target, options: DraftOptions, chain: int | None = 0, nodes: int = 1) -> DraftModel:
    """The target itself over what ``--kv`` says, with room for a chain, each of its passes over so many nodes."""
    assert options.kv is not None
    if options.kv == FULL:
        return DraftModel(target)
    assert options.budget is not None
    kv = PartialKV(target.kv_shape, options.budget, options.sinks, POLICIES[options.kv], (chain or 0) + nodes)
    return PartialDraftModel(target, kv, nodes)


def _own_level(models: Models, options: DraftOptions, between: bool = False) -> DraftModel:
    """The small model over its own cache."""
    assert models.draft is not None
    budget, ahead = own_size(options, models.positions, between)
    kv = StreamingKV(models.draft.kv_shape, budget, min(options.sinks, budget // 4), ahead, ahead + CHUNK)
    return SmallDraftModel(models.draft, kv)


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


def _chain(name: str, level: DraftModel, options: DraftOptions, inner: Drafter) -> Drafter:
    assert options.gamma is not None
    source = ChainSource(name, level, options.gamma, inner, options.shared_noise)
    return Drafter([source], options.gamma, options.gamma + 1)


Builder = Callable[[Models, DraftOptions], Drafter]
BUILDERS: dict[str, Builder] = {
    "ar": ar,
    "medusa": medusa,
    "tokenswift": tokenswift,
    "cascade": cascade,
    "recall": recall,
    "reuse": reuse,
    "magicdec": magicdec,
    "standalone": standalone,
    "triforce": triforce,
    "block": block,
    "eagle": eagle,
    "auto": auto,
    "ar-reference": ar,
}

# A CUDA pass reads each key once for all rows of its KV head; a row is one query head at one node. Up to about 128 rows
# the matrix products keep up with the memory, beyond that every row costs: the fewer query heads share a KV head, the
# larger the tree. That is an estimate, not measured on a GPU. On a CPU every node costs: two more than eight add 2% to
# a step's tokens and more to its time.
_CUDA_NODES = (8, 128)  # fewest and most
_SLACK = 0.2  # a verification may take so much longer than a pass over one node
_CPU_NODES = 8
_TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"medusa": (3, 3, 3), "tokenswift": (1, 3, 3, 3)},  # the paper's
    "cpu": {"medusa": (2, 2, 2, 2), "tokenswift": (1, 2, 2, 2, 2)},
}


def usual_tree(method: str, device: torch.device, levels: int) -> tuple[int, ...]:
    """Candidates per level of a method's tree, if nothing else is said: at most ``levels``.

    A tree with more nodes than are to be verified is cut to its most promising ones, which is better than fewer
    candidates per level.
    """
    return _TREES["cpu" if device.type == "cpu" else "cuda"][method][:levels]


def usual_nodes(device: torch.device, groups: int) -> int:
    """Most nodes of a draft tree, if nothing else is said: on CUDA as many as fill :data:`ROWS`.

    Args:
        device: where the model is.
        groups: query heads per KV head.
    """
    if device.type == "cpu":
        return _CPU_NODES
    fewest, most = _CUDA_NODES
    return min(most, max(fewest, ROWS // groups))


def verify_nodes(context: int, groups: int, most: int, weight_tokens: float) -> int:
    """Most nodes of a verification on CUDA that takes at most 1.2 times a pass over one node, by the cost model.

    A pass takes the time to read the weights, and for the keys and values the longer of reading and multiplying them.

    Args:
        context: tokens in the cache.
        groups: query heads per KV head.
        most: nodes asked for; never more.
        weight_tokens: bytes of the weights that a pass reads, over those of one token's keys and values.
    """
    rows = ROWS * (1 + _SLACK * (weight_tokens + context) / max(1, context))
    return max(1, min(most, int(rows / groups)))


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
    resolved = resolve_for(name, target.device, target.groups, target.most_nodes, count, options, target.network_spec)
    if target.width is None:
        return resolved
    nodes, gamma = resolved.nodes, resolved.gamma
    return replace(resolved, nodes=nodes and min(nodes, target.width), gamma=gamma and min(gamma, target.width - 1))


def cut_note(options: DraftOptions, width: int | None) -> str | None:
    """What to tell a user whose drafts :func:`resolve` cuts to passes of ``width`` rows; None if it does not."""
    if width is None or ((options.nodes or 0) <= width and (options.gamma or 0) < width):
        return None
    return f"drafts are cut to {width} nodes, the last token's included: exact passes have room for no more"


def resolve_for(
    name: str,
    device: torch.device,
    groups: int,
    most_nodes: int | None,
    heads: int,
    options: DraftOptions,
    network: DrafterSpec | None = None,
) -> DraftOptions:
    """As :func:`resolve`, for a model that need not be there.

    Args:
        name: of the method.
        device: where the model will be.
        groups: its query heads per KV head.
        most_nodes: most nodes of a draft tree that its attention can do; None if there is no such limit.
        heads: how many tokens its heads draft one after another.
        options: as asked for.
        network: sizes of its published drafter, if it has one.
    """
    method = find_method(name)
    gamma, kv = None, options.kv or next(iter(method.kv), None)
    if "kv" in method.uses and kv not in method.kv:
        raise InputError(f"{name} can read {', '.join(method.kv)}, not {kv}", "kv")
    if method.gamma is not None:
        gamma = method.gamma if options.gamma is None else options.gamma
        if not gamma:
            raise InputError(f"must be at least 1 for {name}", "gamma")
    tree: tuple[int, ...] | str | None = None
    if method.needs_heads and not heads:
        without = (kind.needs_heads or kind.draft or kind.networks or kind.reference for kind in METHODS.values())
        others = [other for other, needs in zip(METHODS, without, strict=True) if not needs]
        message = f"{name} drafts with heads and the model has none; without heads there are {', '.join(others)}"
        raise InputError(message, "method")
    if method.networks and (network is None or network.kind not in method.networks):
        there = "there is none" if network is None else f"this one is {network.kind}"
        raise InputError(f"{name} drafts with a drafter of kind {' or '.join(method.networks)}, and {there}", "drafter")
    if "tree" in method.uses:
        levels = network.count if network and method.networks else heads + method.by_lm_head
        usual = AUTO if method.networks else usual_tree(name, device, levels)
        tree = options.tree or usual
        if options.gamma is not None:
            least, most = 1 - method.by_lm_head, (levels if tree == AUTO else len(usual)) - method.by_lm_head
            if not least <= options.gamma <= most:
                raise InputError(f"must be between {least} and {most} for {name}, got {options.gamma}", "gamma")
            if tree == AUTO:
                gamma = options.gamma
            elif isinstance(usual, tuple):
                tree = usual[: options.gamma + method.by_lm_head]
        if isinstance(tree, tuple) and len(tree) > levels:
            those = "this drafter" if method.networks else "these heads"
            raise InputError(f"{name} can draft {levels} levels with {those}, got {len(tree)}", "tree")
    chooses = "costs" in method.uses and tree in (None, AUTO)
    recall = None
    if chooses:
        missing = None if options.recall == 0 else unbuilt()
        if missing and (options.recall or name == "recall"):
            raise InputError(f"cannot be recalled without a C program, and there is none: {missing}", "recall")
        recall = 0 if missing else _KEPT if options.recall is None else options.recall
    if recall and "ngrams" in method.uses and (options.ngrams not in (0, _NGRAMS) or options.reuse_recent):
        option = "reuse_recent" if options.reuse_recent else "ngrams"
        raise InputError(f"goes with a tree of its own or `recall` 0: with `tree` auto {name} recalls instead", option)
    if name == "recall" and not recall:
        raise InputError("must be at least 1 for recall, which drafts from nothing else", "recall")
    if name == "reuse" and not options.ngrams:
        raise InputError("must be at least 1 for reuse, which drafts from nothing else", "ngrams")
    default = min(_AUTO_NODES, most_nodes or _AUTO_NODES) if chooses else usual_nodes(device, groups)
    nodes = (options.nodes or default) if "nodes" in method.uses else None
    if nodes and most_nodes and nodes > most_nodes:
        raise InputError(f"must be at most {most_nodes} with this attention, got {nodes}", "nodes")
    longest = max(gamma or 0, options.inner_gamma if "inner_gamma" in method.uses else 0)
    if most_nodes and longest >= most_nodes:
        raise InputError(f"must be below {most_nodes} with this attention, got {longest}", "gamma")
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
    drafting: Target | None = None,
    draft_costs: PassCosts | None = None,
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
        drafting: what drafting passes of the model run on; None for itself.
        draft_costs: what those cost; None for as much as others.

    Raises:
        InputError: as :func:`resolve`, or there is no smaller model where one is needed.
    """
    method, options = find_method(name), resolve(name, target, heads, options)
    if method.draft and draft is None:
        raise InputError(f"{name} drafts with a smaller model, and there is none", "draft_model")
    positions = positions or target.max_positions
    models = Models(target, drafting or target, heads, draft, positions, costs, draft_costs or costs)
    return BUILDERS[name](models, options)


def partial_slots(name: str, options: DraftOptions) -> int:
    """Tokens that a method's partial cache of the target has room for, by resolved options; 0 if it has none."""
    method = find_method(name)
    if not method.partial or options.kv == FULL:
        return 0
    chain = 0 if method.gamma is None else options.gamma or method.gamma  # in a tree it counts levels, drafted by heads
    return (
        (options.budget or method.budget)
        + chain
        + (INNER_NODES if method.heads else 1)
        + (options.inner_gamma if method.draft else 0)
    )


def network_slots(name: str, options: DraftOptions, network: DrafterSpec) -> int:
    """Tokens that the window of a method's published drafter has room for, by resolved options; 0 if it has none."""
    method = find_method(name)
    if not (method.networks or method.may_network):
        return 0
    levels = (options.gamma if method.networks else None) or network.count
    return (options.budget or method.budget) + 1 + network.slots(levels, BEAM)


def recall_bytes(name: str, options: DraftOptions, positions: int, vocab_size: int) -> int:
    """Bytes of the machine's own memory that a method recalls a text with, by resolved options; 0 if it does not.

    Args:
        name: of the method.
        options: resolved ones.
        positions: tokens of prompt and text together.
        vocab_size: of the model.
    """
    kept = options.recall if "recall" in used(name, options) else 0
    return LogitHistory.bytes_for(positions, vocab_size, kept) if kept else 0


def draft_slots(name: str, options: DraftOptions, positions: int) -> int:
    """Tokens that the cache of a method's smaller model has room for, by resolved options; 0 if it has none."""
    method = find_method(name)
    if not (method.draft or method.may_draft):
        return 0
    if not method.draft:
        options = _standalone_options(options)
    budget, ahead = own_size(options, positions, between=method.draft and method.partial)
    return budget + 2 * ahead + CHUNK
