"""The methods: the drafter of each for one decode,
and the options that model and device fill in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from tswift.attention.sdpa import ROWS
from tswift.caches import POLICIES, PartialKV, StreamingKV
from tswift.decoding.drafter import Drafter, Source
from tswift.decoding.pass_costs import NOMINAL, PassCosts, PassTimes
from tswift.drafting.adaptive import AdaptiveDrafter
from tswift.drafting.chains import (
    CAUGHT_UP_TOGETHER,
    CascadeSource,
    ChainSource,
    DraftModel,
    PartialDraftModel,
    SmallDraftModel,
)
from tswift.drafting.dynamic_tree import DynamicTreeDrafter, TreeBudget
from tswift.drafting.fixed_tree import FixedTreeDrafter
from tswift.drafting.heads import WIDTH, HeadSource, HeadTreeSource
from tswift.drafting.history import HistorySource, LogitHistory, unbuilt
from tswift.drafting.networks import BEAM, NetworkSource
from tswift.drafting.ngrams import NgramTable, ReuseSource
from tswift.drafting.options import (
    AUTO_METHOD,
    AUTO_TREE,
    FULL,
    MEASURED,
    METHODS,
    NGRAMS,
    OF_CASCADE,
    OF_PARTIAL,
    SINKS,
    DraftOptions,
    Method,
    RecordedOptions,
    ResolvedOptions,
    find_method,
    refuse_sinks,
    used,
    varies,
)
from tswift.errors import InputError
from tswift.forward.target import Target
from tswift.speculators.heads import Heads
from tswift.speculators.spec import MTP, SpeculatorSpec

if TYPE_CHECKING:
    from tswift.loading.plan import ModelPlan

NGRAM = 4
_FOLLOWED = 32  # most tokens that are recalled in a row
INNER_NODES = 16  # most nodes of the trees from which a cascade's chain is decoded
_RECORDED = 1.5e-3  # seconds of a pass beside which those of keeping its tokens are nothing
# of the small model where the target over retrieved keys stands between (TriForce, section 5.1)
_SMALL_BUDGET = 256
_T = TypeVar("_T")


@dataclass(frozen=True)
class Models:
    """What a method drafts with."""

    method: Method
    target: Target  # the model whose tokens are wanted
    heads: Heads | None  # of the target
    draft: Target | None  # a smaller model with the same vocabulary
    positions: int  # most tokens of prompt and text together
    costs: PassCosts  # what passes cost, for methods that choose which ones pay
    history: LogitHistory | None  # of the text, if it is recalled


def _set(value: _T | None) -> _T:
    """A value that resolved options, or the models of a method, always have."""
    assert value is not None
    return value


def ar(models: Models, options: DraftOptions) -> Drafter:
    """Of nothing: plain decoding."""
    return Drafter()


def medusa(models: Models, options: DraftOptions) -> Drafter:
    """Heads on the last verification pass."""
    return _of_heads(models, options, None, [])


def tokenswift(models: Models, options: DraftOptions) -> Drafter:
    """A drafting pass of the target, heads on it, and n-grams of the text if heads leave them
    room.
    """
    full = _filled(models.target, options.tree, options.nodes)
    others = [] if full else _reuse_sources(options, below=1)
    return _of_heads(models, options, _self_draft(models, options), others)


def _of_heads(
    models: Models,
    options: DraftOptions,
    draft_model: DraftModel | None,
    others: list[ReuseSource],
    every_level: bool = False,
) -> Drafter:
    """Heads in the tree of the options, or in one that pays, and other sources beside them.

    ``every_level``: in one that pays, all levels are drafted and not those alone that pay.
    """
    target = models.target
    heads = _set(models.heads)
    tree = options.tree
    nodes = _set(options.nodes)
    longest = NGRAM if others else 0
    if isinstance(tree, tuple):
        source = HeadSource(target, heads, draft_model, tree, options.shared_noise)
        return FixedTreeDrafter([source, *others], max(len(tree), longest), nodes)
    by_lm_head = int(draft_model is not None)
    levels = (
        heads.count + by_lm_head
        if options.gamma is None
        else min(options.gamma + by_lm_head, nodes - 1)
    )
    budget = _budget(models, options)
    beams = HeadTreeSource(target, heads, draft_model, (WIDTH,) * levels, options.shared_noise)
    beams.budget = None if every_level else budget
    return _pruned(models, options, max(levels, longest), [beams, *others], budget)


def recall(models: Models, options: DraftOptions) -> Drafter:
    """What the target computed where the text stood like this before, and nothing else."""
    return _pruned(models, options, 0, [])


def _budget(models: Models, options: DraftOptions, every: bool = False) -> TreeBudget:
    return TreeBudget(models.costs, every, timed=options.costs == MEASURED)


def _pruned(
    models: Models,
    options: DraftOptions,
    depth: int,
    sources: Sequence[Source],
    budget: TreeBudget | None = None,
) -> DynamicTreeDrafter:
    """A tree of what sources propose, and of what is recalled,
    which goes as deep as the tree has nodes for.
    """
    nodes = _set(options.nodes)
    history = models.history
    budget = budget or _budget(models, options)
    if history is None:
        return DynamicTreeDrafter(sources, depth, nodes, budget=budget)
    sources = [*sources, HistorySource(history, budget, nodes)]
    return DynamicTreeDrafter(
        sources, max(depth, min(nodes - 1, _FOLLOWED)), nodes, [history], budget
    )


def network(models: Models, options: DraftOptions) -> Drafter:
    """A published drafter in the tree of the options, or in one that pays,
    and what is recalled beside it.
    """
    network = models.target.speculator
    nodes = _set(options.nodes)
    assert network is not None
    shape = options.tree if isinstance(options.tree, tuple) else None
    levels = min(len(shape) if shape else options.gamma or network.spec.count, nodes - 1)
    budget = _budget(models, options, every=shape is not None)
    window = _set(options.budget), _set(options.sinks)
    source = NetworkSource(network, levels, window, options.shared_noise, nodes, shape)
    drafter = _pruned(models, options, levels, [source], budget)
    return replace(drafter, histories=[source, *drafter.histories])


def cascade(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by the target itself over the newest keys, as long as it is sure,
    itself drafted by heads.
    """
    gamma = _set(options.gamma)
    nodes = _set(options.nodes)
    inner = Drafter()
    limited = replace(options, tree=AUTO_TREE, gamma=None, nodes=min(nodes, INNER_NODES))
    if models.heads is not None:
        # a chain's trees are small
        inner = _of_heads(models, limited, None, [], every_level=True)
    elif models.history is not None:
        inner = recall(models, limited)
    inner.histories = ()  # kept up for the tree that the chain is verified in
    draft_model = _self_draft(models, options)
    budget = _budget(models, options)
    chain = CascadeSource(draft_model, inner, options.shared_noise, budget, models.costs.alone)
    return replace(_pruned(models, options, 0, [chain], budget), depth=min(gamma, nodes - 1))


