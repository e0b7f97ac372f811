"""Every architecture that the C program takes: all methods give plain decoding's tokens,
in a run gone on with, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Ministral3Config, PreTrainedModel

from recipes.corpus import train_tokenizer
from tests.conftest import SENTENCES
from tests.forward.test_program import KINDS, network
from tests.helpers import needs_program, options_for, tokens_of
from tswift.decoding.audit import audit
from tswift.engine import generate
from tswift.forward.adapting import wrap_model
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.program import PassProgram, may_serve
from tswift.forward.notes import PROGRAM, execution_note
from tswift.loading import packing as coded
from tswift.loading.model import adopt, load
from tswift.models.architecture import skeleton
from tswift.sampling.parameters import SamplingParams

pytestmark = needs_program
ARCHITECTURES = [kind for kind in KINDS if not kind.startswith("of ")]
METHODS = ("auto", "recall", "reuse", "magicdec")
LENGTH, KILLED = 400, 200
TOKENS = 320
FIELDS = {"nodes": 12, "budget": 128, "sinks": 4}


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(coded, "cache_folder", lambda: tmp_path)


def checkpoint_of(folder: Path, kind: str) -> Path:
    """A tiny random model with a tokenizer; sizes are multiples of a block of codes."""
    train_tokenizer(SENTENCES, TOKENS).save_pretrained(folder)
    made = network(
        kind,
        hidden_size=64,
        intermediate_size=96,
        vocab_size=TOKENS,
        bos_token_id=0,
        eos_token_id=None,
    )
    made.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int4"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_all_methods_give_the_tokens_of_plain_decoding(kind, weights, tmp_path):
    """In a run that is gone on with in another process, too;
    and the audit finds each drawn exactly, or altered.
    """
    folder = str(checkpoint_of(tmp_path / "model", kind))
    model = load(folder, weights=weights)
    assert (model.layers, model.quantization) == (PROGRAM, weights)
    assert may_serve(skeleton(model.target.model.config))
    params = SamplingParams(min_p=0.02)
    prompt = model.encode(SENTENCES[0])

    def text(model, method, written=()):
        options = options_for(method, **FIELDS)
        steps = generate(
            model, prompt, LENGTH, method=method, options=options, params=params, written=written
        )
        return [*written, *tokens_of(steps)]

    wanted = text(model, "ar")
    assert len({*wanted}) > 20
    # recurrent layers: a cut of the cache does not make the model's own drafts cheaper
    by_itself = model.target.kv_shape.states is None
    for method in METHODS if by_itself else METHODS[:-1]:
        assert text(model, method) == wanted, method
    assert text(load(folder, weights=weights), "recall", wanted[:KILLED]) == wanted
    params = replace(params, banned=model.eos_ids)
    found = audit(model.target, prompt, wanted, params, 0)
    assert (found.exact, found.violations) == (LENGTH, [])
    altered = [
        token if place != 300 else (token + 1) % TOKENS for place, token in enumerate(wanted)
    ]
    assert not audit(model.target, prompt, altered, params, 0).ok


def test_what_depends_on_the_place_in_a_text_is_not_taken_for_what_does_not():
    """Ministral 3 scales queries, but only far into a text: no short text shows it."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    }
    config = Ministral3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=None,
        initializer_range=0.3,
        rope_parameters={**rope, "llama_4_scaling_beta": 0.5},
    )
    target = wrap_model(AutoModelForCausalLM.from_config(config).eval(), "m", "native")
    assert execution_note(target) == "eager, as a C program gave other logits"


def with_more(made: PreTrainedModel) -> PreTrainedModel:
    made.model.layers[1].mlp.adapter = nn.Linear(48, 48)
    return made


def with_other_norms(made: PreTrainedModel) -> PreTrainedModel:
    made.model.norm = nn.LayerNorm(48, eps=1e-6, bias=False)
    return made


def with_norms_without_weights(made: PreTrainedModel) -> PreTrainedModel:
    made.model.norm = nn.LayerNorm(48, eps=1e-6, elementwise_affine=False)  # OLMo's
    return made


def with_heads_normed_without_weights(made: PreTrainedModel) -> PreTrainedModel:
    made.model.layers[0].self_attn.q_norm = nn.RMSNorm(16, elementwise_affine=False)
    return made


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_more, "model.layers.1.mlp.adapter.weight has no place in a program"),
        (with_other_norms, "it has norms that are no RMS norms"),
        (with_norms_without_weights, "LayerNorm has no program"),
        (with_heads_normed_without_weights, "RMSNorm has no program"),
    ],
)
def test_what_has_other_parts_is_told(change, why):
    with pytest.raises(Unfit, match=why):
        PassProgram(change(network()).requires_grad_(False))


def test_other_layers_are_told():
    """Cohere's attention and MLP stand side by side."""
    config = CohereConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=0,
    )
    assert not may_serve(skeleton(config))
    network = AutoModelForCausalLM.from_config(config).eval()
    reason = "CohereDecoderLayer has parts that have no program"
    assert execution_note(wrap_model(network, "m", "native")) == f"eager, as {reason}"
    assert adopt(network).remarks().endswith(f", layers by PyTorch, as {reason}")
