"""No option of drafting is silently ignored: what is accepted makes another drafter."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.drafters import load_own_head, qwen35
from tests.drafting.test_networks import drafted
from tests.helpers import needs_program, tiny_draft, tiny_heads, tiny_target
from tswift.drafting.methods import make_drafter, resolve
from tswift.drafting.options import KV, METHODS, DraftOptions, RecordedOptions, refuse_unused
from tswift.errors import InputError
from tswift.forward.target import Target
from tswift.speculators.heads import Heads

VALUES: dict[str, tuple[Any, ...]] = {
    "tree": ("auto", (1,), (2, 1)),
    "nodes": (3, 4),
    "ngrams": (0, 3, 20),
    "reuse_recent": (True, False),
    "gamma": (0, 1, 2),
    "inner_gamma": (1, 3),
    "kv": KV,
    "budget": (64, 80),
    "sinks": (3, 16),
    "shared_noise": (True, False),
    "costs": ("measured", "nominal"),
    "recall": (0, 3),
}
OPAQUE = (Target, Heads, torch.nn.Module, DraftOptions)


@functools.cache
def recurrent(head: bool = False) -> Target:
    target = Target(qwen35())
    if head:
        load_own_head(target)
    return target


MODELS = {
    "heads": lambda: (tiny_target(), tiny_heads(), None),
    "no heads": lambda: (tiny_target(), None, None),
    "draft model": lambda: (tiny_target(), tiny_heads(), tiny_draft()),
    "block": lambda: (drafted("dflash"), None, None),
    "eagle": lambda: (drafted("eagle-safeai"), None, None),
    "recurrent": lambda: (recurrent(), None, None),
    "recurrent with a draft model": lambda: (recurrent(), None, tiny_draft()),
    "recurrent with a head": lambda: (recurrent(head=True), None, None),
}


def test_every_option_is_tried():
    assert VALUES.keys() == {each.name for each in fields(DraftOptions)}


def parts(value, seen: dict[int, Any]) -> Any:
    """What a drafter is made of, but for models and weights."""
    if isinstance(value, OPAQUE):
        return type(value).__name__
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(value.shape)
    if isinstance(value, dict):
        return [(parts(name, seen), parts(each, seen)) for name, each in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [parts(each, seen) for each in value]
    if type(value).__module__.startswith("tswift") and hasattr(value, "__dict__"):
        if id(value) in seen:
            return type(value).__name__
        seen[id(value)] = value
        return type(value).__name__, parts(vars(value), seen)
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def made(method: str, model: str, typed: dict[str, Any]) -> Any:
    """The drafter's parts; None where something typed is refused."""
    target, heads, draft = MODELS[model]()
    if "draft_model" in METHODS[method].needs and draft is None:
        return None
    try:
        refuse_unused([method], typed)
        return parts(make_drafter(method, target, heads, DraftOptions(**typed), draft, 400), {})
    except InputError:
        return None


@needs_program
@given(
    st.sampled_from(sorted(METHODS)),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(VALUES)),
    st.fixed_dictionaries({}, optional={name: st.sampled_from(VALUES[name]) for name in VALUES}),
)
def test_what_is_typed_is_read_or_refused(method, model, name, others):
    others.pop(name, None)
    found = [
        (value, drafter)
        for value in VALUES[name]
        if (drafter := made(method, model, {**others, name: value})) is not None
    ]
    for index, (value, drafter) in enumerate(found):
        for other, another in found[:index]:
            assert drafter != another, (name, value, other)


def test_what_a_run_recorded_is_no_option_that_was_typed():
    """Earlier versions resolved, and recorded, what nothing reads."""
    recorded = RecordedOptions(kv="snapkv", gamma=3, budget=128, sinks=3)
    resolved = resolve("auto", recurrent(), None, recorded)
    assert (resolved.kv, resolved.gamma, resolved.budget, resolved.sinks) == (None,) * 4
    filled = RecordedOptions(tree=(1, 2, 2, 2), nodes=8, ngrams=20)
    resolve("tokenswift", tiny_target(), tiny_heads(), filled)
