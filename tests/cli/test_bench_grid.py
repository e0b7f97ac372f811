"""``tswift bench`` stopped, killed and resumed."""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path

import pytest

from tests.conftest import SENTENCES
from tests.helpers import read_json
from tests.words import words_of
from tswift.benchmarking import run as run_module
from tswift.cli import main

GRID = "--warmup 0 --seeds 1,2 --no-plots"
WORDS = f"bench --prefill 4 --lens 10,25 --methods reuse {GRID}"
SUITE = "bench --suite case-study --prefill 4 --lens 6,12 --warmup 0 --seeds 1,2"
COUNTERS = ("tokens", "passes", "nodes", "accepted", "reused", "depth")


class Killed(BaseException):
    """The process has ended here."""


def write_texts(folder: Path) -> list[str]:
    """Two prompts in files, as options."""
    for name in "ab":
        (folder / f"{name}.txt").write_text(" ".join(SENTENCES[ord(name) - 97 :][:4]))
    return [f"--prompts {folder}/{name}.txt" for name in "ab"]


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory, load_once):
    """What an undisturbed benchmark of some words counts."""
    folder = tmp_path_factory.mktemp("whole")
    texts = write_texts(folder)

    @functools.cache
    def of(words):
        out = folder / str(len(words))
        words = words_of([words, f"--quiet --model {checkpoint} --out {out}", *texts])
        assert main(words) == 0
        return counted(out)

    return of


@pytest.fixture
def bench(tswift, checkpoint, texts, load_once):
    return lambda *words: tswift(*words, f"--model {checkpoint}", *texts)


def read(folder: str | Path) -> dict:
    (path,) = [*Path(folder).glob("bench*.json"), *Path(folder).glob("suite.json")]
    return read_json(path)


def parts(record: dict) -> list[dict]:
    return (
        [group["measurement"] for group in record["groups"]]
        if record["kind"] == "suite"
        else [record]
    )


def counted(folder: str | Path) -> list:
    """Everything in a record that is no time, in order."""
    record = read(folder)
    assert record["state"] == "finished"
    for part in parts(record):
        assert part["state"] == "finished"
    samples = [
        (part["workload"]["hash"], sample) for part in parts(record) for sample in part["samples"]
    ]
    places = [
        [h, *(sample[name] for name in ("repeat", "prompt", "prefill", "seed", "method"))]
        for h, sample in samples
    ]
    figures = [
        [[point[name] for name in COUNTERS] for point in sample["points"]] for _, sample in samples
    ]
    texts = [
        (text["label"], text["prompt"], text["seed"], text["tokens"])
        for text in record.get("texts", ())
    ]
    return [places, figures, texts]


def stop(monkeypatch, after: int, error: type[BaseException]):
    """Let cells after some be stopped on their way."""
    advance = run_module.BenchRun.advance
    cells = []
    open_runs = run_module.open_runs

    def opened(*arguments, **named):
        cells.append(1)
        return open_runs(*arguments, **named)

    def stopped(self, goal):
        if len(cells) > after + 1 and self.stats.tokens > 10:
            # the first one was opened to see that all fits
            raise error
        advance(self, goal)

    monkeypatch.setattr(run_module, "open_runs", opened)
    monkeypatch.setattr(run_module.BenchRun, "advance", stopped)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "error"), [(WORDS, Killed), (SUITE, KeyboardInterrupt)])
