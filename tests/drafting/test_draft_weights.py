"""Drafting passes on a copy of the target: the text is plain decoding's, whatever the copy's weights are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor

from tests.fake_torchao import broken, change, garbage, rounded
from tests.helpers import (
    METHODS,
    decode_method,
    decode_steps,
    random_prompt,
    take_turns,
    tiny_draft,
    tiny_heads,
    tiny_target,
    tokens_of,
)
from tswift.decoding.params import SamplingParams
from tswift.drafting.adaptive import AdaptiveDrafter
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.models.passes import NOMINAL
from tswift.models.target import Target

PARAMS = SamplingParams(min_p=0.02)
SELF_DRAFTING = [name for name, method in METHODS.items() if method.partial]
KV = [(name, kv) for name in SELF_DRAFTING for kv in (METHODS[name].kv or (None,))]
CASES = [
    *((*case, how, torch.float64) for case, how in zip(KV, cycle((rounded, garbage, broken)), strict=False)),
    ("tokenswift", "dynamic", rounded, torch.float32),
    ("cascade", "streaming", broken, torch.float32),
]


def copy_of(target: Target, how: Callable[[Tensor], Tensor]) -> Target:
    network = deepcopy(target.model)
    change(network.get_decoder(), how)
    return Target(network)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kv", "how", "dtype"), CASES)
def test_the_text_is_plain_decodings(
    method: str, kv: str | None, how: Callable[[Tensor], Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = tiny_target(dtype=dtype), random_prompt(80, 6)
    copied = copy_of(target, how)
    passes = []
    monkeypatch.setattr(copied, "forward", lambda *given: passes.append(1) or Target.forward(copied, *given))
    options = DraftOptions(kv=kv, budget=64, sinks=4, nodes=12 if "nodes" in METHODS[method].uses else None)
    heads, draft = tiny_heads(dtype), tiny_draft(dtype)
    drafter = make_drafter(method, target, heads, options, draft, costs=NOMINAL, drafting=copied)
    if isinstance(drafter, AdaptiveDrafter):
        take_turns(drafter)
    length = 60 if method == "auto" else 40  # that chooses a cascade later
    steps = decode_steps(target, drafter, prompt, PARAMS, 1, length)
    assert tokens_of(steps) == decode_method("ar", target, prompt, PARAMS, 1, length)
    assert passes


def test_the_small_model_of_standalone_and_others_heads_are_no_drafting_passes() -> None:
    target = tiny_target()
    copied = copy_of(target, garbage)
    copied.forward = None  # type: ignore[assignment]
    for method in sorted(set(METHODS) - set(SELF_DRAFTING)):
        drafter = make_drafter(method, target, tiny_heads(), DraftOptions(budget=64), tiny_draft(), drafting=copied)
        assert len(tokens_of(decode_steps(target, drafter, random_prompt(80, 6), PARAMS, 1, 20))) == 20


def test_a_cascade_decodes_more_where_its_passes_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree that it is verified in costs what it did."""
    target, prompt = tiny_target(), random_prompt(80, 6)
    copied, passes, found = copy_of(target, Tensor.clone), [], []
    monkeypatch.setattr(copied, "forward", lambda *given: passes.append(1) or Target.forward(copied, *given))
    for share in (0.05, 20.0):
        costs = replace(NOMINAL, base=tuple(share * each for each in NOMINAL.base), level=share * NOMINAL.level)
        options = DraftOptions(budget=64, nodes=24)
        drafter = make_drafter(
            "cascade", target, tiny_heads(), options, costs=NOMINAL, drafting=copied, draft_costs=costs
        )
        passes.clear()
        steps = decode_steps(target, drafter, prompt, PARAMS, 1, 50)
        assert tokens_of(steps) == decode_method("ar", target, prompt, PARAMS, 1, 50)
        found.append(len(passes) / len(steps))
    assert found[0] > found[1]
