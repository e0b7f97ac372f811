"""What is asked of the training of a small model that is to draft for a large one, and the shapes it can have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import LlamaConfig

from tswift.errors import InputError
from tswift.training.corpus import jumping_positions
from tswift.training.loss import OBJECTIVES, TEXT
from tswift.training.plan import Schedule, refuse_others, refuse_outside

_FARTHEST = 1 << 24  # positions, as in models.positions

# Vocabulary and special tokens are the large model's.
SHAPES: dict[str, Any] = {
    # The paper's table 11. It says nothing of layers and embeddings; two layers and an LM head of its own, as the
    # model of 68M parameters has that TriForce drafts with, make 205.9 x 2^20 parameters with LLaMA3.1's vocabulary.
    "205m": LlamaConfig(
        vocab_size=128_256,
        hidden_size=768,
        hidden_act="silu",
        intermediate_size=3072,
        max_position_embeddings=2048,
        num_attention_heads=12,
        num_key_value_heads=12,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        num_hidden_layers=2,
        tie_word_embeddings=False,
    ),
    # the bundled one's, half a million parameters with a vocabulary of 2,048
    "demo": LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=512,
        max_position_embeddings=131_072,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        num_hidden_layers=1,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class DraftPlan(Schedule):
    """A training of a small model from random weights.

    Attributes:
        shape: one of ``SHAPES``.
        reach: positions that it is made for; None for the shape's own. Rows are shorter: a random tail of each is moved
            forward by a random jump, up to here.
        objective: ``text``, or ``distill``: the large model's own distribution.

    Raises:
        InputError: a value outside its range.
    """

    seq_len: int = 512
    steps: int | None = None
    batch: int = 16
    accumulate: int = 1
    lr: float = 0.02
    weight_decay: float = 0.01
    shape: str = "demo"
    reach: int | None = None
    objective: str = TEXT

    FREE: ClassVar[frozenset[str]] = Schedule.FREE

    def __post_init__(self) -> None:
        refuse_others(self, {"shape": tuple(SHAPES), "objective": OBJECTIVES})
        refuse_outside(self, {"reach": 2}, {} if self.reach is None else {"reach": _FARTHEST})
        super().__post_init__()
        if self.seq_len > self.farthest:
            raise InputError(
                f"is {self.seq_len:,}, the draft model is to have {self.farthest:,} positions", "--seq-len"
            )

    @property
    def farthest(self) -> int:
        """Positions that the model is made for."""
        return self.reach or SHAPES[self.shape].max_position_embeddings

    def positions(self, key: Sequence[int]) -> np.ndarray | None:
        """Where the tokens of a batch are, so that far positions are learnt from short rows."""
        if self.farthest < self.seq_len + 2:
            return None  # no room to jump
        rng = np.random.default_rng([*key, 1])  # the rows are drawn with the key alone
        return jumping_positions(self.batch, self.seq_len, self.farthest, rng)