def auto(models: Models, options: DraftOptions) -> Drafter:
    """Whatever is fastest: plain decoding, heads, a cascade, recall, a smaller model,
    as far as these are there.

    What came is kept of the whole text where a pass takes so long that keeping it is nothing beside
    it, and logits with it where the pass takes longer still, or the text repeats itself. Elsewhere
    they are kept while recall drafts.
    """
    target = models.target
    heads = models.heads
    history = models.history
    quick = models.costs.seconds(1, 0) <= _RECORDED
    steady = history is not None and not quick
    if history is not None and steady:
        history.costs = models.costs
    beside = models if steady else replace(models, history=None)
    paying = replace(options, tree=AUTO_TREE, gamma=None)
    arms: dict[str, Drafter] = {"ar": Drafter()}
    if heads is not None and (target.replays or not steady):
        nodes = min(_set(options.nodes), usual_nodes(target.device, target.groups))
        tree = usual_tree(METHODS["medusa"], target.device, heads.count)
        arms["medusa"] = medusa(models, replace(options, tree=tree, gamma=None, nodes=nodes))
    if heads is not None and steady:
        # the least that heads can do, which on a processor often pays most
        arms["medusa, one token"] = medusa(models, replace(options, tree=(1,), gamma=None))
        arms["medusa, tree auto"] = medusa(models, paying)
    if target.speculator is not None:
        arms[target.speculator.spec.method] = network(beside, paying)
    if target.kv_shape.states is None:  # else keys and values are too small a part of a pass
        arms["cascade"] = cascade(beside, options)
    if history is not None:
        arms["recall"] = recall(models, options)
    if models.draft is not None:
        arms["standalone"] = standalone(models, _standalone_options(options))
    timed = options.costs == MEASURED
    times = PassTimes(models.costs, timed)
    for drafter in arms.values():
        if isinstance(drafter, DynamicTreeDrafter):
            # not all that may be drafted in its first step, as if time were free
            drafter.budget.rate = 1 / models.costs.seconds(1, 0)
            if not quick:  # of all arms' passes something is learned for all
                drafter.budget.times = times
                drafter.budget.learns = False
    # the states that a network reads are gone with the next pass
    kept = [
        each for arm in arms.values() for each in arm.histories if steady or each is not history
    ]
    for drafter in arms.values():
        drafter.histories = [each for each in drafter.histories if each not in kept]
    depth, limit = (
        max(getattr(drafter, name) for drafter in arms.values()) for name in ("depth", "limit")
    )
    return AdaptiveDrafter(
        depth=depth,
        limit=limit,
        histories=[*dict.fromkeys(kept)],
        arms=arms,
        times=times,
        clock=timed,
        times_whole_steps=quick,
    )


