"""benchmarks/peers.py: every lane makes what it should, and greedy transformers writes our greedy text."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "peers.py"
LENGTH = 24
LANES = {
    f"{kind}-{mode}"
    for kind in ("ar", "tokenswift", "generate", "lookup", "assisted")
    for mode in ("sampled", "greedy")
}

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="the source distribution has no benchmarks")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The JSON of one run of all lanes; with the table's text under ``table``."""
    folder = tmp_path_factory.mktemp("peers")
    # with a penalty the greedy text does not loop, and shows that both sides penalise the same
    options = ["--len", LENGTH, "--prompt-tokens", 48, "--slices", 3, "--greedy-penalty", 1.2]
    words = [*options, "--json", folder / "out.json", "--out", folder / "out.md"]
    with redirect_stdout(io.StringIO()) as printed:
        import_module("benchmarks.peers").main([str(word) for word in words])
    record = json.loads((folder / "out.json").read_text())
    record["table"] = (folder / "out.md").read_text()
    assert record["table"] == printed.getvalue()
    return record


def test_every_lane_makes_every_token(made: dict) -> None:
    assert {lane["name"] for lane in made["lanes"]} == LANES
    for lane in made["lanes"]:
        assert len(lane["tokens"]) == LENGTH, lane["name"]
        assert lane["samples"][-1][0] == LENGTH, lane["name"]


def test_our_lanes_and_greedy_peers_write_the_text_of_plain_decoding(made: dict) -> None:
    tokens = {lane["name"]: lane["tokens"] for lane in made["lanes"]}
    assert tokens["tokenswift-sampled"] == tokens["ar-sampled"]
    for kind in ("tokenswift", "generate", "lookup", "assisted"):
        assert tokens[f"{kind}-greedy"] == tokens["ar-greedy"], kind
    assert tokens["ar-sampled"] != tokens["ar-greedy"] != tokens["generate-sampled"]


def test_samples_only_grow_and_no_pass_is_lost(made: dict) -> None:
    for lane in made["lanes"]:
        for before, after in zip(lane["samples"], lane["samples"][1:], strict=False):
            assert all(a < b for a, b in zip(before, after, strict=True)), lane["name"]
        if lane["name"].startswith(("ar-", "generate-")):
            assert lane["samples"][-1][2] == LENGTH


def test_the_table_has_a_row_for_every_lane(made: dict) -> None:
    rows = [line for line in made["table"].splitlines() if line.startswith("| t")]
    assert len(rows) == len(LANES)
    assert sum("its own draws" in row for row in rows) == 3
