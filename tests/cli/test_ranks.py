"""The command line on several ranks: one voice, one folder, one text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import read_json
from tests.ranks import Ended, on_ranks
from tests.words import words_of
from tswift.cli import main
from tswift.loading import model as loading

TEXT = (
    "The ship had lain three days becalmed, and the captain would not leave the deck. The ship "
    "had lain three days"
)


@pytest.fixture
def words(checkpoint: Path, tmp_path) -> str:
    (tmp_path / "prompt.txt").write_text(TEXT)
    model = f"--model {checkpoint} --dtype float64 --device cpu"
    return f"generate --no-progress {model} --prompt {tmp_path}/prompt.txt"


def _main(words: list[str], folder: Path) -> int:
    os.chdir(folder)
    return main(words)


def ranked(tmp_path, *words, function=_main) -> list[Ended]:
    (tmp_path / "there").mkdir(exist_ok=True)
    return on_ranks(tmp_path, 2, function, words_of(words), tmp_path / "there")


@pytest.mark.slow
def test_one_text_one_folder_one_voice(tswift, words, tmp_path):
    alone = tswift(words, f"--len 40 --out {tmp_path}/alone")
    first, second = ranked(tmp_path, words, "--len 40")
    assert (first.code, first.found, second.code, second.found) == (0, 0, 0, 0), (
        first.err + second.err
    )
    assert first.out == alone.out
    assert (second.out, second.err) == (b"", "")
    assert "cpu, float64, attention sdpa, checkpoint in float32, split over 2 ranks" in first.err
    (run,) = (tmp_path / "there" / "runs").iterdir()
    assert (run / "tokens.u32").read_bytes() == (tmp_path / "alone" / "tokens.u32").read_bytes()
    record = read_json(run / "run.json")
    assert record["model"]["ranks"] == 2
    tswift(f"verify {run}").ok()
    first, second = ranked(tmp_path, "generate", f"--resume {run}")
    assert (first.found, second.found) == (0, 0)
    assert first.err == f"tswift: the run in {run} is finished; a larger --len goes on with it\n"


@pytest.mark.slow
def test_a_stop_string_ends_all_ranks(tswift, words, tmp_path):
    words += " --len 40 --logit-bias 70=2"
    text = tswift(words, f"--out {tmp_path}/alone").out.decode()
    stop = next(text[at : at + 3] for at in range(12, 30) if "\ufffd" not in text[at : at + 3])
    first, second = ranked(tmp_path, words, "--stop", stop, "--logprobs 1")
    assert (first.code, first.found, second.code, second.found) == (0, 0, 0, 0), (
        first.err + second.err
    )
    assert first.out.decode() == text[: text.index(stop)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--len many"], "Invalid value for '--len'"),  # before the ranks meet
        (
            ["--len 5000"],
            "--len: 52 prompt tokens and 5,000 new ones need 5,052 positions, the model has 4,096",
        ),
    ],
)
def test_bad_input_is_said_once(words, tmp_path, more, message):
    first, second = ranked(tmp_path, words, *more)
    assert first.found == 2
    assert second.found != 0
    assert first.err.startswith("tswift: error: ")
    assert message in first.err
    assert first.err.count("\n") == 1
    assert second.err == ""
    assert not (tmp_path / "there" / "runs").exists()


def _broken(words: list[str], folder: Path) -> int:
    if os.environ["RANK"] == "1":

        def load(*asked):
            raise MemoryError("there is none left")

        loading.load_model = load
    return _main(words, folder)


@pytest.mark.slow
def test_what_one_rank_alone_finds_it_says_itself(words, tmp_path):
    first, second = ranked(tmp_path, words, function=_broken)
    assert (first.found, second.found) == (1, 1)
    assert first.err == "tswift: error: another rank is gone; it, or torchrun's report, says why\n"
    assert second.err == "tswift: error: rank 1: MemoryError: there is none left\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_other_commands_are_not_run_in_copies(tswift, monkeypatch, rank):
    for name, value in (("TORCHELASTIC_RUN_ID", "test"), ("WORLD_SIZE", "2"), ("RANK", rank)):
        monkeypatch.setenv(name, value)
    said = {
        command: f"tswift {command} works in one process; start it without torchrun"
        for command in ("bench", "compare", "verify", "roofline")
    }
    said["generate --verify"] = "--verify: works in one process; tswift verify does it afterwards"
    for command, message in said.items():
        result = tswift(*command.split())
        assert (result.code, result.out) == (2, b"")
        assert result.err == (f"tswift: error: {message}\n" if rank == "0" else "")


def test_one_rank_is_no_rank(tswift, words, monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    tswift(words, f"--len 5 --out {tmp_path}/one").ok()
    assert read_json(tmp_path / "one" / "run.json")["model"]["ranks"] == 1


@pytest.mark.slow
def test_torchrun(tswift, words, tmp_path):
    """Started by torchrun itself and interrupted: all of it ends,
    and what was made is one rank's text.
    """
    torchrun = "-m torch.distributed.run --nproc-per-node 2 -m tswift"
    tokens = tmp_path / "run" / "tokens.u32"
    with (tmp_path / "err").open("w") as err, (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words_of([f"{torchrun} {words} --len 3900 --out {tokens.parent}"])],
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        until = time.monotonic() + 90
        while not (tokens.exists() and tokens.stat().st_size >= 80) and time.monotonic() < until:
            assert process.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(40)
    finally:
        process.kill()
    said = (tmp_path / "err").read_text()
    assert read_json(tokens.parent / "run.json")["state"] == "interrupted", said
    made = tokens.stat().st_size // 4
    assert 20 <= made < 3900
    assert f"{made:,} tokens are saved" in said
    assert (tokens.parent / "text.txt").read_bytes().startswith((tmp_path / "out").read_bytes())
    # one process can go on: it is the same model
    for more in (f"generate --resume {tokens.parent}", f"{words} --out {tmp_path}/alone"):
        tswift(more, f"--len {made + 10}").ok()
    for name in ("tokens.u32", "text.txt"):
        assert (tmp_path / "alone" / name).read_bytes() == (tokens.parent / name).read_bytes()
