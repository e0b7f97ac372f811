"""What each method drafts from, made of models and resolved options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tswift.decoding.drafter import Drafter
from tswift.drafting.beams import BeamSource
from tswift.drafting.cascade import CascadeSource
from tswift.drafting.chain import ChainSource
from tswift.drafting.fixed_tree import FixedTreeDrafter
from tswift.drafting.heads import DraftingPass, HeadSource, LastPass
from tswift.drafting.levels import CHUNK, FullLevel, Level, OwnLevel, PartialLevel
from tswift.drafting.options import AUTO, FULL, MEASURED, DraftOptions
from tswift.drafting.plan import Plan
from tswift.drafting.planned import PlannedDrafter, PricedSource
from tswift.drafting.recall import Recall
from tswift.drafting.recalled import RecallSource
from tswift.drafting.reuse import NgramTable, ReuseSource
from tswift.drafting.rivals import Rival, RivalDrafter
from tswift.drafting.trees import usual_nodes, usual_tree, verify_nodes
from tswift.kv.partial import PartialKV
from tswift.kv.policies import POLICIES
from tswift.kv.streaming import StreamingKV
from tswift.models.base_heads import Heads
from tswift.models.costs import PassCosts
from tswift.models.target import Target

NGRAM = 4
_BEYOND = 2  # levels after those of the heads, where the last one goes on by itself
_FOLLOWED = 32  # most tokens that are recalled in a row
INNER_NODES = 16  # most nodes of the trees from which a cascade's chain is decoded

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
    memory: Recall | None,
) -> Drafter:
    """Heads in the tree of the options, or in one that pays, and other sources beside them."""
    heads, tree = models.heads, options.tree
    assert heads is not None
    assert options.nodes is not None
    longest = NGRAM if others else 0
    if isinstance(tree, tuple):
        source = HeadSource(models.target, heads, reader, tree, options.shared_noise)
        depth, ngrams = max(len(tree), longest), others[0] if others else None
        fewer = _fewer(models.target, options.nodes)
        return FixedTreeDrafter([source, *others], depth, options.nodes, heads=source, ngrams=ngrams, fewer=fewer)
    plan = Plan(models.costs)
    if options.gamma is None:
        levels = heads.count + reader.direct + (_BEYOND if heads.conditioned else 0)
    else:
        levels = min(options.gamma + reader.direct, options.nodes - 1)
    beams = BeamSource(models.target, heads, reader, levels, options.shared_noise, plan)
    if memory is not None:
        return _recalling(options, plan, max(levels, _deepest(options)), [beams], memory)
    return PlannedDrafter(offering=[beams, *others], depth=max(levels, longest), limit=options.nodes, plan=plan)


def _fewer(target: Target, nodes: int) -> Callable[[int], int] | None:
    """How many of the nodes to verify with so many tokens in the cache; None where that is not known."""
    if target.device.type != "cuda":
        return None
    weights = sum(weight.nbytes for weight in target.model.parameters()) / target.kv_shape.bytes_per_token
    return lambda length: verify_nodes(length, target.groups, nodes, weights)


def recall(models: Models, options: DraftOptions) -> Drafter:
    """What the target thought where the text stood like this before, and nothing else."""
    memory = _memory(models, options)
    assert memory is not None
    return _recalling(options, Plan(models.costs), _deepest(options), [], memory)


def _memory(models: Models, options: DraftOptions) -> Recall | None:
    """Of the text, if it is recalled."""
    return Recall(models.target, options.shared_noise, options.recall) if options.recall else None


def _deepest(options: DraftOptions) -> int:
    """Most tokens that are recalled in a row: as many as the tree has nodes for."""
    assert options.nodes is not None
    return min(options.nodes - 1, _FOLLOWED)


def _recalling(
    options: DraftOptions, plan: Plan, depth: int, sources: Sequence[PricedSource], memory: Recall
) -> PlannedDrafter:
    """Sources and what is recalled, up to ``depth`` tokens deep."""
    assert options.nodes is not None
    offering = [*sources, RecallSource(memory, plan, options.nodes)]
    return PlannedDrafter(offering=offering, depth=depth, limit=options.nodes, plan=plan, memory=memory)


def cascade(models: Models, options: DraftOptions) -> Drafter:
    """A chain decoded by the target itself over the newest keys, as long as it is sure, itself drafted by heads."""
    return _cascade(models, options, _memory(models, options))


def _cascade(models: Models, options: DraftOptions, memory: Recall | None) -> PlannedDrafter:
    assert options.gamma is not None
    assert options.nodes is not None
    verified = replace(models, costs=models.draft_costs)  # by the level's passes
    inner = medusa(verified, replace(options, tree=AUTO, gamma=None, nodes=INNER_NODES, recall=0))
    assert isinstance(inner, PlannedDrafter)
    plan = Plan(models.costs)
    recalled: list[PricedSource] = []
    if memory is not None:  # one for the chain and for what the chain is drafted from
        recalled = [RecallSource(memory, plan, options.nodes)]
        guessing = RecallSource(memory, inner.plan, inner.limit)
        inner = replace(inner, offering=[*inner.offering, guessing], depth=INNER_NODES - 1)
    level = _self_level(models.drafting, options, chain=options.gamma, nodes=inner.limit)
    source = CascadeSource(level, inner, options.shared_noise, plan)
    deepest = min(options.gamma, options.nodes - 1)
    offering = [source, *recalled]
    return PlannedDrafter(offering=offering, depth=deepest, limit=options.nodes, plan=plan, memory=memory)


def auto(models: Models, options: DraftOptions) -> Drafter:
    """Whatever has been the fastest of late: heads in a fixed tree, heads in one that pays, or a cascade."""
    heads, memory = models.heads, _memory(models, options)
    assert heads is not None
    assert options.nodes is not None
    nodes = min(options.nodes, usual_nodes(models.target.device, models.target.groups))
    tree = usual_tree("medusa", models.target.device, heads.count)
    fixed = replace(options, tree=tree, gamma=None, nodes=nodes)
    chosen = replace(options, tree=AUTO, gamma=None)
    rivals = [
        Rival("fixed tree", _of_heads(models, fixed, LastPass(), [], None), len(tree)),
        Rival("tree auto", replace(_of_heads(models, chosen, LastPass(), [], memory), memory=None)),
        Rival("cascade", replace(_cascade(models, options, memory), memory=None)),
    ]
    depth, limit = (max(getattr(rival.drafter, name) for rival in rivals) for name in ("depth", "limit"))
    costs = None if options.costs == MEASURED else models.costs
    return RivalDrafter(depth=depth, limit=limit, memory=memory, rivals=rivals, costs=costs)


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
    return _chain("retrieval", PartialLevel(models.drafting, retrieved, inner.limit), options, inner)


def _self_level(target: Target, options: DraftOptions, chain: int | None = 0, nodes: int = 1) -> Level:
    """The target itself over what ``--kv`` says, with room for a chain, each of its passes over so many nodes."""
    assert options.kv is not None
    if options.kv == FULL:
        return FullLevel(target)
    assert options.budget is not None
    kv = PartialKV(target.kv_shape, options.budget, options.sinks, POLICIES[options.kv], (chain or 0) + nodes)
    return PartialLevel(target, kv, nodes)


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
