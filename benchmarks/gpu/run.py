"""What the measuring sections share: how much is measured, the model at hand,
and decodes at any context.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig

from benchmarks.gpu import note
from tswift.benchmarking.roofline import Machine
from tswift.benchmarking.run import SimulatedWalk
from tswift.caches import FullKV, KVBuffer
from tswift.drafting.options import DraftOptions
from tswift.engine import Generation, Request, begin
from tswift.forward.passes import Forwarded
from tswift.forward.target import Target
from tswift.forward.text import chunks
from tswift.loading.model import LoadedModel, load
from tswift.machine import synchronize
from tswift.models.checkpoint import SHAPES
from tswift.models.config import SHAPE_PREFIX

ALPHA = 0.9  # simulated acceptance
TOKENS = 100_000  # of the text whose time is integrated
_WORDS = 500  # tokens that texts are made of, so that n-grams come again
_SPREAD = 4.0  # of their logits, so that random weights draw them and no others
_FORWARDED = 64  # tokens of a prompt that are really forwarded


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    main: str = "llama3.1-8b"  # shape of which everything is measured
    # tokens, in order of value
    contexts: tuple[int, ...] = (4096, 100_000, 50_000)
    nodes: tuple[int, ...] = (1, 8, 16, 32)  # of verification passes
    tree: int = 32  # nodes of the pass whose kernels are looked at
    budget: int = 4096  # tokens of the partial cache that a draft pass reads
    rounds: int = 12  # timed passes of each kind
    steps: int = 20  # timed steps of each kind
    text: int = 12_000  # tokens with simulated acceptance
    peer: int = 8192  # tokens of the prompt of transformers' generate
    # that methods write, and of their prompt: by a shape, and by a model with a tokenizer
    texts: tuple[int, int] = (120, 4096)
    own_texts: tuple[int, int] = (2000, 1024)


DRY = Scale(
    main="tiny-llama",
    contexts=(1100, 1200),  # n-grams are taken from what has left the penalty's window of 1,024
    nodes=(1, 8),
    tree=8,
    budget=128,
    rounds=2,
    steps=3,
    text=40,
    peer=48,
    texts=(12, 60),
    own_texts=(12, 60),
)


def add_tiny_shape() -> None:
    """Make the shape of a dry run known."""
    SHAPES[DRY.main] = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=4096,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="bfloat16",
    )


class Run:
    """A process that measures: its section and when that ends, the device's rates, and a model."""

    def __init__(self, folder: Path, scale: Scale, device: torch.device, section: str) -> None:
        self.folder, self.scale, self.device = folder, scale, device
        self.section = section
        self.until = 0.0
        self.machine = Machine(1.0, 1.0)
        self._model: LoadedModel | None = None
        if scale is DRY:
            add_tiny_shape()

    def late(self) -> bool:
        """Whether no time is left to the section; it is noted then that something is left out."""
        if self.until < time.time():
            self.note("left out", why="its time was up")
            return True
        return False

    def note(self, table: str, **values: Any) -> None:
        """Write one figure, or one row of figures, at once."""
        note(self.folder, self.section, table, **values)

    def load(self, name: str, **how: Any) -> LoadedModel:
        """A model in bfloat16, and what is told of it."""
        started = time.perf_counter()
        model = load(name, device=str(self.device), dtype="bfloat16", **how)
        if self.scale is DRY and model.simulated:
            # decode as on a GPU, by programs, without the slow interpreter
            from tests.forward.test_passes import LengthOnDevice

            model.target.backend = LengthOnDevice
        synchronize(model.target.device)
        about = {
            key: model.about()[key]
            for key in ("name", "dtype", "attention", "layers", "exact", "heads")
        }
        about["inexact"] = model.target.fallbacks.get("exact")
        self.note("loaded", **about, seconds=time.perf_counter() - started)
        return model

    @property
    def model(self) -> LoadedModel:
        """The shape that is measured, with random weights that draw few tokens."""
        if self._model is None:
            self.take()
        assert self._model is not None
        return self._model

    def take(self, **how: Any) -> None:
        """Measure that shape from now on, loaded with options."""
        self._model = model = self.load(SHAPE_PREFIX + self.scale.main, **how)
        if "weights" in how:  # codes, whose logits are what they are
            return
        rows = model.target.model.get_output_embeddings().weight[: _words(model)]
        with torch.inference_mode():  # hidden states are as long as the root of their size
            rows.mul_(_SPREAD / float(rows.double().std()) / model.target.hidden_size**0.5)

    def drop_model(self) -> None:
        """Let go of the model."""
        self._model = None
        self.tidy()

    def tidy(self) -> None:
        """Let go of the device's memory."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def at_context(
    model: LoadedModel,
    method: str,
    context: int,
    length: int,
    nodes: int | None = None,
    **settings: Any,
) -> Generation:
    """A decode that stands at so many tokens without having forwarded them:
    most of its cache is noise.

    Its text is made of few tokens, so that n-grams are found as in a real one. If it drafts,
    acceptance is simulated.
    """
    ids = torch.randint(
        _words(model), (context + 1,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    walk = None if method == "ar" else lambda depth: SimulatedWalk(ALPHA, depth)
    decode = begin(
        model,
        Request(
            prompt=ids, length=length, method=method, options=DraftOptions(nodes=nodes), **settings
        ),
        simulate=walk,
    )

    def last(
        target: Target, tokens: Sequence[int], kv: FullKV, prompt: int | None = None
    ) -> Iterator[Forwarded]:
        noisy(kv)
        kv.length = max(0, len(tokens) - _FORWARDED)
        yield from chunks(target, tokens[kv.length :], kv, prompt)

    with patch("tswift.decoding.loop.chunks", last):
        decode.decoding.prefill()
    return decode


def _words(model: LoadedModel) -> int:
    return min(_WORDS, model.target.vocab_size // 16)


def noisy(kv: KVBuffer) -> None:
    """Fill a cache with noise."""
    for buffer in kv.buffers:
        if not kv.shape.steps_behind:
            buffer.normal_()
        elif buffer.dtype == torch.int8:
            buffer.random_(-127, 128)
        else:  # steps, of codes that spread by 73
            buffer.fill_(1 / 73)
