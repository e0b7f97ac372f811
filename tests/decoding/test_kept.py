"""A text that is begun from another's cache is the one that it would be alone, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import (
    NO_PROGRAM,
    first,
    needs_program,
    options_for,
    random_prompt,
    tiny_target,
)
from tests.lossless.models import WIDE, exact_target, network
from tswift.decoding import kept as module
from tswift.decoding.audit import audit
from tswift.decoding.drafter import Step
from tswift.decoding.kept import KeptCaches
from tswift.decoding.loop import Decoding, NotFinite
from tswift.drafting.methods import make_drafter
from tswift.forward import text as texts
from tswift.forward.adapting import wrap_model
from tswift.forward.exact_passes import choose_fixed_rows
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams

CHUNK = 24
PARAMS = SamplingParams(temperature=0.7, penalty=1.1, window=16)
METHODS = ("ar", "recall", "cascade", "auto")
DELTA = "Qwen3.5 to 3.8 (gated delta nets)"


def chunked(kind: str) -> Target:
    """A model whose prompts have passes of their own, with other bits."""
    target = exact_target(kind, torch.bfloat16)
    made = Target(target.model, target.backend)
    made.set_fixed_rows(target.fixed_rows, chunked_prompt=True)
    return made


@functools.cache
def by_program(kind: str, kv_dtype: torch.dtype) -> Target:
    """A model whose passes the C program makes."""
    target = wrap_model(network(kind, torch.float32), kind, "native", kv_dtype=kv_dtype)
    assert target.runner.program is not None
    assert choose_fixed_rows(target, "native", True) is None
    return target


KINDS = {
    "C, int16": partial(by_program, WIDE, torch.int16),
    "PyTorch, prompts in chunks": partial(chunked, WIDE),
    "delta nets in chunks": partial(chunked, DELTA),
    "windows": partial(exact_target, "Mistral 7B v0.1 (sliding window)", torch.bfloat16),
    "PyTorch": partial(exact_target, "Llama, GQA", torch.bfloat16),
    "windows in chunks": partial(chunked, "Gemma 3 (windows)"),
    "delta nets": partial(exact_target, DELTA, torch.bfloat16),
    "convolutions": partial(exact_target, "LFM2 (short convolutions)", torch.bfloat16),
    "C": partial(by_program, WIDE, torch.float32),
    "C, int8": partial(by_program, WIDE, torch.int8),
    "C, delta nets": partial(by_program, DELTA, torch.int16),
}


@contextmanager
def small() -> Iterator[None]:
    """Chunks and texts are short, so that many borders are met."""
    with (
        mock.patch.object(texts, "PROMPT_CHUNK", CHUNK),
        mock.patch.object(module, "PROMPT_CHUNK", CHUNK),
        mock.patch.object(module, "_LEAST", 3),
    ):
        yield


def decoded(
    target: Target,
    prompt: list[int],
    length: int,
    method: str = "ar",
    caches: KeptCaches | None = None,
    written: tuple[int, ...] = (),
) -> tuple[Decoding, list[Step]]:
    options = options_for(method, sinks=4, budget=64)
    drafter = make_drafter(method, target, None, options, None)
    kv = caches and caches.begin(
        target, [*prompt, *written], len(prompt), len(prompt) + length + drafter.limit, 1, 0
    )
    made = Decoding(target, prompt, PARAMS, 3, drafter, length, written=written, logprobs=2, kv=kv)
    return made, [*made.steps()]


def same(one: tuple[Decoding, list[Step]], other: tuple[Decoding, list[Step]]) -> None:
    """Two decodes gave the same tokens, log-probabilities, keys, values and states."""
    tokens, rows = zip(
        *(
            (
                [token for step in steps for token in step.tokens],
                np.concatenate([step.logprobs for step in steps]).tobytes(),
            )
            for _, steps in (one, other)
        ),
        strict=True,
    )
    assert tokens[0] == tokens[1]
    assert rows[0] == rows[1]
    caches = [each._kv for each, _ in (one, other)]
    for ours, theirs in zip(*(each.buffers for each in caches), strict=True):
        held = min(each.length for each in caches)
        assert torch.equal(ours[:, :, :held], theirs[:, :, :held])


@st.composite
def conversations(draw) -> list[tuple[int, int, int, int, str, bool]]:
    """Of each text: the one that it is begun from, where it parts from that, its own tokens, how
    many are generated, the method, and whether it is let go of what more is there.
    """
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, 9),
                st.integers(0, 120),
                st.integers(1, 2 * CHUNK + 3),
                st.integers(1, 20),
                st.sampled_from(METHODS),
                st.booleans(),
            ),
            min_size=2,
            max_size=3,
        )
    )


def talk(target: Target, turns: list[tuple[int, int, int, int, str, bool]]) -> None:
    """Hold a conversation, each text of which is the one alone, the last one by an audit, too."""
    caches = KeptCaches()
    said = [random_prompt(70, 1)]
    with small():
        for index, (before, cut, more, length, method, settled) in enumerate(turns):
            if target.kv_shape.states is not None and method == "cascade":
                method = "ar"
            begun = said[min(before, len(said) - 1)] if before else said[-1]
            prompt = begun[: cut or len(begun)] + random_prompt(more, 50 + index)
            one = decoded(target, prompt, length, method, caches)
            same(one, decoded(target, prompt, length))
            said.append(one[0]._context.text)
            caches.keep(one[0])
            if settled:
                caches.settle()
        tokens = [token for step in one[1] for token in step.tokens]
        judged = audit(target, prompt, tokens, PARAMS, 3)
        assert judged.exact == len(tokens)


@pytest.mark.parametrize("kind", first(3, KINDS))
@given(turns=conversations())
def test_a_text_begun_from_a_cache_is_the_one_alone(kind, turns):
    if kind[0] == "C" and NO_PROGRAM is not None:
        pytest.skip(str(NO_PROGRAM))
    talk(KINDS[kind](), turns)


def kept(target: Target, *prompts: list[int], **given) -> KeptCaches:
    """The caches of some texts of 8 tokens each, the last one used last."""
    caches = KeptCaches(**given)
    for prompt in prompts:
        caches.keep(decoded(target, prompt, 8, "ar", caches)[0])
        caches.settle()
    return caches


def found(target: Target, caches: KeptCaches, prompt: list[int], needed: int = 0) -> int:
    return caches.begin(target, prompt, len(prompt), len(prompt) + 8, 1, needed).length


TEXTS = [random_prompt(100, seed) for seed in range(3)]


def test_rows_that_are_not_exact_serve_nobody_but_who_says_so():
    target = tiny_target()
    again = [*TEXTS[0], 1]
    assert kept(target, TEXTS[0]).nbytes == 0
    assert found(target, kept(target, TEXTS[0], inexact=True), again, 0) == 99
    # nor where a model's rows are exact no more
    caches = kept(target, TEXTS[0], inexact=True)
    caches._inexact = False
    assert found(target, caches, again) == 0


def test_a_text_is_gone_on_with_in_its_own_buffers_if_they_have_room():
    target = KINDS["PyTorch"]()
    caches = kept(target, *TEXTS)
    held = [each.kv for each in caches._texts]
    for place in (2, 0):
        taken = caches.begin(target, [*TEXTS[place], 1, 2], 102, 110, 1, 0)
        assert taken.length == 100
        assert taken.buffers[0].data_ptr() == held[place].buffers[0].data_ptr()
    copied = caches.begin(target, [*TEXTS[1], 1, 2], 102, 200, 1, 0)
    assert (copied.length, [each.kv for each in caches._texts]) == (100, [held[1]])
    # nor is a text that would lose much taken over
    with mock.patch.object(module, "PROMPT_CHUNK", 10):
        caches = kept(target, TEXTS[1])
        assert found(target, caches, TEXTS[1][:90]) == 88
        assert len(caches._texts) == 1


def test_a_gpu_keeps_no_room_that_nothing_is_in():
    caches = kept(KINDS["PyTorch"](), *TEXTS)
    before = [each.kv.capacity - each.kv.length for each in caches._texts]
    assert before == [8 + 1 + 109 // 8 - 7] * 3
    texts = [*caches._texts]
    texts[-1].kv.rows = None  # as of a GPU's
    with mock.patch.object(module._Text, "trim") as trimmed:
        caches.settle()
    assert trimmed.call_count == 3
    texts[0].trim()
    assert texts[0].kv.capacity == texts[0].kv.length


def test_caches_take_no_more_than_they_may():
    target = KINDS["PyTorch"]()
    size = 107 * target.kv_shape.bytes_per_token
    assert kept(target, *TEXTS).nbytes == 3 * size
    for most, there in ((3 * size, 3), (3 * size - 1, 2), (size, 1), (size - 1, 0), (0, 0)):
        caches = kept(target, *TEXTS, most=most / 1e9)
        assert [found(target, caches, [*text, 1]) > 0 for text in TEXTS] == [
            index >= 3 - there for index in range(3)
        ]
    free = 7 * size  # beside what they take, which makes eight
    with mock.patch.object(module, "available_bytes", return_value=free):
        assert kept(target, *TEXTS).nbytes == 2 * size
    with mock.patch.object(module, "available_bytes", return_value=None):
        assert kept(target, *TEXTS).nbytes == 0


def test_a_decode_gets_the_memory_that_it_needs():
    target = KINDS["PyTorch"]()
    caches = kept(target, *TEXTS)
    size = caches.nbytes // 3
    free = mock.Mock(side_effect=lambda device: 4 * size - caches.nbytes)
    with mock.patch.object(module, "available_bytes", free):
        assert found(target, caches, [*TEXTS[2], 1], 3 * size) == 99
        assert len(caches._texts) == 2  # what was taken is a part of it
        assert found(target, caches, [*TEXTS[1], 1], 5 * size) == 99
        assert not caches._texts  # the oldest went


@pytest.mark.parametrize("kind", ["PyTorch, prompts in chunks", "delta nets in chunks"])
def test_what_was_written_before_serves_as_it_was_made(kind):
    """By narrow passes, if the prompt is the same: a run that goes on."""
    target = KINDS[kind]()
    with small():
        caches = kept(target, TEXTS[1])
        whole = decoded(target, TEXTS[0], 40, "ar", caches)
        written = tuple(whole[0]._context.text[100:130])
        caches.keep(whole[0])
        one = decoded(target, TEXTS[0], 40, "ar", caches, written)
        assert one[0].copied == (128 if target.kv_shape.states is None else 99)
        same(one, decoded(target, TEXTS[0], 40, written=written))
        # of another prompt with the same beginning they are not
        caches.keep(one[0])
        other = decoded(target, [*TEXTS[0], *written], 4, "ar", caches)
        assert other[0].copied == 96
        same(other, decoded(target, [*TEXTS[0], *written], 4))


def test_states_go_back_to_a_few_places():
    target = KINDS["delta nets"]()
    with small():
        caches = kept(target, random_prompt(600, 4))
        marks = [mark.length for mark in caches._texts[0].kv.marks]
        assert len(marks) <= 8
        assert marks[-1] == 607
        assert found(target, caches, [*random_prompt(600, 4)[:500], 1]) == max(
            mark for mark in marks if mark <= 499
        )


@needs_program
def test_faults_among_kept_integers_are_found():
    """What a text before it generated nobody has looked at yet."""
    target = KINDS["C, int16"]()
    caches = kept(target, TEXTS[0])
    caches._texts[0].kv.buffers[0][0, 0, 103] = -(2**15)
    text = [*caches._texts[0].tokens.tolist(), *random_prompt(20, 9)]
    with pytest.raises(NotFinite):
        decoded(target, text, 2, "ar", caches)
