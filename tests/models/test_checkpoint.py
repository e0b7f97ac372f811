"""A model's folder is looked at before it is read: what is let through.

``tests/cli/bad_inputs`` has what is not.
"""

from __future__ import annotations

import functools
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.cli.bad_inputs.files import sparse
from tests.cli.bad_inputs.models import config, edit_json, sharded, tensors
from tests.conftest import make_checkpoint
from tests.helpers import CPU, first, refused, tiny_llama
from tests.models.refusals import refuse
from tests.rows import every_row
from tswift.loading.model import load
from tswift.models import checkpoint as module
from tswift.models.architecture import skeleton
from tswift.models.checkpoint import (
    eos_ids,
    refuse_excess,
    refuse_misfit,
    stored_tensors,
)
from tswift.models.hashes import fingerprint_in_any_dtype, fingerprint_of
from tswift.speculators.heads import ChainedHeads, ConditionedHeads
from tswift.speculators.heads_files import load_heads


@pytest.fixture
def folder(checkpoint: Path, tmp_path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "m")


@functools.cache
def _logits(model: Path) -> torch.Tensor:
    target = load(str(model), dtype="float64").target
    with torch.inference_mode():
        return target.embed(3) @ target.model.get_output_embeddings().weight.T


@pytest.mark.parametrize(
    "change",
    [
        sharded(),
        config(dtype="bfloat16"),
        config(torch_dtype="torch.float16"),
        config(head_dim=None, unknown=[1, {"a": 2}]),
        config(eos_token_id=[0, 3]),
        # whatever attention a file asks for, ours is used: nothing is fetched, and no code of
        # anybody's run
        config(attn_implementation="nobody/kernels", _attn_implementation="nobody/kernels"),
        config(attn_implementation="flash_attention_2"),
        lambda folder: (folder / "generation_config.json").unlink(),
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b"not looked at"),
        lambda folder: (folder / "README.md").symlink_to("nowhere"),
        lambda folder: (folder / "original").mkdir(),
        lambda folder: sparse(folder / "consolidated.00.pth"),
        lambda folder: [
            (folder / "model.safetensors").rename(folder / "blob"),
            (folder / "model.safetensors").symlink_to("blob"),  # as in the hub's cache
        ],
        # buffers of integers and tensors that are none of the model's; an index beside a whole file
        # is not read
        tensors(
            lambda weights: weights.update(
                {"model.layers.0.self_attn.masked_bias": torch.zeros(3).long()}
            )
        ),
        tensors(
            lambda weights: weights.update(
                {"model.medusa_layers.0.linear.weight": torch.zeros(32, 32)}
            )
        ),
        edit_json(
            "model.safetensors.index.json", lambda index: index.update(weight_map={"a": "../x"})
        ),
    ],
)
def test_what_is_fine(folder, checkpoint, change):
    change(folder)
    assert torch.equal(_logits(folder), _logits(checkpoint))


