"""Steps whose state stays on the device: the same text and acceptance as the host's;
wrong ones are found out.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.forward.test_passes import LengthOnDevice, static_target
from tests.helpers import (
    decode_steps,
    first,
    medusa_heads,
    needs_program,
    random_prompt,
    random_tree,
    tiny_draft,
    tiny_heads,
    tiny_llama,
    tiny_target,
    tokens_of,
)
from tswift import checking
from tswift.benchmarking.run import SimulatedWalk
from tswift.caches import PartialKV
from tswift.decoding import device_tree
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.device_step_check import try_steps
from tswift.decoding.device_tree import ancestors_of, reached_node
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding, NotFinite
from tswift.drafting.fixed_tree import FixedTree
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler

PARAMS = SamplingParams(min_p=0.02, window=24)
# room for every candidate and every n-gram
ROOMY = DraftOptions(tree=(1, 3, 2, 2), nodes=128, budget=64, costs="nominal")


def drafter(method: str, target: Target, options: DraftOptions, kind: str = "chained"):
    heads = medusa_heads() if kind == "medusa" else tiny_heads(kind=kind)
    if method == "medusa" and options.tree:
        options = DraftOptions(**{**options.__dict__, "tree": options.tree[-3:]})
    return make_drafter(method, target, heads, options, tiny_draft())


def on_host_and_device(
    method, options=ROOMY, kind="chained", params=PARAMS, length=60, prompt=90, stop=()
):
    return [
        decode_steps(
            target,
            drafter(method, target, options, kind),
            random_prompt(prompt),
            params,
            3,
            length,
            stop,
        )
        for target in (tiny_target(), static_target())
    ]


# as often as a token was generated, and where
COUNTED = replace(PARAMS, presence_penalty=0.7, frequency_penalty=0.4, penalty=1.0)
# of tokens that biases make likely: by all penalties, and some not before there are so many
REPEATED = replace(
    COUNTED,
    penalty=1.2,
    repetition_penalty=1.3,
    logit_bias={5: 3.0, 6: 4.0, 7: 4.0},
    stop_token_ids=(6, 7),
    min_tokens=31,
)
# such a text repeats itself: n-grams are accepted
GREEDY = SamplingParams(temperature=0.0, penalty=1.0)


@pytest.mark.parametrize(
    ("method", "kind", "params", "length", "prompt"),
    first(
        1,
        [
            ("medusa", "conditioned", COUNTED, 60, 90),
            ("medusa", "conditioned", REPEATED, 60, 90),
            ("medusa", "conditioned", PARAMS, 60, 90),
            ("medusa", "medusa", PARAMS, 60, 90),
            *(("tokenswift", "chained", PARAMS, 60, prompt) for prompt in (1, 64, 65, 90)),
            ("tokenswift", "chained", GREEDY, 180, 90),
        ],
    ),
)
def test_a_tree_made_on_the_device_is_accepted_as_one_made_by_the_host(
    method, kind, params, length, prompt
):
    host, device = on_host_and_device(
        method, kind=kind, params=params, length=length, prompt=prompt
    )
    assert tokens_of(device) == tokens_of(host)
    if params is REPEATED:
        assert not {6, 7} & {*tokens_of(host)[:31]}
        assert {6, 7} & {*tokens_of(host)[31:]}
    assert [(step.accepted, step.source) for step in device] == [
        (step.accepted, step.source) for step in host
    ]
    assert max(step.accepted for step in host) > 1
    assert sum(step.source == "reuse" for step in device) > 1 or params is not GREEDY


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tokenswift", ROOMY),
        # timings would choose other trees
        pytest.param("recall", replace(ROOMY, costs="nominal"), marks=needs_program),
    ],
)
def test_biases_and_log_probabilities_on_the_device(method, options):
    params = SamplingParams(0.8, min_p=0.02, window=24, logit_bias={5: 3.0, 6: -2.0, 7: -100})
    host, device = (
        list(
            Decoding(
                target,
                random_prompt(30),
                params,
                3,
                drafter(method, target, options),
                60,
                logprobs=3,
            ).steps()
        )
        for target in (tiny_target(), static_target())
    )
    assert tokens_of(device) == tokens_of(host)
    assert 5 in tokens_of(host)
    for ours, theirs in zip(device, host, strict=True):
        assert len(ours.logprobs) == len(ours.tokens)
        for field in ("raw", "warped", "raw_top", "warped_top"):
            np.testing.assert_allclose(
                ours.logprobs[field], theirs.logprobs[field], rtol=0, atol=1e-9
            )


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_next_draft_is_launched_before_the_host_waits(monkeypatch, logprobs):
    """Unless a selection may come first, or somebody wants the verification's logits,
    which it may overwrite.
    """
    events: list[str] = []
    decoding = Decoding(
        target := static_target(),
        random_prompt(90),
        PARAMS,
        3,
        drafter("tokenswift", target, ROOMY),
        90,
        logprobs=logprobs,
    )
    decoding.prefill()
    for place, name in (
        (PartialKV, "select"),
        (decoding._stepper, "_launch"),
        (decoding._stepper, "_launch_draft"),
        (decoding._drafter, "committed"),
    ):
        right = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *given, n=name, r=right: events.append(n) or r(*given)
        )
    assert tokens_of(decoding.steps()) == tokens_of(on_host_and_device("ar", length=90)[0])
    pairs = Counter(pairwise(events))
    assert pairs["committed", "select"] == pairs["select", "_launch_draft"] > 1
    assert (pairs["_launch", "_launch_draft"] > 10) == (logprobs is None)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_plain_step_is_launched_before_the_host_reads_the_one_before(monkeypatch, logprobs):
    """Unless somebody wants the logits, which it overwrites;
    and never one beyond the text's length.
    """
    events: list[str] = []
    decoding = Decoding(
        static_target(), random_prompt(90), PARAMS, 3, Drafter(), 40, logprobs=logprobs
    )
    decoding.prefill()
    for name in ("_launch", "_read"):
        right = getattr(decoding._stepper, name)
        monkeypatch.setattr(
            decoding._stepper, name, lambda *given, n=name, r=right: events.append(n) or r(*given)
        )
    assert tokens_of(decoding.steps()) == tokens_of(on_host_and_device("ar", length=40)[0])
    expected = [*["_launch"] * 2, *["_read", "_launch"] * 38, *["_read"] * 2]
    assert events == (expected if logprobs is None else ["_launch", "_read"] * 40)


@pytest.mark.slow
def test_a_text_ends_at_a_stop_token_or_at_its_length():
    stop = tokens_of(on_host_and_device("ar", length=60)[0])[40]
    for method in ("ar", "tokenswift"):
        host, device = on_host_and_device(method, stop=(stop,))
        assert tokens_of(device) == tokens_of(host)
        assert tokens_of(device)[-1] == stop
        assert len(tokens_of(on_host_and_device(method, length=61)[1])) == 61


@pytest.mark.parametrize("method", first(1, ["tokenswift", "ar"]))
def test_plain_steps_in_between_leave_no_trace(method):
    target = static_target()
    prompt = random_prompt(40)
    decoding = Decoding(target, prompt, COUNTED, 3, drafter(method, target, ROOMY), 40)
    steps, probes = [], []
    for step in decoding.steps():
        steps.append(step)
        if len(tokens_of(steps)) < 35:
            probes.append((len(tokens_of(steps)), tokens_of(decoding.plain(4))))
    plain = tokens_of(on_host_and_device("ar", params=COUNTED, length=44, prompt=40)[0])
    assert tokens_of(steps) == plain[:40]
    assert all(found == plain[start : start + len(found)] for start, found in probes)


@pytest.mark.parametrize(
    ("method", "alpha"), [("tokenswift", 1.0), ("tokenswift", 0.3), ("reuse", 0.3)]
)
def test_a_given_acceptance_is_met(method, alpha):
    accepted = []
    for target in (tiny_target(), static_target()):
        made = drafter(method, target, ROOMY)
        walk = SimulatedWalk(alpha, made.depth)
        steps = list(Decoding(target, random_prompt(90), PARAMS, 3, made, 80, walk).steps())
        accepted.append([step.accepted for step in steps[:20]])
        assert len(tokens_of(steps)) == 80
    if method != "reuse":  # whose trees depend on the text, which is no draw here
        assert accepted[0] == accepted[1]


def reached(tokens: list[int], parents: list[int], drawn: list[int], wanted: int) -> int:
    ancestors = ancestors_of(torch.tensor(parents), torch.arange(len(parents)), len(parents))
    given = torch.tensor(tokens), torch.tensor(parents), ancestors, ancestors.sum(1) - 1
    return reached_node(*given, torch.tensor(drawn), torch.tensor([wanted])).item()


@given(st.integers(1, 40), st.integers(1, 6), st.randoms(use_true_random=False))
def test_ancestors_and_the_path_are_those_of_the_tree(nodes, wanted, random):
    tree = random_tree(nodes, random, vocab=50)
    parents = [0, *tree.parents[1:]]
    found = ancestors_of(torch.tensor(parents), torch.arange(nodes), max(tree.depths))
    assert torch.equal(found, tree.ancestors())
    drawn = [
        random.choice([*(tree.tokens[n] for n in range(nodes) if tree.parents[n] == node), 50])
        for node in range(nodes)
    ]
    assert reached(tree.tokens, parents, drawn, wanted) == tree.walk(drawn)[:wanted][-1]


def test_of_two_children_with_the_same_token_both_are_followed():
    """As where an n-gram goes on below a candidate of the heads: the longer path counts."""
    assert reached([9, 5, 5, 7], [0, 0, 0, 2], [5, 7, 7, 1], 4) == 3


def test_a_node_that_is_not_there_is_not_what_could_not_be_drawn():
    """Both are -1: where the root's logits are broken and those beside it are not,
    nothing is accepted.
    """
    for drawn, last in (([-1, 3, 3, 3], 0), ([5, -1, 3, 3], 1)):
        assert reached([9, 5, -1, -1], [0, 0, 1, 0], drawn, 4) == last


@pytest.mark.parametrize(("method", "absent"), [("medusa", False), ("tokenswift", True)])
def test_a_candidate_that_breaks_the_model_does_not_end_the_text(method, absent):
    """A token whose embedding is NaN spoils the whole pass: one drafted, or what stands for none.

    The root is drawn.
    """
    bad = 43 if absent else 0
    prompt = [token for token in random_prompt(90) if token != bad]
    exact = tokens_of(
        decode_steps(tiny_target(), drafter("ar", tiny_target(), ROOMY), prompt, PARAMS, 3, 20)
    )
    assert bad not in exact
    network = tiny_llama("gqa", torch.float64)
    network.model.embed_tokens.weight.data[bad] = float("nan")
    target = Target(network, LengthOnDevice)

    class Poison(FixedTree):
        def draft(self):
            if absent:
                super().draft()
                self._state.tokens[2] = bad
            else:
                self._state.tokens[1:] = -1

    made = drafter(method, target, ROOMY)
    made.on_device = lambda state: Poison(made, made.sources[0], state)
    steps = decode_steps(target, made, prompt, PARAMS, 3, 20)
    assert tokens_of(steps) == exact
    assert absent or {step.nodes for step in steps} == {1}


def test_nothing_to_draw_is_said_and_commits_nothing():
    network = tiny_llama("gqa", torch.float64)
    target = Target(network, LengthOnDevice)
    decoding = Decoding(
        target, random_prompt(40), PARAMS, 3, drafter("tokenswift", target, ROOMY), 60
    )
    steps = decoding.steps()
    next(steps)
    network.lm_head.weight.data.fill_(float("nan"))
    length = decoding._context.kv.length
    text = list(decoding._context.text)
    with pytest.raises(NotFinite):
        list(steps)
    assert (decoding._context.kv.length, decoding._context.text) == (length, text)


@pytest.mark.slow
def test_a_partial_cache_holds_the_same_by_either_way():
    """Tokens appended on the device lie where the host would have put them."""
    held = []
    for target in (tiny_target(), static_target()):
        made = drafter("tokenswift", target, ROOMY)
        decoding = Decoding(target, random_prompt(90), PARAMS, 3, made, 150)
        list(decoding.steps())
        kv = made.sources[0].draft_model.kv
        assert isinstance(kv, PartialKV)
        held.append(kv)
    host, device = held
    assert (host.length, host.copied, host.selections) == (
        device.length,
        device.copied,
        device.selections,
    )
    assert host.selections > 2
    assert int(device.device_length) == device.length
    assert torch.allclose(
        host.buffers[0][:, :, : host.length], device.buffers[0][:, :, : host.length], atol=1e-9
    )


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Steps of no configuration are known."""
    monkeypatch.setattr(checking, "KERNELS", {})


