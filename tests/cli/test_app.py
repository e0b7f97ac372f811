"""The command as a whole: help, version, usage errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tswift as package
from tests.cli.terminal import on_terminal
from tswift.cli.output import Display, Pace
from tswift.decoding.stats import DecodeStats
from tswift.errors import DecodeError
from tswift.jobs.config import RunConfig


@pytest.mark.slow
def test_help_does_not_import_torch():
    commands = ("generate", "verify", "bench", "roofline", "train")
    code = "import sys; from tswift.cli import main; main(['--help']); "
    code += "".join(f"main(['{name}', '--help']); " for name in commands)
    code += "main(['generate', '--help-all']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    assert "--no-shared-noise" in done.stdout
    assert "first 1,024 tokens" in " ".join(done.stdout.split())


# every option and argument that takes the name of a file or a folder, by command; what is said of
# it names it
NAMED = {
    "generate": (
        "--out",
        "--resume",
        "--prompt",
        "--heads",
        "--prompt-text hi --model",
        "--chat --prompt-text hi --system",
    ),
    "serve": ("--runs",),
    "compare": ("--json", "--prompt", "--heads", "--prompt-text hi --model"),
    "runs": ("", "--json"),
    "verify": ("", "--tokens", "--json"),
    "bench": (
        "--out",
        "--resume",
        "--fail-on auto=9% --against",
        "--prompts",
        "--workload",
    ),
    "roofline": ("--json", "--model"),
    "env": ("--json",),
    "export-generate": ("",),
    "train": ("--out", "--resume", "--corpus"),
    "heads inspect": ("", "x --json"),
}
NO_NAMES = {
    "~nobody-at-all/x": "lies in a home folder that does not exist",
    "x" * 300: "is too long (30",
}


@pytest.mark.parametrize("command", NAMED)
@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_no_file_can_have(tswift, command, name):
    for option in NAMED[command]:
        typed = f"{name}.jsonl" if option == "--workload" else name
        refused = tswift(*command.split(), *option.split(), typed)
        assert refused.code == 2, option
        named = option.split()[-1:]
        assert (named[0] if named and named[0].startswith("--") else name[:20]) in refused.err
        assert NO_NAMES[name] in refused.err
        assert refused.err.count("\n") == 1
        assert len(refused.err) < 160
    assert list(Path.cwd().iterdir()) == []


def test_every_name_of_a_file_is_expanded(monkeypatch, tmp_path, tswift):
    """A shell leaves the ``~`` of ``--out=~/run`` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tswift("export-generate", "~/model").ok()
    assert (tmp_path / "model" / "custom_generate" / "generate.py").is_file()
    tswift("roofline", "--json=~/found.json").ok()
    assert (tmp_path / "found.json").is_file()
    (tmp_path / "runs").mkdir()
    tswift("runs", "~/runs").ok()
    assert list(Path.cwd().iterdir()) == []


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
    train --corpus x --kind odd
    train --corpus x --lr 0
    train --resume nowhere
