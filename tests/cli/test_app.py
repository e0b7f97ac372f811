"""The command as a whole: help, version, usage errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tswift as package
from tests.cli.conftest import Tswift
from tests.cli.terminal import on_terminal
from tswift.cli.output import Display
from tswift.errors import Fault


def test_help_does_not_import_torch() -> None:
    code = "import sys; from tswift.cli import main; main(['--help']); main(['generate', '--help']); "
    code += "main(['verify', '--help']); main(['bench', '--help']); main(['roofline', '--help']); "
    code += "main(['train', '--help']); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    assert "--no-shared-noise" in done.stdout
    assert "first 1,024 tokens" in " ".join(done.stdout.split())


CHEAP = """
    generate --resume nowhere
    generate --heads no.safetensors
    compare --heads no.safetensors
    bench --heads no.safetensors
    bench --prompts nowhere
    bench --workload prosa
    verify nowhere
    verify --tokens nowhere
    train --corpus ./nowhere
    train-draft --corpus ./nowhere
    train --resume nowhere
"""


def test_cheap_mistakes_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    lines = [line.split() for line in CHEAP.strip().splitlines()]
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); from tswift.cli import main; "
    code += f"print([main(words) for words in {lines}], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{[2] * len(lines)} False\n", done.stderr
    assert done.stderr.count("\n") == len(lines)
    assert not any(tmp_path.iterdir())


def test_version_and_help(tswift: Tswift) -> None:
    result = tswift("--version")
    assert (result.code, result.out.decode()) == (0, f"tswift {package.__version__}\n")
    for words, said in (((), b"generate"), (("heads",), b"inspect")):
        result = tswift(*words)
        assert (result.code, said in result.out) == (0, True)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Fault("the disk\nis full"), "the disk is full"),
        (ZeroDivisionError("oops"), "unexpected ZeroDivisionError: oops"),
        (OSError(28, "No space left"), "writing: No space left"),
        (MemoryError(), "no memory is left"),
    ],
)
def test_what_breaks_on_the_way_is_one_line(
    tswift: Tswift, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def broken(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("tswift.jobs.job.start", broken)
    result = tswift("generate")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith(f"tswift: error: {says}")
    if isinstance(error, ZeroDivisionError):  # a mistake of ours: where it is can be asked for
        monkeypatch.setenv("TSWIFT_TRACEBACK", "1")
        with pytest.raises(ZeroDivisionError):
            tswift("generate")


def test_machine_and_costs(tswift: Tswift, checkpoint: Path) -> None:
    asked = ("env", "--model", checkpoint, "--dtype", "float32")
    found = tswift(*asked)
    assert found.code == 0
    told = json.loads(tswift(*asked, "--json", "-").out)
    assert told["kind"] == "env"
    text = found.out.decode()
    assert told["environment"]["torch"] in text
    first = told["costs"]["base"][0] + 100 * told["costs"]["per_key"][0]
    assert f"{1e3 * first:.2f}" in text  # remembered, not measured anew


# --- the text and the bar on one terminal: a pseudo-terminal's whole output

CODE = """
import time
from types import SimpleNamespace
from tswift.cli.output import Display
stats = SimpleNamespace(tokens=10, tokens_per_second=20.0, tokens_per_step=5.0, alpha=1.0)
with Display(100, quiet=False, progress=True) as display:
    for word in "one two three\\nfour [bold]five[/bold] six seven eight nine ten".split(" "):
        display.show(word + " ", stats)
        time.sleep(0.1)
"""


def test_text_goes_above_the_bar_in_whole_lines() -> None:
    text = on_terminal(CODE, columns=20).decode()
    # each line is printed once, unbroken, at the start of a line
    for line in ("one two three\r\n", "[bold]five[/bold]", "six seven eight\r\n", "nine ten"):
        assert text.count(line) == 1, text
    assert "\x1b[1m" not in text


def test_raw_when_stdout_is_no_terminal(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    stats: Any = SimpleNamespace(tokens=1)
    with Display(10, quiet=True, progress=True) as display:
        display.show("é\n", stats)
        display.show("[b]", stats)
    assert capfdbinary.readouterr().out == "é\n[b]".encode()
