"""benchmarks/gpu: a dry run leaves what a borrowed machine hands back, on a machine that lacks much
of what tswift is installed with; and what fails there takes nothing else along.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the source distribution has no benchmarks", allow_module_level=True)

from benchmarks.gpu import (  # noqa: E402
    EQUALITY,
    FIGURES,
    HELD,
    MEASURED,
    SECONDS,
    SECTIONS,
    figures,
    measure,
    texts,
)
from benchmarks.gpu import __main__ as command  # noqa: E402
from benchmarks.gpu.clocks import covered  # noqa: E402
from benchmarks.gpu.measure import integrated  # noqa: E402
from benchmarks.gpu.run import DRY, Run, noisy  # noqa: E402
from tests.helpers import needs_program  # noqa: E402
from tswift.caches import FullKV, KVShape  # noqa: E402

# what a machine that is borrowed for its GPU need not have
LACKED = ("pydantic", "gguf", "datasets", "matplotlib", "hypothesis", "scipy")
LACKING = """
import sys
from importlib.machinery import PathFinder

class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {lacked!r}:
            return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
"""
TABLES = {
    EQUALITY: {"loaded", "methods", "bits", "tests", "ended"},
    "steps": {"loaded", "prompt", "steps", "integrated", "ended"},
    "passes": {"passes", "ended"},
    "codes": {"ended"},  # on a device alone
    "parts": {"pass", "idle", "memory", "sampler", "ended"},
    "simulated": {"simulated", "ended"},
    "generate": {"generate", "ended"},
}


def lacking(folder: Path, *names: str) -> dict[str, str]:
    """The environment of Python processes that find no such modules."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LACKING.format(lacked=names))
    own = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)])}
    return {**os.environ, **own, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def python(env: dict[str, str], *words) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, words)]
    given: dict[str, Any] = {"cwd": ROOT, "env": env, "capture_output": True, "text": True}
    return subprocess.run(line, timeout=480, check=False, **given)


