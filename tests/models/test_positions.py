"""How many positions a model serves: what transformers' frequencies say, and configurations as they are published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.helpers import tiny_llama
from tswift.models.hf import max_positions, probe_attention
from tswift.models.shapes import SHAPES
from tswift.models.target import Target

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def llama(positions: int, **rope: Any) -> LlamaConfig:
    settings = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    return LlamaConfig(**settings, max_position_embeddings=positions, rope_parameters={"rope_theta": 1e4, **rope})


# as they are published, or as their model cards say that they are to be changed
CONFIGS = {
    "Llama 2": (llama(4096, rope_type="default"), 4096),
    "Llama 2 at linear 4": (llama(4096, rope_type="linear", factor=4.0), 16_384),
    "Yarn Llama 2": (llama(131_072, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096), 131_072),
    "Qwen2.5 with YaRN": (llama(32_768, **QWEN), 131_072),
    "Qwen3 with YaRN": (llama(40_960, **QWEN), 131_072),
    "YaRN without an original": (llama(32_768, rope_type="yarn", factor=4.0), 131_072),
    "Llama 3.1": (llama(131_072, **LLAMA3, factor=8.0, original_max_position_embeddings=8192), 131_072),
    "Llama 3.2": (llama(131_072, **LLAMA3, factor=32.0, original_max_position_embeddings=8192), 131_072),
    "Llama 3 scaled by hand": (llama(8192, **LLAMA3, factor=8.0, original_max_position_embeddings=8192), 65_536),
    "nonsense": (llama(4096, rope_type="linear", factor="x"), 4096),
    "more than there is": (llama(4096, rope_type="linear", factor=1e30), 1 << 24),
    "Gemma 3": (Gemma3TextConfig(max_position_embeddings=131_072, rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }), 131_072),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    config, positions = CONFIGS[name]
    assert max_positions(config) == positions


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_serve_what_the_paper_needs(name: str) -> None:
    assert max_positions(SHAPES[name]) == 131_072


def frequencies(config: PreTrainedConfig) -> torch.Tensor:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return 1 / 1e4 ** (torch.arange(0, 64, 2) / 64)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


@pytest.mark.parametrize(
    ("name", "trained"),
    [("Llama 2 at linear 4", 4096), ("Yarn Llama 2", 4096), ("Qwen2.5 with YaRN", 32_768), ("Qwen3 with YaRN", 32_768)],
)
def test_the_last_position_turns_no_further_than_the_last_one_trained(name: str, trained: int) -> None:
    """What scaling is for: slow frequencies, which training has not seen go round, stay within what it has seen."""
    config, _ = CONFIGS[name]
    slowest = frequencies(config)[-1]
    seen = frequencies(llama(trained, rope_type="default"))[-1] * trained
    assert float(slowest * max_positions(config)) == pytest.approx(float(seen), rel=1e-5)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_as_it_stands_in_a_file(tmp_path, key: str) -> None:  # type: ignore[no-untyped-def]
    """Qwen2.5's model card: add this to config.json."""
    config = Qwen2Config(max_position_embeddings=32_768).to_dict()
    config.pop("rope_parameters")
    scaling = {"rope_type" if key == "rope_parameters" else "type": "yarn", "factor": 4.0}
    config[key] = {**scaling, "original_max_position_embeddings": 32_768}
    Qwen2Config.from_dict(config).save_pretrained(tmp_path)
    assert max_positions(AutoConfig.from_pretrained(tmp_path)) == 131_072


def test_a_window_beyond_the_maximum_that_is_named_is_seen() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=100,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    )  # fmt: skip
    assert probe_attention(MistralForCausalLM(config)).special == "sliding windows of 100 tokens"
    assert Target(MistralForCausalLM(config)).max_positions == 128
    assert Target(tiny_llama("gqa", torch.float32)).max_positions == 16_384
