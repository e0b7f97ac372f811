"""``tswift env``."""

from __future__ import annotations

import json


def test_machine_and_costs(tswift, checkpoint) -> None:  # type: ignore[no-untyped-def]
    asked = ("env", "--model", checkpoint, "--dtype", "float32")
    found = tswift(*asked)
    assert found.code == 0
    told = json.loads(tswift(*asked, "--json", "-").out)
    assert told["kind"] == "env"
    text = found.out.decode()
    assert told["environment"]["torch"] in text
    first = told["costs"]["base"][0] + 100 * told["costs"]["per_key"][0]
    assert f"{1e3 * first:.2f}" in text  # remembered, not measured anew
