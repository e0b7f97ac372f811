"""The dict of methods: what each looks at."""

from __future__ import annotations

import pytest

from tswift.drafting.methods import find_method, used
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError


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


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InputError, match=r"method: .*nope.*ar, medusa, tokenswift, cascade, recall, reuse"):
        find_method("nope")
