"""benchmarks/audit_power.py: float32 and exact bfloat16 refuse every text that a mistake has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import tswift

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the source distribution has no benchmarks", allow_module_level=True)

from benchmarks.audit_power import FAULTS, decode_reference  # noqa: E402

CERTAIN = {"runner-up at the middle token", "the closest lead swapped", "a token from the filter's edge"}
TRIED = CERTAIN | {"none", "temperature 1.02", "another seed from the middle"}


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["float32", "exact bfloat16"])
def test_what_changes_the_text_is_refused(exact: bool) -> None:
    model = tswift.load(dtype="bfloat16" if exact else "float32", exact=exact)
    reference = decode_reference(model, 1, 80)
    changed = set()
    for fault in sorted(TRIED):
        tokens = FAULTS[fault](reference)
        assert len(tokens) == 80
        found = reference.audit(tokens)
        assert found.ok == (tokens == reference.tokens), fault
        if tokens != reference.tokens:
            changed.add(fault)
            first = next(at for at, pair in enumerate(zip(tokens, reference.tokens, strict=True)) if pair[0] != pair[1])
            assert found.findings[0].index == first, fault
    assert changed >= CERTAIN
    assert "none" not in changed


@pytest.mark.slow
def test_without_exact_passes_some_are_not_seen() -> None:
    reference = decode_reference(tswift.load(dtype="bfloat16", exact=False), 2, 80)
    assert reference.audit(reference.tokens).ok
    tokens = FAULTS["the closest lead swapped"](reference)
    found = reference.audit(tokens)
    assert tokens != reference.tokens
    assert found.ok
    assert 0 < len(found.within) < found.contested
    assert not reference.audit(FAULTS["a token from the filter's edge"](reference)).ok
    assert not reference.audit(FAULTS["noise of the next position"](reference)).ok
