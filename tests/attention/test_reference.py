"""The slow attention computes what the fast one does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.helpers import PLAIN, decode, drafter_of, random_prompt, tiny_target
from tswift.attention.layout import Layout
from tswift.attention.reference import ReferenceAttention
from tswift.attention.sdpa import TreeAttention
from tswift.drafting.options import DraftOptions


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 700])
def test_equal_to_tree_attention(heads, kv_heads, prefix):
    generator = torch.Generator().manual_seed(prefix + heads)
    nodes, size = 5, 8
    query = torch.randn(heads, nodes, size, dtype=torch.float64, generator=generator)
    keys, values = torch.randn(2, kv_heads, prefix + nodes, size, dtype=torch.float64, generator=generator)
    ancestors = torch.eye(nodes, dtype=torch.bool) | torch.tensor([[True] + [False] * (nodes - 1)])
    asked = (Layout(kv_heads, heads // kv_heads, torch.float64, query.device), prefix, nodes, ancestors)
    slow = ReferenceAttention(*asked)(query, keys, values, 0.3)
    torch.testing.assert_close(slow, TreeAttention(*asked)(query, keys, values, 0.3), rtol=1e-10, atol=1e-12)


def test_the_reference_target_decodes_the_same_text():
    target, options = tiny_target(), DraftOptions(budget=64)
    prompt, params = random_prompt(30), dataclasses.replace(PLAIN, penalty=1.2)
    texts = [
        decode(model, drafter_of("ar", model, options), prompt, params, 4, 60) for model in (target, target.reference())
    ]
    assert texts[0] == texts[1]
    assert target.reference() is not target
