"""What a method has for one decode: what it drafts from and reads, how far it goes, what room it takes."""

from __future__ import annotations

import pytest

from tests.helpers import tiny_draft, tiny_heads, tiny_target
from tswift.decoding.drafter import Drafter
from tswift.drafting.adaptive import AdaptiveDrafter
from tswift.drafting.chains import CascadeSource, ChainSource, FullDraftModel, PartialDraftModel, SmallDraftModel
from tswift.drafting.dynamic_tree import DynamicTreeDrafter
from tswift.drafting.head_tree import HeadTreeSource
from tswift.drafting.heads import HeadSource
from tswift.drafting.history import HistorySource
from tswift.drafting.methods import METHODS, draft_slots, make_drafter, partial_slots, resolve, used
from tswift.drafting.ngrams import ReuseSource
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.kv.policies import POLICIES
from tswift.models.passes import NOMINAL


def made(method: str, **options):
    return make_drafter(method, tiny_target(), tiny_heads(), DraftOptions(**options), tiny_draft())


def sources_of(drafter: Drafter) -> list:
    if isinstance(drafter, AdaptiveDrafter):
        return [source for rival in drafter.rivals for source in sources_of(rival.drafter)]
    return list(drafter.offering if isinstance(drafter, DynamicTreeDrafter) else drafter.sources)


def test_what_each_method_drafts_from() -> None:
    kinds = {method: [type(source) for source in sources_of(made(method))] for method in METHODS}
    assert kinds == {
        "ar": [],
        "medusa": [HeadSource],
        "tokenswift": [HeadSource, ReuseSource],
        "cascade": [CascadeSource, HistorySource],
        "recall": [HistorySource],
        "reuse": [ReuseSource],
        "magicdec": [ChainSource],
        "standalone": [ChainSource],
        "triforce": [ChainSource],
        "auto": [HeadSource, HeadTreeSource, HistorySource, CascadeSource, HistorySource],
        "ar-reference": [],
    }


def test_what_each_system_reads() -> None:
    def level(drafter: Drafter):
        return drafter.sources[0]._level

    for kv in ("streaming", "snapkv", "dynamic", "partial"):
        for drafted in (level(made("magicdec", kv=kv)), made("tokenswift", kv=kv).sources[0].reader._level):
            assert drafted.kv.policy is POLICIES[kv]
            assert drafted.target is tiny_target()
    assert type(level(made("magicdec", kv="full"))) is FullDraftModel
    assert type(made("tokenswift", kv="full").sources[0].reader._level) is FullDraftModel
    alone = level(made("standalone", budget=128))
    assert (alone.target, alone.kv.budget) == (tiny_draft(), 128)
    everything = make_drafter("standalone", tiny_target(), None, DraftOptions(kv="full"), tiny_draft(), 700)
    assert level(everything).kv.budget == 700
    middle = made("triforce", budget=512)
    assert level(middle).kv.policy is POLICIES["retrieval"]
    assert (level(middle).target, level(middle).kv.budget) == (tiny_target(), 512)
    small = level(middle.sources[0].drafter)
    assert (small.target, small.kv.budget) == (tiny_draft(), 256)


def _levels(drafter: Drafter) -> list:
    """What its sources decode or read, and what theirs do."""
    found = []
    for source in sources_of(drafter):
        if isinstance(source, HeadSource | HeadTreeSource):
            found += [source.reader._level] if source.reader.direct else []
        elif isinstance(source, ChainSource | CascadeSource):
            found += [source._level, *_levels(source.drafter)]
    return found


def test_room_for_what_is_forwarded_over_a_partial_cache() -> None:
    for method in METHODS:
        for options in (
            DraftOptions(budget=64),
            DraftOptions(budget=64, gamma=2, inner_gamma=5),
            DraftOptions(budget=64, gamma=2, tree="auto"),
        ):
            resolved = resolve(method, tiny_target(), tiny_heads(), options)
            drafter = make_drafter(method, tiny_target(), tiny_heads(), options, tiny_draft())
            held = [level.kv.capacity for level in _levels(drafter) if isinstance(level, PartialDraftModel)]
            assert [partial_slots(method, resolved)] == (held or [0])
            own = [level.kv.capacity for level in _levels(drafter) if isinstance(level, SmallDraftModel)]
            positions = tiny_target().max_positions
            assert [draft_slots(method, resolved, positions)] == (own or [0])


def test_a_missing_smaller_model_is_refused() -> None:
    for name, method in METHODS.items():
        if name in ("standalone", "triforce"):
            with pytest.raises(InputError, match=r"draft_model: .*smaller model"):
                make_drafter(name, tiny_target(), tiny_heads(), DraftOptions())
        else:
            make_drafter(name, tiny_target(), None if not method.with_heads else tiny_heads(), DraftOptions())


def test_depth_and_limit() -> None:
    assert (made("ar").depth, made("ar").limit) == (0, 1)
    assert made("medusa", tree=(3, 3, 3)).depth == 3
    assert made("medusa", tree=(3,)).depth == 1
    assert made("tokenswift", tree=(1, 3, 3, 3)).depth == 4
    assert made("tokenswift", tree=(1, 3)).depth == 4  # reused n-grams reach further than these heads
    assert made("tokenswift", tree=(1, 3), ngrams=0).depth == 2
    assert made("reuse").depth == 3
    assert made("reuse", nodes=17).limit == 17
    for method, gamma in (("magicdec", 4), ("standalone", 4), ("triforce", 6)):
        assert (made(method).depth, made(method).limit) == (gamma, gamma + 1)
        assert made(method, gamma=9).depth == 9
    assert made("medusa", gamma=2).depth == 2
    assert made("tokenswift", gamma=0, ngrams=0).depth == 1
    assert made("tokenswift", gamma=3, ngrams=0).depth == 4


def test_trees_that_pay() -> None:
    for method, source in (("medusa", HeadTreeSource), ("tokenswift", HeadTreeSource)):
        drafter = made(method, tree="auto")
        assert type(sources_of(drafter)[0]) is source
        assert drafter.plan.costs is NOMINAL
        assert resolve(method, tiny_target(), tiny_heads(), DraftOptions(tree="auto")).costs == "measured"
        assert {"costs", "recall"} <= used(method, DraftOptions(tree="auto"))
        assert not {"costs", "recall"} & used(method, DraftOptions(tree=(1, 1)))
    assert made("medusa", tree="auto", recall=0).depth == 3
    assert made("medusa", tree="auto", gamma=2, recall=0).depth == 2
    assert made("tokenswift", tree="auto", gamma=2, ngrams=0, recall=0).depth == 3
    assert made("medusa", tree="auto", nodes=12).depth == 11
    assert made("tokenswift", tree="auto", nodes=9).limit == 9
    many = tiny_heads(count=30)
    for method, gamma, nodes, depth in (("medusa", 9, None, 9), ("tokenswift", 9, None, 10), ("medusa", 29, 20, 19)):
        options = DraftOptions(tree="auto", gamma=gamma, nodes=nodes, recall=0, ngrams=0)
        assert make_drafter(method, tiny_target(), many, options).depth == depth
