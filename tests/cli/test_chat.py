"""``tswift chat``: lines are turns, Ctrl-C ends an answer, and the end of the input the chat."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serving.server import with_template
from tests.words import words_of

pytestmark = pytest.mark.usefixtures("load_once")

WORDS = "--method ar --seed 1 --temperature 1.5"


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory) -> Path:
    return with_template(checkpoint, tmp_path_factory.mktemp("chat") / "tiny")


def test_lines_are_turns(tswift, model, tmp_path, monkeypatch):
    (tmp_path / "system.txt").write_text("Be brief.\n")
    words = f"{WORDS} --model {model} -n 12 -t 1 --system {tmp_path}/system.txt"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\n  \nAnd then?\n/bye\nNot said\n"))
    result = tswift("chat", words).ok()
    assert result.err.count(" tokens/s; ") == 2
    assert "(llama.cpp's), seed 1" in result.err
    # a turn is a text of generate
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    answer = tswift("chat", words, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    said = f"--chat --prompt-text Hello --out {tmp_path}/run --quiet"
    own = tswift("generate", words, said)
    assert answer.out == own.out + b"\n"
    assert result.out.startswith(answer.out)
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_answered(tswift, model, checkpoint, monkeypatch):
    """Is told before a turn, where that shows; a turn that goes wrong has no figures."""
    words = f"chat {WORDS} -n 4 --model"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    tswift(words, checkpoint).refused("has no chat template")
    said = ("Hello", "word " * 5000, "a\udcff", "a\0b", "/clear", "Hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said)))
    result = tswift(words, model).ok()
    assert result.err.count(" tokens/s; ") == 2
    full, *no_text = [line for line in result.err.splitlines() if "error: " in line]
    assert "the model has 4,096; " in full
    assert full.endswith("; /clear begins another conversation")
    assert no_text == [
        f"tswift: error: the text is not text: it {what}"
        for what in ("is not UTF-8", "has NUL bytes")
    ]
    # what was said before is forgotten
    assert result.err.splitlines()[-1].endswith("; 0 tokens of what was said were in the cache")
    assert "; ends <|endoftext|>" in result.err


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_not_the_chat(model, tmp_path):
    words = words_of([f"-m tswift chat {WORDS} --model {model} -n 3000 --no-stop-at-eos"])
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        talk = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            # which a shell in the background would have it ignore
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert talk.stdin is not None
        assert talk.stdout is not None
        talk.stdin.write(b"Hello\n")
        talk.stdin.flush()
        assert os.read(talk.stdout.fileno(), 1)
        talk.send_signal(signal.SIGINT)
        while "tokens/s" not in errors.read_text():
            os.read(talk.stdout.fileno(), 1 << 16)
            time.sleep(0.01)
        while select.select([talk.stdout], [], [], 0)[0]:  # the answer's end, if it is still there
            os.read(talk.stdout.fileno(), 1 << 16)
        talk.send_signal(signal.SIGINT)  # where nothing is answered it does nothing
        time.sleep(0.2)
        talk.stdin.write(b"And then?\n")
        talk.stdin.flush()
        assert os.read(talk.stdout.fileno(), 1)
        talk.send_signal(signal.SIGINT)
        talk.communicate(timeout=60)
        assert talk.returncode == 0
    assert errors.read_text().count(" tokens/s; ") == 2
    assert "3,000 tokens" not in errors.read_text()
