"""Readers of files from outside, fuzzed: whatever is in the file, it is read or refused in a line,
and soon.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given

from tests.benchmarking.helpers import make_measurement
from tests.fuzzing import damage, fuzzed, json_damage
from tests.helpers import CPU, first
from tswift.benchmarking.record import encode, load_measurement
from tswift.errors import InputError
from tswift.loading.model import load
from tswift.models.checkpoint import Checkpoint, stored_tensors
from tswift.speculators.heads_files import load_heads


def refused(read: Callable[[], object], path: Path):
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
def here(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


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
            ("config.json", lambda path: Checkpoint.find(str(path.parent)).config),
            ("model.safetensors", lambda path: stored_tensors(path.parent)),
            *(
                (name, lambda path: load(str(path.parent)).encode("The ship had lain three days."))
                for name in WHOLE
            ),
        ],
    ),
)
def test_damaged_files(model, checkpoint, name, read):
    path = model / name
    made = encode(make_measurement(repeats=2)).encode() if name == "bench.json" else None
    whole = made or (checkpoint / name).read_bytes()

    @fuzzed
    @given(done=damage() if name.endswith(".safetensors") else json_damage())
    def check(done):
        path.write_bytes(done(whole))
        refused(lambda: read(path), path)

    try:
        check()
    finally:
        path.write_bytes(whole)
