"""Which architectures are served, by which methods, and why not: a table, in Markdown.

For each one a tiny random checkpoint is written by transformers itself and loaded by its path, in
float64. A method is "equal" if its text is plain decoding's, token for token; "logits" says how far
the target's logits are from those that transformers itself computes over the whole text at once, as
a share of their standard deviation.

    python -m benchmarks.architectures --len 200 --only Gemma
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

import tswift
from recipes.corpus import train_tokenizer
from tswift.caches import FullKV
from tswift.drafting.methods import METHODS as ALL_METHODS
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.forward.passes import Nodes
from tswift.loading.model import LoadedModel
from tswift.models.architecture import class_of
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.heads import ChainedHeads

# drafters are of single models
METHODS = [name for name, method in ALL_METHODS.items() if not method.speculator_kinds]
WINDOW = 24  # tokens of a sliding window, where one is wanted
POSITIONS = 512
HIDDEN = 32

SENTENCES = [
    "The ship had lain three days becalmed, and the captain would not leave the deck."
] * 20
_BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# min-p low enough for random models to wander; a partial cache that has to select anew every few
# dozen tokens
_PARAMS = SamplingParams(min_p=0.02, window=32)
_OPTIONS = {
    "medusa": DraftOptions(tree=(2, 2, 1), nodes=12),
    "tokenswift": DraftOptions(tree=(1, 2, 2), nodes=12, budget=64, sinks=4, reuse_recent=True),
    "reuse": DraftOptions(nodes=12, reuse_recent=True),
    **{
        name: DraftOptions(gamma=4, budget=64, sinks=4)
        for name in ("magicdec", "standalone", "triforce")
    },
}


@dataclass(frozen=True)
class Architecture:
    """A row of the table: a configuration class and its settings,
    where None takes a common one away.

    ``refused`` is a regular expression that the reason of its refusal matches, empty for one that
    is served; ``whole`` are settings of the configuration around it, where it is a part of a larger
    model.
    """

    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    whole: Mapping[str, Any] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        """Whether this version of transformers has it."""
        return hasattr(transformers, self.config)

    def make(self, vocab_size: int) -> transformers.PreTrainedModel:
        """A random model: all weights are drawn, biases and norms too,
        so that none of them goes unnoticed.
        """
        settings = {**_BASE, "vocab_size": vocab_size, **self.settings}
        settings = {
            name: value
            for name, value in settings.items()
            if value is not None or name not in _BASE
        }
        if self.whole:
            settings = {"text_config": settings, **self.whole}
        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**settings)
        model = class_of(config)(config)
        return drawn(model)


def drawn(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A model with all of its weights drawn at random."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "factor": 8.0,
}
_YARN = {"original_max_position_embeddings": 64, "factor": 8.0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWED = {"sliding_window": WINDOW}
_OF_8, _OF_16 = {"head_dim": 8}, {"head_dim": 16}
_UNGROUPED = {"num_key_value_heads": None}
_TWO_KINDS = {**_OF_16, **_WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_LONGROPE = _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=8.0)

_FIXED = "attention that cannot be replaced"
_KEPT = "layers that keep arguments from their attention"
_LINEAR = "layers of type linear_attention"
_MAMBA = "has layers of type|the architecture mamba"
_EXPERTS_OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2}
_EXPERTS_OF_NEXT = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_CONVOLVED = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "sliding_attention"]}
_MAMBA2 = {
    **{
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48},
}
_DELTA = {
    **_OF_16,
    "layer_types": ["linear_attention", "full_attention"],
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
_LATENT = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
_ROUTED = {**_LATENT, "moe_intermediate_size": 16, "routed_scaling_factor": 1.5}
_BIASES = {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, **_OF_16}
_LAYERS_OF_3N = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EMBEDDINGS_OF_3N = {
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "vocab_size_per_layer_input": 300,
}
_OF_4 = {
    **{
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **_WINDOWED,
    },
    **{"head_dim": 16, "global_head_dim": 32, "final_logit_softcapping": 30.0},
}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}
_EXPERTS_OF_4 = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}

# name: configuration class, settings, why it is refused, settings around it
ARCHITECTURES: dict[str, Architecture] = {
    name: Architecture(*row)
    for name, row in {
        "Llama, MHA": ("LlamaConfig", {"num_key_value_heads": 4}),
        "Llama, GQA": ("LlamaConfig",),
        "Llama, GQA, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
        "Llama, MQA, biases": ("LlamaConfig", _BIASES),
        "Llama 3.1 (llama3 scaling)": ("LlamaConfig", _rope("llama3", **_LLAMA3)),
        "Llama 2 (YaRN)": ("LlamaConfig", {"num_key_value_heads": 4, **_rope("yarn", **_YARN)}),
        "Llama 2 (linear scaling)": ("LlamaConfig", _rope("linear", factor=4.0)),
        "Llama (dynamic scaling)": (
            "LlamaConfig",
            _rope("dynamic", factor=4.0),
            "rotary embeddings of type",
        ),
        "Qwen2.5": ("Qwen2Config",),
        "Qwen2.5, tied, YaRN": (
            "Qwen2Config",
            {"tie_word_embeddings": True, **_rope("yarn", **_YARN)},
        ),
        "Qwen2, sliding window in a layer": (
            "Qwen2Config",
            {"use_sliding_window": True, **_WINDOWED, "max_window_layers": 1},
        ),
        "Qwen3": ("Qwen3Config", _OF_16),
        "Qwen3 MoE": ("Qwen3MoeConfig", {**_EXPERTS_OF_QWEN, "moe_intermediate_size": 32, **_OF_8}),
        "Qwen3-Next (gated delta nets)": (
            "Qwen3NextConfig",
            {**_DELTA, **_EXPERTS_OF_QWEN, **_EXPERTS_OF_NEXT},
        ),
        "Qwen3.5 to 3.8 (gated delta nets)": ("Qwen3_5TextConfig", _DELTA),
        "Qwen3.5 to 3.8 MoE (gated delta nets)": (
            "Qwen3_5MoeTextConfig",
            {**_DELTA, **_EXPERTS_OF_QWEN, **_EXPERTS_OF_NEXT},
        ),
        "Mistral": ("MistralConfig", {"sliding_window": None}),
        "Mistral 7B v0.1 (sliding window)": ("MistralConfig", _WINDOWED),
        "Ministral 3 (queries scaled by position)": (
            "Ministral3Config",
            {"sliding_window": None, **_OF_8, **_rope("yarn", **_YARN, llama_4_scaling_beta=0.5)},
        ),
        "Mixtral": ("MixtralConfig", _EXPERTS),
        "Phi-2": ("PhiConfig", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
        "Phi-3": ("Phi3Config", {"sliding_window": None}),
        "Phi-3 mini 4K (sliding window)": ("Phi3Config", _WINDOWED),
        "Phi-3 mini 128K (longrope)": (
            "Phi3Config",
            {"original_max_position_embeddings": 64, **_LONGROPE},
        ),
        "Gemma": ("GemmaConfig", {"num_key_value_heads": 1, **_OF_16}),
        "Gemma 2 (windows, soft caps)": (
            "Gemma2Config",
            {**_OF_16, **_WINDOWED, "query_pre_attn_scalar": 16},
        ),
        "Gemma 3 (windows)": ("Gemma3TextConfig", _TWO_KINDS),
        "Gemma 3, with images (windows)": (
            "Gemma3Config",
            _TWO_KINDS,
            "",
            {
                "vision_config": {**_VISION, "image_size": 28, "patch_size": 14},
                "mm_tokens_per_image": 4,
            },
        ),
        "Gemma 3n": (
            "Gemma3nTextConfig",
            {**_LAYERS_OF_3N, "num_kv_shared_layers": 2, **_WINDOWED, **_OF_8, **_EMBEDDINGS_OF_3N},
        ),
        "Gemma 4 (K = V, other heads in global layers)": (
            "Gemma4TextConfig",
            {
                **_OF_4,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "hidden_size_per_layer_input": 0,
            },
        ),
        "Gemma 4 E (shared keys and values, embeddings by layer)": (
            "Gemma4TextConfig",
            {**_OF_4, **_PER_LAYER, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        ),
        "Gemma 4 MoE": (
            "Gemma4TextConfig",
            {
                **_OF_4,
                **_EXPERTS_OF_4,
                "hidden_size_per_layer_input": 0,
                "num_global_key_value_heads": 1,
            },
        ),
        "Gemma 4, with images": (
            "Gemma4Config",
            {**_OF_4, **_PER_LAYER},
            "",
            {
                "vision_config": {**_VISION, "head_dim": 8, "num_key_value_heads": 2},
                "audio_config": None,
            },
        ),
        "GPT-2": ("GPT2Config", {**_UNGROUPED, "n_inner": 48}),
        "GPT-BigCode": ("GPTBigCodeConfig", {**_UNGROUPED, "n_inner": 48}),
        "GPT-J": ("GPTJConfig", {**_UNGROUPED, "rotary_dim": 4}, _FIXED),
        "GPT-NeoX": ("GPTNeoXConfig", _UNGROUPED),
        "gpt-oss (windows, sinks)": (
            "GptOssConfig",
            {**_EXPERTS, **_OF_8, **_WINDOWED, **_rope("yarn", **_YARN)},
        ),
        "OPT": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, **_UNGROUPED}),
        "BLOOM": ("BloomConfig", _UNGROUPED, _FIXED),
        "Falcon": ("FalconConfig", _UNGROUPED, _FIXED),
        "StableLM": ("StableLmConfig", {}, _KEPT),
        "StarCoder2 (sliding window)": ("Starcoder2Config", _WINDOWED),
        "Mellum 2 (windows)": (
            "MellumConfig",
            {
                **_TWO_KINDS,
                **_EXPERTS_OF_QWEN,
                "moe_intermediate_size": 16,
                "num_nextn_predict_layers": 1,
            },
        ),
        "OLMo": ("OlmoConfig",),
        "OLMo 2": ("Olmo2Config",),
        "OLMo 3 (windows)": ("Olmo3Config", _WINDOWED),
        "OLMoE": ("OlmoeConfig", _EXPERTS_OF_QWEN),
        "Granite": (
            "GraniteConfig",
            {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        ),
        "Granite MoE": ("GraniteMoeConfig", {**_EXPERTS, "logits_scaling": 4.0}),
        "Command R (Cohere)": ("CohereConfig", {"logit_scale": 0.5, "use_qk_norm": True}),
        "Command R7B (Cohere 2, windows)": (
            "Cohere2Config",
            {"logit_scale": 0.5, **_WINDOWED, "sliding_window_pattern": 2, **_OF_8},
        ),
        "SmolLM3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
        "GLM-4": ("Glm4Config", _OF_8),
        "GLM-4.5 to 4.7 MoE": (
            "Glm4MoeConfig",
            {**_OF_8, **_ROUTED, "n_shared_experts": 1, "use_qk_norm": True},
        ),
        "Nemotron": ("NemotronConfig", {}, _KEPT),
        "Helium": ("HeliumConfig", _OF_8),
        "EXAONE 4": ("Exaone4Config", {**_WINDOWED, "sliding_window_pattern": 2}),
        "ERNIE 4.5": ("Ernie4_5Config", _OF_8),
        "Seed-OSS": ("SeedOssConfig", _OF_8),
        "Arcee": ("ArceeConfig",),
        "Apertus": ("ApertusConfig",),
        "Hunyuan": ("HunYuanDenseV1Config", _OF_8),
        "Llama 4 (chunked attention)": (
            "Llama4TextConfig",
            {**_OF_8, **_EXPERTS, "intermediate_size_mlp": 48},
            "layers of type chunked_attention",
        ),
        "DeepSeek-V3 (latent attention)": ("DeepseekV3Config", _LATENT, "latent attention"),
        "Mamba": ("MambaConfig", _UNGROUPED, _MAMBA),
        "Granite 4-H (Mamba2)": (
            "GraniteMoeHybridConfig",
            {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
        ),
        "Bamba (Mamba2)": ("BambaConfig", {**_MAMBA2, "attn_layer_indices": [1]}),
        "Falcon-H1 (Mamba2 beside attention)": (
            "FalconH1Config",
            {**_MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0},
        ),
        "Nemotron-H (Mamba2, MLP or MoE)": (
            "NemotronHConfig",
            {
                "layer_types": ["linear_attention", "full_attention", "moe", "linear_attention"],
                "num_hidden_layers": 4,
                "head_dim": 8,
                **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16},
                **{"chunk_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
                **{"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
            },
        ),
        "OLMo Hybrid (gated delta nets)": ("OlmoHybridConfig", {**_DELTA, **_rope("default")}),
        "LFM3 (short convolutions)": ("Lfm3Config", {**_OF_8, **_WINDOWED, **_MIXED}),
        "Jamba": ("JambaConfig", {}, f"{_LINEAR}|the architecture jamba"),
        "LFM2 (short convolutions)": ("Lfm2Config", _CONVOLVED),
        "LFM2 MoE (short convolutions)": (
            "Lfm2MoeConfig",
            {**_CONVOLVED, **_EXPERTS_OF_QWEN, "num_dense_layers": 1, "moe_intermediate_size": 16},
        ),
        "MiniMax": ("MiniMaxConfig", {}, _LINEAR),
    }.items()
}


def checkpoint(architecture: Architecture, folder: Path) -> transformers.PreTrainedModel:
    """Write a tiny random model in several shards, its tokenizer and chained heads;
    returns the model, in float32.
    """
    tokenizer = train_tokenizer(SENTENCES, 300)
    model = architecture.make(len(tokenizer))
    model.save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    heads = ChainedHeads(HIDDEN, 3)
    torch.manual_seed(2)
    for head in heads.heads:
        torch.nn.init.normal_(head.linear.weight, std=0.1)
    heads.save(folder / "heads.safetensors")
    return model


def texts(model: LoadedModel, lengths: Mapping[str, int]) -> dict[str, list[int]]:
    """What methods write, by their names, given how much;
    and the prompt by the name of ``prompt``.
    """
    prompt = model.encode(SENTENCES[0])
    written = {"prompt": prompt}
    for method, length in lengths.items():
        options = _OPTIONS.get(method, DraftOptions())
        steps = tswift.generate(
            model, prompt, length, method=method, params=_PARAMS, seed=4, options=options
        )
        written[method] = list(chain.from_iterable(step.tokens for step in steps))
    return written


def apart(model: LoadedModel, stock: transformers.PreTrainedModel, text: Sequence[int]) -> float:
    """How far the target's logits, token by token, are from the stock model's over the whole text,
    at most.

    As a share of the logits' standard deviation.
    """
    with torch.inference_mode():
        expected = stock(torch.tensor([text]), use_cache=False).logits[0]
    target = model.target
    kv = FullKV(model.target.kv_shape, len(text))
    hidden = []
    for at, token in enumerate(text):
        hidden.append(target.forward(Nodes(torch.tensor([token]), torch.tensor([at]), kv)).hidden)
        kv.commit([0])
    return float((target.logits(torch.cat(hidden)) - expected).abs().max() / expected.std())


def stock(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A model as transformers computes it in float64: experts by the one way that can,
    soft caps by eager attention.
    """
    model = model.double()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    for part in model.modules():
        if (
            isinstance(part, transformers.PreTrainedModel)
            and part._can_set_experts_implementation()
        ):
            part.set_experts_implementation("eager")
    return model


