"""Architectures as transformers writes them: the texts of all methods, and transformers' own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import logging

from benchmarks.architectures import ARCHITECTURES, WINDOW, apart, checkpoint, stock, texts
from tswift.caches import FullKV, PartialKV
from tswift.errors import InputError
from tswift.loading import LoadedModel, load

# Whole texts cost a second each; these are what people have, and one of every kind of layer. The others are asked for
# their logits, and `python -m benchmarks.architectures` writes texts with all of them.
TEXTS = [
    "Llama, GQA, tied",
    "Llama 3.1 (llama3 scaling)",
    "Llama 2 (YaRN)",
    "Qwen2, sliding window in a layer",
    "Qwen3",
    "Mistral 7B v0.1 (sliding window)",
    "Mixtral",
    "Gemma 2 (windows, soft caps)",
    "Gemma 3, with images (windows)",
    "gpt-oss (windows, sinks)",
    "Granite",
]
LENGTHS = {"ar": 100, "tokenswift": 100, "medusa": 20, "reuse": 20}
SERVED = [name for name, each in ARCHITECTURES.items() if not each.refused]
# eager attention, which alone knows soft caps and sinks, takes its softmax in float32, and Gemma its norms
NEAR = 1e-4


@pytest.fixture(autouse=True)
def _silent() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def made(name: str, folder: Path) -> tuple[transformers.PreTrainedModel, LoadedModel]:
    """The stock model in float64, and the same from its files."""
    if not ARCHITECTURES[name].there:
        pytest.skip(f"not in transformers {transformers.__version__}")
    model = checkpoint(ARCHITECTURES[name], folder)
    return stock(model), load(str(folder), dtype="float64", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_every_method_writes_the_text_of_plain_decoding(name: str, tmp_path: Path, monkeypatch) -> None:
    selected = []
    right = PartialKV.select
    monkeypatch.setattr(PartialKV, "select", lambda self, *given: (selected.append(1), right(self, *given))[1])
    own, model = made(name, tmp_path)
    found = texts(model, LENGTHS)
    plain = found.pop("ar")
    prompt = found.pop("prompt")
    assert len(plain) == 100
    assert len(set(plain)) > 20  # no text of one word
    assert len(selected) > 1  # the partial cache was too small for it
    assert found == {method: plain[: LENGTHS[method]] for method in found}
    assert apart(model, own, prompt + plain) < NEAR


@pytest.mark.parametrize("name", [name for name in SERVED if name not in TEXTS])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    own, model = made(name, tmp_path)
    text = torch.randint(model.target.vocab_size, (2 * WINDOW,), generator=torch.Generator().manual_seed(1)).tolist()
    assert apart(model, own, text) < NEAR


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.refused])
def test_what_cannot_be_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=ARCHITECTURES[name].refused) as error:
        made(name, tmp_path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"model: {tmp_path}")


@pytest.mark.parametrize("name", ["Llama 3.1 (llama3 scaling)", "Llama 2 (YaRN)", "Llama 2 (linear scaling)"])
def test_scaled_rotary_embeddings_beyond_the_original_length(name: str, tmp_path: Path) -> None:
    own, model = made(name, tmp_path)
    target, same = model.target, ARCHITECTURES["Llama, MHA" if "YaRN" in name else "Llama, GQA"]
    plain = stock(same.make(target.vocab_size))  # the same weights, nothing scaled
    text = torch.randint(target.vocab_size, (500,), generator=torch.Generator().manual_seed(1))  # 64 is the original
    with torch.inference_mode():
        wanted, unscaled = (each(text[None], use_cache=False).logits[0] for each in (own, plain))
    kv = FullKV(target.kv_shape, len(text))
    ours = target.logits(torch.cat([part.hidden for part in target.chunks(text.tolist(), kv)]))
    assert (ours - wanted)[64:].abs().max() < 1e-6 * wanted.std()
    assert (ours - unscaled)[64:].abs().max() > 0.1 * wanted.std()


def test_the_check_of_logits_sees_a_window_that_is_off_by_one(tmp_path: Path) -> None:
    own, model = made("Mistral 7B v0.1 (sliding window)", tmp_path)
    text = torch.randint(model.target.vocab_size, (2 * WINDOW,), generator=torch.Generator().manual_seed(1)).tolist()
    own.config.sliding_window = WINDOW + 1
    assert apart(model, own, text) > 100 * NEAR
