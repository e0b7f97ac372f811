"""Methods: their options, what each drafts from and reads, how deep and wide, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.helpers import METHODS, tiny_draft, tiny_heads, tiny_target
from tswift.attention.sdpa import ROWS
from tswift.decoding.drafter import Drafter
from tswift.drafting.adaptive import AdaptiveDrafter
from tswift.drafting.dynamic_tree import ChainSource, PartialDraftModel, SmallDraftModel
from tswift.drafting.heads import HeadSource, HeadTreeSource
from tswift.drafting.methods import (
    cache_slots,
    make_drafter,
    resolve,
    used,
    usual_nodes,
    verify_nodes,
)
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.models.passes import NOMINAL


def test_options_that_are_not_looked_at() -> None:
    full = DraftOptions(kv="full")
    assert used("tokenswift", full) == used("tokenswift", DraftOptions()) - {"budget", "sinks"}
    assert "budget" not in used("medusa", full)
    ngrams = {"ngrams", "reuse_recent"}
    assert ngrams <= used("tokenswift", DraftOptions(tree=(1, 3)))
    assert ngrams <= used("tokenswift", DraftOptions(tree="auto", recall=0))
    for recall in (None, 1):
        assert not ngrams & used("tokenswift", DraftOptions(tree="auto", recall=recall))
    assert {"gamma", "budget", "inner_gamma"} <= used("triforce", DraftOptions())


def model(device: str, groups: int = 4, most_nodes: int | None = None) -> SimpleNamespace:
    """The sizes of a model that is not there."""
    return SimpleNamespace(device=torch.device(device), groups=groups, most_nodes=most_nodes, network_spec=None)


def resolved(method: str, **options) -> DraftOptions:
    return resolve(method, tiny_target(), tiny_heads(), DraftOptions(**options))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("standalone", {"kv": "snapkv"}, r"kv: standalone can read streaming, full, not snapkv"),
        ("recall", {"recall": 0}, r"recall: must be at least 1 for recall"),
        ("tokenswift", {"tree": "auto", "ngrams": 3}, r"ngrams: goes with a tree of its own or recall 0"),
        ("tokenswift", {"tree": "auto", "reuse_recent": True}, r"reuse_recent: goes with a tree of its own"),
        ("tokenswift", {"gamma": 4, "tree": "auto"}, r"gamma: must be between 0 and 3 for tokenswift, got 4"),
    ],
)
def test_what_a_method_cannot_do(method: str, options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(method, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["medusa", "tokenswift"])
def test_a_tree_that_pays_is_as_deep_as_the_heads_go(method: str, device: str) -> None:
    """However deep the usual tree is."""

    def gamma(heads: int, tree: str | None, asked: int) -> int | None:
        options = DraftOptions(gamma=asked, tree=tree)
        return resolve(method, model(device), heads, options).gamma

    for heads in (2, 7):
        assert gamma(heads, "auto", heads) == heads
        with pytest.raises(InputError, match=rf"gamma: must be between \d and {heads} for {method}"):
            gamma(heads, "auto", heads + 1)
    with pytest.raises(InputError, match=rf"gamma: must be between \d and [34] for {method}, got 7"):
        gamma(7, None, 7)


def test_a_chain_that_the_attention_cannot_do() -> None:
    with pytest.raises(InputError, match=r"gamma: must be below 16 with this attention, got 16"):
        resolve("triforce", model("cpu", most_nodes=16), 3, DraftOptions(inner_gamma=16))


def test_a_gpus_nodes_by_head_layout() -> None:
    def on_cuda(groups: int, **options) -> int | None:
        return resolve("tokenswift", model("cuda", groups, 128), 3, DraftOptions(**options)).nodes

    assert (on_cuda(4), on_cuda(1), on_cuda(4, nodes=128)) == (32, 128, 128)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA, QWEN_7B, MHA = 4, 7, 1  # query heads per KV head


def test_nodes_fill_the_rows_of_a_kv_head() -> None:
    assert [usual_nodes(CUDA, groups) for groups in (MHA, LLAMA, QWEN_7B, 64)] == [128, 32, 18, 8]
    assert usual_nodes(CPU, LLAMA) == usual_nodes(CPU, QWEN_7B) == 8


def test_fewer_nodes_as_the_text_grows() -> None:
    weight_tokens = 15.0e9 / 131_072  # LLaMA3.1-8B in bfloat16
    found = [verify_nodes(context, LLAMA, 128, weight_tokens) for context in (0, 4096, 20_000, 50_000, 100_000)]
    assert found == sorted(found, reverse=True)
    assert found[:2] == [128, 128]
    assert 32 < found[-1] < found[2]
    # the keys alone, of an endless text: 1.2 times the rows that cost nothing
    assert verify_nodes(10**9, LLAMA, 128, weight_tokens) == int(1.2 * ROWS / LLAMA)


def made(method: str, **options):
    return make_drafter(method, tiny_target(), tiny_heads(), DraftOptions(**options), tiny_draft())


def sources_of(drafter: Drafter) -> list:
    if isinstance(drafter, AdaptiveDrafter):
        return [source for arm in drafter.arms.values() for source in sources_of(arm)]
    return list(drafter.sources)


def _levels(drafter: Drafter) -> list:
    """What its sources decode or read, and what theirs do."""
    found = []
    for source in sources_of(drafter):
        if isinstance(source, HeadSource):
            found += [source.level] if source.level else []
        elif isinstance(source, ChainSource):
            found += [source.level, *_levels(source.drafter)]
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
            own = [level.kv.capacity for level in _levels(drafter) if isinstance(level, SmallDraftModel)]
            partial, small, _ = cache_slots(method, resolved, tiny_target().max_positions)
            assert ([partial], [small]) == (held or [0], own or [0])


def test_only_some_need_a_smaller_model() -> None:
    for name, method in METHODS.items():
        if name not in ("standalone", "triforce"):
            make_drafter(name, tiny_target(), tiny_heads() if method.needs_heads else None, DraftOptions())


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
        assert drafter.budget.costs is NOMINAL
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
