"""What a loaded model makes of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.loads import changed
from tswift.errors import InputError
from tswift.models.loading import load


def test_a_prompt_longer_than_the_tokenizer_thinks_is_no_news(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = changed(checkpoint, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 4}))
    loaded = load(model)
    capfd.readouterr()
    assert len(loaded.encode("The ship had lain three days becalmed.")) > 4
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_fails_on_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    model = changed(checkpoint, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "many"}))
    loaded = load(model)
    with pytest.raises(InputError, match=r"^model: .* cannot be loaded \(its tokenizer: "):
        loaded.encode("The ship")