def test_what_is_missing_is_named_at_once(tmp_path, monkeypatch, capsys):
    """And is found in a folder of wheels."""
    monkeypatch.setattr(command, "NEEDED", ("json", "lacked_module", "another_lacked"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert command.main(words) == 2
    assert capsys.readouterr().err == (
        "lacked_module, another_lacked: not installed here; a folder of wheels that have it does: "
        "make gpu SITE=FOLDER\n"
    )
    with zipfile.ZipFile(tmp_path / "lacked_module-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacked_module/__init__.py", "")
    assert command.main([*words, "--site", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("another_lacked: not")


def test_noise_in_a_cache_of_codes_has_the_size_of_other_noise():
    kv = FullKV(KVShape(2, 3, 16, torch.int8, torch.device("cpu"), steps_behind=True), 50)
    noisy(kv)
    assert kv.numbers(1, 1, slice(None)).std().item() == pytest.approx(1, rel=0.05)


@pytest.mark.slow
def test_layouts_of_attention_give_the_same(tmp_path):
    layouts = pytest.importorskip("benchmarks.gpu.layouts", reason="triton is not installed")
    env = {**lacking(tmp_path / "site", *LACKED), "TRITON_INTERPRET": "1"}
    done = python(env, "-m", "benchmarks.gpu.layouts", "--dry")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("|") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 1 + len(layouts.LAYOUTS)
    assert all(float(row[-2]) < 0.02 for row in rows)


@pytest.mark.slow
@needs_program
def test_a_dry_run_hands_back_everything(tmp_path):
    """In one test, as it takes most of two minutes."""
    out = tmp_path / "out"
    words = ("--dry", "--work", tmp_path / "work", "--out", out, "--commit", "abc")
    done = python(lacking(tmp_path / "site", *LACKED), "-m", "benchmarks.gpu", *words)
    said = {path.name: path.read_text() for path in out.iterdir()}
    assert done.returncode == 0, done.stderr + "\n".join(said.values())
    assert not [name for name, text in said.items() if "Traceback" in text]
    assert said["gpu.md"].startswith("# tswift on a GPU (dry run")

    # every part is done and leaves nothing out
    rows = figures(out)
    assert {row["state"] for row in rows if row["table"] == "ended"} == {"done"}
    assert [row["commit"] for row in rows if row["table"] == "command"] == ["abc"]
    assert [name for name in TABLES if name != EQUALITY] == list(SECTIONS)
    for section, tables in TABLES.items():
        assert {row["table"] for row in rows if row["section"] == section} == tables
    assert not [row for row in rows if row.get("error")]

    # every method has written plain decoding's text of each model
    methods = [row for row in rows if row["table"] == "methods"]
    assert all(row["same_as_ar"] for row in methods)
    own = {"ar", "tokenswift", "medusa", "block", "auto", "cascade", "recall", "magicdec"}
    assert own <= {row["method"] for row in methods if row["drafter"] == "dspark"}
    assert [row["method"] for row in methods if row["drafter"] == "eagle3"] == ["ar", "eagle"]
    assert len([row for row in methods if row["model"] == "demo"]) >= 6
    outcomes = {row["test"]: row["outcome"] for row in rows if row["table"] == "tests"}
    assert set(outcomes.values()) == {"passed", "skipped"}
    assert next(iter(outcomes)) == "test_nothing_of_the_core_is_done_without"

    # steps are a real text's: n-grams are found, and as much is accepted as was asked for
    steps = [row for row in rows if row["table"] == "steps"]
    assert [(row["method"], row["nodes"], row["context"]) for row in steps[:4]] == [
        (method, None, context) for method in ("ar", "tokenswift") for context in (1100, 1200)
    ]
    assert [(row["tree"], row["tokens"]) for row in steps[:2]] == [(1, 1), (1, 1)]
    for row in steps[2:4]:
        assert 5 <= row["tree"] <= 8  # heads alone make 5 of the 8 nodes
        assert row["tokens"] == pytest.approx(4.6, abs=0.4)
    # what a walk accepts is drawn anew in each run, so the three steps of one context may find none
    assert max(row["tree"] for row in steps[2:4]) > 5


# What follows runs no model.


def test_all_fits_into_a_quarter_of_an_hour(tmp_path, monkeypatch):
    """A machine takes 100 s to begin, and a command 600 at most: sections fit into their half."""
    assert sum(SECTIONS.values()) + 30 <= SECONDS[MEASURED]  # Python's imports, rates
    assert sum(SECONDS.values()) <= 540
    # what each process is for, in order of value: the first ones begin at once
    words = command.processes(command.Session(tmp_path, tmp_path, False, 0.0), None)
    first = [*words][: command._TOGETHER]
    assert [name.removeprefix("8B with ") for name in first[:4]] == [
        "weights int4",
        "kv_dtype int8",
        "weights int8",
        "weights int4 kv_dtype int8",
    ]
    assert "tests" in first
    loaded: list[dict[str, str]] = []
    monkeypatch.setattr(texts, "compare", lambda *given: True)
    monkeypatch.setattr(texts.Run, "load", lambda self, name, **how: loaded.append(how))
    for name, line in words.items():
        if name.startswith("8B"):
            monkeypatch.setattr(sys, "argv", [name, *line[2:]])
            assert texts.main() == 0
    drafters = [{"drafter": "dspark"}, {"drafter": "eagle3"}]
    assert sorted(map(str, loaded)) == sorted(map(str, [*HELD, *drafters]))


@pytest.mark.parametrize("late", [False, True])
def test_what_is_held_in_fewer_bits_is_measured_in_order(late, monkeypatch):
    """By a device alone, so here nothing is computed; what follows measures the model as it is."""
    seen: list[tuple[str, dict[str, str]]] = []
    for name in ("_prompt", "passes", "_steps"):
        monkeypatch.setattr(measure, name, lambda *given, n=name, **how: seen.append((n, how)))
    held: list[object] = ["the model"]
    run: Any = SimpleNamespace(device=torch.device("cuda"), scale=DRY, model=SimpleNamespace())
    run.model.target = None
    run.late = lambda: late
    run.drop_model = held.clear
    run.take = lambda **how: held.append(how)
    measure.codes(run)
    assert not held
    steps = [how for name, how in seen if name == "_steps"]
    assert steps == ([] if late else [*HELD])
    assert [how for name, how in seen if name == "passes"] == steps[:4]


def test_the_second_process_of_a_half_has_what_the_first_has_left(tmp_path):
    ours = session(tmp_path, 60)
    ours.ends[EQUALITY] = time.time() + 0.5
    ours.run(EQUALITY, "late", ["-c", "import time; time.sleep(60)"])
    (row,) = figures(tmp_path)
    assert (row["state"], row["seconds"] < 30) == ("cut short", True)


def session(folder: Path, seconds: float) -> command.Session:
    (folder / FIGURES).write_text("")
    return command.Session(folder, folder, True, time.time() + seconds)


@pytest.mark.parametrize(
    ("code", "seconds", "state"),
    [
        ("print('I am')", 60.0, "done"),
        ("print('I am'); raise SystemExit(3)", 60.0, "failed: it ended with 3"),
        ("import time; print('I am', flush=True); time.sleep(60)", 2.0, "cut short"),
        ("", 0.0, "cut short"),
    ],
)
def test_how_a_process_ends_is_noted(tmp_path, code, seconds, state):
    session(tmp_path, seconds).run(MEASURED, "it", ["-c", code])
    (row,) = figures(tmp_path)
    assert (row["section"], row["process"], row["state"]) == (MEASURED, "it", state)
    assert (tmp_path / "it.txt").read_text() == ("I am\n" if code else "")


def test_one_process_takes_no_other_along(tmp_path, monkeypatch):
    """And two that find other bits fail."""
    noted = (
        f"from benchmarks.gpu import note; from pathlib import Path; at = Path({str(tmp_path)!r})"
    )
    found = {
        "broken": ["-c", "import os; os._exit(9)"],
        **{
            f"bits {bits}": ["-c", f"{noted}; note(at, 'equality', 'bits', bits={bits})"]
            for bits in (1, 2)
        },
    }
    monkeypatch.setattr(command, "processes", lambda *given: found)
    command.compare_texts(session(tmp_path, 60), None)
    ends = {row["process"]: row["state"] for row in figures(tmp_path) if row["table"] == "ended"}
    assert ends == {
        "broken": "failed: it ended with 9",
        "bits 1": "done",
        "bits 2": "done",
        "bits": "failed: they are {1, 2}",
    }


@pytest.mark.parametrize(("odd", "same"), [("medusa", False), ("cascade", False), (None, True)])
def test_another_text_than_plain_decodings_fails(tmp_path, monkeypatch, odd, same):
    """Or none."""

    def written(model, request):
        if request.method == odd == "cascade":
            raise RuntimeError("no kernel image")
        return {"text": "1" if request.method == odd else "0"}

    monkeypatch.setattr(texts, "_written", written)
    monkeypatch.setattr(texts, "possible", lambda *given, draft: ("medusa", "ar", "cascade"))
    target = SimpleNamespace(vocab_size=999)
    model: Any = SimpleNamespace(name="m", target=target, heads=None, draft=None, simulated=True)
    model.quantization = None
    run = Run(tmp_path, DRY, torch.device("cpu"), EQUALITY)
    assert texts.compare(run, model, None) is same
    rows = figures(tmp_path)
    assert [row["method"] for row in rows] == ["ar", "medusa", "cascade"]
    assert [row["method"] for row in rows if not row.get("same_as_ar")] == [odd] * (odd is not None)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "met"), (1.3, "MISSED")])
def test_targets_are_met_or_missed(slower, verdict):
    step = {"table": "steps", "method": "ar", "exact": True}
    verify = {"table": "passes", "kind": "verify", "context": 4096}
    text = {"table": "integrated", "method": "tokenswift"}
    rows: list[dict[str, Any]] = [
        step | {"context": 4096, "ms": 6.1 * slower},
        step | {"context": 4096, "ms": 99.0, "exact": False},
        step | {"context": 100_000, "ms": 10.2 * slower},
        verify | {"nodes": 1, "ms": 6.0},
        verify | {"nodes": 32, "ms": 6.3 * slower},
        verify | {"nodes": 64, "ms": 99.0},
        text | {"nodes": None, "seconds": 290 * slower},
        text | {"nodes": 16, "seconds": 999.0},
        {"table": "prompt", "written": False, "seconds": 0.23 * slower},
        {"table": "prompt", "written": True, "seconds": 9.0},
    ]
    # what is held in fewer bits is judged by itself
    rows += [row | {"kv_dtype": "int8", "ms": 99.0} for row in rows if "ms" in row]
    four = step | {"context": 4096, "weights": "int4", "ms": 3.1 * slower}
    rows += [four, four | {"kv_dtype": "int8", "ms": 99.0}]
    rows += [
        four | {"weights": "int8", "ms": 4.3 * slower},
        verify | {"nodes": 32, "weights": "int4", "ms": 99.0},
    ]
    found = command.targets(rows)
    assert [row["verdict"] for row in found] == [verdict] * 7
    assert {row["measured, worst"] for row in command.targets([])} == {"not measured"}


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_published_tables_are_those_of_the_raw_figures(device):
    path = ROOT / "results" / device / "tables.py"
    spec = spec_from_file_location(f"tables_of_{device}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    published = path.with_name("README.md").read_text()
    assert all(table() in published for table in module.TABLES)
    if device == "h200":
        assert module.tokens() in (ROOT / "README.md").read_text()


def test_a_text_is_integrated_over_its_contexts():
    linear = {context: 1e-3 + 1e-8 * context for context in (4000, 50_000, 100_000)}
    assert integrated(linear, 4000, 100_000) == pytest.approx(100_000 * (1e-3 + 1e-8 * 54_000))
    assert integrated({4000: 2e-3, 100_000: 2e-3}, 4000, 100_000) == pytest.approx(200)


def test_gaps_between_kernels_count_only_if_a_host_could_have_made_them():
    assert covered([(10, 20), (21, 30), (0, 5), (12, 15)], bridge=1) == 25
    assert covered([(0, 10), (4, 6), (30, 40)], bridge=5) == 20
    assert covered([], bridge=5) == 0