def _standalone_options(options: DraftOptions) -> DraftOptions:
    """Those of the smaller model's chain among others."""
    alone = METHODS["standalone"]
    # the root is a node, too
    gamma = min(_set(options.gamma), _set(alone.gamma), _set(options.nodes) - 1)
    return replace(options, gamma=max(1, gamma), kv=alone.kv[0], budget=alone.budget)


def reuse(models: Models, options: DraftOptions) -> Drafter:
    """N-grams of the text alone."""
    return Drafter(_reuse_sources(options, below=0), NGRAM - 1, _set(options.nodes))


def _reuse_sources(options: DraftOptions, below: int) -> list[ReuseSource]:
    if not options.ngrams:
        return []
    return [ReuseSource(NgramTable(NGRAM, options.ngrams), below, options.reuse_recent)]


def magicdec(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by the target itself over less than its full cache, as a rule."""
    return _chain("self", _self_draft(models, options), options)


def standalone(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by a smaller model."""
    return _chain("model", _small_draft(models, options), options)


def triforce(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by the target over retrieved keys, itself drafted by a smaller model."""
    small = _small_draft(models, options, between=True)
    inner = _chain("model", small, replace(options, gamma=options.inner_gamma))
    return _chain("retrieval", _self_draft(models, options), options, inner)


def _self_draft(models: Models, options: DraftOptions) -> DraftModel:
    """The target itself over what ``--kv`` says, or over retrieved keys,
    with room for the method's chain.
    """
    target = models.target
    if options.kv == FULL:
        return DraftModel(target)
    policy = POLICIES[options.kv or "retrieval"]
    (chain, nodes) = _ahead(models.method, options)
    cache = PartialKV(
        target.kv_shape, _set(options.budget), _set(options.sinks), policy, chain + nodes
    )
    return PartialDraftModel(target, cache, nodes)


def _ahead(method: Method, options: DraftOptions) -> tuple[int, int]:
    """Tokens of the chain that the target decodes over a partial cache,
    and most nodes of its passes over that.
    """
    # in a tree it counts levels of heads
    chain = 0 if method.gamma is None else options.gamma or method.gamma
    inner = options.inner_gamma if "inner_gamma" in method.uses else 0
    return chain, INNER_NODES if "heads" in method.may_use else 1 + inner


def _small_draft(models: Models, options: DraftOptions, between: bool = False) -> DraftModel:
    """The small model over its own cache."""
    draft = _set(models.draft)
    (budget, ahead) = _small_cache_size(options, models.positions, between)
    sinks = min(_set(options.sinks), budget // 4)
    kv = StreamingKV(draft.kv_shape, budget, sinks, ahead, ahead + CAUGHT_UP_TOGETHER)
    return SmallDraftModel(draft, kv)


def _small_cache_size(options: DraftOptions, positions: int, between: bool) -> tuple[int, int]:
    """Tokens that a small model's cache holds for good,
    and how far it can be ahead of the text (or of a chain).
    """
    gamma = _set(options.gamma)
    budget = _set(options.budget)
    if between:
        return min(budget, _SMALL_BUDGET), gamma + options.inner_gamma + 2
    return positions if options.kv == FULL else budget, gamma + 2


def _chain(
    name: str, draft_model: DraftModel, options: DraftOptions, inner: Drafter | None = None
) -> Drafter:
    gamma = _set(options.gamma)
    return Drafter(
        [ChainSource(name, draft_model, gamma, inner or Drafter(), options.shared_noise)],
        gamma,
        gamma + 1,
    )


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
    "block": network,
    "eagle": network,
    "mtp": network,
    "auto": auto,
    "ar-reference": ar,
}

# A CUDA pass reads each key once for all rows of its KV head; a row is one query head at one node.
# On an H100 128 rows cost 6% more than 4 after 4,096 tokens and 9 to 14% after 100,000
# (results/h100); beyond that every row costs: the fewer query heads share a KV head, the larger the
# tree. On a CPU every node costs: two more than eight add 2% to a step's tokens and more to its
# time.
_CUDA_NODES = (8, 128)  # fewest and most
_CPU_NODES = 8


def usual_tree(method: Method, device: torch.device, levels: int) -> tuple[int, ...]:
    """Candidates per level of a method's tree, if nothing else is said: at most ``levels``.

    A tree with too many nodes is cut to its most promising ones, which is better than fewer
    candidates per level.
    """
    return (method.cpu_tree if device.type == "cpu" else method.cuda_tree)[:levels]


def usual_nodes(device: torch.device, groups: int) -> int:
    """Most nodes of a draft tree, if nothing else is said:
    on CUDA as many as fill :data:`ROWS` of a KV head.
    """
    if device.type == "cpu":
        return _CPU_NODES
    fewest, most = _CUDA_NODES
    return min(most, max(fewest, ROWS // groups))


# half as many lose 3% of the guesses that come true, and all that there are gain less than 1%
_KEPT = 64
_AUTO_NODES = 32  # no tree that pays is larger, where passes over more were measured


def resolve(
    name: str,
    model: Target | ModelPlan,
    heads: Heads | int | None,
    options: DraftOptions,
    draft: bool = False,
) -> ResolvedOptions:
    """The options with the defaults of method and device filled in, where the method uses them.

    Drafts that are wider than the target's passes are cut.

    Args:
        name: of the method.
        model: the target, or the sizes of one that need not be there.
        heads: its heads, or how many tokens they draft one after another.
        options: as asked for.
        draft: whether there is a smaller model.

    Raises:
        InputError: no such method, heads or a drafter that it needs are missing, or options that do
            not fit them, or that nothing would read.
    """
    method = find_method(name)
    count = heads.count if isinstance(heads, Heads) else heads or 0
    unread = _unread(method, model, draft)
    for each in unread:
        if getattr(options, each) is not None and not isinstance(options, RecordedOptions):
            reason = f"{name} has no use for it where layers are recurrent"
            raise InputError(reason, each)
    kv = options.kv or next(iter(method.kv), None)
    if "kv" in method.uses and kv not in method.kv:
        raise InputError(f"{name} can read {', '.join(method.kv)}, not {kv}", "kv")
    _refuse_missing(method, model, count, draft)
    tree, gamma = _tree_and_gamma(method, model, count, options)
    chooses = "costs" in method.uses and tree in (None, AUTO_TREE)
    recall = _recalled(method, options) if chooses else None
    ngrams = NGRAMS if options.ngrams is None else options.ngrams
    alone = {"recall": ("recall", recall or 0), "reuse": ("ngrams", ngrams)}
    if len(unread) == len(OF_CASCADE) and not count:
        alone[AUTO_METHOD] = ("recall", 1 if options.recall is None else options.recall)
    only, amount = alone.get(name, ("", 1))
    if not amount:
        raise InputError(f"must be at least 1 for {name}, which drafts from nothing else", only)
    nodes = _nodes(model, options, chooses) if "nodes" in method.uses else None
    typed = _typed_ngrams(options) if "ngrams" in method.uses else None
    if typed and _filled(model, tree, nodes):
        reason = f"not used by {name} in a tree of {nodes} nodes, which its heads fill"
        raise InputError(f"{reason}; give more `nodes`, or a narrower `tree`", typed)
    budget = options.budget or method.budget
    sinks = SINKS if options.sinks is None else options.sinks
    if "sinks" in used(method, options):
        refuse_sinks(sinks, budget)
    filled = {
        "tree": tree,
        "nodes": nodes,
        "gamma": gamma,
        "kv": kv if "kv" in method.uses else None,
        "budget": budget,
        "sinks": sinks,
        "ngrams": ngrams,
        "costs": (options.costs or MEASURED) if chooses else None,
        "recall": recall,
    }
    made = ResolvedOptions(**{**vars(options), **filled, **dict.fromkeys(unread)})
    return _fitted(method, made, model)


def _fitted(method: Method, options: ResolvedOptions, model: Target | ModelPlan) -> ResolvedOptions:
    """Resolved options, with drafts cut to the width of a target's passes."""
    most = model.most_nodes
    if most and (options.nodes or 0) > most:
        reason = f"must be at most {most} with this attention, got {options.nodes}"
        raise InputError(reason, "nodes")
    inner = options.inner_gamma if "inner_gamma" in method.uses else 0
    if most and (longest := max(options.gamma or 0, inner)) >= most:
        raise InputError(f"must be below {most} with this attention, got {longest}", "gamma")
    width = model.fixed_rows if isinstance(model, Target) else None
    if width is None:
        return options
    return replace(
        options,
        nodes=options.nodes and min(options.nodes, width),
        gamma=options.gamma and min(options.gamma, width - 1),
    )


def resolved(
    method: Method, model: Target, heads: Heads | None, options: DraftOptions, draft: bool
) -> ResolvedOptions:
    """As :func:`resolve`; what was resolved for the model's plan is only fitted to it."""
    if isinstance(options, ResolvedOptions):
        return _fitted(method, options, model)
    return resolve(method.name, model, heads, options, draft)


def _unread(method: Method, model: Target | ModelPlan, draft: bool) -> frozenset[str]:
    """Of the options that a method uses, those that it has no use for with this model: beside
    recurrent layers, keys and values are too small a part of a pass for a cut of them to pay.
    """
    if method.name != AUTO_METHOD or model.kv_shape.states is None:
        return frozenset()
    network = OF_PARTIAL if model.speculator_spec is not None else frozenset()
    return OF_CASCADE - network - ({"gamma", "sinks"} if draft else set())


def possible(model: Target, heads: Heads | None, draft: bool) -> tuple[str, ...]:
    """Names of the methods that can decode a model with these heads, and with a smaller model if
    there is one.
    """
    found = []
    for name, method in METHODS.items():
        if method.reference:
            continue
        with suppress(InputError):
            resolve(name, model, heads, DraftOptions(), draft)
            found.append(name)
    return tuple(found)


def _refuse_missing(method: Method, model: Target | ModelPlan, heads: int, draft: bool) -> None:
    """InputError if the model has not what the method drafts with: so many heads, a smaller model,
    a drafter, or keys and values that are most of a pass.
    """
    if "draft_model" in method.needs and not draft:
        raise InputError(
            f"{method.name} drafts with a smaller model, and none is loaded", "draft_model"
        )
    network = model.speculator_spec
    alone = method.drafts_itself and "drafter" not in method.may_use
    if alone and model.kv_shape.states is not None:
        reason = (
            "drafts by the model itself, whose recurrent layers take as long as without a cut of "
            "the cache"
        )
        raise InputError(f"{method.name} {reason}; take auto", "method")
    if "heads" in method.needs and not heads:
        others = [
            other
            for other, kind in METHODS.items()
            if not (kind.needs or kind.speculator_kinds or kind.reference)
        ]
        message = (
            f"{method.name} drafts with heads and the model has none; without heads there are "
            f"{', '.join(others)}"
        )
        raise InputError(message, "method")
    if not method.speculator_kinds or (
        network is not None and network.kind in method.speculator_kinds
    ):
        return
    if method.name == MTP:
        raise InputError(
            "mtp drafts with the model's own MTP head, and it has none that is served", "method"
        )
    there = "there is none" if network is None else f"this one is {network.kind}"
    raise InputError(
        f"{method.name} drafts with a drafter of kind {' or '.join(method.speculator_kinds)}, "
        f"and {there}",
        "drafter",
    )


def _tree_and_gamma(
    method: Method, model: Target | ModelPlan, heads: int, options: DraftOptions
) -> tuple[tuple[int, ...] | str | None, int | None]:
    """The candidates per level and the length of a chain, None where the method has no such."""
    network = model.speculator_spec if method.speculator_kinds else None
    gamma = None
    if method.gamma is not None:
        gamma = method.gamma if options.gamma is None else options.gamma
        if not gamma:
            raise InputError(f"must be at least 1 for {method.name}", "gamma")
    if "tree" not in method.uses:
        return None, gamma
    levels = network.count if network else heads + method.by_lm_head
    usual = AUTO_TREE if network else usual_tree(method, model.device, levels)
    tree = options.tree or usual
    if options.gamma is not None:
        least = 1 - method.by_lm_head
        most = (levels if tree == AUTO_TREE else len(usual)) - method.by_lm_head
        if not least <= options.gamma <= most:
            raise InputError(
                f"must be between {least} and {most} for {method.name}, got {options.gamma}",
                "gamma",
            )
        if tree == AUTO_TREE:
            gamma = options.gamma
        elif isinstance(usual, tuple):
            tree = usual[: options.gamma + method.by_lm_head]
    if isinstance(tree, tuple) and len(tree) > levels:
        those = "this drafter" if network else "these heads"
        raise InputError(
            f"{method.name} can draft {levels} levels with {those}, got {len(tree)}", "tree"
        )
    return tree, gamma


def _recalled(method: Method, options: DraftOptions) -> int:
    """How many logits a dynamic tree keeps of each pass; 0 for none."""
    missing = None if options.recall == 0 else unbuilt()
    if missing and (options.recall or method.name == "recall"):
        raise InputError(
            f"cannot be recalled without a C program, and there is none: {missing}", "recall"
        )
    kept = 0 if missing else _KEPT if options.recall is None else options.recall
    typed = _typed_ngrams(options) if "ngrams" in method.uses else None
    if kept and typed:
        reason = f"not used by {method.name} with `tree` auto, which reuses logits"
        raise InputError(f"{reason}; add `recall` 0, or give a fixed `tree`", typed)
    return kept


def _typed_ngrams(options: DraftOptions) -> str | None:
    """The option that asks for 4-grams, if one was typed."""
    if isinstance(options, RecordedOptions):
        return None
    return "reuse_recent" if options.reuse_recent else "ngrams" if options.ngrams else None


def _filled(
    model: Target | ModelPlan, tree: tuple[int, ...] | str | None, nodes: int | None
) -> bool:
    """Whether heads fill all nodes of a tree, so that 4-grams find no room;
    on CUDA a part of them is theirs.
    """
    return isinstance(tree, tuple) and model.device.type != "cuda" and 1 + sum(tree) >= _set(nodes)


def _nodes(model: Target | ModelPlan, options: DraftOptions, chooses: bool) -> int:
    """Most nodes of a tree; ``chooses``: whether as many of them are taken as pay."""
    most = model.most_nodes
    usual = _AUTO_NODES if chooses else usual_nodes(model.device, model.groups)
    return options.nodes or (min(usual, most or usual) if chooses else usual)


def cut_note(options: DraftOptions, width: int | None) -> str | None:
    """What to tell a user whose drafts :func:`resolve` cuts to passes of ``width`` rows; None if it
    does not.
    """
    if width is None or ((options.nodes or 0) <= width and (options.gamma or 0) < width):
        return None
    return (
        f"drafts are cut to {width} nodes, the last token's included: exact passes have room for "
        "no more"
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

    Options are as asked for; the rest are the fields of :class:`Models`.

    ``positions`` None is as many as the model can do.

    Raises:
        InputError: as :func:`resolve`.
    """
    method = find_method(name)
    options = resolved(method, target, heads, options, draft is not None)
    history = LogitHistory(target, options.shared_noise, options.recall) if options.recall else None
    positions = positions or target.max_positions
    models = Models(method, target, heads, draft, positions, costs, history)
    drafter = BUILDERS[name](models, options)
    drafter.varies |= varies(method, options)
    return drafter


def cache_slots(
    method: Method, options: DraftOptions, positions: int, network: SpeculatorSpec | None = None
) -> tuple[int, int, int]:
    """Tokens that the caches which a method drafts with have room for, by resolved options;
    0 for none.

    They are the target's partial cache, the smaller model's, and the window of the published
    drafter, if there is one.
    """
    partial = 0
    small = 0
    window = 0
    budget = options.budget or method.budget
    if method.drafts_itself and options.kv != FULL and (options.kv or method.name != AUTO_METHOD):
        partial = budget + sum(_ahead(method, options))
    if "draft_model" in method.loads and options.gamma is not None:
        own = _standalone_options(options) if method.name == AUTO_METHOD else options
        held, ahead = _small_cache_size(own, positions, between="inner_gamma" in method.uses)
        small = held + 2 * ahead + CAUGHT_UP_TOGETHER
    if network is not None and (method.speculator_kinds or "drafter" in method.may_use):
        levels = (options.gamma if method.speculator_kinds else None) or network.count
        window = budget + 1 + network.slots(levels, BEAM)
    return partial, small, window
