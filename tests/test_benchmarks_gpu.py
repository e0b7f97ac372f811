"""benchmarks/gpu: a dry run on the CPU writes all that a GPU gets, and what fails does not take the rest along."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the source distribution has no benchmarks", allow_module_level=True)

from benchmarks.gpu import report, session  # noqa: E402
from benchmarks.gpu.__main__ import sections  # noqa: E402
from benchmarks.gpu.scale import DRY, FULL  # noqa: E402
from benchmarks.gpu.targets import verdicts  # noqa: E402
from benchmarks.gpu.timing import covered  # noqa: E402
from tswift.benchmarking.look import available  # noqa: E402
from tswift.models.shapes import SHAPES  # noqa: E402

SECTIONS = ["passes tiny-llama", "loop", "passes tiny-qwen", "demo", "peer", "simulated"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a dry run leaves."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / report.TESTS).write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1" time="2.5">'
        '<testcase name="test_fine"/><testcase name="test_broken"><failure/></testcase></testsuite></testsuites>'
    )
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--published", "h200", "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (folder / session.MARKDOWN).read_text().strip()
    return folder


@pytest.fixture(scope="module")
def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / session.JSON).read_text())


def test_every_section_is_done(content: dict[str, Any]) -> None:
    assert [(each["name"], each["state"]) for each in content["sections"]] == [(name, "done") for name in SECTIONS]
    assert [each for each in content["left_out"] if each["what"] != "plots"] == []
    assert content["dry"]


def test_every_pass_is_timed_against_both_floors(content: dict[str, Any]) -> None:
    for name, modes in (("tiny-llama", ["as loaded", "compiled"]), ("tiny-qwen", ["as loaded"])):
        cells = content["passes"][name]["cells"]
        wanted = [("verify", context, nodes) for context in DRY.contexts for nodes in DRY.nodes]
        found = [(cell["mode"], cell["pass"], cell["context"], cell["nodes"]) for cell in cells]
        assert found == [(mode, *each) for mode in modes for each in [*wanted, ("draft", DRY.budget, 1)]]
        for cell in cells:
            assert len(cell["seconds"]) == DRY.rounds
            assert min(cell["seconds"]) <= cell["median"] <= max(cell["seconds"])
            assert cell["floors"]["measured"] > cell["floors"]["published"] > 0


def test_the_loop_stands_at_its_context_and_accepts_the_published_share(content: dict[str, Any]) -> None:
    methods = content["loop"]["methods"]
    assert methods["ar"]["tokens_per_step"] == methods["ar"]["nodes"] == 1
    assert set(methods["tokenswift"]["passes"]) == {"verify", "draft"}
    assert methods["tokenswift"]["simulated_alpha"] == 0.84
    assert methods["tokenswift"]["tokens_per_step"] == pytest.approx(4 * 0.84 + 1, abs=0.8)
    for found in methods.values():
        assert found["beyond_passes"] == pytest.approx(found["median"] - sum(found["passes"].values()))
        assert found["busy"] is None


def test_the_peer_is_unmodified_and_makes_its_tokens(content: dict[str, Any]) -> None:
    theirs, ours = content["peer"]["theirs"], content["loop"]["methods"]["ar, greedy"]
    assert theirs["attention"] == "sdpa"
    assert not theirs["compiled"]
    assert len(theirs["seconds"]) == DRY.peer_tokens // 2
    assert content["peer"]["x"] == pytest.approx(theirs["per_token"] / ours["mean"])


def test_texts_lie_in_folders_of_their_own(folder: Path, content: dict[str, Any]) -> None:
    for name, file, simulated in (
        ("demo-100k", "bench.json", False),
        ("tiny-llama-simulated", "bench-simulated.json", True),
    ):
        bench, summary = json.loads((folder / name / file).read_text()), content["texts"][name]
        assert bench["simulated"] == summary["simulated"] == simulated
        assert [point["len"] for point in summary["points"]] == list(DRY.lens)
        assert summary["explained"] is (None if simulated else True)
        assert summary["state"] == "finished"


def test_the_report_says_it_all(folder: Path, content: dict[str, Any]) -> None:
    text = (folder / session.MARKDOWN).read_text()
    for part in (
        "# tswift on",
        "(dry run)",
        "## Targets",
        "## Passes: tiny-llama, compiled",
        "## Steps of the loop: tiny-llama at 300 tokens",
        "tokenswift (simulated, alpha 0.84)",
        "## Peer: tiny-llama at 300 tokens",
        "## To 40 tokens: demo",
        "## To 40 tokens: shape:tiny-llama (simulated, alpha 0.84)",
        "failed: test_broken",
        "| rates, published | 4.80 TB/s, 989 TFLOP/s |",
        f"| git_commit | {content['environment']['git_commit']} |",
        "python -m benchmarks.gpu --dry --published h200",
    ):
        assert part in text, part
    assert content["tests"]["failures"] == 1
    assert (folder / report.PLOT).is_file() == available()


# What follows has no model.


def a_session(folder: Path, scale: Any = FULL, seconds: float = 500.0) -> session.Session:
    content: dict[str, Any] = {"deadline": time.time() + seconds, "sections": [], "left_out": [], "found": []}
    return session.Session(folder, scale, torch.device("cpu"), content, lambda content: "text")


def refuse() -> None:
    raise AssertionError("no restart was due")


def part(name: str, what: Any = None, needs: float = 0.0, most: float = 100.0) -> session.Section:
    def run(shared: session.Session) -> str | None:
        shared.content["found"].append(name)
        return what() if what else None

    return session.Section(name, needs, most, run)


def states(shared: session.Session) -> list[tuple[str, str]]:
    kept = json.loads((shared.folder / session.JSON).read_text())
    assert kept == shared.content | {"ended": kept["ended"]}
    return [(each["name"], each["state"]) for each in kept["sections"]]


def test_a_section_that_fails_is_told_of_and_the_next_one_runs(tmp_path: Path) -> None:
    shared = a_session(tmp_path)

    def fail() -> None:
        raise RuntimeError("first line\nsecond line")

    session.run_sections([part("a", fail), part("b")], shared, refuse)
    assert states(shared) == [("a", "failed"), ("b", "done")]
    assert shared.content["left_out"] == [{"what": "a", "why": "failed: RuntimeError: first line"}]
    assert "second line" in (tmp_path / session.LOG).read_text()


def test_a_section_beyond_its_time_is_cut(tmp_path: Path) -> None:
    shared = a_session(tmp_path)

    def sleep() -> None:
        try:
            time.sleep(20)
        except Exception:  # as a library would that tries something else then
            pytest.fail("swallowed")

    started = time.monotonic()
    session.run_sections([part("a", sleep, most=1.0), part("b"), part("c", lambda: "half")], shared, refuse)
    assert time.monotonic() - started < 10
    assert states(shared) == [("a", "cut short"), ("b", "done"), ("c", "cut short")]


def test_what_needs_more_time_than_is_left_is_left_out(tmp_path: Path) -> None:
    shared = a_session(tmp_path, seconds=60)
    session.run_sections([part("a", needs=80), part("b", needs=20)], shared, refuse)
    assert states(shared) == [("a", "left out"), ("b", "done")]
    assert shared.content["left_out"][0]["what"] == "a"


def test_a_new_process_goes_on_after_what_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, restarted = a_session(tmp_path), []
    with monkeypatch.context() as patch:
        patch.setattr(session, "tidy", lambda device: False)
        session.run_sections([part("a")], shared, lambda: restarted.append("yes"))
    assert restarted == ["yes"]
    session.run_sections([part("a"), part("b")], shared, refuse)
    assert shared.content["found"] == ["a", "b"]


def test_a_section_that_ended_the_process_is_not_run_again(tmp_path: Path) -> None:
    """As a crash in a driver would; what was there at that moment is what the next process reads."""
    shared = a_session(tmp_path)
    shared.content["running"] = "never seen"

    def copy() -> None:
        assert json.loads((tmp_path / session.JSON).read_text())["running"] == "a"
        shared.content["found"].append("copied")

    session.run_sections([part("a", copy), part("never seen"), part("b")], shared, refuse)
    assert states(shared) == [("never seen", "failed"), ("a", "done"), ("b", "done")]
    assert shared.content["found"] == ["a", "copied", "b"]


def test_everything_asked_for_is_a_section() -> None:
    names = [section.name for section in sections(FULL)]
    assert sorted(names) == sorted(
        [*(f"passes {name}" for name in SHAPES if "tiny" not in name), *SECTIONS[1:2], *SECTIONS[3:]]
    )
    assert FULL.contexts == (4096, 20_000, 40_000, 60_000, 80_000, 100_000)
    assert FULL.nodes == (1, 41, 121)


@pytest.mark.parametrize(("slower", "met"), [(1.0, True), (1.3, False)])
def test_targets_are_met_or_missed(slower: float, met: bool) -> None:
    def cell(kind: str, context: int, nodes: int, milliseconds: float) -> dict[str, Any]:
        floors = {"measured": 10.0 * context / 4096}
        return {
            "mode": "as loaded",
            "pass": kind,
            "context": context,
            "nodes": nodes,
            "median": milliseconds,
            "floors": floors,
        }

    cells = [
        cell("verify", 4096, 1, 11.0),
        cell("verify", 4096, 41, 12.0),
        cell("verify", 8192, 1, 22.8 * slower),
        cell("verify", 8192, 41, 27.0 * slower**2),
        cell("draft", 4096, 1, 11.4 * slower),
    ]
    host = {"ar": {"beyond_device": 9e-5 * slower}, "tokenswift": {"beyond_device": None}}
    content = {
        "scale": {"judged": ["one", "two"], "nodes": [1, 41], "main": "one", "place": 60_000},
        "passes": {"one": {"cells": cells}},
        "loop": {"methods": host},
        "peer": {"x": 1.6 / slower},
    }
    found = {(each.target, each.where): each for each in verdicts(content)}
    for key, measured in (
        (("AR step over its floor", "one"), 1.14 * slower),
        (("41 nodes over an AR step", "one"), 27 / 22.8 * slower),
        (("draft pass over its floor", "one"), 1.14 * slower),
        (("host's share of a step", "ar"), 9e-5 * slower),
        (("AR faster than transformers' generate", "one at 60,000 tokens"), 1.6 / slower),
    ):
        assert found[key].measured == pytest.approx(measured)
        assert found[key].met is met, key
        assert found[key].cells[-1].startswith("met" if met else "MISSED by"), key
    unknown = [found["AR step over its floor", "two"], found["host's share of a step", "tokenswift"]]
    assert [(each.met, each.cells[-1]) for each in unknown] == [(None, "not measured")] * 2


def test_gaps_between_kernels_count_only_if_a_host_could_have_made_them() -> None:
    assert covered([(10, 20), (21, 30), (0, 5), (12, 15)], bridge=1) == 25
    assert covered([(0, 10), (4, 6), (30, 40)], bridge=5) == 20
    assert covered([], bridge=5) == 0
