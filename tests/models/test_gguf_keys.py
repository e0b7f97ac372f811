"""Keys of GGUF files: none is skipped without a word, and models are those of llama.cpp."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import first
from tests.models.gguf_files import tiny_model, write_gguf
from tests.models.gguf_variants import (
    ANSWERS,
    ARCHITECTURES,
    CHANGES,
    LENGTH,
    PROMPT,
    SIZES,
    Change,
    write_variant,
)
from tests.models.refusals import refuse
from tswift.errors import InputError, Notice, notice
from tswift.loading.model import load
from tswift.loading.packing import load_gguf
from tswift.models.checkpoint import Checkpoint, silence
from tswift.models.gguf import GGUFFile
from tswift.models.gguf_keys import _KNOWN, _SILENT, configuration

# by "architecture: change": a seed and ids; null where llama.cpp does not load the file
KNOWN = json.loads(ANSWERS.read_text())
FAST = (
    *("llama: a factor alone", "llama: all biases", "llama: yarn turned", "llama: longrope"),
    *("granite: no scale", "granite: frequencies", "granite: not turned", "qwen2: one bias"),
    *("qwen3: no head size", "qwen3: the old name", "qwen35: interval", "qwen35: yarn"),
    *("smollm3: no base", "smollm3: biases", "olmo2: window yarn turned", "olmo2: in some"),
    *("phi3: long factors", "phi3: yarn", "phi3: linear", "phi3: window", "phi3: window of 0"),
    *("gemma2: none", "gemma2: window", "gemma2: caps", "gemma3: window yarn turned"),
    *("gemma3: base of windows", "gemma3: no window", "gemma3: half of a head", "llama: unknown"),
)
# the others are slow; but where many examples are asked for, every fifth of them stands for all
_MANY = os.environ.get("HYPOTHESIS_PROFILE") in ("ci", "nightly")
SLOW = [row for row in KNOWN if row not in FAST][:: 1 if _MANY else 5]
# what is refused here and not by llama.cpp, by the name of what is changed
REFUSED = {"not causal", "experts", "unknown", "dimensions of windows", "size of windows"}
# what transformers' classes have none of
WITHOUT = {
    "gemma2": {"half of a head", "a quarter", "none", "base of windows", "window of 0"},
    "gemma3": {"half of a head", "a quarter"},
    "phi3": {"biases"},
    "granite": {"not turned"},
    "qwen35": {"other KV heads", "one more layer"},
}
# what is served here and not by llama.cpp, whose tensors have fixed sizes or names there
SERVED = {"head of 32", "bias of outputs", "all biases", "a bias of the MLP"}


def ids_of(path: Path) -> tuple[list[int], dict[str, str]] | str:
    """The ids that follow the prompt, by transformers, and what is told of the file;
    or why it is refused.
    """
    checkpoint = Checkpoint.find(str(path))
    try:
        with silence():
            network = load_gguf(checkpoint, torch.float32)
    except InputError as error:
        return str(error)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(LENGTH):
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    assert checkpoint.gguf is not None
    return ids[len(PROMPT) :], checkpoint.gguf.told


def names_of(architecture: str, change: Change) -> list[str]:
    """How a refusal may call what is changed: a key, or the name of a tensor."""
    tensors = change.get("tensors", "").replace("tied", "output.weight").split()
    return [*(f"{architecture}.{key}" for key in change), *tensors, "rope_f"]


@pytest.mark.parametrize("row", first(len(FAST), [*FAST, *SLOW]))
def test_a_model_is_llama_cpps_or_refused_by_name(row, tmp_path):
    architecture, name = row.split(": ")
    change = CHANGES[name]
    path = write_variant(tmp_path / "tiny.gguf", architecture, change, (KNOWN[row] or [1])[0])
    found = ids_of(path)
    if isinstance(found, str):
        assert any(each in found for each in names_of(architecture, change)), found
        assert KNOWN[row] is None or name in REFUSED | WITHOUT.get(architecture, set()), found
        return
    assert name not in REFUSED
    ids, told = found
    # which llama.cpp does not use
    own = architecture == "phi3" and bool(change.get("attention.sliding_window"))
    assert ("is used" in told.get("attention.sliding_window", "")) == own
    if KNOWN[row] is None:
        assert name in SERVED
    elif not own:
        assert ids == KNOWN[row][1:]


def test_every_variant_is_known():
    assert [*KNOWN] == [f"{each}: {name}" for each in ARCHITECTURES for name in CHANGES]
    assert {*FAST} <= {*KNOWN}


def in_memory(architecture: str, keys: Change) -> GGUFFile:
    """What the header of a file would say, without tensors."""
    said = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    arrays = {key: value for key, value in said.items() if isinstance(value, list)}
    metadata = {key: value for key, value in said.items() if key not in arrays}
    return GGUFFile(Path("a.gguf"), {"general.architecture": architecture, **metadata}, arrays, {})


def configured(architecture: str, change: Change) -> tuple[dict[str, object], str] | str:
    """The configuration of a changed file and what is told of it, or why it is refused."""
    file = in_memory(architecture, {**SIZES, **ARCHITECTURES[architecture], **change})
    try:
        values = configuration(file)
    except InputError as error:
        return str(error)
    return values, "\n".join(file.told.values())


NUMBERS = st.one_of(st.integers(1, 99), st.floats(0.25, 99), st.booleans())
WORDS = st.text(st.sampled_from("abcdefgh_."), min_size=3, max_size=12)


@given(st.data())
def test_no_key_is_skipped_without_a_word(data):
    """It makes another configuration, is refused or told of by its name, or is known to change
    nothing; or it says what holds anyway, and another value of it does one of these.
    """
    architecture = data.draw(st.sampled_from([*ARCHITECTURES]))
    known = st.sampled_from(sorted({*_KNOWN, *SIZES, *ARCHITECTURES[architecture]}))
    key = data.draw(st.one_of(known, WORDS))
    lists = st.lists(NUMBERS, min_size=1, max_size=4)
    value = data.draw(st.integers(1, 99) if key in SIZES else st.one_of(NUMBERS, lists, WORDS))
    usual = configured(architecture, {})
    assert not isinstance(usual, str)

    def seen(value) -> bool:
        found = configured(architecture, {key: value})
        if isinstance(found, str):
            # of sizes that do not fit each other, either is named
            assert f"{architecture}.{'' if key in SIZES else key + ' '}" in found, found
            return True
        return found[0] != usual[0] or f"{architecture}.{key} " in found[1]

    silent = any(fnmatchcase(key, each) for each in " ".join(_SILENT.values()).split())
    assert seen(value) or silent or seen([7.5, 9])


# what llama.cpp's converter writes beside SIZES, and Ollama's
REAL = {
    "llama": {"vocab_size": 259, "rope.scaling.finetuned": True, "expert_count": 0}
    | {"attention.head_dim": 16, "tensor_data_layout": "Meta AI original pth"},
    "qwen2": {"pooling_type": 3},
    "qwen3": {"classifier.output_labels": ["yes", "no"], "rope.mrope_section": [2, 2, 4]},
    "smollm3": {"vocab_size": 259, "attention.layer_norm_epsilon": 1e-5},
    "olmo2": {"attention.sliding_window": 24, "rope.freq_base": 500_000.0}
    | {"attention.sliding_window_pattern": [True, True, True, False]}
    | {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
    | {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
    | {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.original_context_length": 64},
    "phi3": {"rope.scaling.original_context_length": 512, "attention.sliding_window": 0},
    "granite": {
        "vocab_size": 259,
        "rope.scaling.finetuned": True,
        "attention.head_count_kv": [2] * 4,
    }
    | {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 64}
    | {"ssm.time_step_rank": 4, "expert_count": 0, "expert_used_count": 0}
    | {"expert_shared_feed_forward_length": 96, "deepstack_mapping": [-1, 1, -1, 2]},
    "gemma2": {},
    "gemma3": {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "mm.tokens_per_image": 256,
    }
    | {"rope.freq_base_swa": 10_000.0, "final_logit_softcapping": 30.0, "vision.block_count": 27}
    | {"attention.sliding_window_pattern": [True, True, True, True, True, False]},
    "qwen35": {"full_attention_interval": 4, "ssm.v_head_reordered": True, "mrope_sections": [2, 1]}
    | {"rope.mrope_interleaved": True, "vocab_size": 259},
}


@pytest.mark.parametrize("architecture", REAL)
def test_what_converters_write_is_read_without_a_word(architecture):
    found = configured(architecture, REAL[architecture])
    assert not isinstance(found, str), found
    assert found[1] == ""


def test_olmo_3_turns_its_fourth_layers_alone_by_yarn():
    values, _ = configured("olmo2", REAL["olmo2"])
    assert values["model_type"] == "olmo3"
    assert values["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    ropes = values["rope_parameters"]
    assert {kind: rope["rope_type"] for kind, rope in ropes.items()} == {
        **{"full_attention": "yarn", "sliding_attention": "default"}
    }


@pytest.mark.parametrize(
    ("names", "right"),
    [
        ({"rope.global.freq_base": 1e6, "rope.local.freq_base": 1e3}, (1e6, 1e3)),  # Ollama's
        ({"rope.freq_base": 1e6}, (1e6, 1e4)),
        ({}, (1e4, 1e4)),
    ],
)
def test_bases_of_gemma_3(names, right):
    values, _ = configured("gemma3", {"rope.freq_base": None, **names})
    ropes = values["rope_parameters"]
    assert tuple(ropes[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")) == right


def test_what_is_not_used_is_told(tmp_path):
    notice.cache_clear()  # a line is told once a process
    path = str(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), attention__sliding_window=9))
    with pytest.warns(Notice, match=r"^tiny.gguf: llama.attention.sliding_window is not used, "):
        load(path)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ("rope_freqs.weight", "has rope_freqs.weight, by which no qwen3 turns"),
        ("rope_factors_long.weight", "has rope_factors_long.weight, by which no qwen3 turns"),
        ("blk.0.attn_qkv.bias", "has blk.0.attn_qkv.bias, which no qwen3 of transformers has"),
    ],
)
def test_tensors_that_nobody_reads_are_refused(tensors, says, tmp_path):
    extra = {tensors: torch.ones(8).numpy()}
    refuse(str(write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen3"), extra=extra)), says)


def test_an_mtp_head_has_to_be_there(tmp_path):
    path = write_variant(tmp_path / "tiny.gguf", "qwen35", {"nextn_predict_layers": 1}, 1)
    refuse(
        str(path),
        "lacks blk.3.nextn.eh_proj.weight, of the head of its qwen35.nextn_predict_layers",
    )
