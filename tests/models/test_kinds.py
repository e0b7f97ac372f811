"""Heads made anew from what they said of themselves."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import HIDDEN, medusa_heads, tiny_heads
from tswift.models.heads import KINDS, build
from tswift.models.heads_files import load_heads


@pytest.mark.parametrize("kind", [*KINDS, "medusa"])
@pytest.mark.parametrize("raw", [False, True])
def test_what_they_say_of_themselves_is_enough_to_rebuild_them(tmp_path, kind: str, raw: bool) -> None:
    heads = medusa_heads(layers=2) if kind == "medusa" else tiny_heads(kind=kind)
    if kind != "medusa":
        heads = type(heads)(HIDDEN, 2, 1e-3, raw).double()
    again = build(heads.about())
    assert again.about() == heads.about()
    assert {name: each.shape for name, each in again.state_dict().items()} == {
        name: each.shape for name, each in heads.state_dict().items()
    }
    heads.save(tmp_path / "heads.safetensors", torch.float64, "a fingerprint")
    loaded = load_heads(tmp_path / "heads.safetensors", HIDDEN, torch.float64, torch.device("cpu"))
    assert (loaded.about(), loaded.base) == (heads.about(), "a fingerprint")
    for name, value in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
