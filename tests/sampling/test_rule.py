"""The sampling rule: noise, parameters, filters and penalty, the window,
and draws against exact probabilities.
"""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.logits_process import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.helpers import CPU, PLAIN, path_to, random_tree, refused, seeded
from tswift.sampling import parameters as warping
from tswift.sampling import rule as noises
from tswift.sampling.parameters import SamplingParams, parse_bias, warp
from tswift.sampling.rule import NO_TOKEN, Sampler, gumbel, noise_bits

MASK = 2**64 - 1


def splitmix_stream(state: int):
    """SplitMix64 as published (Steele, Lea, Flood 2014; Vigna's splitmix64.c),
    a generator of its outputs.
    """
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def finalise(z: int) -> int:
    return next(splitmix_stream((z - 0x9E3779B97F4A7C15) & MASK))


def expected_bits(seed: int, position: int, token: int) -> int:
    stream = finalise((finalise(seed & MASK) + 0x9E3779B97F4A7C15 * (position + 1)) & MASK)
    return finalise((stream + 0x9E3779B97F4A7C15 * token) & MASK)


def test_the_reference_generator_is_splitmix64():
    stream = splitmix_stream(1234567)  # the published test vector of splitmix64.c
    assert [next(stream) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(
    st.integers(-(2**70), 2**70),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=5),
)
def test_noise_bits_are_splitmix64_of_seed_position_and_token(seed, positions, tokens):
    """Whatever else is asked for beside them, and by tensors as by integers."""
    ids, places = torch.tensor(tokens), torch.tensor(positions)
    expected = [
        [expected_bits(seed, position, token) for token in tokens] for position in positions
    ]
    assert [
        [bits & MASK for bits in row] for row in noise_bits(seed, places, ids).tolist()
    ] == expected
    assert torch.equal(gumbel(seed, places, ids), gumbel(seed, positions, ids))


def test_noise_bits_are_pinned():
    """A text made with one version is made again with the next: these values never change."""
    bits = noise_bits(1, [0, 7, 100_000], torch.tensor([0, 1, 128_255]))
    assert bits.tolist() == PINNED


PINNED = [
    [-7182655497261256104, 6180444375122719049, 192328286537952395],
    [6376822021608685238, 3377271897212342752, 4311351605190112050],
    [-8527292294044955616, -2471243304597774426, 4884361545578897330],
]


def test_gumbel_is_finite_and_ordered_at_the_extreme_bit_patterns(monkeypatch):
    patterns = torch.tensor(
        [[0, 1, (1 << 12) - 1, 1 << 12, 1 << 62, -(1 << 63), -(1 << 12) - 1, -(1 << 12), -1]]
    )
    monkeypatch.setattr(noises, "noise_bits", lambda *args: patterns)
    noise = gumbel(0, [0], patterns[0])
    assert noise.isfinite().all()
    assert (noise.diff() >= 0).all()  # by unsigned value
    assert noise[0, 0] == pytest.approx(-math.log(53 * math.log(2)))
    assert noise[0, -1] == pytest.approx(53 * math.log(2))


def test_a_value_out_of_range_or_of_another_type_is_refused_by_name():
    """The others are in tests/jobs/test_config.py."""
    wrong: list[tuple[str, Any]] = [
        ("temperature", 1e-101),
        ("temperature", 1e101),
        ("temperature", 10**40),
        ("penalty", 1e101),
        ("banned", [1]),
        ("banned", (1.0,)),
        ("banned", ("1",)),
        ("banned", (-1,)),
        ("banned", None),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"^{name}: must be"):
            SamplingParams(**{name: value})


def transformers_warp(logits, text: list[int], params: SamplingParams):
    """The same filters by transformers, in our order."""
    ids = torch.tensor([text] * len(logits))
    chain = []
    if params.logit_bias:
        chain.append(
            SequenceBiasLogitsProcessor(
                {(token,): bias for token, bias in params.logit_bias.items()}
            )
        )
    if params.temperature != 1:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.penalty))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.eta:
        chain.append(EtaLogitsWarper(params.eta))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    for warper in chain:
        logits = warper(ids, logits)
    return logits


temperatures = st.floats(0.05, 3)
FILTERS = {
    "temperature": {"temperature": temperatures},
    "bias": {
        "logit_bias": st.dictionaries(st.integers(0, 40), st.floats(-9, 9, width=32), min_size=1)
    },
    "penalty": {"penalty": st.floats(1.01, 3)},
    "min_p": {"min_p": st.floats(0.001, 0.999)},
    "eta": {"eta": st.floats(1e-5, 0.5)},
    "top_k": {"top_k": st.integers(1, 40)},
    "top_p": {"top_p": st.floats(0.01, 0.999)},
}
FILTERS["all"] = {name: strategy for one in FILTERS.values() for name, strategy in one.items()}


