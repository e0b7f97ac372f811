"""Options of drafting: what is out of range is told by the option's name."""

from __future__ import annotations

import pytest

from tswift.drafting.options import DraftOptions
from tswift.errors import InputError


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("tree", {"tree": ()}),
        ("tree", {"tree": (3, 0)}),
        ("nodes", {"nodes": 1}),
        ("ngrams", {"ngrams": -1}),
        ("budget", {"budget": 63}),
        ("sinks", {"sinks": -1}),
        ("nodes", {"nodes": 1 << 40}),
        ("tree", {"tree": "x"}),
        ("tree", {"tree": (1.0,)}),
        ("tree", {"tree": [1]}),
        ("nodes", {"nodes": 2.5}),
        ("ngrams", {"ngrams": None}),
        ("budget", {"budget": "64"}),
        ("sinks", {"sinks": True}),
        ("reuse_recent", {"reuse_recent": "no"}),
        ("shared_noise", {"shared_noise": 1}),
        ("kv", {"kv": "some"}),
        ("kv", {"kv": 1}),
        ("gamma", {"gamma": -1}),
        ("gamma", {"gamma": 1001}),
        ("gamma", {"gamma": "4"}),
        ("gamma", {"gamma": 2, "tree": (1, 3)}),
        ("inner_gamma", {"inner_gamma": 0}),
        ("inner_gamma", {"inner_gamma": None}),
    ],
)
def test_options_out_of_range_or_of_another_type_name_themselves(option: str, options) -> None:
    with pytest.raises(InputError, match=f"^{option}: ") as error:
        DraftOptions(**options)
    assert error.value.field == option
