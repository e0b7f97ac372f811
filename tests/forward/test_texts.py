"""Passes over several texts: each has, bit for bit, what it has in a pass of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.forward import test_integers, test_program
from tests.helpers import needs_program, random_tree, tiny_target
from tests.lossless.models import cache_of, exact_target, state_of
from tswift.attention.sdpa import MAX_WIDTH
from tswift.caches import FullKV, PartialKV
from tswift.forward.adapting import wrap_model
from tswift.forward.cpu.runner import CompiledRunner
from tswift.forward.eager import EagerRunner
from tswift.forward.passes import PROMPT_CHUNK, Nodes
from tswift.forward.target import Ask, Target, Verified

VOCAB = 60  # tokens that all the models have
LENGTHS = [0, 1, 63, 64, 150, 700]
PROGRAMS: dict[str, Callable[[], Target]] = {
    "llama, 16-bit cache": lambda: test_program.target_of("llama", kv_dtype=torch.int16),
    "windows, 16-bit cache": lambda: test_program.target_of("gemma3", kv_dtype=torch.int16),
    "windows, soft caps, floats": lambda: test_program.target_of("gemma2"),
    "recurrent, 16-bit cache": lambda: test_program.target_of("qwen3.5", kv_dtype=torch.int16),
    "8-bit cache": lambda: test_program.target_of("qwen3", kv_dtype=torch.int8),
    "one KV head": lambda: test_program.target_of("llama", num_key_value_heads=1),
    "4-bit codes": lambda: coded(4),
    "8-bit codes": lambda: coded(8),
}
STOCK = [
    ("Llama, wide", torch.bfloat16),
    ("Qwen3.5 to 3.8 (gated delta nets)", torch.bfloat16),
    ("Bamba (Mamba2)", torch.bfloat16),
    ("LFM2 (short convolutions)", torch.bfloat16),
    ("Gemma 2 (windows, soft caps)", torch.bfloat16),
    ("Llama, GQA", torch.float64),
    ("Qwen3.5 to 3.8 (gated delta nets)", torch.float64),
]


def coded(bits: int) -> Target:
    made = test_integers.coded("llama", bits, 16, tied=False)
    return wrap_model(made, "llama", "native", kv_dtype=torch.int16)


class Text(NamedTuple):
    """A text and what is asked of it: its cache's length and spare slots, and a tree or a chain."""

    held: int
    spare: int
    nodes: int
    chain: bool
    seed: int

    def cache(self, target: Target) -> FullKV:
        slots = self.held + self.nodes + self.spare
        if target.runner.program is None:
            return cache_of(target, slots, self.held, self.seed)
        kv = test_program.filled(target, self.held, self.nodes + self.spare)
        for buffer in kv.buffers:  # texts of one length differ
            buffer[:, :, : self.held] = buffer[:, :, : self.held].roll(self.seed, 2)
        return kv

    def ask(self, target: Target, kv: FullKV) -> Ask:
        tree = random_tree(self.nodes, Random(self.seed), VOCAB)
        places = [*range(self.nodes)] if self.chain else tree.depths
        ancestors = None if self.chain else tree.ancestors()
        nodes = Nodes(torch.tensor(tree.tokens), torch.tensor(places) + self.held, kv, ancestors)
        return Ask(target, nodes, lambda logits: self.seed + len(logits))

    def path(self) -> list[int]:
        """Nodes that are accepted."""
        if self.chain:
            return [*range(1 + self.seed % self.nodes)]
        tree = random_tree(self.nodes, Random(self.seed), VOCAB)
        path = [self.seed % self.nodes]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        return path


texts = st.lists(
    st.builds(
        Text,
        held=st.sampled_from(LENGTHS),
        spare=st.integers(0, 40),
        nodes=st.sampled_from([1, 1, 2, 5, 16]),
        chain=st.booleans(),
        seed=st.integers(0, 1000),
    ),
    min_size=1,
    max_size=6,
)
partitions = st.lists(st.booleans(), min_size=6, max_size=6)  # after which texts a round ends


def found_by(text: Text, target: Target, kv: FullKV, verified: Verified) -> list[Tensor]:
    """All that a text has of a pass: its result, what was written, and what a commit makes."""
    forwarded = verified.forwarded
    end = kv.length + text.nodes
    written = [buffer[:, :, kv.length : end].clone() for buffer in kv.buffers]
    queries = [query[:, : text.nodes] for query in forwarded.queries]
    kv.commit(text.path())
    assert verified.drawn == text.seed + text.nodes
    return [forwarded.hidden, verified.logits, *queries, *written, *state_of(kv)]


def same_bits(target: Target, wanted: Sequence[Text], ends: Sequence[bool]) -> None:
    """Each of the texts has its bits, whichever are asked for together."""
    alone = []
    for text in wanted:
        kv = text.cache(target)
        alone.append(found_by(text, target, kv, target.verify([text.ask(target, kv)])[0]))
    caches = [text.cache(target) for text in wanted]
    together: list[int] = []
    for place, ended in zip(range(len(wanted)), ends, strict=False):
        together.append(place)
        if not ended and place + 1 < len(wanted):
            continue
        asks = [wanted[each].ask(target, caches[each]) for each in together]
        for each, verified in zip(together, target.verify(asks), strict=True):
            found = found_by(wanted[each], target, caches[each], verified)
            for own, other in zip(found, alone[each], strict=True):
                assert torch.equal(own, other), (each, wanted)
        together = []


