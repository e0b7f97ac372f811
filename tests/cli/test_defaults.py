"""Lengths that nobody typed give way to the positions that a model has, and it is said;
typed ones are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SENTENCES, make_checkpoint
from tests.helpers import read_json

pytestmark = pytest.mark.usefixtures("load_once")

POSITIONS = 96
RATES = "--bandwidth 40 --flops 0.1"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"), max_position_embeddings=POSITIONS)


@pytest.fixture
def long_text(tmp_path) -> Path:
    path = tmp_path / "long.txt"
    path.write_text(" ".join(SENTENCES * 3))
    return path


@pytest.mark.slow
def test_generate_ends_where_the_model_does(tswift, small, tmp_path):
    words = (f"generate --no-progress --model {small} --prompt-text", "The ship")
    result = tswift(*words, f"--out {tmp_path}/a").ok()
    prompt, made = (
        (tmp_path / "a" / name).stat().st_size // 4 for name in ("prompt.u32", "tokens.u32")
    )
    assert prompt + made == POSITIONS
    assert f"tswift: --len is {made}: the model has {POSITIONS} positions\n" in result.err
    assert read_json(tmp_path / "a" / "run.json")["options"]["length"] == made
    tswift(*words, "--len", made + 1, f"--out {tmp_path}/b").refused(
        f"--len: {prompt} prompt tokens and {made + 1} new ones need {POSITIONS + 1} positions"
    )
    assert "--len is" not in tswift(*words, f"--len {made} --out {tmp_path}/c").err


def test_compare(tswift, small):
    words = (f"compare --no-progress --model {small} --prompt-text", "The ship", "--methods medusa")
    result = tswift(*words).ok()
    assert f"the model has {POSITIONS} positions\n" in result.err
    assert tswift(*words, f"--len {POSITIONS}").code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "prefill", "lens"),
    [
        ((), POSITIONS // 2, [POSITIONS // 2]),
        (("--lens 10,20",), POSITIONS - 20, [10, 20]),
        (("--prefill 30",), 30, [POSITIONS - 30]),
    ],
    ids=str,
)
def test_a_grid(
    tswift,
    small,
    long_text,
    tmp_path,
    typed,
    prefill,
    lens,
):
    words = f"bench --no-progress --model {small} --prompts {long_text} --no-plots --warmup 0"
    result = tswift(words, *typed, f"--out {tmp_path}/a").ok()
    lengths = ", ".join(map(str, lens))
    said = (
        f"{small} has {POSITIONS} positions: {prefill} prompt tokens, and {lengths} generated "
        "ones\n"
    )
    assert result.err.count(said) == 1
    workload = read_json(tmp_path / "a" / "bench.json")["workload"]
    assert (workload["prefills"], workload["lens"]) == ([prefill], lens)
    tswift(f"bench --no-progress --resume {tmp_path}/a --no-plots").ok()


def test_a_grid_that_was_typed_is_refused(tswift, small, long_text):
    tswift(
        f"bench --model {small} --prompts {long_text} --prefill 50 --lens 50 --no-plots"
    ).refused(f"the model has {POSITIONS}")


def test_the_roofline(tswift, small):
    half = POSITIONS // 2
    told = " ".join(tswift(f"roofline --model {small}", RATES).text.split())
    assert f"plain decoding of {half} tokens after {half}" in told
    assert f"has {POSITIONS} positions: {half} prompt tokens, and {half} generated ones." in told
    told = " ".join(
        tswift(f"roofline --model {small}", RATES, "--prefill 10 --len 20").text.split()
    )
    assert "plain decoding of 20 tokens after 10" in told
    assert "generated ones" not in told
    tswift(f"roofline --model {small}", RATES, f"--len {POSITIONS}").refused("--len: ")
