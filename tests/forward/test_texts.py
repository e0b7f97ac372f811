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
from tests.helpers import needs_program, random_tree
from tests.lossless.models import cache_of, exact_target, state_of
from tswift.caches import FullKV
from tswift.forward.adapting import wrap_model
from tswift.forward.passes import Nodes
from tswift.forward.target import Ask, Target, Verified

VOCAB = 97
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

    def ask(self, target: Target, kv: FullKV) -> Ask[int]:
        tree = random_tree(self.nodes, Random(self.seed), VOCAB if VOCAB < 60 else 60)
        places = [*range(self.nodes)] if self.chain else tree.depths
        ancestors = None if self.chain else tree.ancestors()
        nodes = Nodes(torch.tensor(tree.tokens), torch.tensor(places) + self.held, kv, ancestors)
        return Ask(target, nodes, lambda logits: self.seed + len(logits))

    def path(self) -> list[int]:
        """Nodes that are accepted."""
        if self.chain:
            return [*range(1 + self.seed % self.nodes)]
        tree = random_tree(self.nodes, Random(self.seed), 60)
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


def found_by(text: Text, target: Target, kv: FullKV, verified: Verified[int]) -> list[Tensor]:
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