def test_a_stopped_or_killed_one_goes_on_with_what_is_missing(bench, tswift, whole, words, error):
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, 1 + (words is SUITE), error)
        if error is Killed:
            with pytest.raises(Killed):
                bench(words, "--out b")
        else:
            stopped = bench(words, "--out b")
            assert stopped.code == 130
            assert (
                "interrupted; what was measured is in b; tswift bench --resume b goes on"
                in stopped.err
            )
    kept = read("b")
    assert kept["state"] == ("running" if error is Killed else "interrupted")
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        open_runs = run_module.open_runs
        patch.setattr(
            run_module,
            "open_runs",
            lambda *at, **named: opened.append(1) or open_runs(*at, **named),
        )
        patch.setattr(platform, "node", lambda: "another")
        result = tswift("bench --resume b")  # nothing has to be said again
    assert result.code == 0, result.err
    assert "What ran where" in result.text
    assert counted("b") == whole(words)
    again = read("b")
    sessions = [[len(s["cells"]) for s in part["sessions"]] for part in parts(read("b"))]
    assert sessions == [[1, 3], [0, 4]][: len(parts(again))]
    assert len(opened) == len(parts(again)) + sum(each[1] for each in sessions)
    done = kept if words is WORDS else kept["groups"][0]["measurement"]
    for sample in done["samples"][:2]:
        # what was measured is not measured again, to the last bit of its times
        assert sample in parts(again)[0]["samples"]
    written = Path("b", f"{again['kind']}.json").read_bytes()
    tswift("bench --resume b").ok()
    assert Path("b", f"{again['kind']}.json").read_bytes() == written
    assert not list(Path("b").glob("*lock*"))


@pytest.mark.slow
def test_a_resumed_gate_judges_as_it_was_to(
    bench, tswift, checkpoint, texts, monkeypatch, tmp_path
):
    bench(WORDS, "--out before").ok()
    baseline = read("before")
    for point in (point for sample in baseline["samples"] for point in sample["points"]):
        point["passes"] -= 1
    Path("before/bench.json").write_text(json.dumps(baseline))
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, 1, Killed)
        with pytest.raises(Killed):
            bench(WORDS, "--out b --against before/bench.json --fail-on passes --paper")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = tmp_path / "cwd" / "b"
    for _ in range(2):  # when it ends, and shown again
        judged = tswift(f"bench --resume {folder} --no-plots")
        assert judged.code == 1, judged.err
        assert "16 of 16 comparisons regressed" in judged.text
        assert "The paper has no row of these" in judged.text
    # judged anew
    other = tswift(f"bench --resume {folder} --fail-on passes:50% --no-plots").ok()
    assert "0 of 16 comparisons regressed" in other.text
    record = read(folder)
    record["options"]["against"] = 3
    (folder / "bench.json").write_text(json.dumps(record))
    damaged = tswift(f"bench --resume {folder}")
    assert (damaged.code, "bench.json is damaged ($.options" in damaged.err) == (2, True)


def test_a_resumed_one_keeps_its_options(bench, tswift, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, 1, KeyboardInterrupt)
        assert bench(WORDS, "--out b --ngrams 5 --logit-bias 5=1,6=2").code == 130
    before = Path("b/bench.json").read_bytes()
    for words, message in {
        "--seeds 1,3": "the benchmark was made with (1, 2), got (1, 3); it keeps its options",
        "--ngrams 6": "the benchmark was made with 5, got 6",
        "--temperature 0.5": "the benchmark was made with 1.0, got 0.5",
        "--logit-bias 5=2": "the benchmark was made with {'5': 1.0, '6': 2.0}, got {5: 2.0}",
        "--repeats 2": "the benchmark was made with 1, got 2",
        "--tree 2,2": "the benchmark was made with none, got ['2,2']",
        "--prompts other.txt": "the benchmark was made with (",
        "--suite table3": "the benchmark was made with none, got table3",
        "--out c": "cannot be given together with --resume",
    }.items():
        tswift("bench --resume b", words).refused(f"{words.split()[0]}: {message}")
    (tmp_path / "a.txt").write_text("Quite another text, which has as many words as it needs.")
    other = tswift("bench --resume b --logit-bias 6=2,5=1")
    assert (other.code, Path("b/bench.json").read_bytes()) == (2, before)
    assert "--resume: b is of another benchmark: prompts differs" in other.err


@pytest.mark.slow
@pytest.mark.parametrize("words", [WORDS, SUITE], ids=["bench", "suite"])
def test_a_finished_one_takes_more_seeds(bench, tswift, whole, words):
    bench(words.replace("1,2", "2"), "--out b").ok()
    before = parts(read("b"))
    tswift("bench --resume b --seeds 1,2").ok()
    assert counted("b") == whole(words)
    for old, new in zip(before, parts(read("b")), strict=True):
        assert [s for s in new["samples"] if s["seed"] == 2] == old["samples"]
    tswift("bench --resume b").ok()  # they are its own from now on
    assert counted("b") == whole(words)