def row(name: str, length: int) -> list[str]:
    """The cells of a line of the table."""
    architecture = ARCHITECTURES[name]
    if not architecture.there:
        return [name, *["-"] * len(METHODS), "", f"not in transformers {transformers.__version__}"]
    with tempfile.TemporaryDirectory() as folder:
        own = checkpoint(architecture, Path(folder))
        drafting = Path(folder) / "draft"
        # for the methods that draft with a model of its own
        checkpoint(ARCHITECTURES["Llama, GQA"], drafting)
        try:
            model = tswift.load(folder, dtype="float64", device="cpu", draft_model=str(drafting))
        except InputError as error:
            return [name, *["refused"] * len(METHODS), "", error.message.replace(f"{folder} ", "")]
        recurrent = model.target.kv_shape.states is not None
        served = [
            method
            for method in METHODS
            if not (recurrent and method != "auto" and ALL_METHODS[method].drafts_itself)
        ]
        written = texts(model, dict.fromkeys(served, length))
        far = apart(model, stock(own), written["prompt"] + written["ar"])
    words = [
        "refused"
        if method not in written
        else "equal"
        if written[method] == written["ar"]
        else "DIFFERS"
        for method in METHODS
    ]
    return [name, *words, f"{far:.0e}", model.target.attention_features]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--len", type=int, default=120)
    parser.add_argument("--only", default="", help="architectures with this in their names")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}, {args.len} tokens, float64\n")
    rule = ["---", *["---"] * len(METHODS), "---:", "---"]
    for cells in (
        ["architecture", *METHODS, "logits", "what its layers want, or why it is refused"],
        rule,
    ):
        print(f"| {' | '.join(cells)} |")
    for name in ARCHITECTURES:
        if args.only in name:
            print(f"| {' | '.join(row(name, args.len))} |", flush=True)


if __name__ == "__main__":
    main()