@pytest.mark.parametrize(
    ("control", "words", "template", "ends"),
    [
        # beside <eos>, which the file names
        (["<|im_end|>", "<|x|>"], [], None, ["<|im_end|>"]),
        (["<|end|>", "<|call|>"], ["<end_of_turn>"], "{{ m }}<end_of_turn>", None),
        ([], ["<|eot_id|>", "</s>"], "<|eot_id|>", ["<|eot_id|>"]),
        # of models that have these it ends a part of an answer
        (["<|end|>", "<|return|>"], [], "<|end|>", ["<|return|>"]),
        ([], ["<|im_end|>"], None, []),
    ],
)
def test_ends_are_known_by_their_names(control, words, template, ends):
    """Where they are control tokens, or stand in the chat template; of those that there are."""
    backend = Tokenizer(WordLevel({"<eos>": 0, "a": 1, **{w: n for n, w in enumerate(words, 2)}}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    tokenizer.add_tokens(control, special_tokens=True)
    said = SimpleNamespace(eos_token_id=0)
    network = SimpleNamespace(generation_config=said, config=said)
    wanted = {0, *map(tokenizer.convert_tokens_to_ids, control + words if ends is None else ends)}
    assert eos_ids("m", network, tokenizer, len(tokenizer)) == tuple(sorted(wanted))
    assert eos_ids("m", network, tokenizer, 2) == (0,)


def stored(dtype: str, *shape: int) -> module.StoredTensor:
    return module.StoredTensor(Path("f"), "x", dtype, shape)


def test_a_tied_head_need_not_be_stored(tmp_path):
    make_checkpoint(tmp_path / "m", tie_word_embeddings=True)
    there = stored_tensors(tmp_path / "m")
    assert "lm_head.weight" not in there
    refuse_misfit(skeleton(AutoConfig.from_pretrained(tmp_path / "m")), there, "m")


def test_far_fewer_weights_than_asked_for_take_no_memory(folder):
    config(num_hidden_layers=9, intermediate_size=1 << 16, hidden_size=1 << 15, head_dim=1 << 12)(
        folder
    )
    tensors(
        lambda weights: [
            weights.update({f"other.{name}": weights.pop(name)}) for name in list(weights)
        ]
    )(folder)
    with refused(r"model: .* has 29,792 weights, config.json asks for [0-9,]{14}"):
        load(str(folder))


HUGE = 10**30
SIDES = {"model.layers.0.up.weight": stored("F32", 64, 8), "model.layers.199.x": stored("F32", 9)}


@every_row(
    ("values", "tensors", "most"),
    [
        ({"num_hidden_layers": 1000}, {"scale": stored("F32")}, 128),
        ({"num_hidden_layers": 201}, SIDES, 200),
        ({"n_layer": HUGE}, SIDES, 200),
        ({"text_config": {"num_layers": 201}}, SIDES, 200),
        ({"vision_config": {"depth": 201}}, SIDES, 200),
        ({"mtp_num_hidden_layers": 201}, SIDES, 200),
        *(
            ({name: 65_537}, SIDES, 65_536)
            for name in (
                *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "n_embd"),
                *("num_attention_heads", "n_head", "num_key_value_heads", "num_local_experts"),
                *("n_routed_experts", "altup_num_inputs", "d_model", "mamba_d_state"),
            )
        ),
        ({"vocab_size": 80_001}, {"embed": stored("I32", 10_000, 8)}, 80_000),
        ({"num_hidden_layers": 1025}, {}, 1024),  # on the hub
        ({"hidden_size": HUGE}, {}, 1 << 24),
    ],
)
def test_a_configuration_counts_no_more_than_its_weights(values, tensors, most):
    def less(values):
        return {
            name: less(value) if isinstance(value, dict) else most for name, value in values.items()
        }

    refuse_excess(less(values), tensors, "m")
    with refused(rf"^model: m says \w+ \d+, and its weights can have {most:,} at most$"):
        refuse_excess(values, tensors, "m")


def test_what_counts_no_weights_may_be_large():
    large = {"max_position_embeddings": HUGE, "n_positions": HUGE, "sliding_window": HUGE}
    others = {"rope_theta": HUGE, "batch_size": HUGE, "num_train_steps": HUGE, "seed": HUGE}
    refuse_excess(large | others | {"hidden_size": "x", "vocab_size": None}, SIDES, "m")


def test_nothing_is_built_by_a_configuration_of_too_many_layers(folder, monkeypatch):
    config(num_hidden_layers=10**8)(folder)
    monkeypatch.setattr(module.AutoConfig, "from_pretrained", None)
    refuse(str(folder), "says num_hidden_layers 100000000, and its weights can have 128 at most$")


def test_a_quantised_checkpoint_is_smaller_than_its_model(folder):
    config(quantization_config={"quant_method": "nope"})(folder)
    wanted = skeleton(AutoConfig.from_pretrained(folder))
    # an eighth, and of integers
    refuse_misfit(wanted, {"model.embed_tokens.weight": stored("I32", 320, 16)}, "m")
    with refused(r"has 320 weights, config\.json asks for 29,792"):
        refuse_misfit(wanted, {"x": stored("I32", 320)}, "m")


# -------------------------------------------------------------------------------------------------
# What tells one network from another, and what heads remember of the one they were made for


DTYPES = ("float64", "float32", "bfloat16", "float16")


def test_the_dtype_is_of_no_matter():
    network = tiny_llama("gqa", torch.float64)
    with torch.no_grad():  # what float16 rounds to zero
        network.lm_head.weight[0] *= 1e-12
    found = {
        fingerprint_in_any_dtype(deepcopy(network).to(getattr(torch, dtype))) for dtype in DTYPES
    }
    assert len(found) == 1
    assert (
        len({fingerprint_of(deepcopy(network).to(getattr(torch, dtype))) for dtype in DTYPES}) > 1
    )


@pytest.mark.parametrize(
    "weight", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
)
def test_another_sign_in_any_weight_is_another_network(weight):
    network = tiny_llama("gqa", torch.float32)
    before = fingerprint_in_any_dtype(network)
    with torch.no_grad():
        network.get_parameter(weight)[0, 3] *= -1
    assert fingerprint_in_any_dtype(network) != before


@pytest.mark.parametrize("kind", first(1, [ChainedHeads, ConditionedHeads]))
def test_heads_remember_their_base_model(checkpoint, tmp_path, kind, tiny_shapes):
    path = tmp_path / "mine.safetensors"
    other = make_checkpoint(tmp_path / "other")
    # trained otherwise
    tensors(lambda weights: weights["model.layers.0.mlp.up_proj.weight"].mul_(-1))(other)
    base = fingerprint_in_any_dtype(load(str(checkpoint), dtype="float32").target.model)
    for saved in (base, None):
        kind(32, 2).save(path, base=saved)
        for model, dtype in (
            (checkpoint, "float64"),
            (checkpoint, "float32"),
            ("shape:tiny", "float32"),
        ):
            heads = load(str(model), dtype=dtype, heads=path, exact=False).heads
            assert heads is not None
            assert heads.base == saved
        if saved is None:
            assert load(str(other), heads=path).heads is not None
        else:
            refuse(
                str(other),
                r"^heads: .*mine.safetensors was made for another model: ",
                "heads",
                heads=path,
            )


def test_what_is_remembered_is_kept_when_saved_again(tmp_path):
    path = tmp_path / "mine.safetensors"
    ChainedHeads(32, 2).save(path, base="abc")
    load_heads(path, 32, torch.float32, CPU).save(path)
    assert load_heads(path, 32, torch.float32, CPU).base == "abc"
    load_heads(path, 32, torch.float32, CPU).save(path, base="def")
    assert load_heads(path, 32, torch.float32, CPU).base == "def"
