"""Checkpoints that something is changed in, and loads that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.helpers import read_json, refused
from tswift.loading.model import load


def changed(checkpoint: Path, folder: Path, **changes) -> str:
    """A copy of a checkpoint with another configuration."""
    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**read_json(path), **changes}))
    return str(folder)


def refuse(model: str, match: str, option: str = "model", **options):
    """See that a model is not loaded, and that one line says why."""
    with refused(match) as caught:
        load(model, **options)
    assert caught.value.field == option
    assert "\n" not in str(caught.value)
