"""``tswift verify`` and ``tswift generate --verify`` on a tiny model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.cli.conftest import TEXT
from tests.helpers import read_json, round_single_rows
from tests.jobs.killing import write_record
from tests.rows import every_row
from tests.words import words_of
from tswift.cli import main
from tswift.cli.verify import verdict
from tswift.decoding.audit import VIOLATION, WITHIN, Audit, Finding

pytestmark = pytest.mark.usefixtures("load_once")

LENGTH = 64
SAMPLING = "--temperature 1.3 --min-p 0.02 --penalty 1.1 --window 20"


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory) -> Path:
    """A finished run, in float64."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "prompt.txt").write_text(TEXT)
    words = f"generate --model {checkpoint} --prompt {folder}/prompt.txt --len {LENGTH} {SAMPLING}"
    words += f" --seed 5 --quiet --dtype float64 --out {folder}/run"
    assert main(words_of([words])) == 0
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path) -> Path:
    """The same, to be altered."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def alter(path: Path, places: list[int]):
    """Another token, none that ends a text, at these places of a file of tokens."""
    tokens = np.fromfile(path, "<u4")
    tokens[places] = tokens[places] % 300 + 1
    tokens.tofile(path)


def test_a_run(tswift, run, tmp_path):
    result = tswift(f"verify {run} --json {tmp_path}/found.json")
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.text.splitlines()]
    assert lines[2][:3] == ["drawn", "exactly", str(LENGTH)]
    assert lines[3:5] == [["within", "rounding", "0", "-", "-"], ["violations", "0", "-", "-"]]
    found = read_json(tmp_path / "found.json")
    expected = {
        "ok": True,
        "schema": 1,
        "kind": "verify",
        "tokens": LENGTH,
        "exact": LENGTH,
        "seed": 5,
    }
    expected |= {"violations": 0, "within_rounding": 0, "findings": [], "source": str(run)}
    assert {name: found[name] for name in expected} == expected
    assert (found["command"][:2], found["model"]["dtype"]) == (["tswift", "verify"], "float64")
    assert 0 < found["measured"] < found["bound"] < 1e-9
    assert 0 < found["least_lead"] < found["greatest_lead"]
    assert found["seconds"] > 0
    result = tswift(f"verify {run} --json - --quiet --dtype float32")
    found = result.json
    assert (result.err, found["model"]["dtype"]) == ("", "float32")
    assert found["measured"] > 1e-9
    assert found["exact"] >= LENGTH - 1


def test_a_gpus_run_is_judged_here(tswift, run):
    """By the attention that there is; but not gone on with."""
    record = read_json(run / "run.json")
    record["model"] |= {"device": "cuda:0", "attention": "triton", "layers": "fused"}
    write_record(run, record)
    found = tswift(f"verify {run} --device cpu --json -").json
    assert (found["ok"], found["model"]["attention"]) == (True, "sdpa")
    again = tswift(f"generate --resume {run} --len {LENGTH + 1} --device cpu")
    says = "the run was made with cuda:0, got cpu; it keeps its options"
    assert (again.code, again.err) == (2, f"tswift: error: --device: {says}\n")


@pytest.mark.slow
def test_an_exact_run(tswift, prompt, tmp_path, monkeypatch):
    round_single_rows(monkeypatch)
    out = tmp_path / "run"
    words = f"--model demo --prompt {prompt} --dtype bfloat16 {SAMPLING}"
    tswift("generate", words, f"--len 60 --out {out} --quiet").ok()
    found = tswift(f"verify {out} --json -").json
    assert (found["ok"], found["exact"], found["within_rounding"], found["note"]) == (
        True,
        60,
        0,
        None,
    )
    assert found["width"] == found["model"]["exact"]["width"]
    assert (found["measured"], found["bound"], found["near_ties"]) == (0, 0, 0)
    said = tswift(f"verify {out}").text
    assert "within rounding" not in said
    assert "all logits are those of the run, bit for bit: any changed token is seen" in said

    # made on another machine
    record = read_json(out / "run.json")
    record["model"]["exact"]["bits"] = "0" * len(record["model"]["exact"]["bits"])
    write_record(out, record)
    result = tswift(f"verify {out} --json {tmp_path}/found.json").ok()
    assert (
        "the run was exact, but the arithmetic here differs from that of the run: judged"
        in result.text
    )
    found = read_json(tmp_path / "found.json")
    assert found["width"] is found["model"]["exact"] is None
    assert found["note"].startswith("the run was exact")
    assert found["bound"] == 2 * found["measured"] > 0


def test_violations(tswift, run):
    alter(run / "tokens.u32", [7])
    result = tswift(f"verify {run}")
    assert result.code == 1
    assert "violations at generated tokens (from 0) 7" in result.text
    alter(run / "tokens.u32", list(range(20, 60)))
    result = tswift(f"verify {run} --json -")
    assert result.code == 1
    found = result.json
    assert found["ok"] is False
    assert found["findings"][0]["index"] == 7
    assert found["violations"] == len(found["findings"]) > 30
    assert f"and {found['violations'] - 20} more" in tswift(f"verify {run}").text


def test_another_text_is_seen(tswift, run):
    """All of it in a finished run; of one that was killed a part may be there, and nothing else."""
    text = (run / "text.txt").read_bytes()
    for state, forged, ok in (
        ("finished", text[:-1], False),
        ("finished", b"?" + text[1:], False),
        ("interrupted", text + b"?", False),
        ("running", text[:40], True),
        ("running", text[:40] + b"??", False),
    ):
        record = {**read_json(run / "run.json"), "state": state}
        write_record(run, record)
        (run / "text.txt").write_bytes(forged)
        result = tswift(f"verify {run} --json -")
        found = result.json
        assert (result.code, found["ok"], found["text_fault"] is None) == (
            0 if ok else 1,
            ok,
            ok,
        ), (state, forged)
        assert found["violations"] == 0
    assert (
        "text.txt is not the text of tokens.u32: they differ from byte 40 on"
        in tswift(f"verify {run}").text
    )


@pytest.mark.slow
def test_a_text_with_a_stop_string_and_parts_of_characters(tswift, checkpoint, tmp_path):
    words = f"--model {checkpoint} --prompt-text '{TEXT}' --dtype float64 --temperature 3 --min-p 0"
    for seed in range(4):
        out = tmp_path / str(seed)
        more = f"--len 40 --seed {seed} --quiet --out {out}" + " --stop e" * (seed == 3)
        tswift("generate", words, more).ok()
        tswift(f"verify {out} --quiet").ok()
        tswift(f"generate --resume {out}").ok()
    assert any(
        "\N{REPLACEMENT CHARACTER}" in (tmp_path / str(seed) / "text.txt").read_text()
        for seed in range(3)
    )


def test_another_model_is_refused(tswift, run, checkpoint, tmp_path):
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    same = Path(shutil.copytree(checkpoint, tmp_path / "same"))
    tswift(f"verify {run} --model {same} --quiet").ok()
    for name, differs in ((other, "weights"), ("demo", "config")):
        said = (
            f"tswift: error: --model: {name} is not the model that {run} was made with: {differs} "
            "differ\n"
        )
        refused = tswift(f"verify {run} --model {name} --quiet")
        assert (refused.code, refused.err) == (2, said)


@pytest.mark.slow
def test_a_text_and_its_options(tswift, run, prompt, checkpoint):
    words = f"verify --tokens {run}/tokens.u32 --prompt {prompt} --model {checkpoint} {SAMPLING}"
    other = ("--seed 0", "--seed 5 --prefill 4", "--seed 5 --logit-bias 40=4")
    for more, code in (("--seed 5", 0), *((each, 1) for each in other)):
        assert tswift(words, f"--dtype float64 {more}").code == code, more


def test_stop_at_eos(tswift, prompt, checkpoint, tmp_path):
    sampling = "--temperature 100 --min-p 0 --seed 4"
    words = f"generate --model {checkpoint} --prompt {prompt} --len 3000 --method ar --quiet"
    tswift(words, sampling, f"--stop-at-eos --out {tmp_path}/run").ok()
    tokens = np.fromfile(tmp_path / "run" / "tokens.u32", "<u4").tolist()
    assert tokens.index(0) == len(tokens) - 1 < 2999  # almost flat: one of 320 tokens ends the text
    tswift(f"verify {tmp_path}/run").ok()
    text = f"verify --tokens {tmp_path}/run/tokens.u32 --prompt {prompt} --model {checkpoint}"
    tswift(text, sampling, "--stop-at-eos").ok()
    result = tswift(text, sampling)
    assert result.code == 1  # the last token would have been banned
    assert b" inf " in result.out


def test_generate_verify(tswift, checkpoint, prompt, tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = f"generate --model {checkpoint} --prompt {prompt} --len 40 --verify --out"
    result = tswift(words, out).ok()
    assert result.out == (out / "text.txt").read_bytes()  # nothing but the text
    assert "within rounding" in result.err
    found = read_json(out / "verify.json")
    assert found["ok"] is True
    assert (found["tokens"], found["source"]) == (40, str(out))
    assert tswift(words, tmp_path / "quiet", "--quiet").err == ""

    from tswift.sampling.rule import Sampler

    def broken(self, logits, nodes, **_):
        return self.draw(logits, None, nodes[1] + 1), []

    monkeypatch.setattr(Sampler, "draw_nodes", broken)  # nothing is penalised
    # not by the C program
    monkeypatch.setattr("tswift.forward.cpu.runner.CompiledRunner.verify", lambda *given: None)
    result = tswift(words, tmp_path / "broken")
    assert result.code == 1
    assert "violations at generated tokens" in result.err
    assert read_json(tmp_path / "broken" / "verify.json")["ok"] is False


# --- what is said of an audit

VIOLATIONS = tuple(
    Finding(index, index + 10, 7, 8, None if index > 10 else 0.5, VIOLATION)
    for index in range(9, 34)
)
ROUNDED = (Finding(3, 13, 7, 8, 0.01, WITHIN), Finding(5, 15, 7, 8, 0.02, WITHIN))
WHOLE = Audit(4000, 3998, ROUNDED, 0.02, 0.5, 0.04, 0.001, 9.0, 2.0, None, 700)


def test_the_table():
    said = verdict(
        Audit(4000, 3973, (*ROUNDED, *VIOLATIONS), 0.02, 0.5, 0.04, 0.001, 9.0, 2.0)
    ).plain()
    rows = [line.split() for line in said.splitlines()]
    assert rows[0] == ["4,000", "tokens", "judged", "in", "2.0", "s"]
    assert rows[2:5] == [
        ["drawn", "exactly", "3,973", "0.001", "9"],
        ["within", "rounding", "2", "0.01", "0.02"],
        ["violations", "25", "0.5", "0.5"],
    ]
    assert said.endswith("(from 0) " + ", ".join(map(str, range(9, 29))) + " and 5 more\n")
    said = verdict(Audit(3, 3, (), 0.0, 1.0, 0.0, None, None, 2.0)).plain()
    assert ["violations", "0", "-", "-"] in [line.split() for line in said.splitlines()]


@every_row(
    ("audit", "ok", "said", "unsaid"),
    [
        (
            WHOLE,
            True,
            "differ by up to 0.02 in a logit; within rounding is up to 0.04",
            "violations at",
        ),
        (
            WHOLE,
            True,
            "700 of 4,000 tokens have a competitor within rounding: an error that swaps them is "
            "not",
            "more",
        ),
        (
            Audit(3, 3, (), 0.0, 1.0, 0.0, None, None, 2.0, 16),
            True,
            "any changed token is seen",
            "within rounding",
        ),
        (
            Audit(3, 3, (), 5.0, 0.5, 10.0, None, None, 2.0),
            False,
            "more than rounding can make, 0.5: these passes do not compute the same",
            "any changed token",
        ),
    ],
)
def test_the_notes(audit, ok, said, unsaid):
    found = verdict(audit, "it was made elsewhere").plain()
    assert "it was made elsewhere" in found
    assert (said in found, unsaid in found, audit.ok, audit.as_dict()["ok"]) == (
        True,
        False,
        ok,
        ok,
    )
