"""What stands in for a function or class of transformers takes arguments that it does not know:
later versions hand over more.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from recipes.pretrain import CAUSAL
from tests.helpers import CPU, seeded
from tswift.caches import KVShape, WindowKV
from tswift.forward import hf, recurrent
from tswift.speculators import window_layers

NEWER: dict[str, Any] = {"kwargs": {"one": 1}, "unheard_of": 2}  # as 5.24 began to, and another


def drawn(count: int, *shape: int) -> list[Tensor]:
    return [*torch.randn(count, *shape, generator=seeded(0))]


def served(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return (query @ key.transpose(-1, -2) * scaling).softmax(-1) @ value


@pytest.mark.parametrize("name", [hf.ATTENTION, CAUSAL, window_layers.ATTENDS_SEEN])
def test_attention(name):
    rows = drawn(3, 1, 2, 3, 4)
    given = {
        "attention_mask": torch.ones(3, 3, dtype=torch.bool),
        "scaling": 0.5,
        "tswift": SimpleNamespace(queries=[], layer=served),
    }
    attend: Callable[..., tuple[Tensor, None]] = AttentionInterface()[name]
    found = attend(None, *rows, **given)[0]
    assert torch.equal(attend(None, *rows, **given, **NEWER)[0], found)


def test_the_rule_of_a_mask():
    def rule(*_): ...

    assert AttentionMaskInterface()[hf._PROBE](1, mask_function=rule, **NEWER) == hf._Rule(rule)


def test_the_cache_of_a_drafter():
    keys, values = drawn(2, 1, 2, 3, 4)
    held = []
    for more, named in (((), {}), (({"position": 1},), NEWER)):
        kv = WindowKV(KVShape(1, 2, 4, torch.float32, CPU), 8, 2, 4)
        held.append(
            window_layers.SlotCache(kv, torch.arange(3)).update(keys, values, 0, *more, **named)
        )
    assert all(map(torch.equal, *held))


@pytest.mark.parametrize("name", recurrent._OURS)
def test_functions_of_recurrent_layers(name):
    def answer(*given):
        return sum(part.sum() for part in given if part is not None)

    run = SimpleNamespace(convolve=answer, recur=answer, scan=answer)
    rows = drawn(2 if name == "causal_conv1d_fn" else 5, 3)
    named: dict[str, Any] = {"D": rows[0], "dt_bias": rows[1], "dt_limit": (0.0, 1.0)}
    found, more = (recurrent._OURS[name]([run], *rows, **named, **newer) for newer in ({}, NEWER))
    assert torch.equal(*(out[0] if name.endswith("delta_rule") else out for out in (found, more)))