@pytest.mark.parametrize("name", FILTERS)
@given(st.data())
def test_filters_are_those_of_transformers(name, data):
    options = {option: data.draw(strategy) for option, strategy in FILTERS[name].items()}
    if name == "all":
        options = {option: value for option, value in options.items() if data.draw(st.booleans())}
    vocab, seed = data.draw(st.sampled_from([41, 97, 300, 2000])), data.draw(st.integers(0, 10**6))
    params = dataclasses.replace(PLAIN, window=10**6, **options)
    logits = torch.randn(3, vocab, generator=seeded(seed), dtype=torch.float64)
    logits *= data.draw(st.sampled_from([0.1, 1.0, 4.0]))
    text = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=30))
    seen = torch.zeros(3, vocab, dtype=torch.bool).index_fill_(1, torch.tensor(text), True)
    theirs = transformers_warp(logits.clone(), text, params)
    ours = warp(logits.clone(), seen if params.penalises else None, params)
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_bias_is_one_float64_sum_before_all_else():
    params = dataclasses.replace(
        PLAIN, temperature=0.5, logit_bias={"1": 1e-12, 2: -3}, banned=(0,)
    )
    logits = torch.tensor([[9.0, 1.0, 1.0], [math.nan, -1.0, 0.25]], dtype=torch.float64)
    assert warp(logits, None, params).tolist() == [
        [-math.inf, (1 + 1e-12) / 0.5, -4],
        [-math.inf, (1e-12 - 1) / 0.5, -5.5],
    ]
    twin = dataclasses.replace(params, logit_bias={2: -3.0, 1: 1e-12})
    assert twin == params
    assert hash(twin) == hash(params)
    assert json.dumps(dataclasses.asdict(params)["logit_bias"]) == '{"1": 1e-12, "2": -3.0}'


@pytest.mark.parametrize(
    "bias",
    [
        None,
        3,
        [(1, 2.0)],
        {1.5: 1},
        {True: 1},
        {"x": 1},
        {"-1": 1},
        {-1: 1},
        {1: "2"},
        {1: None},
        {1: math.nan},
        {1: math.inf},
        {1: -math.inf},
        {1: 100.1},
        {1: 10**400},
        {1: True},
        {1: 1, "1": 2},
        {"9" * 5000: 1},
    ],
)
def test_what_is_no_bias_is_refused(bias):
    with refused(r"^logit_bias: "):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize(
    "text",
    ["", "5", "5=", "=5", "5=x", "x=5", "-1=5", "5=nan", "5=-inf", "5=101", "5=1,5=2", "5=1,"],
)
def test_what_is_no_bias_is_refused_as_typed(text):
    assert parse_bias("7=2.5, 3=-1e2") == {3: -100.0, 7: 2.5}
    with refused():
        parse_bias(text)


def test_top_k_keeps_all_that_tie_with_the_last():
    logits = torch.tensor(
        [[2.0, 3.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]], dtype=torch.float64
    )
    kept = warp(logits.clone(), None, dataclasses.replace(PLAIN, top_k=2)) > -math.inf
    assert kept.tolist() == [[True, True, False, True, True], [False, False, False, True, True]]


@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 3, 127, 128, 129, 1500]),
    st.floats(0.0, 6.0),
    st.sampled_from([1, 2, 16]),
    st.one_of(st.sampled_from([1e-12, 0.1, 0.25, 0.5, 0.999999]), st.floats(1e-6, 0.9999)),
)
def test_top_p_keeps_the_same_with_all_probabilities_sorted(seed, vocab, scale, steps, top_p):
    logits = torch.randn(4, vocab, generator=seeded(seed), dtype=torch.float64) * scale
    logits = (logits * steps).round() / steps  # ties
    logits[3, seed % vocab] = math.nan if seed % 2 else -math.inf
    probs = logits.softmax(-1)
    some = warping._enough(probs, top_p)
    every = warping._sorted(probs)
    dropped = warping._too_much(probs, top_p, some)
    assert torch.equal(dropped, warping._too_much(probs, top_p, every))
    warped = warp(logits.clone(), None, dataclasses.replace(PLAIN, top_p=top_p))
    torch.testing.assert_close(
        warped, logits.masked_fill(dropped, -math.inf), rtol=0, atol=0, equal_nan=True
    )


