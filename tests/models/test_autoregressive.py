"""The layer that is fed with its own states: against its rule by hand, and while a text grows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.helpers import HIDDEN
from tswift.models.autoregressive import HEAD_DIM
from tswift.models.autoregressive_heads import AutoregressiveHeads

LENGTH, WINDOW, DEPTH, QUERIES = 21, 5, 4, 2


def heads_of(window: int = WINDOW) -> AutoregressiveHeads:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        heads = AutoregressiveHeads(HIDDEN, DEPTH, window=window, inner=24, queries=QUERIES).double()
        for weight in heads.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return heads.eval().requires_grad_(False)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told_of(embedded: Tensor) -> Tensor:
    """``[DEPTH, ..., LENGTH, H]`` of the tokens that follow each."""
    return torch.stack([embedded[..., step : step + LENGTH, :] for step in range(DEPTH)])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(vector: Tensor, place: int) -> Tensor:
    """RoPE by complex numbers."""
    half = HEAD_DIM // 2
    speeds = torch.tensor([10_000 ** (-index / half) for index in range(half)], dtype=torch.float64)
    spun = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(speeds), place * speeds)
    return torch.cat([spun.real, spun.imag])


def by_hand(heads: AutoregressiveHeads, hidden: Tensor, embedded: Tensor, base: int) -> list[Tensor]:
    """What it says from one token of a text on, one input after another."""
    weights = {name.removeprefix("heads.0."): weight for name, weight in heads.state_dict().items()}
    inputs = [(hidden[place], embedded[place], place) for place in range(max(0, base - heads.window + 1), base + 1)]
    said = []
    for step in range(DEPTH):
        keys, values = [], []
        for state, token, place in inputs:
            token = norm(token, weights["embedding_layernorm.weight"])
            both = weights["attention.weight"] @ torch.cat([norm(state, weights["input_layernorm.weight"]), token])
            keys.append(turned(both[QUERIES * HEAD_DIM : (QUERIES + 1) * HEAD_DIM], place))
            values.append(both[(QUERIES + 1) * HEAD_DIM :])
        read = []
        for query in both[: QUERIES * HEAD_DIM].split(HEAD_DIM):
            scores = torch.stack([turned(query, place) @ key / math.sqrt(HEAD_DIM) for key in keys])
            read.append(scores.softmax(0) @ torch.stack(values))
        state = state + weights["output.weight"] @ torch.cat(read)
        mixed = weights["mix.weight"] @ torch.cat([norm(state, weights["mix_layernorm.weight"]), token])
        state = state + weights["linear.weight"] @ (mixed * mixed.sigmoid())
        said.append(norm(state, weights["post_layernorm.weight"]))
        inputs.append((state, embedded[base + step + 1], base + step + 1))
    return said


@pytest.mark.parametrize("window", [2, WINDOW, 7, 64])
def test_every_place_is_unrolled_as_the_rule_says(window: int) -> None:
    heads, hidden, embedded = heads_of(window), numbers(2, LENGTH), numbers(2, LENGTH + DEPTH, seed=2)
    states = heads(hidden, told_of(embedded))
    assert states.shape == (DEPTH, 2, LENGTH, HIDDEN)
    for row in range(2):
        for base in range(LENGTH):
            wanted = by_hand(heads, hidden[row], embedded[row], base)
            torch.testing.assert_close(states[:, row, base], torch.stack(wanted), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(heads(hidden[0], told_of(embedded[0])), states[:, 0])
    torch.testing.assert_close(heads(hidden, told_of(embedded), most=2), states[:2])


@pytest.mark.parametrize("held_back", [0, 1])
@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (2, 1, 9, 1, 3, 5), (LENGTH,), (4, 13, 4)])
def test_a_memory_that_grows_drafts_as_the_whole_text_says(pieces: tuple[int, ...], held_back: int) -> None:
    heads, hidden, embedded = heads_of(), numbers(LENGTH), numbers(LENGTH + DEPTH, seed=2)
    wanted = heads(hidden, told_of(embedded))
    memory, grown = heads.memory(held_back), 0
    for piece in pieces:
        memory.follow(hidden[grown : grown + piece], embedded[grown : grown + piece])
        grown += piece
        base = grown - held_back  # the input that drafting begins with
        if base == LENGTH:
            break
        for _ in range(2):  # drafting leaves no trace
            states = hidden[base]
            for step in range(DEPTH):
                states, out = memory.step(states, embedded[base + step])
                torch.testing.assert_close(out, wanted[step, base], rtol=1e-9, atol=1e-9)


def test_branches_go_on_from_what_each_has_drafted() -> None:
    heads, hidden, embedded = heads_of(), numbers(LENGTH), numbers(LENGTH, seed=2)
    memory = heads.memory(0)
    memory.follow(hidden[:-1], embedded[:-1])
    tokens = numbers(3, 3, seed=3)
    first, _ = memory.step(hidden[-1:], embedded[-1:])
    second, out = memory.step(first[[0, 0, 0]], tokens[0])
    _, last = memory.step(second[[2, 0, 2]], tokens[1])
    for row, parent in enumerate([2, 0, 2]):
        states, _ = memory.step(hidden[-1], embedded[-1])
        states, alone = memory.step(states, tokens[0, parent])
        torch.testing.assert_close(out[parent], alone)
        torch.testing.assert_close(last[row], memory.step(states, tokens[1, row])[1])


def test_the_length_of_a_text_cannot_be_seen() -> None:
    heads = heads_of()
    said = []
    for before in (0, 1000, 131_000):
        memory = heads.memory(0)
        if before:
            memory.follow(numbers(before, seed=3), numbers(before, seed=4))
        memory.follow(numbers(2 * WINDOW), numbers(2 * WINDOW, seed=2))
        said.append(memory.step(numbers(1, seed=5), numbers(1, seed=6))[1])
    torch.testing.assert_close(said[1], said[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(said[2], said[0], rtol=1e-8, atol=1e-8)


def test_a_step_without_a_memory_is_one_at_a_texts_beginning() -> None:
    heads, hidden, embedded = heads_of(), numbers(1), numbers(LENGTH, seed=2)
    states, out = heads.step(0, hidden, embedded[:1])
    torch.testing.assert_close(out[0], by_hand(heads, hidden, embedded, 0)[0])
    _, out = heads.step(1, states, embedded[1:2])
    torch.testing.assert_close(out[0], by_hand(heads, hidden, embedded, 0)[1])
