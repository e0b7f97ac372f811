"""Biases, stop strings and log-probabilities under all methods: those of plain decoding,
however drafts are cut.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.helpers import METHODS, options_for, refused, tokens_of
from tests.jobs.test_text import first_stop, text_of
from tests.sampling.test_rule import transformers_warp
from tswift.decoding.drafter import Step
from tswift.decoding.text import TextRules, TextStream
from tswift.drafting.options import DraftOptions
from tswift.engine import generate
from tswift.loading.model import LoadedModel, load
from tswift.loading.plan import plan_model
from tswift.memory import Demand, preflight
from tswift.models.config import ModelConfig
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import row_type

PROMPT = "The ship had lain three days"
FAST = [name for name in ("medusa", "tokenswift", "recall") if name in METHODS]
LENGTH = 60


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return load(str(checkpoint), dtype="float64", draft_model=str(checkpoint))


def steps_of(model: LoadedModel, method: str, params: SamplingParams, **asked) -> list[Step]:
    options = options_for(method, budget=64)
    if method == "recall":  # the same trees whatever the clock says
        options = replace(options, costs="nominal")
    return list(
        generate(
            model, PROMPT, LENGTH, method=method, params=params, options=options, seed=3, **asked
        )
    )


biases = st.dictionaries(st.integers(1, 319), st.floats(-100, 100), max_size=6)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    penalty=st.sampled_from([1.0, 1.3]),
    window=st.just(20),
    logit_bias=biases,
)


# of all methods
WIDTHS = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.mark.slow
@WIDTHS
@settings(max_examples=5)
@given(samplings, st.data())
def test_biases_and_stop_strings_under_methods(model, every, params, data):
    plain = tokens_of(steps_of(model, "ar", params))
    whole = text_of(model.tokenizer, plain)
    stop = []
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, max(0, len(whole) - 2)))
        stop.append(whole[begin : begin + data.draw(st.integers(1, 7))])
    stop = [each for each in stop if each and "\ufffd" not in each] or ["never"]
    count, text, each = first_stop(model.tokenizer, plain, stop)
    for method in METHODS if every else ("ar", data.draw(st.sampled_from(FAST))):
        made = tokens_of(steps_of(model, method, params, stop=stop))
        assert made == plain[:count], (method, stop)
        stream = TextStream(model.tokenizer, TextRules(tuple(stop)))
        assert stream.add(made) + stream.finish() == text
        assert stream.stopped == each


def test_a_stop_string_cuts_a_step_and_spans_tokens(model):
    """Of a long accepted path only the tokens up to the string's end are kept,
    and counted as accepted.
    """
    greedy = SamplingParams(temperature=0.0, penalty=1.0)
    cut = 0
    whole = steps_of(model, "standalone", greedy)  # by itself: five tokens a step
    tokens = tokens_of(whole)
    for count in range(10, len(tokens), 8):
        before, text = (
            text_of(model.tokenizer, tokens[: count - 2]),
            text_of(model.tokenizer, tokens[:count]),
        )
        stop = text[len(before) - 1 :]  # of several tokens
        expected = first_stop(model.tokenizer, tokens, [stop])[0]
        steps = steps_of(model, "standalone", greedy, stop=stop)
        assert tokens_of(steps) == tokens[:expected]
        assert all(step.accepted <= len(step.tokens) for step in steps)
        cut += len(steps[-1].tokens) < len(whole[len(steps) - 1].tokens)
    assert cut > 2


def test_a_stop_string_in_what_was_written_is_refused(model):
    tokens = tokens_of(steps_of(model, "ar", SamplingParams()))
    with refused(r"^stop: the text so far has"):
        steps_of(
            model,
            "ar",
            SamplingParams(),
            stop=text_of(model.tokenizer, tokens[:9])[1:4],
            written=tokens[:9],
        )


def test_what_is_no_stop_string_or_number_of_logprobs_is_refused(model):
    wrong = {
        "stop": ("", [""], 3, [3], None, "x" * 1001, ["x"] * 65, b"x"),
        "logprobs": (-1, 21, 1.5, True, "3"),
    }
    for name, values in wrong.items():
        for value in values:
            with refused(rf"^{name}: must "):
                steps_of(model, "ar", SamplingParams(), **{name: value})
    with refused(r"^stop: must not be empty$"):
        steps_of(model, "ar", SamplingParams(), stop=["x", ""])


def test_a_biased_token_that_the_model_lacks_is_refused_before_and_after_loading(
    model,
):
    params = SamplingParams(logit_bias={320: 1.0})
    with refused(r"^logit_bias: has token ids outside the model's vocabulary of 320$"):
        preflight(
            plan_model(ModelConfig(model=model.name)),
            Demand(3, 50, "ar", DraftOptions()),
            params=params,
        )
    with refused(r"^logit_bias: has token ids outside the model's vocabulary of 320$"):
        steps_of(model, "ar", params)


# -------------------------------------------------------------------------------------------------
# log-probabilities


@functools.cache
def dense(checkpoint: Path):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()


def rows_of(steps: list[Step]) -> np.ndarray:
    return np.concatenate([step.logprobs for step in steps])


SAMPLINGS = {
    "all": SamplingParams(
        0.8, 30, 0.9, 0.02, 0.001, 1.3, 25, logit_bias={40: 3.0, 41: -2.5, 100: 1.5}
    ),
    "defaults": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0, penalty=1.2, window=10**6, logit_bias={40: 3.0}),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@torch.inference_mode()
def test_logprobs_are_those_of_transformers(model, checkpoint, name):
    """Recomputed from dense logits of the whole text in float64,
    with the warpers of transformers.
    """
    params = SAMPLINGS[name]
    top = 4
    steps = steps_of(model, "tokenswift", params, logprobs=top)
    tokens = tokens_of(steps)
    prompt = model.encode(PROMPT)
    rows = rows_of(steps)
    assert rows.dtype == row_type(top)
    assert max(len(step.tokens) for step in steps) > 1
    assert all(len(step.logprobs) == len(step.tokens) for step in steps)
    logits = dense(checkpoint)(torch.tensor([[*prompt, *tokens]])).logits[0].double()
    for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        text = [*prompt, *tokens[:at]]
        own = logits[len(text) - 1].clone()
        raw = own.log_softmax(-1)
        own[0] = -torch.inf  # the end of the text is banned
        if params.temperature:
            warped = transformers_warp(own[None], text[-params.window :], params)[0].log_softmax(-1)
        else:
            own[40] += 3
            lower = torch.where(own > 0, own / params.penalty, own * params.penalty)
            own[text] = lower[text]
            warped = own.log_softmax(-1)
        for kind, logs in (("raw", raw), ("warped", warped)):
            # transformers keeps biases in float32
            assert row[kind] == pytest.approx(float(logs[token]), abs=1e-7)
            best = logs.topk(top)
            assert row[f"{kind}_top"] == pytest.approx(best.values.numpy(), abs=1e-7)
            assert row[f"{kind}_top"] == pytest.approx(
                logs[row[f"{kind}_ids"].astype(int)].numpy(), abs=1e-7
            )


@WIDTHS
@settings(max_examples=3)
@given(samplings, st.sampled_from(FAST), st.sampled_from([0, 1, 5]))
def test_logprobs_are_those_of_plain_decoding(model, every, params, method, top):
    plain = rows_of(steps_of(model, "ar", params, logprobs=top))
    assert np.isfinite(plain["raw"]).all()
    assert np.isfinite(plain["warped"]).all()
    for name in METHODS if every else (method,):
        rows = rows_of(steps_of(model, name, params, logprobs=top))
        for field in plain.dtype.names:
            np.testing.assert_allclose(
                rows[field], plain[field], rtol=0, atol=0 if "ids" in field else 1e-9
            )


def test_logprobs_go_with_the_tokens_that_a_stop_string_keeps(model):
    greedy = SamplingParams(temperature=0.0, penalty=1.0)
    whole = steps_of(model, FAST[-1], greedy, logprobs=1)
    for count in range(30, 34):
        stop = text_of(model.tokenizer, tokens_of(whole)[:count])[-4:]
        steps = steps_of(model, FAST[-1], greedy, logprobs=1, stop=stop)
        assert len(rows_of(steps)) == len(tokens_of(steps))
        np.testing.assert_allclose(
            rows_of(steps)["raw"], rows_of(whole)["raw"][: len(tokens_of(steps))], atol=1e-9
        )


def test_logprobs_go_on_after_what_was_written(model):
    params = SamplingParams(window=9)
    whole = steps_of(model, "ar", params, logprobs=3)
    rest = steps_of(model, "medusa", params, logprobs=3, written=tokens_of(whole)[:25])
    for field in ("raw", "warped", "warped_top"):
        np.testing.assert_allclose(
            rows_of(rest)[field], rows_of(whole)[field][25:], rtol=0, atol=1e-9
        )


def test_nothing_is_recorded_unless_asked_for(model):
    assert all(step.logprobs is None for step in steps_of(model, "medusa", SamplingParams()))


def test_a_row_is_what_the_documentation_says():
    assert (row_type(0).itemsize, row_type(5).itemsize) == (16, 16 + 24 * 5)
    assert row_type(2).names == ("raw", "warped", "raw_ids", "raw_top", "warped_ids", "warped_top")