def test_something_is_always_kept():
    logits = torch.randn(4, 30, generator=seeded(2), dtype=torch.float64)
    for params in (
        SamplingParams(min_p=1.0, penalty=1),
        SamplingParams(top_p=1e-12, min_p=0, penalty=1),
        SamplingParams(top_k=1, min_p=0, penalty=1),
    ):
        kept = warp(logits.clone(), None, params)
        assert torch.equal((kept > -torch.inf).sum(-1), torch.ones(4, dtype=torch.int64))
        assert torch.equal(kept.argmax(-1), logits.argmax(-1))


def test_nothing_overflows_within_the_ranges():
    logits = torch.tensor([[3e38, -3e38, 7.0, -7.0, 0.0, 1e-30]], dtype=torch.float64)
    for temperature, penalty in product((1e-100, 1e-12, 1e100), (1.0, 1e100)):
        params = SamplingParams(
            temperature=temperature, penalty=penalty, min_p=0.0, window=9, banned=(4,)
        )
        warped = warp(logits.clone(), torch.ones(1, 6, dtype=torch.bool), params)
        assert warped[0, [0, 1, 2, 3, 5]].isfinite().all()
        assert warped[0, 4] == -math.inf


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_a_sampler_gives_the_noise_of_a_position_whatever_was_asked_before(
    positions,
):
    sampler = Sampler(PLAIN, 9, 11, CPU)
    for position in positions:
        sampler.noise([position])
    assert torch.equal(sampler.noise(positions), gumbel(9, positions, torch.arange(11)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn(temperature):
    params = SamplingParams(temperature, min_p=0, penalty=1, banned=(0, 2, 3))
    logits = torch.tensor([[9.0, 1.0, 9.0, 9.0, 0.0]]).repeat(500, 1)
    drawn = Sampler(params, 1, 5, CPU).draw(logits, None, range(500))
    assert set(drawn) == ({1} if temperature == 0 else {1, 4})
    assert logits[0, 0] == 9  # the caller's logits are not touched


@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=25),
    st.lists(st.integers(0, 25), max_size=4),
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(0, 10**6),
)
def test_the_window_at_a_node_is_the_last_tokens_on_its_path(text, pieces, nodes, window, seed):
    """However the text was added; and along a text as in a tree."""
    vocab = 12
    sampler = Sampler(SamplingParams(penalty=1.5, window=window), 1, vocab, CPU)
    start = 0
    for end in sorted({min(piece, len(text)) for piece in pieces} | {len(text)}):
        sampler.extend(text[start:end])
        start = end
    tree = random_tree(nodes, Random(seed), vocab)
    tree.tokens[0] = text[-1]
    positions = torch.tensor(tree.depths) + len(text) - 1
    seen = sampler.seen(torch.tensor(tree.tokens), positions, tree.ancestors())
    for node in range(nodes):
        path = path_to(tree, node)
        expected = set([*text, *path][-window:])
        assert set(seen[node].nonzero().flatten().tolist()) == expected, (node, text, path)
    _, along = sampler.along(torch.zeros(1 + len(tree.tokens), 1), [text[-1], *tree.tokens])
    whole = [*text, *tree.tokens]
    for row, end in zip(along, range(len(text), len(whole) + 1), strict=True):
        assert set(row.nonzero().flatten().tolist()) == {*whole[:end][-window:]}
    assert sampler.length == len(whole)


def drawn_node_by_node(text, tree, logits, params, seed) -> list[int]:
    """What plain decoding draws after every node: a text of its own for each, and one row."""
    drawn = []
    for node in range(len(tree)):
        path = path_to(tree, node)
        sampler = Sampler(params, seed, logits.shape[1], CPU)
        sampler.extend([*text, *path])
        place = torch.tensor([len(text) + len(path) - 1])
        seen = sampler.seen(
            torch.tensor([tree.tokens[node]]), place, torch.ones(1, 1, dtype=torch.bool)
        )
        drawn += sampler.draw(logits[node : node + 1], seen, [int(place) + 1])
    return drawn


RULES = [
    SamplingParams(window=6),
    SamplingParams(temperature=0, penalty=1.5, window=4, banned=(3,)),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.8, eta=0.01, window=3, banned=(0, 11)),
    SamplingParams(min_p=0, penalty=1),
]


def in_a_tree(params: SamplingParams, seed: int, device: torch.device = CPU):
    random = Random(seed)
    text = [random.randrange(12) for _ in range(random.randrange(1, 20))]
    tree = random_tree(random.randrange(1, 12), random, 12)
    tree.tokens[0] = text[-1]
    logits = torch.randn(len(tree), 12, generator=seeded(seed)) * 3
    sampler = Sampler(params, seed, 12, device)
    sampler.extend(text)
    return (
        text,
        tree,
        logits,
        sampler,
        (torch.tensor(tree.depths) + len(text) - 1, tree.ancestors()),
    )


