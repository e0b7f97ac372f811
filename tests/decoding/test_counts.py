"""Presence and frequency penalties, and loops that end a text: of every node, by every method,
as plainly decoded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tests.helpers import METHODS, first, options_for, tokens_of
from tswift.decoding.audit import audit
from tswift.decoding.drafter import DraftTree
from tswift.decoding.text import TextRules, TextStream
from tswift.engine import generate
from tswift.errors import InputError
from tswift.loading.model import LoadedModel, load
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler

PROMPT = "The ship had lain three days"
LENGTH = 60
CPU = torch.device("cpu")
COUNTED = SamplingParams(min_p=0.02, presence_penalty=0.7, frequency_penalty=-0.9, penalty=1.0)
BOTH = replace(COUNTED, presence_penalty=1.5, frequency_penalty=0.4, penalty=1.2, window=16)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return load(str(checkpoint), draft_model=str(checkpoint))


def written(model: LoadedModel, method: str, params: SamplingParams, **asked) -> list[int]:
    options = options_for(method, budget=64)
    return tokens_of(
        generate(
            model, PROMPT, LENGTH, method=method, params=params, options=options, seed=3, **asked
        )
    )


def plainly(logits: torch.Tensor, generated: list[int], params: SamplingParams) -> torch.Tensor:
    """OpenAI's formula, a token at a time."""
    lowered = logits.double().clone()
    for token, count in Counter(generated).items():
        lowered[token] -= count * params.frequency_penalty + params.presence_penalty
    return lowered


@pytest.mark.parametrize("seed", first(3, range(20)))
def test_every_node_counts_its_own_path(seed: int) -> None:
    """And of the text what was generated; the prompt does not count."""
    random = Random(seed)
    vocab = 9
    params = replace(BOTH, presence_penalty=0.7)
    prompt, generated = (
        [random.randrange(vocab) for _ in range(count)] for count in (12, random.randrange(6))
    )
    sampler = Sampler(params, 5, vocab, CPU, prompt=len(prompt))
    sampler.extend(prompt + generated[:2])
    sampler.extend(generated[2:])
    tree = DraftTree((prompt + generated)[-1], 8)
    while len(tree) < 8:
        tree.grow(random.randrange(len(tree)), random.randrange(vocab), "random")
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(seed))
    places = torch.tensor(tree.depths) + sampler.length - 1
    nodes = torch.tensor(tree.tokens), places, tree.ancestors()
    lowered = sampler.lowered(logits, *nodes)
    for node in range(8):
        path = []
        at = node
        while at:
            path.append(tree.tokens[at])
            at = tree.parents[at]
        torch.testing.assert_close(
            lowered[node], plainly(logits[node], generated + path, params), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("params", first(1, [BOTH, COUNTED]))
def test_all_methods_give_the_tokens_of_plain_decoding(
    model: LoadedModel, params: SamplingParams
) -> None:
    wanted = written(model, "ar", params)
    neither = replace(params, presence_penalty=0.0, frequency_penalty=0.0)
    assert wanted != written(model, "ar", neither)
    for method in METHODS:
        assert written(model, method, params) == wanted, method
    assert wanted[:25] + written(model, "auto", params, written=wanted[:25]) == wanted
    prompt = model.encode(PROMPT)
    banned = replace(params, banned=model.eos_ids)
    assert audit(model.target, prompt, wanted, banned, 3).ok
    assert not audit(model.target, prompt, wanted, replace(neither, banned=model.eos_ids), 3).ok


def test_log_probabilities_are_of_what_is_drawn_from(model: LoadedModel) -> None:
    def rows(method: str) -> list:
        steps = generate(model, PROMPT, 40, method=method, params=COUNTED, logprobs=2)
        return [row for step in steps for row in step.logprobs]

    plain, drafted = rows("ar"), rows("reuse")
    for ours, theirs in zip(plain, drafted, strict=True):
        assert abs(ours["warped"] - theirs["warped"]) < 1e-4


def thrice(tokens: list[int], size: int) -> int | None:
    """After how many tokens the same ``size`` stand there thrice in a row."""
    for end in range(3 * size, len(tokens) + 1):
        last = tokens[end - 3 * size : end]
        if last[:size] == last[size : 2 * size] == last[2 * size :]:
            return end
    return None


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_loop_is_seen_where_it_is_complete(size: int, model: LoadedModel) -> None:
    random = Random(size)
    for _ in range(60):
        piece = [random.randrange(1, 4) for _ in range(size)]
        tokens = [
            random.randrange(1, 3) for _ in range(random.randrange(9))
        ] + piece * random.randrange(5)
        stream = TextStream(model.tokenizer, TextRules(loop=size))
        seen = [at for at, token in enumerate(tokens, 1) if (stream.add([token]), stream.looped)[1]]
        end = seen[0] if seen else None
        assert end == thrice(tokens, size)


def test_a_loop_ends_every_method_at_the_same_token(model: LoadedModel) -> None:
    greedy = SamplingParams(temperature=0, penalty=1.0)
    whole = tokens_of(generate(model, PROMPT, 400, method="ar", params=greedy))
    size = next(size for size in range(1, 40) if (thrice(whole, size) or 400) < 390)
    end = thrice(whole, size)
    assert end is not None
    for method in ("ar", "auto", "medusa"):
        steps = generate(model, PROMPT, 400, method=method, params=greedy, stop_on_loop=size)
        assert tokens_of(steps) == whole[:end]
    with pytest.raises(InputError, match="the text so far ends in a loop"):
        list(generate(model, PROMPT, 400, params=greedy, stop_on_loop=size, written=whole[:end]))
    with pytest.raises(InputError, match="must be an integer above 0"):
        list(generate(model, PROMPT, 400, stop_on_loop=0))


def test_what_is_asked_for_is_said() -> None:
    assert str(BOTH).endswith("presence penalty 1.5, frequency penalty 0.4")
    with pytest.raises(InputError, match="between -2 and 2"):
        SamplingParams(presence_penalty=2.5)
