"""Gemma 4's assistants: Google's, as transformers reads them."""

from __future__ import annotations

from transformers import AutoConfig

from tswift.caches import LayerKV
from tswift.speculators.layouts.layout import Layout, Said
from tswift.speculators.spec import ASSISTANT, SpeculatorSpec


def _spec(said: Said) -> SpeculatorSpec:
    sizes = {name: value for name, value in said.config.items() if name != "model_type"}
    made = AutoConfig.for_model(said["model_type"], **sizes)
    text = made.get_text_config()
    layers = [text.per_layer_config[kind] for kind in sorted({*text.layer_types})]
    kept = tuple(
        LayerKV(each.num_key_value_heads, each.head_dim, index) for index, each in enumerate(layers)
    )
    clusters = made.num_centroids, made.centroid_intermediate_top_k
    # its embeddings again
    said.beside["lm_head.weight"] = text.vocab_size, text.hidden_size
    return SpeculatorSpec(
        kind=ASSISTANT,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        kv_heads=kept[0].heads,
        head_dim=kept[0].head_dim,
        vocab_size=text.vocab_size,
        eps=text.rms_norm_eps,
        tap_size=made.backbone_hidden_size,
        tap_count=1,
        embeds=True,
        window=text.sliding_window + 1,  # its reader counts the edge in
        text=text,
        kept=kept,
        clusters=clusters if made.use_ordered_embeddings else (0, 0),
    )


LAYOUT = Layout(
    "Gemma 4's assistants",
    ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    _spec,
)
