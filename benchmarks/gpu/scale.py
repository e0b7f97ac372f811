"""How much is measured: everything on a GPU, next to nothing in a dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Qwen2Config


@dataclass(frozen=True)
class Scale:
    """What is measured, and how often.

    Attributes:
        shapes: by name, the most wanted first.
        judged: those that the targets speak of.
        main: the one whose loop, peer and long text are measured.
        compiled: those measured with compiled layers too, where ``load`` does not compile them.
        backend: of ``torch.compile``.
        contexts: tokens in the cache.
        nodes: of the draft trees.
        budget: tokens of the partial cache that a drafting pass reads.
        rounds: timed passes of each kind, after ``warmups`` that are not timed.
        place: tokens of context for the loop and the peer.
        steps: timed steps of the loop.
        peer_tokens: tokens that ``generate`` makes; the second half of them is timed, the first holds its compiling.
        lens: generated lengths of the long texts.
        prefill: their prompt's tokens.
        patient: False begins every section, however little time is left, and draws no plots of texts; for dry runs.
    """

    shapes: tuple[str, ...]
    judged: tuple[str, ...]
    main: str
    compiled: tuple[str, ...]
    backend: str
    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    budget: int
    rounds: int
    warmups: int
    place: int
    steps: int
    peer_tokens: int
    lens: tuple[int, ...]
    prefill: int
    patient: bool = True


FULL = Scale(
    shapes=("llama3.1-8b", "yarn-llama2-7b-128k", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-1.5b"),
    judged=("llama3.1-8b", "yarn-llama2-7b-128k", "qwen2.5-7b", "qwen2.5-14b"),
    main="llama3.1-8b",
    compiled=("llama3.1-8b",),
    backend="inductor",
    contexts=(4096, 20_000, 40_000, 60_000, 80_000, 100_000),
    nodes=(1, 41, 121),
    budget=4096,
    rounds=20,
    warmups=3,
    place=60_000,
    steps=100,
    peer_tokens=96,
    lens=(20_000, 40_000, 60_000, 80_000, 100_000),
    prefill=4096,
)

DRY = Scale(
    shapes=("tiny-llama", "tiny-qwen"),
    judged=("tiny-llama",),
    main="tiny-llama",
    compiled=("tiny-llama",),
    backend="eager",  # traced for real; code for a CPU would take a minute to make
    contexts=(64, 300),
    nodes=(1, 5),
    budget=128,
    rounds=3,
    warmups=1,
    place=300,
    steps=4,
    peer_tokens=8,
    lens=(20, 40),
    prefill=160,
    patient=False,
)

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 7,
    "eos_token_id": 7,
    "dtype": "bfloat16",
}


def tiny_shapes() -> dict[str, Any]:
    """Configurations of the shapes of a dry run."""
    return {
        "tiny-llama": LlamaConfig(**_TINY, tie_word_embeddings=False),
        "tiny-qwen": Qwen2Config(**_TINY, tie_word_embeddings=True),
    }
