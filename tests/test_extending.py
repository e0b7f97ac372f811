"""A made-up filter and a made-up method, added where docs/development.md says, are found everywhere."""

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
    "src/tswift/decoding/params.py": [
        (
            "    eta: float = option(",
            '    floor: float = option(0.0, "Drop logits below it.", panel=_PANEL, off=0.0, least=0, most=99)\n'
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


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with a filter and a method more."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "prompts", folder / "prompts")
    assert len(FILTER) == 1
    assert len(METHOD) == 2
    for name, changes in {**FILTER, **METHOD}.items():
        text = (folder / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def _tswift(tree: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "tswift", *map(str, words)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_filter_is_found_everywhere(tree: Path) -> None:
    for command in ("generate", "compare", "bench", "verify"):
        assert "--floor" in _tswift(tree, command, "--help").stdout
    refused = _tswift(tree, "generate", "--floor", 100)
    assert refused.stderr == "tswift: error: --floor: must be between 0 and 99, got 100.0\n"
    words = ["generate", "--len", 40, "--method", "medusa", "--min-p", 0, "--seed", 5]
    for name, floor in (("free", 0), ("run", 1.5)):
        made = _tswift(tree, *words, "--floor", floor, "--out", name)
        assert made.returncode == 0, made.stderr
    texts = [(tree / name / "tokens.u32").read_bytes() for name in ("free", "run")]
    assert texts[0] != texts[1]
    record = json.loads((tree / "run" / "run.json").read_text())
    assert record["sampling"]["floor"] == 1.5
    assert _tswift(tree, "verify", "run").returncode == 0
    text = ["verify", "--tokens", "run/tokens.u32", "--min-p", 0, "--seed", 5]
    assert _tswift(tree, *text, "--floor", 1.5).returncode == 0
    assert _tswift(tree, *text, "--floor", 0.5).returncode == 1
    other = _tswift(tree, "generate", "--resume", "run", "--floor", 2)
    assert (
        other.stderr == "tswift: error: --floor: the run was made with 1.5, got 2.0; a resumed run keeps its options\n"
    )


@pytest.mark.slow
def test_a_method_is_found_everywhere(tree: Path) -> None:
    assert "there are ar, twice, medusa" in _tswift(tree, "generate", "--method", "none").stderr
    unused = _tswift(tree, "generate", "--method", "twice", "--gamma", 3)
    assert unused.stderr == "tswift: error: --gamma: twice does not use it\n"
    compared = _tswift(tree, "compare", "--len", 40, "--methods", "twice", "--ngrams", 5, "--json", "compare.json")
    assert compared.returncode == 0, compared.stderr
    record = json.loads((tree / "compare.json").read_text())
    assert [outcome["method"] for outcome in record["outcomes"]] == ["ar", "twice"]
    assert record["drafting"]["twice"]["ngrams"] == 5
    bench = ["bench", "--methods", "twice", "--prefill", 64, "--lens", "20,40", "--warmup", 0, "--no-plots"]
    assert _tswift(tree, *bench, "--out", "bench").returncode == 0
    assert "twice" in (tree / "bench" / "bench.md").read_text()
