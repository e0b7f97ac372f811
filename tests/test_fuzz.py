"""Readers of files from outside, fuzzed: whatever is in the file, it is read or refused in a line,
and soon.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarking.helpers import make_measurement
from tests.fuzzing import damage, fuzzed, json_damage, other_values
from tests.helpers import first
from tswift.benchmarking.record import encode, load_measurement
from tswift.errors import InputError
from tswift.jobs.config import read_prompt
from tswift.jobs.folder import read_tokens
from tswift.loading import load
from tswift.models.checkpoint import read_config, stored_tensors
from tswift.speculators.heads import load_heads

CPU = torch.device("cpu")


def refused(read: Callable[[], object], path: Path) -> None:
    """Read; what is not read must be refused with an option or the file's name, in words."""
    error = None
    try:
        read()
    except InputError as caught:
        error = caught
    if error:
        assert error.field or path.name in str(error)
        assert len(str(error).split()) >= 3


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@fuzzed
@given(data=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_prompts(here: Path, data: bytes) -> None:
    path = here / "prompt.txt"
    path.write_bytes(data)
    refused(lambda: read_prompt(str(path)), path)


@fuzzed
@given(data=st.binary(max_size=64))
def test_tokens(here: Path, data: bytes) -> None:
    path = here / "tokens.u32"
    path.write_bytes(data)
    refused(lambda: read_tokens(path, "--tokens"), path)
    if len(data) % 4 == 0 and data:
        assert len(read_tokens(path)) == len(data) // 4


@fuzzed
@given(change=other_values(), told=st.booleans())
def test_what_the_header_of_heads_says(
    here: Path, checkpoint: Path, change: Callable[[Any], Any], told: bool
) -> None:
    data = (checkpoint / "heads.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if told:  # of what tswift says there
        header["__metadata__"]["tswift"] = json.dumps(
            change(json.loads(header["__metadata__"]["tswift"]))
        )
    else:
        header = change(header)
    text = json.dumps(header).encode()
    path = here / "heads.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    refused(lambda: load_heads(path, 32, torch.float32, CPU), path)


@pytest.fixture(scope="module")
def model(here: Path, checkpoint: Path) -> Path:
    """A model's folder, to be damaged."""
    return shutil.copytree(checkpoint, here / "model")


WHOLE = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors",
]


@pytest.mark.parametrize(
    ("name", "read"),
    first(
        3,
        [
            ("bench.json", load_measurement),
            ("heads.safetensors", lambda path: load_heads(path, 32, torch.float32, CPU)),
            ("config.json", lambda path: read_config(str(path.parent))),
            ("model.safetensors", lambda path: stored_tensors(path.parent)),
            *(
                (name, lambda path: load(str(path.parent)).encode("The ship had lain three days."))
                for name in WHOLE
            ),
        ],
    ),
)
def test_damaged_files(
    model: Path, checkpoint: Path, name: str, read: Callable[[Path], object]
) -> None:
    path = model / name
    made = encode(make_measurement(repeats=2)).encode() if name == "bench.json" else None
    whole = made or (checkpoint / name).read_bytes()

    @fuzzed
    @given(done=damage() if name.endswith(".safetensors") else json_damage())
    def check(done: Callable[[bytes], bytes]) -> None:
        path.write_bytes(done(whole))
        refused(lambda: read(path), path)

    try:
        check()
    finally:
        path.write_bytes(whole)
