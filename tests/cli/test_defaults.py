"""Lengths that nobody typed give way to the positions that a model has, and it is said;
typed ones are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tswift
from tests.conftest import SENTENCES, make_checkpoint

POSITIONS = 96
RATES = ("--bandwidth", 40, "--flops", 0.1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"), max_position_embeddings=POSITIONS)


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    path = tmp_path / "long.txt"
    path.write_text(" ".join(SENTENCES * 3))
    return path


@pytest.mark.slow
def test_generate_ends_where_the_model_does(tswift: Tswift, small: Path, tmp_path: Path) -> None:
    words = ("generate", "--no-progress", "--model", small, "--prompt-text", "The ship")
    result = tswift(*words, "--out", tmp_path / "a")
    assert result.code == 0, result.err
    prompt, made = (
        (tmp_path / "a" / name).stat().st_size // 4 for name in ("prompt.u32", "tokens.u32")
    )
    assert prompt + made == POSITIONS
    assert f"tswift: --len is {made}: the model has {POSITIONS} positions\n" in result.err
    assert json.loads((tmp_path / "a" / "run.json").read_text())["options"]["length"] == made
    refused = tswift(*words, "--len", made + 1, "--out", tmp_path / "b")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert (
        f"--len: {prompt} prompt tokens and {made + 1} new ones need {POSITIONS + 1} positions"
        in refused.err
    )
    assert "--len is" not in tswift(*words, "--len", made, "--out", tmp_path / "c").err


def test_a_prompt_that_leaves_no_room_is_refused(
    tswift: Tswift, small: Path, long_text: Path
) -> None:
    refused = tswift("generate", "--model", small, "--prompt", long_text)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--len: " in refused.err
    assert f"the model has {POSITIONS}" in refused.err


def test_compare(tswift: Tswift, small: Path) -> None:
    words = (
        "compare",
        "--no-progress",
        "--model",
        small,
        "--prompt-text",
        "The ship",
        "--methods",
        "medusa",
    )
    result = tswift(*words)
    assert result.code == 0, result.err
    assert f"the model has {POSITIONS} positions\n" in result.err
    assert tswift(*words, "--len", POSITIONS).code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "prefill", "lens"),
    [
        ((), POSITIONS // 2, [POSITIONS // 2]),
        (("--lens", "10,20"), POSITIONS - 20, [10, 20]),
        (("--prefill", 30), 30, [POSITIONS - 30]),
    ],
    ids=str,
)
def test_a_grid(
    tswift: Tswift,
    small: Path,
    long_text: Path,
    tmp_path: Path,
    typed: tuple[object, ...],
    prefill: int,
    lens: list[int],
) -> None:
    words = (
        "bench",
        "--no-progress",
        "--model",
        small,
        "--prompts",
        long_text,
        "--no-plots",
        "--warmup",
        0,
    )
    result = tswift(*words, *typed, "--out", tmp_path / "a")
    assert result.code == 0, result.err
    lengths = ", ".join(map(str, lens))
    said = (
        f"{small} has {POSITIONS} positions: {prefill} prompt tokens, and {lengths} generated "
        "ones\n"
    )
    assert result.err.count(said) == 1
    workload = json.loads((tmp_path / "a" / "bench.json").read_text())["workload"]
    assert (workload["prefills"], workload["lens"]) == ([prefill], lens)
    assert tswift("bench", "--no-progress", "--resume", tmp_path / "a", "--no-plots").code == 0


def test_a_grid_that_was_typed_is_refused(tswift: Tswift, small: Path, long_text: Path) -> None:
    refused = tswift(
        "bench",
        "--model",
        small,
        "--prompts",
        long_text,
        "--prefill",
        50,
        "--lens",
        50,
        "--no-plots",
    )
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert f"the model has {POSITIONS}" in refused.err


def test_the_roofline(tswift: Tswift, small: Path) -> None:
    half = POSITIONS // 2
    told = " ".join(tswift("roofline", "--model", small, *RATES).out.decode().split())
    assert f"plain decoding of {half} tokens after {half}" in told
    assert f"has {POSITIONS} positions: {half} prompt tokens, and {half} generated ones." in told
    told = " ".join(
        tswift("roofline", "--model", small, *RATES, "--prefill", 10, "--len", 20)
        .out.decode()
        .split()
    )
    assert "plain decoding of 20 tokens after 10" in told
    assert "generated ones" not in told
    refused = tswift("roofline", "--model", small, *RATES, "--len", POSITIONS)
    assert refused.code == 2
    assert "--len: " in refused.err
