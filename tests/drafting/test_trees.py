"""The usual trees, by device."""

from __future__ import annotations

import pytest
import torch

from tswift.drafting.trees import usual_nodes, usual_tree


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["medusa", "tokenswift"])
def test_no_more_levels_than_there_are(method: str, device: str) -> None:
    whole = usual_tree(method, torch.device(device), 99)
    assert usual_tree(method, torch.device(device), 2) == whole[:2] != whole


def test_a_gpu_verifies_more() -> None:
    assert usual_nodes(torch.device("cuda")) > usual_nodes(torch.device("cpu"))
