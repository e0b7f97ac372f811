"""DeepSpec's block drafters: DSpark, and DFlash as DSpark without its bias."""

from __future__ import annotations

from tswift.speculators.layouts.layout import Layout, Said
from tswift.speculators.spec import SpeculatorSpec


def _spec(said: Said) -> SpeculatorSpec:
    own = said.markov(0, False)
    for name in said.beside:
        said.refuse(name not in said.stored, f"lacks {name}")
    return said.block(taps=said["target_layer_ids"], **own)


LAYOUT = Layout("DeepSpec", ("Qwen3DSparkModel", "DSparkDraftModel"), _spec, copies=True)
