"""z-lab's drafters: DFlash and DFlash2."""

from __future__ import annotations

from tswift.speculators.layouts.layout import Layout, Said
from tswift.speculators.spec import DFLASH, SpeculatorSpec

_SECOND = "DFlash2DraftModel"


def spread(layers: int, count: int) -> list[int]:
    """The usual taps of a drafter of so many layers: those of a target, evenly spread."""
    places = (1 + index * (layers - 4) / max(1, count - 1) for index in range(count))
    return [max(0, round(place)) for place in places]


def _spec(said: Said) -> SpeculatorSpec:
    if "num_target_layers" in said:
        usual = spread(said["num_target_layers"], said["num_hidden_layers"])
        said.setdefault("target_layer_ids", usual)
    factor, cap = (
        float(said.get(name, 0)) for name in ("output_multiplier", "final_logit_softcapping")
    )
    own = said.second() if _SECOND in said["architectures"] else {"kind": DFLASH}
    return said.block(
        taps=said["target_layer_ids"],
        edge=1,  # the slot itself
        in_place=True,
        moving=True,
        embed_scale=float(said.get("input_embedding_scale", 1)),
        output=(0.0 if factor == 1 else factor, max(cap, 0.0)),
        **own,
    )


LAYOUT = Layout("DFlash", ("DFlashDraftModel", _SECOND), _spec)
