"""Which tokens of a prompt are used."""

from __future__ import annotations

import pytest

from tswift.errors import InputError
from tswift.jobs.prompt import read_prompt, take


def test_take() -> None:
    tokens = list(range(5000))
    assert take(tokens, None, bundled=False) == tokens
    assert take(tokens, None, bundled=True) == tokens[:1024]
    assert take(tokens, 4096, bundled=True) == tokens[:4096]
    with pytest.raises(InputError, match="--prefill: asks for 5,001 tokens, the prompt has 5,000"):
        take(tokens, 5001, bundled=False)


def test_the_bundled_prompt_is_long() -> None:
    assert len(read_prompt(None).split()) >= 6500