@pytest.mark.parametrize("params", RULES)
def test_tokens_drawn_in_a_tree_are_those_of_plain_decoding(params):
    for seed in range(30):
        text, tree, logits, sampler, where = in_a_tree(params, seed)
        rows = logits.bfloat16() if seed % 2 else logits
        if seed % 3 == 0:
            rows[seed % len(tree), 5] = math.nan
        drawn = sampler.draw_rows(rows, torch.tensor(tree.tokens), *where)
        assert drawn.tolist() == drawn_node_by_node(text, tree, rows, params, seed)
        assert (drawn.dtype, drawn.shape) == (torch.int64, (len(tree),))


def test_candidates_that_do_not_exist_change_nothing_elsewhere():
    for seed in range(30):
        _, tree, logits, sampler, (positions, ancestors) = in_a_tree(RULES[0], seed)
        tokens = torch.tensor(tree.tokens)
        drawn = sampler.draw_rows(logits, tokens, positions, ancestors)
        tokens[-1] = NO_TOKEN  # a leaf
        assert torch.equal(sampler.draw_rows(logits, tokens, positions, ancestors)[:-1], drawn[:-1])


class OneDevice(TorchDispatchMode):
    """Sees to it that no tensor is anywhere but on one device.

    One on ``meta`` cannot be waited for anyway.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", func
        return out


@pytest.mark.parametrize("params", RULES)
def test_nothing_is_copied_to_a_device_or_waited_for(params):
    meta = torch.device("meta")
    _, tree, logits, sampler, where = in_a_tree(params, 7, meta)
    tokens, logits, positions, ancestors = (
        each.to(meta) for each in (torch.tensor(tree.tokens), logits, *where)
    )
    count = tokens.sum()
    with OneDevice():
        drawn = sampler.draw_rows(logits, tokens, positions, ancestors)
        assert drawn.shape == tokens.shape
        sampler.candidates(logits, sampler.seen(tokens, positions, ancestors), positions, 3)
        sampler.extend_rows(tokens, positions, count)
    with OneDevice(), pytest.raises(AssertionError):
        warp(logits.double(), None, SamplingParams(banned=(1,)))  # ids that are not held there


def draw_p_value(probabilities, seeds: int, by_position: bool) -> float:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    if by_position:
        drawn = Sampler(PLAIN, 77, logits.shape[-1], CPU).draw(
            logits.expand(seeds, -1), None, range(seeds)
        )
    else:
        drawn = [
            Sampler(PLAIN, seed, logits.shape[-1], CPU).draw(logits, None, [5])[0]
            for seed in range(seeds)
        ]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities))
    assert counts[[p == 0 for p in probabilities]].sum() == 0
    keep = [i for i, p in enumerate(probabilities) if p]
    return stats.chisquare(counts[keep].numpy(), [probabilities[i] * seeds for i in keep]).pvalue


@pytest.mark.parametrize(
    "probabilities", [[0.5, 0.25, 0.125, 0.125], [0.0, 0.9, 0.0, 0.09, 0.01], [1 / 16] * 16]
)
def test_draws_have_their_exact_probabilities(probabilities):
    assert draw_p_value(probabilities, 8_000, by_position=True) > 1e-3
    assert draw_p_value(probabilities, 400, by_position=False) > 1e-3


def test_a_banned_id_outside_the_vocabulary_is_refused():
    for token in (5, -1):
        with pytest.raises(ValueError, match="banned"):
            Sampler(SamplingParams(banned=(token,)), 1, 5, CPU)


def test_parameters_that_are_exchanged_draw_as_a_sampler_of_their_own():
    every = [
        SamplingParams(penalty=1.5, window=3, min_p=0.0),
        SamplingParams(temperature=0.0, penalty=1.0, banned=(2, 5), logit_bias={7: 3.0}),
        SamplingParams(top_k=2, penalty=1.0),
    ]
    text = [3, 1, 4, 1, 5]
    places = torch.arange(4, 12)
    alone = torch.eye(8, dtype=torch.bool)
    for dtype in (torch.float32, torch.float64):
        # by the C program, if there is one, and by PyTorch
        logits = torch.randn(8, 20, generator=seeded(1)).to(dtype)
        sampler = Sampler(every[0], 3, 20, CPU)
        sampler.extend(text)
        for params in (*every, *every):
            own = Sampler(params, 3, 20, CPU)
            own.extend(text)
            sampler.params = params
            assert sampler.params == params
            nodes = (torch.tensor([5] * 8), places, alone)
            assert (sampler.seen(*nodes) is None) == (params.penalty == 1)
            assert sampler.draw_nodes(logits, nodes) == own.draw_nodes(logits, nodes)
