"""Tables on a terminal and in a pipe; and where JSON goes: by whatever name or link,
and never over something else.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import on_terminal
from tests.conftest import make_checkpoint
from tests.helpers import needs_program, read_json
from tests.jobs.killing import Process
from tests.rows import every_row
from tests.words import words_of
from tswift import native_build
from tswift.cli import main
from tswift.cli.output import CLOSED_PIPE, loading_notice, one_line, show, visible, writable
from tswift.forward.cpu.program import PassProgram
from tswift.jobs import job
from tswift.stages import tell
from tswift.tables import Table


def test_a_link_stays_and_what_it_points_at_is_written(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    found = writable(tmp_path / "link.json")
    writable(tmp_path / "new.json")
    # to ask leaves nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]
    assert (tmp_path / "real.json").read_text() == "old"
    found.write("made-up", ["tswift"], {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert read_json(tmp_path / "real.json")["a"] == 1


@pytest.mark.slow
def test_names_that_are_no_text(tswift, checkpoint, tmp_path):
    """A file name is bytes, and the command line keeps them:
    half a character is written as JSON writes it.
    """
    prompt = tmp_path / "caf\udce9.txt"
    prompt.write_text("The ship had lain three days becalmed, and nobody spoke.")
    words = f"--model {checkpoint} --prompt {prompt} --len 3 --methods ar --json"
    tswift("compare", words, tmp_path / "found.json").ok()
    told = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert told["prompt"]["source"] == str(prompt)
    result = tswift("compare", words, "-").ok()
    assert result.json["prompt"]["source"] == str(prompt)
    grid = f"--prefill 8 --lens 4 --methods ar --warmup 0 --no-plots --out {tmp_path}/out"
    tswift(f"bench --model {checkpoint} --prompts {prompt}", grid).ok()
    assert "caf\\udce9.txt" in (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    out = tmp_path / "run\udce9"
    tswift(f"generate --model {checkpoint} --prompt {prompt} --len 3 --out {out}").ok()
    tswift(f"generate --resume {out} --len 5 --prompt {prompt}").ok()
    assert (out / "tokens.u32").stat().st_size == 4 * 5


def test_a_stdout_that_has_no_such_characters(tswift, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "größer").symlink_to(checkpoint)
    words = f"roofline --model {tmp_path}/größer --bandwidth 1 --flops 1 --len 9 --prefill 9"
    for more, shown in ((["--json -"], rb"gr\u00f6\u00dfer"), ([], rb"gr\xf6\xdfer")):
        written = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
            tswift(words, *more).ok()
            assert shown in written.getvalue()


CODE = """
from tswift.tables import Table
from tswift.cli.output import Bars, show
with Bars(quiet=False, progress=True) as bars:
    bars.update("verify", 50, 100)
rows = [("exact", "1,234")]
show(Table("A title", ("class", "tokens"), rows, left=1, notes=["[a] note"]), stderr=STDERR)
"""


@pytest.mark.parametrize("stderr", [False, True])
def test_on_a_terminal(stderr):
    seen = on_terminal(CODE.replace("STDERR", str(stderr)), columns=80)
    for said in (b"verify", b"50/100", b"A title", b"1,234", b"[a] note"):
        assert said in seen, seen


@every_row("stderr", [False, True])
def test_in_a_pipe(stderr, capsys):
    grid = Table("A title", ("class", "tokens"), [("exact", "1,234")], left=1)
    show(grid, stderr)
    assert capsys.readouterr() == (("", grid.plain()) if stderr else (grid.plain(), ""))


# --- what goes to a terminal is not obeyed by it; a reader of stdout that goes away is no violation


@every_row(
    ("text", "seen"),
    [
        ("a name, größer: 名前 ± 1", "a name, größer: 名前 ± 1"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("half \udcff", r"half \udcff"),
        ("a\0b", r"a\x00b"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text, seen):
    assert visible(text) == seen
    assert visible(seen) == seen


def test_a_message_is_one_line_of_words_none_of_them_endless():
    assert one_line(" a\n\tb\x1b  c\u2028d ") == r"a b\x1b c d"
    line = one_line(f"there is no file {'x' * 5000}")
    assert line == f"there is no file {'x' * 120}...{'x' * 120}"


def test_names_in_tables_and_lines_are_not_obeyed(tswift, checkpoint, prompt, tmp_path):
    """The escapes of a model's name reach neither the lines on stderr nor the table on stdout."""
    model = tmp_path / "red\x1b[31m"
    model.symlink_to(checkpoint)
    words = f"--model {model} --prompt {prompt} --len 3"
    result = tswift("compare", words, "--methods ar").ok()
    assert r"red\x1b[31m" in result.err
    made = tswift("generate", words, "--method ar --out", tmp_path / "run\x1b[0m").ok()
    resumed = tswift("generate --resume", tmp_path / "run\x1b[0m")
    assert r"run\x1b[0m is finished" in resumed.err
    told = tswift(f"heads inspect {model}/heads.safetensors")
    assert r"red\x1b[31m" in told.text
    listed = tswift(f"runs {tmp_path}")
    assert r"run\x1b[0m" in listed.text
    table = tswift(f"roofline --model {model} --bandwidth 1 --flops 1 --len 9 --prefill 9")
    assert r"red\x1b[31m" in table.text
    shown = [each.text for each in (result, told, listed, table)]
    for said in (result.err, made.err, resumed.err, *shown):
        assert "\x1b" not in said


