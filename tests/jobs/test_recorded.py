"""A run's folder read back, and everything that can be wrong with it in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tswift.decoding.sampling import SamplingParams
from tswift.errors import InputError
from tswift.jobs.prompt import fingerprint
from tswift.jobs.recorded import check_ids, read_run, read_tokens


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a run leaves it."""
    np.array([5, 6, 7], "<u4").tofile(tmp_path / "prompt.u32")
    np.array([1, 2**31], "<u4").tofile(tmp_path / "tokens.u32")
    record = {
        "schema": 1,
        "state": "interrupted",
        "options": {"seed": 2**70, "length": 9},
        "sampling": {
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.0,
            "eta": 0.1,
            "penalty": 1.1,
            "window": 8,
            "banned": [0, 4],
        },
        "model": {"name": "x/y", "device": "cpu", "dtype": "float64", "attention": "sdpa", "heads": None},
        "prompt": {"tokens": 3, "sha256": fingerprint([5, 6, 7])},
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    return tmp_path


def test_reads_everything(run: Path) -> None:
    found = read_run(run)
    assert found.params == SamplingParams(0.5, 3, 0.9, 0.0, 0.1, 1.1, 8, (0, 4))
    assert (found.seed, found.state, found.path) == (2**70, "interrupted", run)
    assert (found.prompt, found.tokens) == ([5, 6, 7], [1, 2**31])
    assert (found.model, found.device, found.dtype, found.attention) == ("x/y", "cpu", "float64", "sdpa")
    assert found.heads is None


def _without(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def _file(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(data) and None


def _field(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        record = json.loads((run / "run.json").read_text())
        change(record)
        (run / "run.json").write_text(json.dumps(record))

    return edit


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("run.json"), "holds no run: there is no run.json in it"),
        (_without("prompt.u32"), "there is no file .*prompt.u32"),
        (_without("tokens.u32"), "there is no file .*tokens.u32"),
        (_file("run.json", b"{"), "run.json is broken: it is not JSON"),
        (_file("run.json", b"\xff\xfe"), "run.json is broken: it is not JSON"),
        (_file("run.json", b"[]"), "is not of schema 1"),
        (_file("run.json", b'{"schema": 2}'), "is not of schema 1"),
        (_file("run.json", b'{"schema": 1}'), "run.json is broken: there is no 'model'"),
        (_file("tokens.u32", b""), "tokens.u32 holds no tokens"),
        (_file("tokens.u32", b"12345"), "tokens.u32 is not a file of uint32: it has 5 bytes"),
        (_file("prompt.u32", b"123"), "prompt.u32 is not a file of uint32"),
        (_file("prompt.u32", b"1234"), "prompt.u32 is not the prompt of run.json"),
        (_field(lambda record: record["options"].pop("seed")), "there is no 'seed'"),
        (_field(lambda record: record["prompt"].pop("sha256")), "there is no 'sha256'"),
        (_field(lambda record: record["sampling"].update(min_p=3)), "run.json is broken: min_p must be between"),
        (_field(lambda record: record["sampling"].update(hot=1)), "run.json is broken: .*hot"),
        (_field(lambda record: record.update(model=None)), "run.json is broken"),
    ],
)
def test_what_is_broken_is_told_in_a_line(run: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(run)
    with pytest.raises(InputError, match=message) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(InputError, match="there is no folder"):
            read_run(path)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_tokens_come_back(tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "some.u32"
    np.array(tokens, "<u4").tofile(path)
    assert read_tokens(path) == tokens


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--tokens: .* cannot be read"):
        read_tokens(tmp_path, "--tokens")


def test_ids_outside_the_vocabulary() -> None:
    check_ids([0, 4], 5, "x")
    with pytest.raises(InputError, match="--tokens: x has token id 5 at 2, outside the model's vocabulary of 5"):
        check_ids([0, 4, 5, 6], 5, "x", "--tokens")
