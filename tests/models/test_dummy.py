"""Random weights in a shape: made where they run, the same every time, good for decoding."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config

from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.prompt import read_prompt
from tswift.models import shapes
from tswift.models.fingerprint import fingerprint_of
from tswift.models.heads import ChainedHeads
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load
from tswift.models.shapes import SHAPES


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_everything_that_a_method_needs(tiny_shapes: None, name: str) -> None:
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
    tied = model.target.model.get_input_embeddings().weight is model.target.model.get_output_embeddings().weight
    assert tied == (name == "tied")


def test_a_real_model_is_not_simulated() -> None:
    assert not load("demo", device="cpu").about()["simulated"]


def test_weights_are_noise_and_norms_are_ones(tiny_shapes: None) -> None:
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


def test_the_same_weights_every_time(tiny_shapes: None) -> None:
    torch.manual_seed(1)
    first = load("shape:tiny", dtype="float32")
    torch.manual_seed(2)
    again, other = load("shape:tiny", dtype="float32"), load("shape:tied", dtype="float32")
    assert fingerprint_of(first.target.model) == fingerprint_of(again.target.model)
    assert fingerprint_of(first.target.model) != fingerprint_of(other.target.model)
    pairs = zip(first.target.model.parameters(), again.target.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_no_float32_copy_is_made(tiny_shapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is born in the dtype, and transformers initialises none of them."""
    from transformers import PreTrainedModel

    def initialise(*_: object, **__: object) -> None:
        raise AssertionError("weights were initialised")

    monkeypatch.setattr(PreTrainedModel, "init_weights", initialise)
    born: list[torch.dtype] = []
    made = torch.nn.Linear.__init__

    def note(self: torch.nn.Linear, *arguments: object, **options: object) -> None:
        made(self, *arguments, **options)  # type: ignore[arg-type]
        born.append(self.weight.dtype)

    config = SHAPES["tiny"]
    monkeypatch.setattr(shapes, "skeleton", lambda config: torch.nn.Module())
    monkeypatch.setattr(torch.nn.Linear, "__init__", note)
    shapes.random_network(config, torch.bfloat16, torch.device("cpu"), "shape:tiny")
    assert set(born) == {torch.bfloat16}


@pytest.mark.parametrize("method", ["medusa", "tokenswift", "reuse"])
def test_every_method_decodes_what_plain_decoding_does(tiny_shapes: None, method: str) -> None:
    model = load("shape:tiny", dtype="float64")
    prompt = model.encode("The ship had lain three days becalmed.")
    texts = []
    for name in ("ar", method):
        drafter = make_drafter(name, model.target, model.heads, DraftOptions(budget=64))
        steps = Decoding(model.target, prompt, SamplingParams(), 3, drafter, 60).steps()
        texts.append([token for step in steps for token in step.tokens])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 20


def test_heads_of_either_kind_or_from_a_file(tiny_shapes: None, tmp_path) -> None:  # type: ignore[no-untyped-def]
    conditioned = load("shape:tiny", heads="conditioned").heads
    assert conditioned is not None
    assert (conditioned.kind, conditioned.count) == ("conditioned", 3)
    ChainedHeads(32, 2).save(tmp_path / "mine.safetensors")
    own = load("shape:tiny", heads=tmp_path / "mine.safetensors").heads
    assert own is not None
    assert own.count == 2
    with pytest.raises(InputError, match="heads: there is no file"):
        load("shape:tiny", heads="nowhere")


def test_memory_is_looked_at_first(tiny_shapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("shape:tiny")
    assert model.heads is not None
    squares = [head.linear.weight for head in model.heads.heads]
    needed = sum(weight.nbytes for weight in (*model.target.model.parameters(), *squares))
    monkeypatch.setattr(shapes, "available_bytes", lambda device: needed)
    load("shape:tiny")
    monkeypatch.setattr(shapes, "available_bytes", lambda device: needed - 1)
    with pytest.raises(InputError, match=r"^model: shape:tiny in bfloat16 needs 0.1 MB, cpu has 0.1 MB free$"):
        load("shape:tiny")
    monkeypatch.setattr(shapes, "available_bytes", lambda device: None)
    load("shape:tiny")


def test_a_shape_that_there_is_not() -> None:
    with pytest.raises(InputError, match=r"^model: no shape 'gpt9'; there are "):
        load("shape:gpt9")


def test_deep_stacks_in_bfloat16_pass_the_check_of_our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many layers as the deepest shape has: rounding adds up, and must stay below what the check allows."""
    deep = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=700,
        num_hidden_layers=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    monkeypatch.setitem(SHAPES, "deep", deep)
    assert isinstance(load("shape:deep"), LoadedModel)


def test_the_bundled_prompt_is_long_enough(tiny_shapes: None) -> None:
    ids = load("shape:tiny").encode(read_prompt(None))
    assert len(ids) >= 8192
    assert max(ids) < 256
    assert load("shape:tiny").tokenizer.decode(ids[:1234]) == "[1,234 tokens of random weights]"