@functools.cache
def program(kind: str) -> Target:
    made = PROGRAMS[kind]()
    assert made.runner.program is not None, made.fallbacks
    made.tap()
    return made


@needs_program
@pytest.mark.parametrize("kind", PROGRAMS)
@given(wanted=texts, ends=partitions)
def test_a_programs_texts_have_their_bits(kind, wanted, ends):
    same_bits(program(kind), wanted, ends)


@pytest.mark.parametrize(("kind", "dtype"), STOCK)
@given(wanted=texts, ends=partitions)
def test_texts_have_their_bits_by_pytorch(kind, dtype, wanted, ends):
    same_bits(exact_target(kind, dtype), wanted, ends)


def asked(target: Target, *texts: Text) -> list[Ask]:
    return [text.ask(target, text.cache(target)) for text in texts]


@pytest.fixture
def passes(monkeypatch):
    """The texts of each pass that several have."""
    found = []
    for runner in (EagerRunner, CompiledRunner):
        right = runner.forward_together

        def counted(self, texts, right=right):
            found.append([len(nodes) for nodes in texts])
            return right(self, texts)

        monkeypatch.setattr(runner, "forward_together", counted)
    return found


@needs_program
@pytest.mark.parametrize("threads", [1, 2])
def test_a_programs_texts_share_threads_whatever_their_lengths(threads, passes):
    """And one that is very long keeps all of them busy by itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target = program("one KV head" if threads == 1 else "llama, 16-bit cache")
        wanted = [Text(held, 3, 2, False, held) for held in (10, 16_400, 500, 16_390, 0, 90)]
        same_bits(target, wanted, [False] * 6)
    finally:
        torch.set_num_threads(before)
    assert passes == [[2] * 6]


@needs_program
def test_a_program_takes_as_many_texts_as_a_prompt_has_rows(passes):
    target = program("llama, 16-bit cache")
    assert target.runner.most_rows == PROMPT_CHUNK
    found = target.verify(asked(target, *[Text(9, 0, MAX_WIDTH, False, at) for at in range(9)]))
    assert passes == [[MAX_WIDTH] * 8]  # and one of its own
    assert [each.drawn for each in found] == [MAX_WIDTH + at for at in range(9)]


@needs_program
def test_what_does_not_fit_has_a_pass_of_its_own(passes):
    target = program("8-bit cache")
    other = FullKV(test_program.target_of("qwen3").kv_shape, 20)
    fit = [Text(9, 0, 3, False, at) for at in range(3)]
    chain = Text(9, 0, MAX_WIDTH + 1, True, 4)
    asks = asked(target, fit[0], chain, *fit[1:])
    asks.insert(
        3, Ask(target, asks[2].nodes.__class__(*list(vars(asks[2].nodes).values())[:2], other), len)
    )
    target.verify(asks)
    assert passes == []
    target.verify([asks[0], *asks[2:3], *asks[4:]])
    assert passes == [[3, 3, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_not_exact_have_passes_of_their_own(dtype, passes):
    target = tiny_target(dtype=dtype)
    assert target.runner.most_rows is None
    wanted = [Text(9, 0, 2, False, at) for at in range(3)]
    same_bits(target, wanted, [False] * 3)
    assert passes == []


def test_texts_fill_a_pass_of_fixed_rows_and_no_more(passes):
    target = exact_target("Llama, GQA", torch.float64)
    assert target.runner.most_rows == target.fixed_rows == 16
    partial = PartialKV(target.kv_shape, 8, 2, scratch=4)
    sizes = [8, 8, 1, 12, 4, 2, 3]
    asks = asked(target, *[Text(70, 0, size, False, size) for size in sizes])
    asks.append(Ask(target, Nodes(torch.tensor([3]), torch.tensor([0]), partial), len))
    assert len(target.verify(asks)) == len(asks)
    assert passes == [[8, 8], [1, 12], [4, 2, 3]]


def test_a_text_pays_for_its_rows(monkeypatch):
    """Of a pass that takes so many seconds by the clock."""
    clock = iter([1.0, 4.0, 10.0, 15.0])
    monkeypatch.setattr("tswift.forward.target.time.perf_counter", lambda: next(clock))
    target = exact_target("Llama, GQA", torch.float64)
    found = target.verify(asked(target, *[Text(9, 0, size, False, 1) for size in (2, 1, 9)]))
    assert [each.share for each in found] == [0.5, 0.25, 2.25]
    assert target.verify(asked(target, Text(9, 0, 7, False, 1)))[0].share == 5.0


@needs_program
def test_a_text_alone_is_one_function_with_its_draw():
    target = program("llama, 16-bit cache")
    seen = []

    def draw(logits: Tensor, verification: int | None = None) -> None:
        seen.append((len(logits), verification is None))

    nodes = [ask.nodes for ask in asked(target, *[Text(9, 0, 3, False, 1)] * 2)]
    for by_program in (True, False):
        target.verify([Ask(target, nodes[0], draw, by_program)])
    target.verify([Ask(target, each, draw, True) for each in nodes])
    assert seen == [(3, False), (3, True), (3, True), (3, True)]
