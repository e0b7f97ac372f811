"""Published drafters as modules: block drafters (DSpark, DFlash),
EAGLE-3, a model's own MTP head and Gemma 4's assistants, over a window.

They read the target's states after some of its layers (taps), MTP heads and assistants those after
its final norm, and assistants its keys and values. A block drafter guesses a whole block in one
pass; the others guess token by token, fed with their own. Either way a round is a few
passes of known sizes: nothing in it waits for the device, so that one CUDA graph can hold it.
"""

from __future__ import annotations

import torch

from tswift.forward.target import Target
from tswift.speculators.assistant import AssistantSpeculator
from tswift.speculators.block import BlockSpeculator
from tswift.speculators.draft_network import (
    DraftNetwork,
)
from tswift.speculators.eagle import EagleSpeculator
from tswift.speculators.mtp import MtpSpeculator
from tswift.speculators.spec import ASSISTANT, EAGLE3, MTP, SpeculatorSpec


def build(spec: SpeculatorSpec, target: Target | None = None) -> DraftNetwork:
    """A drafter with uninitialised weights."""
    kinds: dict[str, type[DraftNetwork]] = {
        EAGLE3: EagleSpeculator,
        MTP: MtpSpeculator,
        ASSISTANT: AssistantSpeculator,
    }
    return kinds.get(spec.kind, BlockSpeculator)(spec, target)


def weights_of(spec: SpeculatorSpec) -> dict[str, int]:
    """Number of a drafter's weights by parameter."""
    with torch.device("meta"):
        return {name: weight.numel() for name, weight in build(spec).named_parameters()}


def read_bytes(spec: SpeculatorSpec, itemsize: int, budget: int, levels: int, lm_head: int) -> int:
    """Bytes that a round of a drafter reads at least: weights, and the window.

    Args:
        spec: sizes.
        itemsize: bytes of a number.
        budget: tokens of the window.
        levels: tokens drafted along a path.
        lm_head: weights of the target's LM head, which all but EAGLE-3 share.
    """
    sizes = weights_of(spec)
    read = sum(
        size
        for name, size in sizes.items()
        if not any(table in name for table in ("embed_tokens", "markov_w1", "codebook"))
    )
    window = 2 * budget * sum(kept.heads * kept.head_dim for kept in spec.kept)
    if spec.kind == ASSISTANT:
        parts, chosen = spec.clusters
        head = sizes["model.embed_tokens.weight"] * (chosen / parts if parts else 1)
        return itemsize * levels * (read + window + int(head))
    window = 2 * spec.layers * spec.kv_heads * spec.head_dim * budget
    again = levels - 1
    if spec.kind == MTP:
        return itemsize * levels * (read + window + lm_head * spec.draft_vocab // spec.vocab_size)
    if spec.kind == EAGLE3:  # all but what the taps go through is read for every level
        return itemsize * (read + window + again * (read - sizes["fc.weight"] + window))
    lm_head = 0 if "lm_head.weight" in sizes else lm_head
    biased = spec.chosen or spec.draft_vocab or spec.vocab_size
    return itemsize * (read + window + lm_head + again * spec.rank * biased)
