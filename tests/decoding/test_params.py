"""Sampling parameters out of range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tswift.decoding.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0),
        ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2.0), ("min_p", math.nan), ("eta", 1.0), ("eta", -0.5),
        ("penalty", 0.9), ("penalty", math.inf), ("window", -1), ("temperature", 1e-101), ("temperature", 1e101),
        ("penalty", 1e101), ("temperature", "1"), ("temperature", None), ("temperature", 10**40), ("penalty", 10**40),
        ("top_k", 2.0), ("top_k", "2"), ("top_p", [1]),
        ("window", 1.5), ("banned", [1]), ("banned", (1.0,)), ("banned", ("1",)), ("banned", (-1,)), ("banned", None),
    ],
)  # fmt: skip
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        SamplingParams(**{name: value})