@pytest.mark.parametrize("closed", [1, 2])
def test_one_stream_that_is_closed_from_the_start(checkpoint, prompt, tmp_path, closed):
    out = tmp_path / "run"
    words = [f"generate --len 9 --model {checkpoint} --prompt {prompt} --out {out}"]
    process = Process(words, tmp_path / "out", [closed])
    assert process.wait(60) == 0, process.errors.read_text()
    assert read_json(out / "run.json")["state"] == "finished"
    assert (out / "tokens.u32").stat().st_size == 4 * 9
    assert process.output.read_bytes() == ((out / "text.txt").read_bytes() if closed == 2 else b"")
    assert bool(process.errors.read_text()) is (closed == 1)


def test_a_closed_pipe_has_its_own_exit_code(checkpoint, prompt, monkeypatch, capfd):
    """And nothing is left in the stream over which Python would stumble at its exit."""
    words = f"compare --len 5 --methods reuse --quiet --model {checkpoint} --prompt {prompt}"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words_of([words])) == CLOSED_PIPE
        stdout.flush()
        monkeypatch.undo()
    assert capfd.readouterr().err == ""


def test_ctrl_c_while_a_model_is_loaded(capsys):
    with pytest.raises(KeyboardInterrupt), loading_notice("demo", quiet=False):
        raise KeyboardInterrupt
    assert (
        capsys.readouterr().err == "tswift: interrupted while demo was loaded; nothing was begun\n"
    )


@pytest.mark.usefixtures("signals_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_model_is_loaded(tswift, number, monkeypatch):
    monkeypatch.setattr(job, "start", lambda *given: os.kill(os.getpid(), number))
    result = tswift("generate --len 5")
    told = f"stopped by {signal.Signals(number).name} while demo was loaded; nothing was begun\n"
    assert (result.code, result.err) == (128 + number, f"tswift: {told}")


@pytest.mark.parametrize(
    ("terminal", "how", "told"),
    [(False, {}, False), (False, {"logged": True}, True), (True, {}, True)],
)
def test_stages_of_loading_are_told(terminal, how, told, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    for quiet in (False, True):
        with loading_notice("demo", quiet, **how):
            tell("compiling x.c")
        wanted = ["tswift: loading demo ...", "tswift: compiling x.c ..."]
        assert capsys.readouterr().err.splitlines() == (wanted if told and not quiet else [])
    tell("nobody listens any more")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("signals_heard")
def test_ctrl_c_while_modules_are_imported(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tswift", "generate"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.fixture
def blocked(monkeypatch) -> Iterator[None]:
    """A C compiler that compiles attention, and not the program."""
    right = native_build._built

    def built(source: Path, *given: str, **named):
        if source.name == "program.c":
            raise native_build.Unbuilt("needs another C compiler: blocked")
        return right(source, *given, **named)

    monkeypatch.setattr(native_build, "_built", built)
    native_build._attempted.cache_clear()
    yield
    native_build._attempted.cache_clear()


@pytest.fixture
def lying(monkeypatch):
    """A program that computes something else."""
    right = PassProgram.__call__

    def wrong(self, *given):
        found = right(self, *given)
        found[0].hidden.mul_(1.5)
        return found

    monkeypatch.setattr(PassProgram, "__call__", wrong)


FAULTS = {
    "blocked": "the C program that computes {model} needs another C compiler: blocked; without it "
    "every token takes several times as long",
    "lying": "decoding is slower than it could be: layers by stock operators (several times as "
    "long), as a C program gave other logits",
}
COMMANDS = {
    "generate": ["--len 4"],
    "compare": ["--len 4 --methods reuse"],
    "bench": ["--lens 4 --prefill 8 --methods reuse --warmup 0 --no-plots"],
    "serve": ["--port 0"],
    "env": [],
}


@needs_program
@pytest.mark.parametrize(
    ("fault", "command"),
    [
        ("blocked", "generate"),
        ("blocked", "env"),
        *(("lying", name) for name in ("compare", "bench", "serve")),
        pytest.param("lying", "generate", marks=pytest.mark.slow),
        *(
            pytest.param("blocked", name, marks=pytest.mark.slow)
            for name in ("compare", "bench", "serve")
        ),
    ],
)
def test_what_stands_in_for_the_program_is_told_in_a_line(
    tswift, tmp_path, prompt, monkeypatch, request, fault, command
):
    """Once, before anything is decoded; and a user who wants quiet has it."""
    request.getfixturevalue(fault)
    monkeypatch.setattr("tswift.serving.routes.serve", lambda *given: None)
    model = make_checkpoint(tmp_path / "m", head_dim=16)
    option = {"bench": "--prompts", "serve": None, "env": None}.get(command, "--prompt")
    words = [command, f"--model {model}", *COMMANDS[command], *([option, prompt] if option else [])]
    results = [tswift(*words), tswift(*words, *["--quiet"] * (command != "env"))]
    assert [result.code for result in results] == [0, 0], results[0].err
    lines = results[0].err.splitlines()
    if command == "serve":  # which tells at once that it loads, and what that is at
        assert lines[0] == f"tswift: loading {model} ..."
    told = f"tswift: {FAULTS[fault].format(model=model)}"
    before = lines[: lines.index(told)]  # that something is compiled, at most
    others = [*lines[len(before) + 1 :], *[results[1].err] * (command != "env")]
    assert not [each for each in before if "token" in each]
    assert not [each for each in others if "slower" in each or "as long" in each]