def tried(dtype: torch.dtype = torch.float64) -> Target:
    target = Target(tiny_llama("gqa", dtype), LengthOnDevice)
    asked: list[Target] = []
    target.set_fixed_rows(None, True, lambda target: bool(asked.append(target)))
    try_steps(target, SamplingParams())
    assert not asked  # whether a text has wide passes is tried by one that needs them
    assert callable(target.chunked_text)
    target.set_fixed_rows(None)
    return target


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_right_steps_are_trusted(dtype):
    target = tried(dtype)
    assert target.fallbacks.graph_fault is None
    assert target.replays


class _Broken(LengthOnDevice):
    """Misses the newest key of the prefix."""

    def __init__(self, layout, prefix, nodes, ancestors):
        super().__init__(layout, prefix, nodes, ancestors)
        self._newest = int(prefix) - 1 if isinstance(prefix, torch.Tensor) else -1

    def __call__(self, query, keys, values, scale):
        if self._newest >= 0:
            values = values.clone()
            values[:, self._newest] = 0
        return super().__call__(query, keys, values, scale)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("draw_rows", lambda self, logits, *given: logits.double().argmax(-1)),
        ("extend_rows", lambda *given: None),  # the penalty's table stays as it was
    ],
)
def test_a_sampler_that_is_wrong_is_found_out(part, wrong, monkeypatch):
    monkeypatch.setattr(Sampler, part, wrong)
    assert "tokens of a step from slot " in tried().fallbacks.graph_fault


