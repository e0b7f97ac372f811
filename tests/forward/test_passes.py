"""Static passes: the same tokens as passes made anew each time."""

from __future__ import annotations

import weakref
from random import Random

import pytest
import torch

from benchmarks.architectures import ARCHITECTURES
from tests.helpers import (
    decode_steps,
    drafter_of,
    needs_triton,
    random_prompt,
    random_tree,
    refused,
    tiny_llama,
    tiny_target,
    tokens_of,
)
from tests.rows import every_row
from tswift.attention.backends import BACKENDS
from tswift.attention.sdpa import TreeAttention
from tswift.caches import FullKV
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.loop import Decoding
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.forward.cuda.graphs import sizes
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import chunks, prefill
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.heads import ChainedHeads

PARAMS = SamplingParams(min_p=0.02, window=24)
OPTIONS = DraftOptions(tree=(1, 3, 2, 2), nodes=20, budget=64, costs="nominal")


class LengthOnDevice(TreeAttention):
    """Attention that may be told the length by a tensor, as the one by Triton is."""

    STATIC = True
    MAX_NODES = 128

    def __init__(self, layout, prefix, nodes, ancestors):
        self._end = int(prefix) + nodes
        super().__init__(layout, prefix, nodes, ancestors)

    def __call__(self, query, keys, values, scale):
        return super().__call__(query, keys[:, : self._end], values[:, : self._end], scale)

    @staticmethod
    def store(keys, values, new_keys, new_values, length):
        end = int(length) + new_keys.shape[1]
        assert end <= keys.shape[1]
        keys[:, int(length) : end], values[:, int(length) : end] = new_keys, new_values


def static_target(attention: type = LengthOnDevice) -> Target:
    return Target(tiny_llama("gqa", torch.float64), attention)


def text(target: Target, method: str = "tokenswift") -> list[int]:
    return tokens_of(
        decode_steps(target, drafter_of(method, target, OPTIONS), random_prompt(30), PARAMS, 3, 60)
    )


@every_row("limit", [1, 8, 10, 41, 128])
def test_sizes_fit_every_tree(limit):
    found = sizes(limit)
    assert found == sorted(set(found))
    assert found[0] == 1
    assert found[-1] == limit


def test_what_a_pass_gave_stays_when_the_next_one_runs():
    target = static_target()
    kv = FullKV(target.kv_shape, 60)
    target.prepare(kv, 4)
    static = target.runner.passes[kv][0]
    (out, replays), run = static._run(), static._run

    def replay():  # as a graph does: into the same memory each time
        out.hidden.copy_(run()[0].hidden)
        return out, replays

    static._run = replay
    first = target.forward(Nodes(torch.tensor([3]), torch.tensor([0]), kv, None)).hidden
    before = first.clone()
    target.forward(Nodes(torch.tensor([4]), torch.tensor([0]), kv, None))
    assert torch.equal(first, before)


def test_passes_go_with_their_cache():
    target = static_target()
    kv = FullKV(target.kv_shape, 60)
    target.prepare(kv, 4)
    gone = weakref.ref(kv)
    del kv
    assert gone() is None
    assert not target.runner.passes


@pytest.mark.parametrize("mistake", ["ancestors", "length", "tokens", "positions", None])
def test_a_replayed_pass_is_the_pass_itself(mistake):
    """And what is left in place from the pass before shows."""
    target = static_target()
    kv = FullKV(tiny_target().kv_shape, 60)
    prefill(target, random_prompt(20), kv)
    target.prepare(kv, 8)
    trees = [random_tree(8, Random(seed)) for seed in (1, 2)]
    for tree in trees:
        parts = torch.tensor(tree.tokens), torch.tensor(tree.depths) + kv.length, tree.ancestors()
        exact = tiny_target().forward(Nodes(parts[0], parts[1], kv, parts[2])).hidden
        replayed = target.forward(Nodes(parts[0], parts[1], kv, parts[2])).hidden
        assert torch.allclose(exact, replayed, atol=1e-12) == (mistake is None or tree is trees[0])
        kv.length += 1
        if mistake:
            for static in target.runner.passes[kv]:
                name = f"_{mistake}"
                run = static._run
                kept = getattr(static, name).clone()
                static._run = lambda static=static, name=name, kept=kept, run=run: (
                    getattr(static, name).copy_(kept),
                    run(),
                )[1]


def test_too_many_nodes_are_refused():
    with refused("nodes: must be at most 128 with this attention, got 129"):
        make_drafter("reuse", static_target(), None, DraftOptions(nodes=129))
    make_drafter("reuse", tiny_target(), None, DraftOptions(nodes=129))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("name", "method"),
    [("Gemma 2", "ar"), ("Gemma 2", "tokenswift"), ("Mistral 7B v0.1", "medusa")],
)
def test_layers_with_windows_and_soft_caps_decode_on_the_device(name, method):
    """Only passes over a partial cache, whose slots are in no order, are left to the host."""
    known = next(known for known in ARCHITECTURES if known.startswith(name))
    network = ARCHITECTURES[known].make(97).half()
    target = Target(network, BACKENDS["triton"]())
    assert target.attention_features
    assert target.replays
    heads = ChainedHeads(target.hidden_size, 2).half()
    options = DraftOptions(tree=(1, 2, 2) if method == "tokenswift" else (2, 2), budget=64)
    prompt = random_prompt(12)
    texts = []
    for each in (target, Target(network)):
        drafter = make_drafter(
            method, each, heads, options if method != "ar" else DraftOptions(), None
        )
        decoding = Decoding(each, prompt, SamplingParams(window=24), 3, drafter, 10)
        texts.append(tokens_of(list(decoding.steps())))
        assert isinstance(decoding._stepper, DeviceStepper) == (each is target)
    assert texts[0] == texts[1]


def test_a_pass_that_does_not_fit_is_refused():
    target = static_target()
    kv = FullKV(target.kv_shape, 10)
    target.prepare(kv, 8)
    kv.length = 3
    with pytest.raises(ValueError, match="8 nodes does not fit behind 3 of 10 slots"):
        target.forward(Nodes(torch.arange(5), torch.arange(5), kv, None))


def test_a_prompt_is_forwarded_the_same_way_whatever_is_prepared(
    monkeypatch,
):
    """Or plain decoding and other methods would begin with different keys and values."""
    target = static_target()
    decoding = Decoding(
        target, random_prompt(30), PARAMS, 3, drafter_of("tokenswift", target, OPTIONS), 60
    )
    prepared = []

    def seen(target, tokens, kv, prompt):
        prepared.append(kv in target.runner.passes)
        return chunks(target, tokens, kv, prompt)

    monkeypatch.setattr("tswift.decoding.loop.chunks", seen)
    decoding.prefill()
    assert prepared == [False]
