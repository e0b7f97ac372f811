"""benchmarks/gpu: a dry run leaves what a borrowed machine hands back,
and a failed section takes no other along.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the source distribution has no benchmarks", allow_module_level=True)

from benchmarks.gpu import SECTIONS, SPOILED, figures, first_texts  # noqa: E402
from benchmarks.gpu import __main__ as command  # noqa: E402
from benchmarks.gpu.clocks import covered  # noqa: E402
from benchmarks.gpu.first_contact import Asked  # noqa: E402
from benchmarks.gpu.measure import integrated  # noqa: E402
from tests.helpers import needs_program  # noqa: E402

TABLES = {
    "first contact": {"loaded", "methods", "products", "probes"},
    "equality": {"tests"},
    "probe": {"loaded", "idle", "pass", "memory", "attention", "sampler"},
    "passes": {"prepared", "passes"},
    "steps": {"steps", "integrated from steps", "prompt"},
    "simulated": {"simulated"},
    "shapes": {"loaded", "prepared", "passes"},
    "generate": {"loaded", "generate"},
}


@pytest.mark.slow
@needs_program
def test_a_dry_run_hands_back_everything(tmp_path: Path) -> None:
    """In one test, as it takes most of a minute.

    The borrowed machine takes at most 8 files, of 16 MiB each.
    """
    arguments = [
        "--dry",
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "out"),
        "--commit",
        "abc",
    ]
    line = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, (
        done.stderr + done.stdout + (tmp_path / "work" / "gpu.log").read_text()
    )

    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "cache.tgz",
        "first_contact.txt",
        "gpu.json",
        "gpu.md",
        "gpu.tgz",
    ]
    assert max(path.stat().st_size for path in out.iterdir()) <= 16 * 2**20
    with tarfile.open(out / "gpu.tgz") as tar:
        names = [
            "equality.xml",
            "figures.jsonl",
            "first_contact.txt",
            "gpu.json",
            "gpu.log",
            "gpu.md",
        ]
        assert sorted(tar.getnames()) == names
    content = json.loads((out / "gpu.json").read_text())
    text = (out / "gpu.md").read_text()
    assert text == command.markdown(content)
    assert text.startswith("# tswift on a GPU (dry run")
    assert content["commit"] == "abc"

    # every section is done and leaves nothing out
    assert content["sections"] == dict.fromkeys(TABLES, "done")
    assert list(TABLES) == list(SECTIONS)
    for section, tables in TABLES.items():
        found = [figure for figure in content["figures"] if figure["section"] == section]
        assert {figure["table"] for figure in found} - {"begun", "ended"} == tables
        assert not [figure for figure in found if figure.get("error")]

    # every method has met the model, and each probe had its own process
    methods = [figure for figure in content["figures"] if figure["table"] == "methods"]
    names = ["ar", "tokenswift", "medusa", "block", "auto", "cascade", "recall", "ar", "eagle"]
    assert [row["method"] for row in methods] == names
    assert all(row["same_as_ar"] and row["graphs"] is None for row in methods)
    said = (out / "first_contact.txt").read_text()
    assert said.count("== bits") == 2  # 3 on a GPU
    assert "Traceback" not in said

    # the equality tests have run, in order of value
    outcomes = {each["test"]: each["outcome"] for each in content["figures"] if "test" in each}
    assert set(outcomes.values()) == {"passed", "skipped"}
    names = list(outcomes)
    assert names[0] == "test_nothing_of_the_core_is_done_without"
    float32 = "test_the_bundled_model_writes_the_text_of_plain_decoding_in_float32[tokenswift]"
    assert outcomes[float32] == "passed"
    assert names.index(float32) > names.index(
        "test_every_method_writes_the_text_of_plain_decoding_in_bfloat16"
    )

    # steps are a real text's: n-grams are found, and as much is accepted as was asked for
    rows = [figure for figure in content["figures"] if figure["table"] == "steps"]
    assert [(row["method"], row["nodes"], row["context"]) for row in rows[:4]] == [
        *(("ar", "default", 1100), ("ar", "default", 1200)),
        *(("tokenswift", "default", 1100), ("tokenswift", "default", 1200)),
    ]
    assert [(row["tree"], row["tokens"]) for row in rows[:2]] == [(1, 1), (1, 1)]
    for row in rows[2:4]:
        assert 6 < row["tree"] <= 8  # heads have 6 of the 8 nodes
        assert row["tokens"] == pytest.approx(4.6, abs=0.4)


# What follows runs no model.


def section(name: str, between: str = "", state: str = "done") -> str:
    """What a process does that measures a section."""
    return (
        f"note(section={name!r}, table='begun')\n{between}\n"
        f"note(section={name!r}, table='ended', state={state!r})\n"
    )


FAILED, KILLED, NO_TIME = (
    "failed: RuntimeError: no",
    "killed: the process ended with {}",
    "left out: no time",
)
FAILS = section("probe", state=FAILED) + section("passes", "os._exit(9)")
BROKEN = section("probe") + section("passes", state=FAILED) + "os._exit(1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bodies", "seconds", "ends"),
    [
        ([FAILS, section("steps")], 60, [FAILED, KILLED.format(9), "done"]),
        (
            ["os._exit(1)", section("passes") + section("steps")],
            60,
            [KILLED.format(1), "done", "done"],
        ),
        ([BROKEN, section("steps")], 60, ["done", FAILED, "done"]),
        ([section("probe", "time.sleep(60)")], 12, [KILLED.format(-9), NO_TIME, NO_TIME]),
        ([], 10.5, [NO_TIME] * 3),
    ],
    ids=[
        "one kills its process",
        "one does not begin",
        "one leaves a broken device",
        "one hangs",
        "no time",
    ],
)
def test_a_section_takes_no_other_along(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bodies: list[str],
    seconds: float,
    ends: list[str],
) -> None:
    """The processes are fakes, one after another."""
    figures = tmp_path / "figures.jsonl"
    waiting = iter(bodies)
    head = (
        "import json, os, time\n"
        f"def note(**x): open({str(figures)!r}, 'a').write(json.dumps(x) + chr(10))\n"
    )
    monkeypatch.setattr(command, "LEAST", 0.5)
    monkeypatch.setattr(command, "GRACE", 0.5)
    monkeypatch.setattr(
        command, "command", lambda session, sections: [sys.executable, "-c", head + next(waiting)]
    )
    made = command.Session(
        tmp_path, tmp_path / "out", True, time.time() + seconds, {"command": "x"}
    )
    made.out.mkdir()
    figures.write_text("")
    names = ["probe", "passes", "steps"]
    command.run_sections(made, names)
    assert made.states() == dict(zip(names, ends, strict=True))
    assert json.loads((made.out / "gpu.json").read_text())["sections"] == made.states()
    assert not list(waiting)


def test_another_process_goes_on_after_a_failed_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([SPOILED, SPOILED, 0, 1])
    monkeypatch.setattr(command, "PROBES", {"model": (9.0, 1), "bits": (9.0, 1)})
    monkeypatch.setattr(
        command,
        "asking",
        lambda session, probe: ["sh", "-c", f"echo I am {probe}; exit {next(codes)}"],
    )
    (tmp_path / "figures.jsonl").write_text("")
    session = command.Session(tmp_path, tmp_path / "out", True, time.time() + 60, {"command": "x"})
    session.out.mkdir()
    assert command.run_probes(session) == "failed: bits ended with 1"
    asked = [(figure["probe"], figure["outcome"]) for figure in session.figures()]
    assert asked == [
        *[("model", "a capture failed")] * 2,
        ("model", "done"),
        ("bits", "ended with 1"),
    ]
    said = (session.out / "first_contact.txt").read_text()
    assert said.count("I am model") == 3  # archived, too


@pytest.mark.parametrize("spoils", ["tokenswift", None])
def test_a_text_that_spoils_its_process_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoils: str | None
) -> None:
    written: list[str] = []

    def text(loaded: object, request: Any) -> dict[str, Any]:
        written.append(request.method)
        return {"text": "1" if request.method == "medusa" else "0"}

    monkeypatch.setattr(
        first_texts,
        "load_shape",
        lambda *given, **how: SimpleNamespace(target=SimpleNamespace(vocab_size=999)),
    )
    monkeypatch.setattr(first_texts, "_decoded", text)
    monkeypatch.setattr(first_texts, "spoiled", lambda loaded: written[-1:] == [spoils])
    (tmp_path / "figures.jsonl").write_text("")
    asked = Asked(tmp_path, dry=True)
    if spoils:
        with pytest.raises(SystemExit) as ended:
            first_texts.meet(asked)
        assert ended.value.code == SPOILED
        assert written == ["ar", "tokenswift"]
        written.append("another process")
    first_texts.meet(asked)
    rows = [(row["drafter"], row["method"]) for row in figures(tmp_path)]
    assert rows == [
        (drafter, method)
        for drafter, methods in first_texts._DRAFTERS.items()
        for method in methods
    ]
    assert {row["method"] for row in figures(tmp_path) if not row["same_as_ar"]} == {"medusa"}
    assert len(written) == len(rows) + bool(spoils)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "met"), (1.3, "MISSED")])
def test_targets_are_met_or_missed(slower: float, verdict: str) -> None:
    passes = {"section": "passes", "table": "passes"}
    text = {"section": "steps", "table": "integrated from steps", "method": "tokenswift"}
    prompt = {"section": "steps", "table": "prompt"}
    figures = [
        passes | {"kind": "verify", "context": 4096, "nodes": 1, "ms": 4.0, "x": 1.1},
        passes | {"kind": "verify", "context": 4096, "nodes": 32, "ms": 9.0, "x": 2.5},
        passes | {"kind": "verify", "context": 100_000, "nodes": 1, "ms": 7.0, "x": 1.15 * slower},
        passes | {"kind": "draft", "context": 4096, "nodes": 1, "ms": 4.0, "x": 2.5},
        text | {"seconds": 200 * slower},
        text | {"seconds": 900.0},  # of other trees than the default
        prompt | {"exact": True, "written": False, "seconds": 0.16 * slower},
        prompt | {"exact": True, "written": True, "seconds": 9.0},
    ]
    found = command.targets(figures)
    assert [row["verdict"] for row in found] == [verdict] * 3
    worst = [max(1.1, 1.15 * slower), 200 * slower, 0.16 * slower]
    assert [row["measured, worst"] for row in found] == pytest.approx(worst)
    assert {row["measured, worst"] for row in command.targets([])} == {"not measured"}


def test_a_text_is_integrated_over_its_contexts() -> None:
    linear = {context: 1e-3 + 1e-8 * context for context in (4000, 50_000, 100_000)}
    assert integrated(linear, 4000, 100_000) == pytest.approx(100_000 * (1e-3 + 1e-8 * 54_000))
    assert integrated({4000: 2e-3, 100_000: 2e-3}, 4000, 100_000) == pytest.approx(200)


def test_gaps_between_kernels_count_only_if_a_host_could_have_made_them() -> None:
    assert covered([(10, 20), (21, 30), (0, 5), (12, 15)], bridge=1) == 25
    assert covered([(0, 10), (4, 6), (30, 40)], bridge=5) == 20
    assert covered([], bridge=5) == 0
