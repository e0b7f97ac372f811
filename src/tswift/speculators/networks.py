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
from tswift.speculators.draft_network import DraftNetwork
from tswift.speculators.eagle import EagleSpeculator
from tswift.speculators.mtp import MtpSpeculator
from tswift.speculators.spec import ASSISTANT, EAGLE3, MTP, SpeculatorSpec

_NETWORKS: dict[str, type[DraftNetwork]] = {
    EAGLE3: EagleSpeculator,
    MTP: MtpSpeculator,
    ASSISTANT: AssistantSpeculator,
}


def build(spec: SpeculatorSpec, target: Target | None = None) -> DraftNetwork:
    """A drafter with uninitialised weights."""
    return _NETWORKS.get(spec.kind, BlockSpeculator)(spec, target)


def shapes_of(spec: SpeculatorSpec) -> dict[str, tuple[int, ...]]:
    """Of a drafter's tensors by name."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in build(spec).state_dict().items()}


def count_weights(spec: SpeculatorSpec) -> int:
    """How many weights a drafter has."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in build(spec).parameters())
