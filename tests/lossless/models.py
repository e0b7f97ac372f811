"""Models whose passes are exact, made for a test: random ones of several architectures,
in any dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.architectures import ARCHITECTURES, Architecture
from tests.helpers import VOCAB, seeded
from tswift.attention.sdpa import BatchInvariantAttention
from tswift.caches import FullKV, steps_of
from tswift.decoding.drafter import DraftTree
from tswift.forward.exact_passes import choose_fixed_rows, fingerprint
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import chunks

POSITIONS = 4096
WRONG = 60  # tokens from here on are in no text
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE = "Llama, wide"  # products of so many terms that every other order of summing shows
_WIDE = Architecture(
    "LlamaConfig", {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
)
KINDS = (
    WIDE,
    "Llama, MHA",
    "Llama, GQA",
    "Llama, MQA, biases",
    "Qwen2.5",
    "Qwen2, sliding window in a layer",
    "Mistral 7B v0.1 (sliding window)",
    "Gemma 2 (windows, soft caps)",
    "Gemma 3 (windows)",
    "Gemma 4 (K = V, other heads in global layers)",
    "Gemma 4 E (shared keys and values, embeddings by layer)",
    "GPT-2",  # learned positions
    "LFM2 (short convolutions)",
    "Qwen3.5 to 3.8 (gated delta nets)",
    "Bamba (Mamba2)",
)


class ExactOnDevice(BatchInvariantAttention):
    """Exact attention that may be told the length by a tensor, as the one by Triton is."""

    STATIC = True

    def __init__(self, layout, prefix, nodes, ancestors):
        self._end = int(prefix) + nodes
        super().__init__(layout, prefix, nodes, ancestors)

    def __call__(self, query, keys, values, scale, **wants):
        return super().__call__(query, keys[:, : self._end], values[:, : self._end], scale, **wants)

    @staticmethod
    def store(keys, values, new_keys, new_values, length):
        end = int(length) + new_keys.shape[1]
        assert end <= keys.shape[1]
        keys[:, int(length) : end], values[:, int(length) : end] = new_keys, new_values


class CodesOnDevice(ExactOnDevice):
    """As :class:`ExactOnDevice`, over a cache of codes as the one by Triton reads it."""

    STEPS_BEHIND = True

    def __call__(self, query, keys, values, scale, **wants):
        if keys.dtype == torch.int8:
            keys, values = (each * steps_of(each).unsqueeze(-1) for each in (keys, values))
        return super().__call__(query, keys, values, scale, **wants)

    @staticmethod
    def store(keys, values, new_keys, new_values, length):
        slots = slice(int(length), int(length) + new_keys.shape[1])
        assert slots.stop <= keys.shape[1]
        for codes, new in ((keys, new_keys), (values, new_values)):
            numbers = new.float()
            steps = numbers.abs().amax(-1, keepdim=True) / 127
            steps_of(codes)[:, slots] = steps[..., 0]
            codes[:, slots] = (numbers / steps).round().where(steps > 0, 0)


def network(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights, the same at every call."""
    known = _WIDE if kind == WIDE else ARCHITECTURES[kind]
    longer = replace(known, settings={**known.settings, "max_position_embeddings": POSITIONS})
    with torch.random.fork_rng():
        made = longer.make(VOCAB).to(dtype)
    return made


@functools.cache
def exact_target(
    kind: str, dtype: torch.dtype, attention: type = BatchInvariantAttention
) -> Target:
    """A model that is seen to be exact."""
    target = Target(network(kind, dtype), attention)
    assert choose_fixed_rows(target, "sdpa", True) is None
    fingerprint(target)
    return target


def cache_of(target: Target, slots: int, held: int = 0, seed: int = 0) -> FullKV:
    """A cache with room for ``slots``, of which ``held`` have random keys and values:
    a prompt in no time.
    """
    kv = FullKV(target.kv_shape, slots)
    random = seeded(seed)
    for buffer in kv.buffers:
        buffer.fill_(float("nan"))  # what is not there must not be read
        shape = buffer[:, :, :held].shape
        buffer[:, :, :held] = torch.randn(shape, generator=random).to(buffer)
    kv.length = held
    if kv.states is not None:
        for state in (kv.states.rows, kv.states.matrices):
            state.copy_(torch.randn(state.shape, generator=random))
    return kv


def state_of(kv: FullKV) -> list[Tensor]:
    """All that a cache holds."""
    states = [] if kv.states is None else [kv.states.rows, kv.states.matrices]
    return [*(buffer[:, :, : kv.length] for buffer in kv.buffers), *states]


def plainly(target: Target, text: Sequence[int], kv: FullKV) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of a text, ``[n, H]`` and ``[n, V]``, forwarded token by token."""
    found = []
    for token in text:
        found.append(
            target.forward(Nodes(torch.tensor([token]), torch.tensor([kv.length]), kv, None)).hidden
        )
        kv.commit([0])
    return torch.cat(found), torch.cat([target.logits(each) for each in found])


def by_trees(
    target: Target, text: Sequence[int], kv: FullKV, random: Random, size: int
) -> tuple[Tensor, Tensor]:
    """As :func:`plainly`, by passes over random trees that have a piece of the text on one path,
    scattered.
    """
    hidden = []
    logits = []
    at = 0
    while at < len(text):
        nodes = random.randint(1, size)
        piece = text[at : at + random.randint(1, nodes)]
        tree = DraftTree(piece[0], nodes)
        path = [0]
        while len(tree) < nodes or len(path) < len(piece):
            left = nodes - len(tree), len(piece) - len(path)
            if random.randrange(left[0]) < left[1]:
                node = tree.grow(path[-1], piece[len(path)], "text")
                path.append(node)
            else:
                tree.grow(
                    random.randrange(len(tree)), WRONG + random.randrange(VOCAB - WRONG), "random"
                )
        places = torch.tensor(tree.depths) + kv.length
        forwarded = target.forward(Nodes(torch.tensor(tree.tokens), places, kv, tree.ancestors()))
        hidden.append(forwarded.hidden[path])
        logits.append(target.logits(forwarded.hidden)[path])
        kv.commit(path)
        at += len(piece)
    return torch.cat(hidden), torch.cat(logits)


def by_chunks(
    target: Target, text: Sequence[int], kv: FullKV, random: Random, size: int
) -> tuple[Tensor, Tensor]:
    """As :func:`plainly`, by chunks of random sizes."""
    hidden = []
    at = 0
    while at < len(text):
        chunk = text[at : at + random.randint(1, size)]
        hidden += [forwarded.hidden for forwarded in chunks(target, chunk, kv)]
        at += len(chunk)
    return torch.cat(hidden), target.logits(torch.cat(hidden))