def test_a_commit_without_its_gather_is_found_out(monkeypatch):
    right = DeviceStepper._verify

    def without(self, nodes, drafted):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_copy_", lambda self, dim, index, source: self)
            patch.setattr(LengthOnDevice, "store", staticmethod(_store))
            return right(self, nodes, drafted)

    def _store(keys, values, new_keys, new_values, length):
        end = int(length) + new_keys.shape[1]
        keys[:, int(length) : end], values[:, int(length) : end] = new_keys, new_values

    monkeypatch.setattr(DeviceStepper, "_verify", without)
    assert "keys and values of steps differ" in tried().fallbacks.graph_fault


def test_wrong_ancestors_are_found_out(monkeypatch):
    right = device_tree.ancestors_of
    monkeypatch.setattr(
        device_tree, "ancestors_of", lambda parents, index, depth: right(parents, index, 1)
    )
    assert tried().fallbacks.graph_fault is not None


def test_an_attention_that_misses_a_key_is_found_out():
    target = Target(tiny_llama("gqa", torch.float64, layers=2), _Broken)
    try_steps(target, SamplingParams())
    assert "keys and values of steps differ" in target.fallbacks.graph_fault
    assert not target.replays


def test_what_cannot_be_done_at_all_is_told(monkeypatch):
    def fails(*given):
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(LengthOnDevice, "store", fails)
    assert re.fullmatch(
        r"no kernel image is available \(forward/eager\.py:\d+\)",
        tried().fallbacks.graph_fault or "",
    )
