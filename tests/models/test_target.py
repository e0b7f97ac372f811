"""The adapter against transformers' own forward of the same model."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import VOCAB, random_prompt, tiny_llama, tiny_target
from tswift.kv.full import FullKV
from tswift.models.target import Target


@pytest.mark.parametrize(
    ("kind", "attention", "tolerance"),
    # the stock eager attention takes its softmax in float32 whatever the model's dtype
    [("gqa", "sdpa", 1e-10), ("mha", "sdpa", 1e-10), ("mqa", "sdpa", 1e-10), ("gqa", "eager", 1e-5)],
)
def test_logits_are_those_of_the_stock_model(kind: str, attention: str, tolerance: float) -> None:
    text = random_prompt(700, 2)  # more than a chunk
    stock = tiny_llama(kind, torch.float64, attention)
    with torch.inference_mode():
        expected = stock(torch.tensor([text])).logits[0]
    target = tiny_target(kind)
    kv = FullKV(target.kv_shape, 720)
    target.prefill(text[:600], kv)
    for at in range(600, 610):  # one by one
        one = torch.ones(1, 1, dtype=torch.bool)
        hidden = target.forward(torch.tensor(text[at : at + 1]), torch.tensor([at]), kv, one).hidden
        kv.commit([0])
        torch.testing.assert_close(target.logits(hidden)[0], expected[at], rtol=0, atol=tolerance)
    rest = target.prefill(text[610:], kv)
    torch.testing.assert_close(target.logits(rest.hidden), expected[610:], rtol=0, atol=tolerance)
    assert kv.length == 700


def test_a_tree_pass_gives_every_path_its_own_logits() -> None:
    target, stock, text = tiny_target(), tiny_llama("gqa", torch.float64), random_prompt(40, 3)
    kv = FullKV(target.kv_shape, 60)
    target.prefill(text[:-1], kv)
    tokens, parents = [text[-1], 5, 6, 5, 5, 9], [-1, 0, 0, 1, 2, 4]
    depths = [0, 1, 1, 2, 2, 3]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    ancestors = torch.zeros(6, 6, dtype=torch.bool)
    for node, path in enumerate(paths):
        assert parents[node] == (path[-2] if node else -1)
        ancestors[node, path] = True
    positions = torch.tensor(depths) + 39
    logits = target.logits(target.forward(torch.tensor(tokens), positions, kv, ancestors).hidden)
    for node, path in enumerate(paths):
        whole = text[:-1] + [tokens[n] for n in path]
        with torch.inference_mode():
            expected = stock(torch.tensor([whole])).logits[0, -1]
        torch.testing.assert_close(logits[node], expected, rtol=0, atol=1e-10)


def test_far_positions() -> None:
    """Past position 4,096, against the stock model on the whole text."""
    text = random_prompt(4200, 4)
    with torch.inference_mode():
        expected = tiny_llama("mqa", torch.float64)(torch.tensor([text]), logits_to_keep=3).logits[0]
    target = tiny_target("mqa")
    kv = FullKV(target.kv_shape, len(text))
    target.prefill(text[:-3], kv)
    last = target.prefill(text[-3:], kv)
    torch.testing.assert_close(target.logits(last.hidden), expected, rtol=0, atol=1e-10)


def test_a_wrong_position_shows() -> None:
    """The negative control of the comparisons above."""
    target, text = tiny_target(), random_prompt(50, 5)
    one = torch.ones(1, 1, dtype=torch.bool)
    kv = FullKV(target.kv_shape, 51)
    target.prefill(text, kv)
    right, wrong = (
        target.logits(target.forward(torch.tensor([3]), torch.tensor([at]), kv, one).hidden) for at in (50, 51)
    )
    assert (right - wrong).abs().max() > 1e-4


def test_the_queries_of_a_pass_are_rotated_and_one_per_layer() -> None:
    target = tiny_target("gqa")
    kv = FullKV(target.kv_shape, 40)
    last = target.prefill(random_prompt(12), kv)
    assert [tuple(query.shape) for query in last.queries] == [(4, 12, 8)] * 2
    assert torch.equal(last.queries_of([7])[1], last.queries[1][:, 7:8])
    # layer 0: rotated query of the same token at two positions have the same norm and different directions
    last = target.prefill([3, 3], FullKV(target.kv_shape, 2))
    first, second = last.queries[0].unbind(1)
    torch.testing.assert_close(first.norm(dim=-1), second.norm(dim=-1))
    assert (first - second).abs().max() > 1e-3


def test_what_the_target_says_of_itself() -> None:
    target = tiny_target("gqa")
    assert (target.vocab_size, target.hidden_size, target.max_positions) == (VOCAB, 32, 16_384)
    shape = target.kv_shape
    assert (shape.layers, shape.heads, shape.head_dim, shape.dtype) == (2, 2, 8, torch.float64)
    assert target.prefill([], FullKV(shape, 1)) is None
    assert isinstance(target, Target)
