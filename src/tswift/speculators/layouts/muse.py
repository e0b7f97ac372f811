"""Muse-Glimmer's assistant, a DFlash: Meta's."""

from __future__ import annotations

from tswift.speculators.layouts.layout import Layout, Said
from tswift.speculators.spec import DFLASH, SpeculatorSpec


def _spec(said: Said) -> SpeculatorSpec:
    said.setdefault("vocab_size", 0)  # it has the model's
    taps = said["target_layer_ids"]
    return said.block(DFLASH, taps, both_ways=True, in_place=True, moving=True, embed_scale=1.0)


LAYOUT = Layout(
    "Muse-Glimmer's assistant",
    ("MuseGlimmerAssistantModel",),
    _spec,
    {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"},
)
