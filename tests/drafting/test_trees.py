"""Default trees and node counts, by device and head layout."""

from __future__ import annotations

import pytest
import torch

from tswift.drafting.options import ROWS, usual_nodes, usual_tree, verify_nodes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA, QWEN_7B, MHA = 4, 7, 1  # query heads per KV head


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["medusa", "tokenswift"])
def test_no_more_levels_than_there_are(method: str, device: str) -> None:
    whole = usual_tree(method, torch.device(device), 99)
    assert usual_tree(method, torch.device(device), 2) == whole[:2] != whole


def test_nodes_fill_the_rows_of_a_kv_head() -> None:
    assert [usual_nodes(CUDA, groups) for groups in (MHA, LLAMA, QWEN_7B, 64)] == [128, 32, 18, 8]
    assert usual_nodes(CPU, LLAMA) == usual_nodes(CPU, QWEN_7B) == 8


def test_fewer_nodes_as_the_text_grows() -> None:
    weight_tokens = 15.0e9 / 131_072  # LLaMA3.1-8B in bfloat16
    found = [verify_nodes(context, LLAMA, 128, weight_tokens) for context in (0, 4096, 20_000, 50_000, 100_000)]
    assert found == sorted(found, reverse=True)
    assert found[:2] == [128, 128]
    assert 32 < found[-1] < found[2]
    # the keys alone, of an endless text: 1.2 times the rows that cost nothing
    assert verify_nodes(10**9, LLAMA, 128, weight_tokens) == int(1.2 * ROWS / LLAMA)


def test_never_more_nodes_than_asked_for_and_never_none() -> None:
    for context in (0, 4096, 100_000):
        assert verify_nodes(context, LLAMA, 32, 1e5) == 32
        assert verify_nodes(context, 1000, 32, 0.0) == 1
