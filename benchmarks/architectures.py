"""Which architectures are served, by which methods, and why not: a table, in Markdown.

For each one a tiny random checkpoint is written by transformers itself and loaded by its path, in float64. A method is
"equal" if its text is plain decoding's, token for token; "logits" says how far the target's logits are from those that
transformers itself computes over the whole text at once, as a share of their standard deviation.

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
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import METHODS
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.kv.full import FullKV
from tswift.models.heads import ChainedHeads
from tswift.models.load import LoadedModel

WINDOW = 24  # tokens of a sliding window, where one is wanted
POSITIONS = 512
HIDDEN = 32

_SENTENCES = ["The ship had lain three days becalmed, and the captain would not leave the deck."] * 20
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
# min-p low enough for random models to wander; a partial cache that has to select anew every few dozen tokens
_PARAMS = SamplingParams(min_p=0.02, window=32)
_OPTIONS = {
    "medusa": DraftOptions(tree=(2, 2, 1), nodes=12),
    "tokenswift": DraftOptions(tree=(1, 2, 2), nodes=12, budget=64, sinks=4, reuse_recent=True),
    "reuse": DraftOptions(nodes=12, reuse_recent=True),
    **{name: DraftOptions(gamma=4, budget=64, sinks=4) for name in ("magicdec", "standalone", "triforce")},
}


@dataclass(frozen=True)
class Architecture:
    """One of the table's rows.

    Attributes:
        config: the name of its configuration class.
        settings: what its configuration has beside the common ones; None takes a common one away.
        refused: a regular expression that the reason of its refusal matches; empty for one that is served.
        whole: settings of the configuration around it, where it is a part of a larger model.
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
        """A random model: all weights are drawn, biases and norms too, so that none of them goes unnoticed."""
        settings = {**_BASE, "vocab_size": vocab_size, **self.settings}
        settings = {name: value for name, value in settings.items() if value is not None or name not in _BASE}
        if self.whole:
            settings = {"text_config": settings, **self.whole}
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, self.config)(**settings))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(std=0.3)
                else:
                    weight.add_(torch.randn_like(weight) * 0.1)
        return model.eval()


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "factor": 8.0}
_YARN = {"original_max_position_embeddings": 64, "factor": 8.0}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, Architecture] = {
    "Llama, MHA": Architecture("LlamaConfig", {"num_key_value_heads": 4}),
    "Llama, GQA": Architecture("LlamaConfig"),
    "Llama, GQA, tied": Architecture("LlamaConfig", {"tie_word_embeddings": True}),
    "Llama, MQA, biases": Architecture(
        "LlamaConfig", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 16}
    ),
    "Llama 3.1 (llama3 scaling)": Architecture("LlamaConfig", _rope("llama3", **_LLAMA3)),
    "Llama 2 (YaRN)": Architecture("LlamaConfig", {"num_key_value_heads": 4, **_rope("yarn", **_YARN)}),
    "Llama 2 (linear scaling)": Architecture("LlamaConfig", _rope("linear", factor=4.0)),
    "Llama (dynamic scaling)": Architecture("LlamaConfig", _rope("dynamic", factor=4.0), "rotary embeddings of type"),
    "Qwen2.5": Architecture("Qwen2Config"),
    "Qwen2.5, tied, YaRN": Architecture("Qwen2Config", {"tie_word_embeddings": True, **_rope("yarn", **_YARN)}),
    "Qwen2, sliding window in a layer": Architecture(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "Qwen3": Architecture("Qwen3Config", {"head_dim": 16}),
    "Qwen3 MoE": Architecture(
        "Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    ),
    "Qwen3-Next (linear attention)": Architecture(
        "Qwen3NextConfig", {"head_dim": 8, "num_experts": 4}, "layers of type linear_attention"
    ),
    "Mistral": Architecture("MistralConfig", {"sliding_window": None}),
    "Mistral 7B v0.1 (sliding window)": Architecture("MistralConfig", {"sliding_window": WINDOW}),
    "Ministral 3 (queries scaled by position)": Architecture(
        "Ministral3Config",
        {"sliding_window": None, "head_dim": 8, **_rope("yarn", **_YARN, llama_4_scaling_beta=0.5)},
    ),
    "Mixtral": Architecture("MixtralConfig", _EXPERTS),
    "Phi-2": Architecture("PhiConfig", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "Phi-3": Architecture("Phi3Config", {"sliding_window": None}),
    "Phi-3 mini 4K (sliding window)": Architecture("Phi3Config", {"sliding_window": WINDOW}),
    "Phi-3 mini 128K (longrope)": Architecture(
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            **_rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=8.0),
        },
        "rotary embeddings of type longrope",
    ),
    "Gemma": Architecture("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 16}),
    "Gemma 2 (windows, soft caps)": Architecture(
        "Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    ),
    "Gemma 3 (windows)": Architecture(
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Gemma 3, with images (windows)": Architecture(
        "Gemma3Config",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        whole={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "Gemma 3n": Architecture(
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "vocab_size_per_layer_input": 300,
        },
    ),
    "GPT-2": Architecture("GPT2Config", {"num_key_value_heads": None, "n_inner": 48}),
    "GPT-BigCode": Architecture("GPTBigCodeConfig", {"num_key_value_heads": None, "n_inner": 48}),
    "GPT-J": Architecture(
        "GPTJConfig", {"num_key_value_heads": None, "rotary_dim": 4}, "attention that cannot be replaced"
    ),
    "GPT-NeoX": Architecture("GPTNeoXConfig", {"num_key_value_heads": None}),
    "gpt-oss (windows, sinks)": Architecture(
        "GptOssConfig", {**_EXPERTS, "head_dim": 8, "sliding_window": WINDOW, **_rope("yarn", **_YARN)}
    ),
    "OPT": Architecture("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None}),
    "BLOOM": Architecture("BloomConfig", {"num_key_value_heads": None}, "attention that cannot be replaced"),
    "Falcon": Architecture("FalconConfig", {"num_key_value_heads": None}, "attention that cannot be replaced"),
    "StableLM": Architecture("StableLmConfig", {}, "layers that keep arguments from their attention"),
    "StarCoder2 (sliding window)": Architecture("Starcoder2Config", {"sliding_window": WINDOW}),
    "OLMo": Architecture("OlmoConfig"),
    "OLMo 2": Architecture("Olmo2Config"),
    "OLMo 3 (windows)": Architecture("Olmo3Config", {"sliding_window": WINDOW}),
    "OLMoE": Architecture("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": Architecture(
        "GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
    ),
    "Granite MoE": Architecture("GraniteMoeConfig", {**_EXPERTS, "logits_scaling": 4.0}),
    "Command R (Cohere)": Architecture("CohereConfig", {"logit_scale": 0.5, "use_qk_norm": True}),
    "Command R7B (Cohere 2, windows)": Architecture(
        "Cohere2Config", {"logit_scale": 0.5, "sliding_window": WINDOW, "sliding_window_pattern": 2, "head_dim": 8}
    ),
    "SmolLM3": Architecture("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "GLM-4": Architecture("Glm4Config", {"head_dim": 8}),
    "Nemotron": Architecture("NemotronConfig", {}, "layers that keep arguments from their attention"),
    "Helium": Architecture("HeliumConfig", {"head_dim": 8}),
    "EXAONE 4": Architecture("Exaone4Config", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "ERNIE 4.5": Architecture("Ernie4_5Config", {"head_dim": 8}),
    "Seed-OSS": Architecture("SeedOssConfig", {"head_dim": 8}),
    "Arcee": Architecture("ArceeConfig"),
    "Apertus": Architecture("ApertusConfig"),
    "Hunyuan": Architecture("HunYuanDenseV1Config", {"head_dim": 8}),
    "Llama 4 (chunked attention)": Architecture(
        "Llama4TextConfig", {"head_dim": 8, **_EXPERTS, "intermediate_size_mlp": 48}, "layers of type chunked_attention"
    ),
    "DeepSeek-V3 (latent attention)": Architecture(
        "DeepseekV3Config",
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
        "latent attention",
    ),
    "Mamba": Architecture("MambaConfig", {"num_key_value_heads": None}, "has layers of type|the architecture mamba"),
    "Falcon-H1": Architecture("FalconH1Config", {}, "layers of type"),
    "Jamba": Architecture("JambaConfig", {}, "layers of type linear_attention|the architecture jamba"),
    "LFM2": Architecture("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "MiniMax": Architecture("MiniMaxConfig", {}, "layers of type linear_attention"),
}


def checkpoint(architecture: Architecture, folder: Path) -> transformers.PreTrainedModel:
    """Write a tiny random model in several shards, its tokenizer and chained heads; returns the model, in float32."""
    tokenizer = train_tokenizer(_SENTENCES, 300)
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
    """What methods write, by their names, given how much; and the prompt by the name of ``prompt``."""
    prompt = model.encode(_SENTENCES[0])
    written = {"prompt": prompt}
    for method, length in lengths.items():
        options = _OPTIONS.get(method, DraftOptions())
        steps = tswift.generate(model, prompt, length, method=method, params=_PARAMS, seed=4, options=options)
        written[method] = list(chain.from_iterable(step.tokens for step in steps))
    return written


def apart(model: LoadedModel, stock: transformers.PreTrainedModel, text: Sequence[int]) -> float:
    """The largest difference between the target's logits, token by token, and the stock model's over the whole text.

    Args:
        model: the loaded one.
        stock: the same weights, in float64.
        text: token ids.

    Returns:
        It, as a share of the logits' standard deviation.
    """
    with torch.inference_mode():
        expected = stock(torch.tensor([text]), use_cache=False).logits[0]
    target, kv = model.target, FullKV(model.target.kv_shape, len(text))
    hidden = []
    for at, token in enumerate(text):
        hidden.append(target.forward(torch.tensor([token]), torch.tensor([at]), kv, None).hidden)
        kv.commit([0])
    return float((target.logits(torch.cat(hidden)) - expected).abs().max() / expected.std())


def stock(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A model as transformers computes it in float64: experts by the one way that can, soft caps by eager attention."""
    model = model.double()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def row(name: str, length: int) -> str:
    """A line of the table."""
    architecture = ARCHITECTURES[name]
    if not architecture.there:
        return _line(name, ["-"] * len(METHODS), "", f"not in transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        own, drafting = checkpoint(architecture, Path(folder)), Path(folder) / "draft"
        checkpoint(ARCHITECTURES["Llama, GQA"], drafting)  # for the methods that draft with a model of its own
        try:
            model = tswift.load(folder, dtype="float64", device="cpu", draft_model=str(drafting))
        except InputError as error:
            return _line(name, ["refused"] * len(METHODS), "", error.message.replace(f"{folder} ", ""))
        written = texts(model, dict.fromkeys(METHODS, length))
        far = apart(model, stock(own), written["prompt"] + written["ar"])
    words = ["equal" if written[method] == written["ar"] else "DIFFERS" for method in METHODS]
    return _line(name, words, f"{far:.0e}", model.target.special)


def _line(name: str, words: Sequence[str], far: str, remark: str) -> str:
    return f"| {name} | {' | '.join(words)} | {far} | {remark} |"


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--len", type=int, default=120)
    parser.add_argument("--only", default="", help="architectures with this in their names")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}, {args.len} tokens, float64\n")
    print(_line("architecture", list(METHODS), "logits", "what its layers want, or why it is refused"))
    print("| --- |" + " --- |" * len(METHODS) + " ---: | --- |")
    for name in ARCHITECTURES:
        if args.only in name:
            print(row(name, args.len), flush=True)


if __name__ == "__main__":
    main()
