"""Published shapes: what a pass over them costs, and random weights,
the same every time and good for decoding.
"""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, Qwen2Config, Qwen3MoeConfig

from tests.helpers import refused
from tests.rows import every_row
from tswift.loading.model import load
from tswift.models import shapes
from tswift.models.architecture import is_moe, refuse_routed, skeleton
from tswift.models.checkpoint import SHAPES, shape_config
from tswift.models.config import SHAPE_PREFIX
from tswift.models.config import SHAPES as NAMES
from tswift.models.hashes import fingerprint_of
from tswift.models.shapes import shape_of

# weights, as the model cards on the hub count them, and bytes of a token's keys and values
PUBLISHED = {
    "llama3.1-8b": (8_030_261_248, 131_072),
    "yarn-llama2-7b-128k": (6_738_415_616, 524_288),
    "qwen2.5-1.5b": (1_543_714_304, 28_672),
    "qwen2.5-7b": (7_615_616_512, 57_344),
    "qwen2.5-14b": (14_770_033_664, 196_608),
    "qwen3-4b": (4_022_468_096, 147_456),
    "qwen3-8b": (8_190_735_360, 147_456),
    "qwen3-14b": (14_768_307_200, 163_840),
    # made of the sizes in their configurations, without MTP heads; no card's count was at hand
    "qwen3.5-9b": (8_953_803_264, 32_768),
    "qwen3.5-27b": (26_895_998_464, 65_536),
}


def test_options_name_every_shape():
    assert tuple(SHAPES) == NAMES


@every_row("name", SHAPES)
def test_published_sizes(name):
    shape = shape_of(skeleton(shape_config(f"{SHAPE_PREFIX}{name}")), 2)
    assert (shape.parameters, shape.kv_bytes) == PUBLISHED[name]
    assert SHAPES[name].max_position_embeddings == 131_072
    recurrent = shape.states is not None
    assert shape.head_dim == (256 if recurrent else 128)
    assert shape.state_bytes // 2 >> 20 == {"qwen3.5-9b": 49, "qwen3.5-27b": 146}.get(name, 0)


@pytest.mark.parametrize("config", [MixtralConfig(), Qwen3MoeConfig()])
def test_experts_are_seen(config):
    assert is_moe(config)
    with refused("model: m reads only some of its experts"):
        refuse_routed(config, "m")


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_everything_that_a_method_needs(tiny_shapes, name):
    model = load(f"shape:{name}")
    assert model.simulated
    assert model.about()["simulated"]
    assert model.target.dtype == torch.bfloat16
    assert model.heads is not None
    assert (model.heads.kind, model.heads.count, model.heads.heads[0].linear.weight.dtype) == (
        "chained",
        3,
        torch.bfloat16,
    )
    assert model.eos_ids == (7,)
    tied = (
        model.target.model.get_input_embeddings().weight
        is model.target.model.get_output_embeddings().weight
    )
    assert tied == (name == "tied")


def test_weights_are_noise_and_norms_are_ones(tiny_shapes):
    model = load("shape:tied", dtype="float32")
    for name, weight in model.target.model.named_parameters():
        if name.endswith("norm.weight"):
            assert (weight == 1).all()
        else:
            assert 0.01 < weight.std() < 0.03, name
    assert model.heads is not None
    assert 0.01 < model.heads.heads[2].linear.weight.std() < 0.03
    rows = model.target.model.model.layers[0].mlp.up_proj.weight
    assert len(rows.unique(dim=0)) == len(rows)


def test_the_same_weights_every_time(tiny_shapes):
    torch.manual_seed(1)
    first = load("shape:tiny", dtype="float32")
    torch.manual_seed(2)
    again, other = load("shape:tiny", dtype="float32"), load("shape:tied", dtype="float32")
    assert fingerprint_of(first.target.model) == fingerprint_of(again.target.model)
    assert fingerprint_of(first.target.model) != fingerprint_of(other.target.model)
    pairs = zip(first.target.model.parameters(), again.target.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_memory_is_looked_at_first(tiny_shapes, monkeypatch):
    model = load("shape:tiny")
    assert model.heads is not None
    squares = [head.linear.weight for head in model.heads.heads]
    needed = sum(weight.nbytes for weight in (*model.target.model.parameters(), *squares))
    monkeypatch.setattr(shapes, "available_bytes", lambda device: needed)
    load("shape:tiny")
    monkeypatch.setattr(shapes, "available_bytes", lambda device: needed - 1)
    with refused(r"^model: shape:tiny in bfloat16 needs 0.1 MB, cpu has 0.1 MB free$"):
        load("shape:tiny")
    monkeypatch.setattr(shapes, "available_bytes", lambda device: None)
    load("shape:tiny")


@pytest.mark.slow
def test_deep_stacks_in_bfloat16_pass_the_check_of_our_attention(
    monkeypatch,
):
    """As many layers as the deepest shape has: rounding adds up,
    and must stay below what the check allows.
    """
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 700,
        "num_hidden_layers": 48,
    }
    deep = Qwen2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
    )
    monkeypatch.setitem(SHAPES, "deep", deep)
    load("shape:deep")
