"""Sizes and switches of a published drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, PreTrainedConfig

from tswift.caches import KVShape, LayerKV

DSPARK, DFLASH, DFLASH2, EAGLE3 = "dspark", "dflash", "dflash2", "eagle3"
MTP, ASSISTANT = "mtp", "assistant"
_EAGLE_LEVELS = 6  # as many as a pass each is worth


@dataclass(frozen=True, kw_only=True)
class SpeculatorSpec:
    """Sizes and switches of a drafter, as its configuration and its tensors' shapes tell them."""

    kind: str  # ``dspark``, ``dflash``, ``dflash2``, ``eagle3``, ``mtp`` or ``assistant``
    hidden_size: int  # this and the next five as in transformers' configurations
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # 0 for the target's
    eps: float
    inner_size: int = 0  # this and the next two: of a drafter whose layers are tswift's
    heads: int = 0
    rope: Mapping[str, object] = field(default_factory=dict)  # transformers' ``rope_parameters``
    tap_size: int  # hidden size of the target
    tap_count: int  # how many of its states are read
    # after which of its layers, from 0; None for EAGLE-3's usual three
    taps: tuple[int, ...] | None = None
    target_layers: int | None = None  # how many layers the target has; None where that is not said
    qk_norm: bool = True  # whether queries and keys are normalised
    block: int = 0  # tokens of a block; EAGLE-3 has none
    mask: int = 0  # token id of the positions to be guessed
    # a slot guesses the token at its own position (DFlash), not the next one
    in_place: bool = False
    rank: int = 0  # of the bias that the token before gives to a slot; 0 for none
    conv: tuple[int, int] = (
        0,
        0,
    )  # taps of DFlash2's convolutions, and channels that share weights
    chosen: int = 0  # candidates of a slot that DFlash2's selector scores
    draft_vocab: int = 0  # tokens that it can guess; 0 for all, by the target's LM head
    embeds: bool = False  # whether EAGLE-3 has embeddings of its own
    # this and the next three: which of its norms EAGLE-3 applies where
    norm_before_residual: bool = False
    norm_output: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    # layers of a block drafter that see a window, and not all of the text
    sliding: tuple[int, ...] = ()
    window: int = 0  # tokens of the text that those see before the block
    moving: bool = False  # whether each slot's window ends at the slot, and not at the root
    causal: bool = False  # whether a slot of the block sees none after it there
    # a factor of the target's embeddings as they are stored; None for those that its layers read
    embed_scale: float | None = None
    # factor and cap (0 for none) of what the target's LM head gives; None for the target's own
    output: tuple[float, float] | None = None
    # of the layers of an assistant or an MTP head, which are transformers'
    text: PreTrainedConfig | None = None
    # this and the next one: of an assistant
    # what a token's keys and values are in the model's last layer of each kind
    kept: tuple[LayerKV, ...] = ()
    clusters: tuple[int, int] = (0, 0)  # of its vocabulary, and how many it looks through; or none

    @property
    def method(self) -> str:
        """The method that drafts with it."""
        return "block" if self.block else "mtp" if self.kind == MTP else "eagle"

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads the target's states after its final norm, which every pass gives."""
        return self.kind in (MTP, ASSISTANT)

    @property
    def kinds(self) -> list[str]:
        """Of an assistant's layers."""
        return [] if self.text is None else sorted({*self.text.layer_types})

    def tapped(self, layers: int) -> tuple[int, ...]:
        """After which layers of a target with so many the states are read (the three are
        SafeAILab's).
        """
        return (1, layers // 2 - 1, layers - 4) if self.taps is None else self.taps

    @property
    def count(self) -> int:
        """Most tokens that it drafts along a path; a pass each, where it has no blocks."""
        return self.block - self.in_place if self.block else _EAGLE_LEVELS

    def slots(self, levels: int, beam: int) -> int:
        """Scratch slots of a round: the whole block, even to use less of it;
        or the tokens that are fed back.
        """
        return self.block or (levels - 1) * beam

    def kv_shape(self, dtype: torch.dtype, device: torch.device) -> KVShape:
        """Of the drafter's own cache."""
        layers = len(self.kept) or self.layers
        return KVShape(layers, self.kv_heads, self.head_dim, dtype, device, by_layer=self.kept)

    def llama(self) -> LlamaConfig:
        """What transformers' modules are made of: the MLP's sizes and the rotary embeddings of a
        head.
        """
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.inner_size,
            num_attention_heads=1,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope),
        )
