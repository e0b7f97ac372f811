"""benchmarks/beyond.py: every lane decodes plain decoding's text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the source distribution has no benchmarks", allow_module_level=True)

from benchmarks.beyond import LANES, main, recalling  # noqa: E402
from tests.helpers import tiny_heads, tiny_target  # noqa: E402
from tswift.drafting.methods import make_drafter  # noqa: E402


def test_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(ROOT / "prompts" / "long-novel.txt")
    words = ["beyond.py", text, "--contexts", "300", "--tokens", "24", "--slices", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    main()
    (found,) = json.loads((tmp_path / "beyond.json").read_text())["contexts"]
    assert [row["lane"] for row in found["lanes"]] == list(LANES)
    assert all(row["same"] for row in found["lanes"])
    assert all("0 violations" in row["audit"] for row in found["lanes"])
    assert (tmp_path / "beyond.md").read_text().count("| yes |") == len(LANES)


def test_what_recalls_is_found() -> None:
    lanes = {name: lane for name, lane in LANES.items() if lane.heads == "conditioned"}
    for name, lane in lanes.items():
        drafter = make_drafter(lane.method, tiny_target(), tiny_heads(kind="conditioned", count=4), lane.options)
        count = len(list(recalling(drafter)))
        expected = {"auto": 3, "cascade": 2, "recall": 1}.get(lane.method, 1 if lane.options.tree == "auto" else 0)
        assert count == (0 if lane.options.recall == 0 else expected), name