"""


def test_cheap_mistakes_are_refused_before_torch_is_imported(tmp_path):
    lines = [line.split() for line in CHEAP.strip().splitlines()]
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); from tswift.cli import main; "
    code += f"print([main(words) for words in {lines}], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{[2] * len(lines)} False\n", done.stderr
    assert done.stderr.count("\n") == len(lines)
    assert not any(tmp_path.iterdir())


def test_version_and_help(tswift):
    result = tswift("--version")
    assert (result.code, result.text) == (0, f"tswift {package.__version__}\n")
    for words, said in (((), b"generate"), (("heads",), b"inspect")):
        result = tswift(*words)
        assert (result.code, said in result.out) == (0, True)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (DecodeError("the disk\nis full"), "the disk is full"),
        (ZeroDivisionError("oops"), "unexpected ZeroDivisionError: oops"),
        (OSError(28, "No space left"), "writing: No space left"),
        (MemoryError(), "no memory is left"),
    ],
)
def test_what_breaks_on_the_way_is_one_line(tswift, monkeypatch, error, says):
    def broken(*arguments):
        raise error

    monkeypatch.setattr("tswift.jobs.job.start", broken)
    result = tswift("generate")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith(f"tswift: error: {says}")
    if isinstance(error, ZeroDivisionError):  # a mistake of ours: where it is can be asked for
        monkeypatch.setenv("TSWIFT_TRACEBACK", "1")
        with pytest.raises(ZeroDivisionError):
            tswift("generate")


def test_machine_and_costs(tswift, checkpoint):
    asked = ("env", "--model", checkpoint, "--dtype", "float32")
    found = tswift(*asked).ok()
    told = tswift(*asked, "--json", "-").json
    assert told["kind"] == "env"
    text = found.text
    assert told["environment"]["torch"] in text
    first = told["costs"]["base"][0] + 100 * told["costs"]["per_key"][0]
    assert f"{1e3 * first:.2f}" in text  # remembered, not measured anew
    assert re.search(r"comes true more often than \d+% to \d+%, by keys", text)


# --- the text and the bar on one terminal: a pseudo-terminal's whole output

CODE = """
import time
from types import SimpleNamespace
from tswift.cli.output import Display
from tswift.decoding.stats import DecodeStats
from tswift.jobs.config import RunConfig
stats = DecodeStats(4, tokens=10, passes=2, seconds=0.5)
job = SimpleNamespace(prompt=[1], config=RunConfig.of(length=100))
with Display(job, quiet=False, progress=True) as display:
    for word in "one two three\\nfour [bold]five[/bold] six seven eight nine ten".split(" "):
        display.show(word + " ", stats)
        time.sleep(0.1)
"""


@pytest.mark.slow
def test_text_goes_above_the_bar_in_whole_lines():
    text = on_terminal(CODE, columns=20).decode()
    # each line is printed once, unbroken, at the start of a line
    for line in ("one two three\r\n", "[bold]five[/bold]", "six seven eight\r\n", "nine ten"):
        assert text.count(line) == 1, text
    assert "\x1b[1m" not in text


def test_raw_when_stdout_is_no_terminal(capfdbinary):
    stats = DecodeStats(4, tokens=1)
    job: Any = SimpleNamespace(prompt=[1], config=RunConfig.of(length=10))
    with Display(job, quiet=True, progress=True) as display:
        display.show("é\n", stats)
        display.show("[b]", stats)
    assert capfdbinary.readouterr().out == "é\n[b]".encode()


@given(
    prompt=st.integers(1, 20_000),
    length=st.integers(200, 100_000),
    share=st.floats(0.1, 0.99),
    base=st.floats(0.5, 9.0),
    key=st.floats(0.0, 1.0),
)
def test_what_is_left_counts_on_slower_passes(prompt, length, share, base, key):
    """The first token takes ``base`` seconds and the share ``key`` more, which grows with the text
    before a token.
    """

    def seconds(tokens):
        return base * (tokens + key * (prompt * tokens + tokens**2 / 2) / prompt)

    pace = Pace(prompt)
    now = int(share * length)
    for tokens in range(1, now + 1, max(1, now // 200)):
        pace.learn(DecodeStats(4, tokens=tokens, seconds=seconds(tokens)))
    expected = seconds(length) - seconds(tokens)
    assert pace.left(length - tokens) == pytest.approx(expected, rel=1e-6)


def test_rare_options_are_in_the_whole_help_alone(tswift):
    usual, whole = (tswift("generate", option).text for option in ("--help", "--help-all"))
    assert "--temperature" in usual
    assert "--gamma" not in usual
    assert "--gamma" in whole
    assert tswift("generate", "--help").text == usual


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_training_is_done_by_several_processes(tswift, monkeypatch, rank):
    for name, value in (("TORCHELASTIC_RUN_ID", "test"), ("WORLD_SIZE", "2"), ("RANK", rank)):
        monkeypatch.setenv(name, value)
    for command in ("generate", "bench", "compare", "verify", "roofline"):
        message = (
            f"tswift {command} works in one process, and no model is split over ranks any more"
        )
        result = tswift(command)
        assert (result.code, result.out) == (2, b"")
        said = f"tswift: error: {message}; start it without torchrun\n"
        assert result.err == (said if rank == "0" else "")
    for name in ("WORLD_SIZE", "RANK"):  # alone, it is no copy of another one
        monkeypatch.setenv(name, str(int(name == "WORLD_SIZE")))
    tswift("runs .").ok()
