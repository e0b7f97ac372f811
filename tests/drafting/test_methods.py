"""The dict of methods: what each is made of, and what it refuses."""

from __future__ import annotations

import pytest

from tests.helpers import tiny_heads, tiny_target
from tswift.drafting.heads import HeadSource
from tswift.drafting.methods import METHODS, DraftOptions, make_drafter
from tswift.drafting.reuse import ReuseSource
from tswift.errors import InputError


def made(method: str, **options):
    return make_drafter(method, tiny_target(), tiny_heads(), DraftOptions(**options))


def test_what_each_method_drafts_from() -> None:
    kinds = {method: [type(source) for source in made(method).sources] for method in METHODS}
    assert kinds == {
        "ar": [],
        "medusa": [HeadSource],
        "tokenswift": [HeadSource, ReuseSource],
        "reuse": [ReuseSource],
        "ar-reference": [],
    }


def test_depth_and_limit() -> None:
    assert (made("ar").depth, made("ar").limit) == (0, 1)
    assert made("medusa", tree=(3, 3, 3)).depth == 3
    assert made("medusa", tree=(3,)).depth == 1
    assert made("tokenswift", tree=(1, 3, 3, 3)).depth == 4
    assert made("tokenswift", tree=(1, 3)).depth == 4  # reused n-grams reach further than these heads
    assert made("tokenswift", tree=(1, 3), ngrams=0).depth == 2
    assert made("reuse").depth == 3
    assert made("reuse", nodes=17).limit == 17


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("--tree", {"tree": ()}),
        ("--tree", {"tree": (3, 0)}),
        ("--nodes", {"nodes": 1}),
        ("--ngrams", {"ngrams": -1}),
        ("--budget", {"budget": 63}),
        ("--sinks", {"sinks": -1}),
        ("--nodes", {"nodes": 1 << 40}),
        ("--tree", {"tree": "x"}),
        ("--tree", {"tree": (1.0,)}),
        ("--tree", {"tree": [1]}),
        ("--nodes", {"nodes": 2.5}),
        ("--ngrams", {"ngrams": None}),
        ("--budget", {"budget": "64"}),
        ("--sinks", {"sinks": True}),
        ("--reuse-recent", {"reuse_recent": "no"}),
        ("--shared-noise", {"shared_noise": 1}),
    ],
)
def test_options_out_of_range_or_of_another_type_name_themselves(option: str, options) -> None:
    with pytest.raises(InputError, match=f"^{option}: ") as error:
        DraftOptions(**options)
    assert error.value.option == option


def test_trees_deeper_than_the_heads_are_refused() -> None:
    for method, tree in (("medusa", (1, 1, 1, 1)), ("tokenswift", (1,) * 5)):
        with pytest.raises(InputError, match="--tree"):
            made(method, tree=tree)


def test_unknown_methods_and_missing_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"--method: .*nope.*ar, medusa, tokenswift, reuse"):
        made("nope")
    for method in METHODS:
        if method in ("ar", "reuse", "ar-reference"):
            make_drafter(method, tiny_target(), None, DraftOptions())
        else:
            with pytest.raises(InputError, match=r"--method: .*heads"):
                make_drafter(method, tiny_target(), None, DraftOptions())
