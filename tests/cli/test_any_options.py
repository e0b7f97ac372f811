"""Any combination of options: a run whose tokens are plain decoding's,
or a refusal in one line that leaves nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.bad_inputs import run
from tswift.engine import generate
from tswift.loading import LoadedModel
from tswift.models.config import ModelConfig
from tswift.sampling.parameters import SamplingParams, parse_bias

LONGEST = 8

# by option: values that are fine alone, and values that are not
VALUES: dict[str, tuple[list[str], list[str]]] = {
    "--len": (list("12345678"), ["0", "-3", "4096", "1e3", "9" * 40]),
    "--prefill": (["1", "2", "7", "25"], ["0", "-1", "26", "x"]),
    "--seed": (["0", "1", "-1", str(2**64 + 3), str(-(2**70))], ["0.5", "x", ""]),
    "--temperature": (["0", "0.3", "1", "1.7", "1e-100", "1e100"], ["-1", "nan", "inf", "1e-320"]),
    "--top-k": (["0", "1", "3", "319", "320", "1000000"], ["-1", "1.5"]),
    "--top-p": (["1", "0.9", "0.3", "1e-12"], ["0", "1.1", "nan"]),
    "--min-p": (["0", "0.05", "0.5", "1"], ["-0.1", "2", "nan"]),
    "--eta": (["0", "1e-4", "0.3", "0.999"], ["-1", "1"]),
    "--penalty": (["1", "1.1", "3", "1e100"], ["0.9", "nan", "inf"]),
    "--window": (["0", "1", "5", "1024", str(2**40)], ["-1", str(2**41)]),
    "--logit-bias": (
        ["5=-100", "7=3,9=-2.5", "0=0"],
        ["", "5", "5=x", "5=nan", "5=101", "-1=2", "320=1", "1=1,1=2"],
    ),
    "--method": (
        ["ar", "medusa", "tokenswift", "reuse", "magicdec", "ar-reference"],
        ["", "none", "standalone"],
    ),
    "--kv": (["full", "partial", "dynamic", "streaming", "snapkv"], ["", "none"]),
    "--tree": (["1", "3", "1,1", "1,2", "2,3,2", "1,2,2,2"], ["0", "", "1,,1", "1,1,1,1,1"]),
    "--gamma": (["0", "1", "2", "3"], ["-1", "4", "x"]),
    "--nodes": (["2", "3", "8", "100"], ["1", "-1", "9" * 20]),
    "--ngrams": (["0", "1", "20", "1000"], ["-1", "x"]),
    "--budget": (["64", "65", "100", "4096"], ["63", "-64", "9" * 20]),
    "--sinks": (["0", "1", "16"], ["-1", "4000"]),
    "--device": (["auto", "cpu"], ["gpu", "cuda:9"]),
    "--attention": (["auto", "sdpa"], ["flash", "triton", "none"]),
    "--heads": (["HEADS"], ["chained", "nowhere", "PROMPT"]),
    "--prompt": (["PROMPT"], ["nowhere", "."]),
    "--out": (["new", "deep/er/run"], ["mine", "mine/theirs"]),
}
SWITCHES = (
    *(
        "--stop-at-eos",
        "--reuse-recent",
        "--no-reuse-recent",
        "--shared-noise",
        "--no-shared-noise",
    ),
    *("--quiet", "--no-progress", "--verify"),
)
SAMPLING = ("temperature", "top-k", "top-p", "min-p", "eta", "penalty", "window", "logit-bias")


@st.composite
def command_lines(draw: st.DrawFn) -> dict[str, str | None]:
    """Options and their values; None for a switch.

    Half of the command lines have no value that is bad alone.
    """
    options: dict[str, str | None] = {}
    chosen = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=9))
    spoilt = draw(st.booleans())
    for option in chosen:
        good, bad = VALUES[option]
        options[option] = draw(st.sampled_from([*good, *good, *bad] if spoilt else good))
    return options | dict.fromkeys(
        draw(st.lists(st.sampled_from(SWITCHES), unique=True, max_size=2))
    )


@pytest.fixture(scope="module")
def model(checkpoint: Path, load_once: Callable[..., LoadedModel]) -> LoadedModel:
    """The tiny model in float64."""
    return load_once(ModelConfig(model=str(checkpoint), dtype="float64"))


def plain_tokens(model: LoadedModel, ids: list[int], options: dict[str, str | None]) -> list[int]:
    """What plain decoding draws."""
    kinds: dict[str, Any] = {"top-k": int, "window": int, "logit-bias": parse_bias}
    values: dict[str, Any] = {
        name.replace("-", "_"): kinds.get(name, float)(value)
        for name in SAMPLING
        if (value := options.get(f"--{name}"))
    }
    steps = generate(
        model,
        ids[: int(options.get("--prefill") or len(ids))],
        int(options.get("--len") or LONGEST),
        method="ar",
        params=SamplingParams(**values),
        seed=int(options.get("--seed") or 0),
        stop_at_eos="--stop-at-eos" in options,
    )
    return [token for step in steps for token in step.tokens]


@pytest.mark.slow
def test_a_run_or_a_refusal(
    model: LoadedModel, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    prompt = folder / "prompt.txt"
    prompt.write_text("The ship had lain three days becalmed, and nobody spoke.")
    ids = model.encode(prompt.read_text())
    names = {"PROMPT": str(prompt), "HEADS": str(checkpoint / "heads.safetensors")}
    codes: list[int] = []

    @settings(max_examples=300, derandomize=True, deadline=None, database=None)
    @given(options=command_lines())
    def check(options: dict[str, str | None]) -> None:
        here = Path(tempfile.mkdtemp(dir=folder))
        (here / "mine").write_text("mine")
        out = options.get("--out", "run")
        whole = {
            "--prompt": "PROMPT",
            "--len": str(LONGEST),
            "--dtype": "float64",
            "--out": "run",
            **options,
        }
        words = [
            word
            for option, value in whole.items()
            for word in ((option,) if value is None else (option, value))
        ]
        found = run(
            ["generate", "--model", checkpoint, *(names.get(word, word) for word in words)], here
        )
        assert not found.traceback, found.err
        codes.append(found.code or 0)
        if found.code == 2:
            assert found.out == b""
            assert found.err.startswith("tswift: error: "), found.err
            assert found.err.count("\n") == 1
            assert [path.name for path in here.iterdir()] == ["mine"]
            assert (here / "mine").read_text() == "mine"
            return
        assert found.code == 0, found.err
        tokens = np.fromfile(here / str(out) / "tokens.u32", "<u4").tolist()
        assert tokens == plain_tokens(model, ids, options)
        assert 0 not in (tokens[:-1] if "--stop-at-eos" in options else tokens)
        assert found.out == (here / str(out) / "text.txt").read_bytes()
        if "--quiet" in options:
            assert found.err == ""

    check()
    assert len(codes) >= 300
    assert min(codes.count(0), codes.count(2)) > 60
