"""benchmarks/audit_power.py: float32 and exact bfloat16 refuse every text that a mistake has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import tswift

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the source distribution has no benchmarks", allow_module_level=True)

from benchmarks.audit_power import FAULTS, ask  # noqa: E402

CERTAIN = ("runner-up at the middle token", "the closest lead swapped", "a token from the filter's edge")


@pytest.mark.parametrize("exact", [False, True], ids=["float32", "exact bfloat16"])
def test_what_changes_the_text_is_refused(exact: bool) -> None:
    model = tswift.load(dtype="bfloat16" if exact else "float32", exact=exact)
    asked = ask(model, 1, 100)
    changed = []
    for fault, make in FAULTS.items():
        tokens = make(asked)
        assert len(tokens) == 100
        found = asked.audit(tokens)
        assert found.ok == (tokens == asked.tokens), fault
        if tokens != asked.tokens:
            changed.append(fault)
            first = next(at for at, pair in enumerate(zip(tokens, asked.tokens, strict=True)) if pair[0] != pair[1])
            assert found.findings[0].index == first, fault
    assert set(CERTAIN) < set(changed)
    assert "none" not in changed
    assert len(changed) > 7


def test_without_exact_passes_some_are_not_seen() -> None:
    asked = ask(tswift.load(dtype="bfloat16", exact=False), 1, 100)
    assert asked.audit(asked.tokens).ok
    tokens = FAULTS["the closest lead swapped"](asked)
    found = asked.audit(tokens)
    assert tokens != asked.tokens
    assert found.ok
    assert 0 < len(found.within) < found.contested
    assert not asked.audit(FAULTS["a token from the filter's edge"](asked)).ok
    assert not asked.audit(FAULTS["noise of the next position"](asked)).ok
