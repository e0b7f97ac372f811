"""A made-up filter, method and metric, added where docs/development.md says,
are found everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FILTER = {
    "src/tswift/sampling/parameters.py": [
        (
            "    eta: float = option(",
            '    floor: float = option(0.0, "Drop logits below it.", panel=_PANEL, '
            "off=0.0, least=0, most=99)\n"
            "    eta: float = option(",
        ),
        (
            '    "min_p": _keep_min_p,\n',
            '    "min_p": _keep_min_p,\n'
            '    "floor": lambda logits, floor: logits.masked_fill(\n'
            "        logits < logits.amax(-1, keepdim=True) - floor, -math.inf\n"
            "    ),\n",
        ),
    ]
}
METHOD = {
    "src/tswift/drafting/options.py": [
        ('    "ar": Method(),\n', '    "ar": Method(),\n    "twice": Method(_OF_REUSE),\n')
    ],
    "src/tswift/drafting/methods.py": [('    "ar": ar,\n', '    "ar": ar,\n    "twice": reuse,\n')],
}
METRIC = {
    "src/tswift/decoding/stats.py": [
        (
            "    @property\n    def alpha(",
            "    @property\n    def nodes_per_step(self) -> float:\n"
            "        return self.nodes / max(self.passes, 1)\n\n"
            "    @property\n    def alpha(",
        )
    ],
    "src/tswift/benchmarking/summary.py": [
        (
            "METRICS: dict[str, Metric] = {\n",
            "METRICS: dict[str, Metric] = {\n"
            '    "nodes_per_step": Metric("nodes/step", "nodes / passes", exact=True, '
            'gate="nodes", column=True),\n',
        )
    ],
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources with a filter, a method and a metric more."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "prompts", folder / "prompts")
    for name, changes in {**FILTER, **METHOD, **METRIC}.items():
        text = (folder / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


# runs many commands in one process, which imports torch but once
_RUN = """
import contextlib, io, json, sys
from tswift.cli import main
for words in json.loads(sys.argv[1]):
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words.split())
        out.flush()
    print(json.dumps([code, out.buffer.getvalue().decode(), err.getvalue()]))
"""


def tswift(tree: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Exit code, standard output and error of each command."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "200"}
    line = [sys.executable, "-c", _RUN, json.dumps(commands)]
    done = subprocess.run(
        line, cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    return [tuple(json.loads(said)) for said in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_filter_is_found_everywhere(tree):
    made = "generate --len 40 --method medusa --min-p 0 --seed 5"
    checked = "verify --tokens run/tokens.u32 --min-p 0 --seed 5"
    *helps, refused, free, run, own, same, less, other = tswift(
        tree,
        *(f"{command} --help" for command in ("generate", "compare", "bench", "verify")),
        "generate --floor 100",
        f"{made} --floor 0 --out free",
        f"{made} --floor 1.5 --out run",
        "verify run",
        f"{checked} --floor 1.5",
        f"{checked} --floor 0.5",
        "generate --resume run --floor 2",
    )
    assert refused[2] == "tswift: error: --floor: must be between 0 and 99, got 100.0\n"
    assert all("--floor" in out for _, out, _ in helps)
    assert [code for code, _, _ in (free, run, own, same, less)] == [0, 0, 0, 0, 1]
    assert (tree / "free" / "tokens.u32").read_bytes() != (tree / "run" / "tokens.u32").read_bytes()
    assert json.loads((tree / "run" / "run.json").read_text())["sampling"]["floor"] == 1.5
    kept = "the run was made with 1.5, got 2.0; it keeps its options"
    assert other[2] == f"tswift: error: --floor: {kept}\n"


@pytest.mark.slow
def test_a_method_is_found_everywhere(tree):
    unknown, unused, compared, measured = tswift(
        tree,
        "generate --method none",
        "generate --method twice --gamma 3",
        "compare --len 40 --methods twice --ngrams 5 --json compare.json",
        "bench --methods twice --prefill 64 --lens 20,40 --warmup 0 --no-plots --out bench",
    )
    assert "there are ar, twice, medusa" in unknown[2]
    assert unused[2] == "tswift: error: --gamma: twice does not use it\n"
    assert (compared[0], measured[0]) == (0, 0)
    record = json.loads((tree / "compare.json").read_text())
    assert [outcome["method"] for outcome in record["outcomes"]] == ["ar", "twice"]
    assert record["drafting"]["twice"]["ngrams"] == 5
    assert "twice" in (tree / "bench" / "bench.md").read_text()


@pytest.mark.slow
def test_a_metric_is_found_everywhere(tree):
    bench = "bench --methods medusa --prefill 64 --lens 20,40 --warmup 0 --no-plots --out"
    unknown, first, judged = tswift(
        tree,
        f"{bench} none --against first/bench.json --fail-on node",
        f"{bench} first",
        f"{bench} second --against first/bench.json --fail-on nodes",
    )
    assert "nodes" in unknown[2]
    assert (first[0], judged[0]) == (0, 0), judged[2]
    assert "nodes/step" in judged[1]
    samples = json.loads((tree / "second" / "bench.json").read_text())["samples"]
    points = [
        point for sample in samples if sample["method"] == "medusa" for point in sample["points"]
    ]
    assert min(point["nodes_per_step"] for point in points) > 1
    assert "nodes_per_step" in (tree / "second" / "bench.csv").read_text().partition("\n")[0]
    assert "nodes/step" in (tree / "second" / "bench.md").read_text()
