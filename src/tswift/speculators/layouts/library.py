"""Block drafters of vLLM's library speculators: DSpark, DFlash and DFlash2."""

from __future__ import annotations

from tswift.speculators.layouts.layout import BY_LIBRARY, Layout, Said
from tswift.speculators.spec import DFLASH, DFLASH2, DSPARK, SpeculatorSpec


def _spec(said: Said) -> SpeculatorSpec:
    kind = said[BY_LIBRARY]
    dspark = kind == DSPARK
    vocab = said["vocab_size"]
    own = said.second() if kind == DFLASH2 else said.markov(256 * dspark, dspark)
    said.maps()
    return said.block(
        taps=said.before() or [],
        both_ways=kind == DFLASH2,
        in_place=not said.get("sample_from_anchor", dspark),
        draft_vocab=said.get("draft_vocab_size", vocab) % vocab,
        **own,
    )


LAYOUT = Layout("speculators, blocks", (DSPARK, DFLASH, DFLASH2), _spec, copies=True)
