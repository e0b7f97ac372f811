"""Logits from hidden states, against what models do with theirs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.architectures import Architecture
from tswift.models.hf import output_of


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("LlamaConfig", {}),
        ("PhiConfig", {}),  # its LM head has a bias
        ("CohereConfig", {"logit_scale": 0.25}),
        ("GraniteConfig", {"logits_scaling": 4.0}),
        ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    ],
)
def test_logits_are_the_models_own(config: str, settings: dict[str, object]) -> None:
    model = Architecture(config, settings).make(97)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(output_of(model)(hidden), wanted, rtol=0, atol=0)
        assert settings == {} or not torch.equal(model.get_output_embeddings()(hidden), wanted)
