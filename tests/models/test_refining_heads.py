"""Heads that refine one state: their rules, by hand."""

from __future__ import annotations

import torch

from tests.helpers import HIDDEN, tiny_heads


def norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_each_head_refines_the_state_of_the_one_before() -> None:
    heads, hidden = tiny_heads(), torch.randn(5, HIDDEN, dtype=torch.float64)
    states = heads(hidden)
    assert states.shape == (3, 5, HIDDEN)
    for index, head in enumerate(heads.heads):
        hidden = hidden + norm(hidden, head.input_layernorm.weight) @ head.linear.weight.T
        torch.testing.assert_close(states[index], norm(hidden, head.post_layernorm.weight))


def test_a_conditioned_head_reads_the_token_before() -> None:
    heads = tiny_heads(kind="conditioned")
    hidden, before = torch.randn(5, HIDDEN, dtype=torch.float64), torch.randn(3, 5, HIDDEN, dtype=torch.float64)
    states = heads(hidden, before)
    for index, head in enumerate(heads.heads):
        read = [norm(hidden, head.input_layernorm.weight), norm(before[index], head.embedding_layernorm.weight)]
        mixed = torch.cat(read, dim=-1) @ head.mix.weight.T
        hidden = hidden + (mixed * mixed.sigmoid()) @ head.linear.weight.T
        torch.testing.assert_close(states[index], norm(hidden, head.post_layernorm.weight))
