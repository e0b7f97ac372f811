"""EAGLE-3: SafeAILab's, SpecForge's and AngelSlim's layout, and those of speculators and
DeepSpec, which name its layer otherwise.
"""

from __future__ import annotations

from tswift.speculators.layouts.layout import Layout, Said
from tswift.speculators.spec import EAGLE3, SpeculatorSpec

_NORMS = {
    "norm_before_fc": "input_norm",
    **{name: name for name in ("norm_before_residual", "norm_output", "fc_norm")},
}
_NAMES = {"midlayer": "layers.0"}


def _spec(said: Said) -> SpeculatorSpec:
    taps = said.before()
    if taps and taps[0] == 0:  # ids that begin with 1 name the layers themselves (SGLang)
        taps = [tap + 1 for tap in taps]
    said.refuse(said.sliding(), "has layers of sliding attention, which EAGLE-3 is not served with")
    said.maps()
    return said.spec(
        EAGLE3,
        said.get("target_layer_ids") if taps is None else taps,
        layers=1,
        tap_size=said.get("target_hidden_size", said["hidden_size"]),
        draft_vocab=said.get("draft_vocab_size", said["vocab_size"]),
        embeds="embed_tokens.weight" in said.stored,
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in said.stored),
        **{own: said.get(name) is True for name, own in _NORMS.items()},
    )


LIBRARY = Layout("speculators", (EAGLE3,), _spec, _NAMES)
DEEPSPEC = Layout("DeepSpec EAGLE-3", ("Qwen3Eagle3Model",), _spec, _NAMES)
SAFEAI = Layout("SafeAILab", (), _spec)  # told by its draft vocabulary
