"""What the measuring sections share: how much is measured, the model at hand, and the file that figures go to."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.gpu import FIGURES
from tswift.benchmarking.roofline import Machine
from tswift.benchmarking.simulated import SimulatedWalk
from tswift.decoding.generation import Generation, begin
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.kv.full import FullKV
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load
from tswift.models.passes import Forwarded
from tswift.models.shapes import PREFIX, SHAPES
from tswift.models.target import Target

ALPHA = 0.9  # simulated acceptance
TOKENS = 100_000  # of the text whose time is integrated
_WORDS = 500  # tokens that texts are made of, so that n-grams come again
_LOUDER = 3.0  # their rows of the LM head, so that random weights draw them
_FORWARDED = 64  # tokens of a prompt that are really forwarded


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        main: shape of which everything is measured.
        others: shapes of which passes are measured.
        contexts: tokens in the cache, in order of value.
        nodes: of verification passes.
        tree: nodes of the verification pass whose kernels are looked at.
        step_nodes: ``--nodes`` of real steps; None for the default.
        budget: tokens of the partial cache that a draft pass reads.
        rounds: timed passes of each kind.
        steps: timed steps of each kind.
        prefill: tokens of the prompt of long texts.
        text: tokens of the simulated text.
        peer: tokens of the prompt of transformers' generate.
        rows: of matrix products.
        load: seconds that a further shape takes to load, compile and measure; with less left it is left out.
    """

    main: str = "llama3.1-8b"
    others: tuple[str, ...] = ("yarn-llama2-7b-128k", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-1.5b")
    contexts: tuple[int, ...] = (4096, 100_000, 50_000, 20_000, 75_000, 35_000)
    nodes: tuple[int, ...] = (1, 8, 16, 24, 32, 48, 64)
    tree: int = 32
    step_nodes: tuple[int | None, ...] = (None, 16, 64)
    budget: int = 4096
    rounds: int = 20
    steps: int = 30
    prefill: int = 4096
    text: int = 20_000
    peer: int = 8192
    rows: tuple[int, ...] = (1, 8, 16, 32, 48, 64, 128)
    load: float = 45.0


DRY = Scale(
    main="tiny-llama",
    others=("tiny-mha",),
    contexts=(80, 300),
    nodes=(1, 8),
    tree=8,
    step_nodes=(None, 4),
    budget=128,
    rounds=2,
    steps=3,
    prefill=80,
    text=40,
    peer=48,
    rows=(1, 8),
    load=0.0,
)


def add_tiny_shapes() -> None:
    """Make the shapes of a dry run known."""
    tiny = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 7,
        "eos_token_id": 7,
        "dtype": "bfloat16",
    }
    for name, kv_heads in (("tiny-llama", 2), ("tiny-mha", 4)):
        SHAPES[name] = LlamaConfig(**tiny, num_key_value_heads=kv_heads)


class Run:
    """A process that measures.

    Args:
        folder: of the figures.
        scale: how much is measured.
        device: where.

    Attributes:
        section: the one under way.
        until: its end, in seconds since the epoch.
        machine: the device's rates, as measured.
    """

    def __init__(self, folder: Path, scale: Scale, device: torch.device) -> None:
        self.folder, self.scale, self.device = folder, scale, device
        self.section, self.until = "", 0.0
        self.machine = Machine(1.0, 1.0)
        self._model: LoadedModel | None = None

    @property
    def left(self) -> float:
        """Seconds left to the section."""
        return self.until - time.time()

    @property
    def late(self) -> bool:
        """Whether the section's time is up; what is left of it is left out then."""
        return self.left < 0

    def note(self, table: str, **values: Any) -> None:
        """Write one figure, or one row of figures, at once."""
        line = json.dumps({"section": self.section, "table": table, **values})
        with (self.folder / FIGURES).open("a") as file:
            file.write(line + "\n")

    def fill_up(self) -> None:
        """Note that the section ended early."""
        self.note("left out", why="its time was up")

    def model(self, name: str) -> LoadedModel:
        """A shape with random weights; the one before is let go of."""
        wanted = PREFIX + name
        if self._model is None or self._model.name != wanted:
            self._model = None
            self.tidy()
            started = time.perf_counter()
            self._model = model = load(wanted, device=str(self.device))
            with torch.inference_mode():
                model.target.model.get_output_embeddings().weight[:_WORDS].mul_(_LOUDER)
            model.target.synchronize()
            self.note("loaded", **model.about(), seconds=time.perf_counter() - started, graphs=model.target.graphs)
        return self._model

    def tidy(self) -> None:
        """Let go of memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def at_context(
    model: LoadedModel,
    method: str,
    context: int,
    length: int,
    *,
    nodes: int | None = None,
    params: SamplingParams | None = None,
    simulated: bool = False,
) -> Generation:
    """A decode that stands at so many tokens without having forwarded them: most of its cache is noise.

    Its text is made of few tokens, so that n-grams are found as often as in a real one.
    """
    generator = torch.Generator().manual_seed(1)
    words = min(_WORDS, model.target.vocab_size // 4)
    ids = torch.randint(words, (context + 1,), generator=generator).tolist()
    run = begin(
        model,
        ids,
        length,
        method=method,
        params=params or SamplingParams(),
        options=DraftOptions(nodes=nodes),
        walk=(lambda depth: SimulatedWalk(ALPHA, depth)) if simulated else None,
    )
    with _skipped_prefill(model.target):
        run.decoding.prefill()
    return run


@contextmanager
def _skipped_prefill(target: Target) -> Iterator[None]:
    """Have the target fill caches with noise and forward no more than the last tokens of a prompt."""
    forward = target.chunks

    def chunks(tokens: Sequence[int], kv: FullKV) -> Iterator[Forwarded]:
        kv.keys.normal_()
        kv.values.normal_()
        kv.length = max(0, len(tokens) - _FORWARDED)
        yield from forward(tokens[kv.length :], kv)

    target.chunks = chunks  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.chunks
