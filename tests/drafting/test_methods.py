"""Methods: their options, what each drafts from and on, how deep and wide, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.drafters import VOCAB, load_own_head, qwen35
from tests.drafting.test_networks import drafted
from tests.forward.test_passes import static_target
from tests.helpers import (
    METHODS,
    NO_PROGRAM,
    PLAIN,
    endings,
    first,
    needs_program,
    outlived,
    random_prompt,
    refused,
    tiny_draft,
    tiny_heads,
    tiny_target,
)
from tswift.caches import POLICIES, KVShape
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.pass_costs import NOMINAL
from tswift.drafting.adaptive import AdaptiveDrafter
from tswift.drafting.chains import DraftModel, PartialDraftModel, SmallDraftModel
from tswift.drafting.methods import _filled, cache_slots, make_drafter, resolve, usual_nodes
from tswift.drafting.options import FULL, KV, DraftOptions, find_method
from tswift.forward.adapting import wrap_model
from tswift.forward.target import Target

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA, QWEN_7B, MHA = 4, 7, 1  # query heads per KV head


def test_every_cache_policy_can_be_named():
    """But for what a method reads by itself."""
    assert {*POLICIES} - {"retrieval"} == {*KV} - {FULL}


def test_ngrams_are_looked_for_where_heads_leave_room():
    for nodes, sources in ((8, ["HeadSource"]), (10, ["HeadSource", "ReuseSource"])):
        options = DraftOptions(tree=(1, 2, 2, 2), nodes=nodes)
        drafter = make_drafter("tokenswift", tiny_target(), tiny_heads(), options)
        assert [type(source).__name__ for source in drafter.sources] == sources
    for typed in ({"ngrams": 5}, {"ngrams": 20}, {"reuse_recent": True}):
        options = DraftOptions(tree=(1, 2, 2, 2), nodes=8, **typed)
        with refused(f"^{next(iter(typed))}: not used by tokenswift in a"):
            resolve("tokenswift", tiny_target(), tiny_heads(), options)
        resolve("tokenswift", tiny_target(), tiny_heads(), replace(options, nodes=9))
    cuda = SimpleNamespace(**{**vars(tiny_target()), "device": CUDA})
    assert not _filled(cuda, (1, 2, 2, 2), 8)


def model(device: torch.device = CPU, groups: int = LLAMA, most_nodes: int | None = None):
    """The sizes of a model that is not there."""
    shape = KVShape(2, 1, 8, torch.float32, device)
    return SimpleNamespace(
        device=device, groups=groups, most_nodes=most_nodes, speculator_spec=None, kv_shape=shape
    )


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("standalone", {"kv": "snapkv"}, r"kv: standalone can read streaming, full, not snapkv"),
        ("recall", {"recall": 0}, r"recall: must be at least 1 for recall"),
        ("reuse", {"ngrams": 0}, r"ngrams: must be at least 1 for reuse"),
        ("magicdec", {"gamma": 0}, r"gamma: must be at least 1 for magicdec"),
        *(
            pytest.param(
                "tokenswift",
                {"tree": "auto", name: value},
                rf"{name}: not used by tokenswift with tree auto",
                marks=needs_program,
            )
            for name, value in (("ngrams", 3), ("reuse_recent", True))
        ),
        (
            "tokenswift",
            {"gamma": 4, "tree": "auto"},
            r"gamma: must be between 0 and 3 for tokenswift, got 4",
        ),
        (
            "medusa",
            {"tree": (1, 1, 1, 1)},
            r"tree: medusa can draft 3 levels with these heads, got 4",
        ),
        ("medusa", {"nodes": 17}, r"nodes: must be at most 16 with this attention, got 17"),
        ("triforce", {"inner_gamma": 16}, r"gamma: must be below 16 with this attention, got 16"),
        ("magicdec", {"sinks": 1025}, r"sinks: must be at most a quarter of budget 4096, got 1025"),
    ],
)
def test_what_a_method_cannot_do(method, options, message):
    with refused(message):
        resolve(method, model(most_nodes=16), 3, DraftOptions(**options), draft=True)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("method", ["medusa", "tokenswift"])
def test_a_tree_that_pays_is_as_deep_as_the_heads_go(method, device):
    """However deep the usual tree is."""

    def gamma(heads, tree, asked):
        return resolve(method, model(device), heads, DraftOptions(gamma=asked, tree=tree)).gamma

    for heads in (2, 7):
        assert gamma(heads, "auto", heads) == heads
        with refused(rf"gamma: must be between \d and {heads} for {method}"):
            gamma(heads, "auto", heads + 1)
    with refused(rf"gamma: must be between \d and [34] for {method}, got 7"):
        gamma(7, None, 7)


def test_nodes_fill_the_rows_of_a_kv_head():
    assert [usual_nodes(CUDA, groups) for groups in (MHA, LLAMA, QWEN_7B, 64)] == [128, 32, 18, 8]
    assert usual_nodes(CPU, LLAMA) == usual_nodes(CPU, QWEN_7B) == 8
    asked = ((LLAMA, None), (MHA, None), (LLAMA, 128))
    resolved = [
        resolve("tokenswift", model(CUDA, groups, 128), 3, DraftOptions(nodes=nodes))
        for groups, nodes in asked
    ]
    assert [each.nodes for each in resolved] == [32, 128, 128]


def made(method: str, **options):
    return make_drafter(method, tiny_target(), tiny_heads(), DraftOptions(**options), tiny_draft())


def levels_of(drafter: Drafter) -> Iterator[DraftModel]:
    """The models that draft, and over what."""
    if isinstance(drafter, AdaptiveDrafter):
        for arm in drafter.arms.values():
            yield from levels_of(arm)
    for source in drafter.sources:
        level = getattr(source, "draft_model", None)
        if level is not None:
            yield level
        yield from levels_of(getattr(source, "drafter", Drafter()))


@pytest.mark.parametrize("method", METHODS)
def test_room_for_what_is_forwarded_over_a_partial_cache(method):
    for options in (
        {"budget": 64},
        {"budget": 64, "gamma": 2, "inner_gamma": 5},
        {"gamma": 2, "tree": "auto"},
    ):
        resolved = resolve(method, tiny_target(), tiny_heads(), DraftOptions(**options), draft=True)
        levels = [*levels_of(made(method, **options))]
        partial, small = (
            sum(level.kv.capacity for level in levels if isinstance(level, kind))
            for kind in (PartialDraftModel, SmallDraftModel)
        )
        found = cache_slots(find_method(method), resolved, tiny_target().max_positions)
        assert found == (partial, small, 0)


@pytest.mark.parametrize(
    ("method", "options", "depth"),
    [
        ("ar", {}, 0),
        ("medusa", {"tree": (3, 3, 3)}, 3),
        ("medusa", {"tree": (3,)}, 1),
        ("medusa", {"gamma": 2}, 2),
        ("medusa", {"tree": "auto", "recall": 0}, 3),
        ("medusa", {"tree": "auto", "gamma": 2, "recall": 0}, 2),
        # recalled as deep as there are nodes
        pytest.param("medusa", {"tree": "auto", "nodes": 12}, 11, marks=needs_program),
        ("tokenswift", {"tree": (1, 3, 3, 3)}, 4),
        ("tokenswift", {"tree": (1, 3)}, 4),  # reused n-grams reach further than these heads
        ("tokenswift", {"tree": (1, 3), "ngrams": 0}, 2),
        ("tokenswift", {"gamma": 0, "ngrams": 0}, 1),
        ("tokenswift", {"gamma": 3, "ngrams": 0}, 4),
        ("tokenswift", {"tree": "auto", "gamma": 2, "ngrams": 0, "recall": 0}, 3),
        ("reuse", {"nodes": 17}, 3),
        ("magicdec", {}, 4),
        ("standalone", {"gamma": 9}, 9),
        ("triforce", {}, 6),
    ],
)
def test_depth_and_limit(method, options, depth):
    drafter = made(method, **options)
    chain = method in ("ar", "magicdec", "standalone", "triforce")
    assert (drafter.depth, drafter.limit) == (
        depth,
        depth + 1 if chain else options.get("nodes", drafter.limit),
    )


def test_trees_that_pay():
    for method in ("medusa", "tokenswift"):
        assert made(method, tree="auto").budget.costs is NOMINAL
        assert (
            resolve(method, tiny_target(), tiny_heads(), DraftOptions(tree="auto")).costs
            == "measured"
        )
    many = tiny_heads(count=30)
    for method, gamma, nodes, depth in (
        ("medusa", 9, None, 9),
        ("tokenswift", 9, None, 10),
        ("medusa", 29, 20, 19),
    ):
        options = DraftOptions(tree="auto", gamma=gamma, nodes=nodes, recall=0, ngrams=0)
        assert make_drafter(method, tiny_target(), many, options).depth == depth


# -------------------------------------------------------------------------------------------------
# a text's caches go with it


def recurrent_target(dtype: torch.dtype) -> Target:
    target = wrap_model(
        deepcopy(qwen35(dtype)), "recurrent", "native" if NO_PROGRAM is None else "sdpa"
    )
    load_own_head(target)
    return target


TARGETS = {
    "on the host": tiny_target,
    "on the device": static_target,
    "with a drafter": lambda: drafted("dspark"),
    "with recurrent layers": lambda: recurrent_target(torch.float64),
    "with recurrent layers in C": lambda: recurrent_target(torch.float32),
}


@pytest.mark.parametrize(
    ("where", "method"),
    first(
        6,
        dict.fromkeys(
            [
                ("on the host", "triforce"),
                ("on the host", "tokenswift"),
                ("on the device", "cascade"),
                ("on the device", "auto"),
                ("with a drafter", "block"),
                ("with recurrent layers in C", "mtp"),
                *((where, method) for where in [*TARGETS][:2] for method in METHODS),
                ("with a drafter", "auto"),
                *((where, method) for where in [*TARGETS][3:] for method in ("ar", "mtp", "auto")),
            ]
        ),
    ),
)
def test_no_cache_outlives_its_decode(where, method, monkeypatch):
    target = TARGETS[where]()
    alone = where.startswith("with")
    models = (None, DraftOptions()) if alone else (tiny_heads(), DraftOptions(), tiny_draft())

    def begun() -> Decoding:
        drafter = make_drafter(method, target, *models)
        return Decoding(target, random_prompt(20, vocab=VOCAB), PLAIN, 3, drafter, 20)

    begun()  # what is made once stays
    assert not outlived(monkeypatch, endings(begun))
