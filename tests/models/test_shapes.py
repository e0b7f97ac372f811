"""The published shapes, and what a pass over them costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig

from tests.helpers import tiny_llama
from tswift.errors import InputError
from tswift.models.shapes import (
    PREFIX,
    SHAPES,
    Shape,
    refuse_routed,
    refuse_shape,
    routed,
    shape_config,
    shape_of,
    skeleton,
)

# as the model cards on the hub count them
PARAMETERS = {
    "llama3.1-8b": 8_030_261_248,
    "yarn-llama2-7b-128k": 6_738_415_616,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
}
KV_BYTES = {
    "llama3.1-8b": 131_072,
    "yarn-llama2-7b-128k": 524_288,
    "qwen2.5-1.5b": 28_672,
    "qwen2.5-7b": 57_344,
    "qwen2.5-14b": 196_608,
}


def of(name: str) -> Shape:
    return shape_of(skeleton(shape_config(f"{PREFIX}{name}")), 2)


@pytest.mark.parametrize("name", SHAPES)
def test_published_sizes(name: str) -> None:
    shape = of(name)
    assert shape.parameters == PARAMETERS[name]
    assert shape.kv_bytes == KV_BYTES[name]
    assert SHAPES[name].max_position_embeddings == 131_072
    assert shape.head_dim == 128


def test_the_papers_table_2() -> None:
    shape = of("llama3.1-8b")
    assert shape.weight_bytes == pytest.approx(15.0e9, rel=0.002)
    assert shape.flops(131_072) == pytest.approx(83.9e9, rel=0.01)


def test_embeddings_are_read_only_where_they_are_the_lm_head() -> None:
    untied, tied = of("qwen2.5-7b"), of("qwen2.5-1.5b")
    assert untied.parameters - untied.read == 152_064 * 3584
    assert tied.read == tied.parameters
    assert (untied.lm_head, tied.lm_head) == (152_064 * 3584, 151_936 * 1536)


def test_rotary_embeddings_reach_as_far_as_published() -> None:
    llama, yarn = (SHAPES[name].rope_parameters for name in ("llama3.1-8b", "yarn-llama2-7b-128k"))
    assert (llama["rope_type"], llama["factor"], llama["original_max_position_embeddings"]) == ("llama3", 8, 8192)
    assert (yarn["rope_type"], yarn["factor"], yarn["original_max_position_embeddings"]) == ("yarn", 32, 4096)
    assert SHAPES["qwen2.5-14b"].rope_parameters["rope_theta"] == 1e6


def test_a_skeleton_counts_as_the_model_does() -> None:
    network = tiny_llama("gqa", torch.float64)
    assert shape_of(skeleton(network.config), 8) == shape_of(network, 8)
    assert next(skeleton(network.config).parameters()).is_meta


def test_costs_of_a_shape_worked_by_hand() -> None:
    shape = Shape(100, 80, hidden_size=8, layers=2, query_heads=4, kv_heads=1, head_dim=3, itemsize=2)
    assert (shape.weight_bytes, shape.kv_bytes) == (160, 2 * 2 * 1 * 3 * 2)
    assert shape.flops(10) == 2 * 80 + 2 * 2 * 10 * 4 * 3 * 2
    assert [replace(shape, lm_head=30).spared_bytes(bits) for bits in (4, 8, 16)] == [75, 50, 0]


def test_a_configuration_may_be_changed() -> None:
    shape_config("shape:qwen2.5-7b").hidden_size = 1
    assert SHAPES["qwen2.5-7b"].hidden_size == 3584


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"^model: no shape 'llama9'; there are llama3.1-8b, "):
        shape_config("shape:llama9")
    with pytest.raises(InputError, match=r"^model: shape:qwen2.5-7b has random weights"):
        refuse_shape("shape:qwen2.5-7b")
    refuse_shape("demo")


@pytest.mark.parametrize("config", [MixtralConfig(), Qwen3MoeConfig()])
def test_experts_are_seen(config: object) -> None:
    assert routed(config)
    with pytest.raises(InputError, match="model: m reads only some of its experts"):
        refuse_routed(config, "m")


def test_dense_models_have_no_experts() -> None:
    assert not any(routed(config) for config in SHAPES.values())
