"""What is known of a model before it is loaded is what it turns out to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import make_checkpoint
from tswift.errors import InputError
from tswift.models import shapes
from tswift.models.heads import KINDS, ConditionedHeads
from tswift.models.loading import load
from tswift.models.prospect import inspect_model


def bytes_of(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(weight.nbytes for weight in module.parameters())


@pytest.mark.parametrize("dtype", ["auto", "float64", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1, "head_dim": 16}])
def test_a_folder(tmp_path: Path, changes: dict[str, object], dtype: str) -> None:
    model = str(make_checkpoint(tmp_path / "m", **changes))
    seen, loaded = inspect_model(model, dtype=dtype), load(model, dtype=dtype)
    target = loaded.target
    assert seen.device == target.device
    assert (seen.positions, seen.vocab_size) == (target.max_positions, target.vocab_size)
    assert seen.weight_bytes == bytes_of(target.model)
    assert seen.token_bytes == target.kv_shape.bytes_per_token
    assert (seen.heads, seen.heads_bytes) == (3, bytes_of(loaded.heads))
    assert seen.most_nodes is None


@pytest.mark.parametrize("heads", [None, *KINDS])
def test_a_shape(tiny_shapes: None, heads: str | None) -> None:
    for model in ("shape:tiny", "shape:tied"):
        seen, loaded = inspect_model(model, heads=heads), load(model, heads=heads)
        assert seen.weight_bytes == bytes_of(loaded.target.model)
        assert (seen.heads, seen.heads_bytes) == (loaded.heads.count, bytes_of(loaded.heads))
        assert loaded.heads.count == shapes.HEADS
        assert seen.token_bytes == loaded.target.kv_shape.bytes_per_token


def test_a_configuration_that_does_not_say_how_many_kv_heads(tmp_path: Path) -> None:
    """At least one: no more may be taken for granted."""
    from transformers import GPTNeoXConfig

    GPTNeoXConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128,
    ).save_pretrained(tmp_path)  # fmt: skip
    seen = inspect_model(str(tmp_path))
    assert seen.token_bytes == 2 * 2 * 8 * 4
    assert (seen.heads, seen.heads_bytes) == (0, 0)


def test_heads_that_are_elsewhere_or_not_there(checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "m")
    (model / "heads.safetensors").unlink()
    assert inspect_model(str(model)).heads == 0
    ConditionedHeads(32, 2).save(tmp_path / "own")
    assert inspect_model(str(model), heads=tmp_path / "own").heads == 2


def test_heads_of_another_model(checkpoint: Path, tmp_path: Path) -> None:
    ConditionedHeads(48, 2).save(tmp_path / "own")
    with pytest.raises(InputError, match=r"^heads: .*own was made for hidden size 48, the model has 32$"):
        inspect_model(str(checkpoint), heads=tmp_path / "own")
    (tmp_path / "none").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"^heads: .*none"):
        inspect_model(str(checkpoint), heads=tmp_path / "none")


def test_medusa_s_heads_of_another_vocabulary(checkpoint: Path, tmp_path: Path) -> None:
    from tswift.models.heads import MedusaHeads

    MedusaHeads(32, 2, 99).save(tmp_path / "own")
    with pytest.raises(InputError, match=r"^heads: .*own was made for a vocabulary of 99, the model has 320$"):
        inspect_model(str(checkpoint), heads=tmp_path / "own")


def test_a_model_on_the_hub_that_carries_heads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say how many before it is there."""
    from transformers import AutoConfig

    from tswift.models import prospect

    config = AutoConfig.from_pretrained(checkpoint)
    config.medusa_heads = 3
    monkeypatch.setattr(prospect, "read_config", lambda model: config)
    seen = inspect_model("somebody/something")
    assert seen.heads is None
    assert seen.weight_bytes > 0


def test_quantised_weights_are_not_guessed_at(checkpoint: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (model / "config.json").write_text(json.dumps(config))
    assert inspect_model(str(model)).weight_bytes == 0


def test_an_attention_that_cannot_serve(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^attention: no attention 'eager'"):
        inspect_model(str(checkpoint), attention="eager")
    with pytest.raises(InputError, match=r"^attention: flash attention takes"):
        inspect_model(str(checkpoint), attention="flash")
    assert inspect_model(str(checkpoint), attention="sdpa").most_nodes is None


def test_nothing_is_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert inspect_model(str(checkpoint)).weight_bytes > 0
