"""Decoding by graphs, whose captures are emulated on the CPU: the text of plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import warnings

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.architectures import ARCHITECTURES
from tests.cuda import capture
from tests.drafters import RECURRENT, load_own_head, qwen35
from tests.helpers import (
    CPU,
    METHODS,
    decode_steps,
    first,
    options_for,
    random_prompt,
    tiny_heads,
    tiny_llama,
    tiny_target,
    tokens_of,
)
from tests.lossless.models import network
from tswift.caches import FullKV
from tswift.decoding.audit import audit
from tswift.decoding.drafter import Drafter, Step
from tswift.decoding.loop import Decoding
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.errors import SlowWarning
from tswift.forward import eager
from tswift.forward.cuda import runner
from tswift.forward.cuda.graphs import Graphs
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.sampling.parameters import SamplingParams

PARAMS = SamplingParams(min_p=0.02, window=24)
OPTIONS = DraftOptions(tree=(1, 3, 2, 2), nodes=20, budget=64, costs="nominal")
SIMPLE = {"nodes": 20, "costs": "nominal"}  # of those options that a method has


@pytest.fixture
def graphs(monkeypatch):
    """Makes graphs be captured, though on the CPU; gives what is to be used for each model."""
    capture.emulate(monkeypatch.setattr)
    return lambda: Graphs(CPU)


def target_of(graphs, layers: int = 2, kind: str = "gqa") -> Target:
    target = Target(tiny_llama(kind, torch.float64, layers=layers), capture.StaticAttention)
    if graphs is not None:
        target.runner.graphs = graphs()
    return target


def drafter_of(
    method: str, kind: str, options: DraftOptions, target: Target, draft: Target
) -> Drafter:
    if method == "medusa" and isinstance(options.tree, tuple):
        options = dataclasses.replace(options, tree=options.tree[-3:])
    return make_drafter(method, target, tiny_heads(kind=kind), options, draft)


def decoded(
    graphs,
    method: str,
    kind: str,
    options: DraftOptions,
    prompt: int,
    length: int,
    params: SamplingParams = PARAMS,
) -> list[Step]:
    target, draft = target_of(graphs), target_of(graphs, layers=1, kind="mqa")
    drafter = drafter_of(method, kind, options, target, draft)
    steps = decode_steps(target, drafter, random_prompt(prompt), params, 3, length)
    assert target.fallbacks.graph_fault is None
    assert draft.fallbacks.graph_fault is None
    return steps


@functools.cache
def on_the_host(prompt: int, length: int, params: SamplingParams = PARAMS) -> list[int]:
    """Plain decoding by passes that are made anew each time."""
    target = tiny_target(layers=2)
    drafter = make_drafter("ar", target, None, OPTIONS)
    return tokens_of(decode_steps(target, drafter, random_prompt(prompt), params, 3, length))


SOMETIMES = [  # method, heads, other options, tokens of the prompt; others: test_device.py
    # every partial cache; those of auto are cascade's
    *(
        (name, "chained", {"kv": kv}, 90)
        for name in METHODS
        for kv in METHODS[name].kv[1:]
        if name != "auto"
    ),
    # lengths and numbers of nodes
    *(("reuse", "chained", {"nodes": nodes}, prompt) for prompt, nodes in ((1, 2), (200, 128))),
    *(
        ("tokenswift", "chained", {"nodes": nodes}, prompt)
        for prompt, nodes in ((2, 20), (20, 4), (63, 41))
    ),
]
ALWAYS = [
    ("medusa", "trimmed", {"tree": "auto"}, 90),
    ("tokenswift", "conditioned", {"tree": "auto"}, 90),
]


@pytest.mark.parametrize(
    ("method", "kind", "changes", "prompt"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SOMETIMES)],
)
def test_every_method_writes_the_same_text(graphs, method, kind, changes, prompt):
    options = dataclasses.replace(OPTIONS, **changes)
    plain = decoded(None, method, kind, options, prompt, 20)
    captured = decoded(graphs, method, kind, options, prompt, 20)
    assert tokens_of(captured) == tokens_of(plain) == on_the_host(prompt, 20)
    assert [step.accepted for step in captured] == [step.accepted for step in plain]
    assert [step.nodes for step in captured] == [step.nodes for step in plain]


def test_graphs_count_what_was_generated(graphs):
    params = dataclasses.replace(PARAMS, presence_penalty=0.7, frequency_penalty=0.4, penalty=1.0)
    captured = decoded(graphs, "medusa", "chained", OPTIONS, 90, 40, params)
    assert tokens_of(captured) == on_the_host(90, 40, params) != on_the_host(90, 40)
    assert max(step.accepted for step in captured) > 0


OF_STATES = [
    *((RECURRENT, method) for method in ("mtp", "ar", "medusa")),  # others: test_device.py
    ("LFM2 (short convolutions)", "medusa"),
    ("Bamba (Mamba2)", "medusa"),
]


@functools.cache
def with_states(kind: str) -> PreTrainedModel:
    if not ARCHITECTURES[kind].there:
        pytest.skip("this transformers has no such model")
    return qwen35() if kind == RECURRENT else network(kind, torch.float64)


@functools.cache
def of_states_on_the_host(kind: str) -> list[int]:
    """Plain decoding."""
    target = Target(with_states(kind))
    return tokens_of(decode_steps(target, Drafter(), random_prompt(50), PARAMS, 3, 24))


@pytest.fixture
def on_a_device(graphs, monkeypatch):
    """As ``graphs``, where a kernel steps states, too."""
    for place in (eager, runner):
        monkeypatch.setattr(place, "device_kernel", lambda device, wide: capture.StaticStates)

    def made(kind: str) -> Target:
        target = Target(with_states(kind), capture.StaticAttention)
        target.runner.graphs = graphs()
        return target

    return made


@pytest.mark.parametrize(("kind", "method"), first(2, OF_STATES))
def test_a_model_with_states_writes_the_same_text(on_a_device, kind, method):
    """With drafts that are accepted and not, and plain steps that are taken back."""
    target = on_a_device(kind)
    if method == "mtp":
        load_own_head(target)
    drafter = make_drafter(method, target, tiny_heads(), options_for(method, **SIMPLE))
    decoding = Decoding(target, random_prompt(50), PARAMS, 3, drafter, 16)
    text: list[int] = []
    accepted = []
    for step in decoding.steps():
        text += step.tokens
        accepted.append(step.accepted)
        if len(accepted) == 3:
            aside = tokens_of(decoding.plain(2))
            assert aside == of_states_on_the_host(kind)[len(text) :][: len(aside)]
    assert target.replays
    assert target.fallbacks == {}
    assert text == of_states_on_the_host(kind)[:16]
    assert max(accepted) > 0 or method == "ar"


def test_states_of_a_replayed_pass_go_on_by_what_the_host_accepts(on_a_device, monkeypatch):
    """As in the audit: one program serves every pass, and the host commits."""
    target = on_a_device(RECURRENT)
    text = of_states_on_the_host(RECURRENT)
    commits = []
    step = capture.StaticStates.step_path
    noted = lambda *given: commits.append(given[-1]) or step(*given)  # noqa: E731
    monkeypatch.setattr(capture.StaticStates, "step_path", staticmethod(noted))
    assert audit(target, random_prompt(50), text, PARAMS, 3).ok
    assert not audit(target, random_prompt(50), text[1:], PARAMS, 3).ok
    assert commits.count(None) > 3
    assert target.fallbacks == {}


def in_turns(graphs, methods: tuple[str, str]) -> list[list[Step]]:
    target, draft = target_of(graphs), target_of(graphs, layers=1, kind="mqa")
    decodings = [
        Decoding(
            target,
            random_prompt(90),
            PARAMS,
            3,
            drafter_of(method, "chained", OPTIONS, target, draft),
            50,
        )
        for method in methods
    ]
    decodings[0].prefill(others=decodings[1:])
    turns = list(itertools.zip_longest(*(decoding.steps() for decoding in decodings)))
    return [[step for step in steps if step] for steps in zip(*turns, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods", [("ar", "tokenswift"), ("tokenswift", "magicdec"), ("auto", "medusa")]
)
def test_decodes_in_turns(graphs, methods):
    """Each one's graphs destroy what the other's have given."""
    for captured, plain in zip(in_turns(graphs, methods), in_turns(None, methods), strict=True):
        assert tokens_of(captured) == on_the_host(90, 50)
        assert [step.accepted for step in captured] == [step.accepted for step in plain]


@pytest.mark.parametrize("method", first(1, ["tokenswift", "ar", "cascade"]))
def test_plain_steps_on_the_way(graphs, method):
    target, draft = target_of(graphs), target_of(graphs, layers=1, kind="mqa")
    decoding = Decoding(
        target,
        random_prompt(90),
        PARAMS,
        3,
        drafter_of(method, "chained", OPTIONS, target, draft),
        30,
    )
    text: list[int] = []
    for step in decoding.steps():
        text += step.tokens
        aside = tokens_of(decoding.plain(2))
        assert aside == on_the_host(90, 40)[len(text) :][: len(aside)]
    assert text == on_the_host(90, 30)


def test_the_audit(graphs):
    target = target_of(graphs)
    assert audit(target, random_prompt(90), on_the_host(90, 40), PARAMS, 3).ok
    assert not audit(target, random_prompt(90), on_the_host(90, 40), PARAMS, 4).ok
    assert target.fallbacks.graph_fault is None


@pytest.mark.parametrize("nodes", [1, 8])
def test_a_capture_leaves_the_prompt_alone(graphs, nodes):
    """Whatever the warm-up of a capture writes, it writes behind the text."""
    target = target_of(graphs)
    kv = FullKV(target.kv_shape, 60)
    prefill(target, random_prompt(30), kv)
    before = kv.buffers[0][:, :, :30].clone(), kv.buffers[1][:, :, :30].clone()
    target.prepare(kv, nodes)
    assert torch.equal(kv.buffers[0][:, :, :30], before[0])
    assert torch.equal(kv.buffers[1][:, :, :30], before[1])


def test_a_warm_up_that_fails_is_told_of(graphs, monkeypatch):
    def broken(*given):
        raise RuntimeError("no kernel for this\nand more")

    target = target_of(graphs)
    monkeypatch.setattr(capture.StaticAttention, "store", broken)
    kv = FullKV(target.kv_shape, 60)
    target.prepare(kv, 8)
    assert target.fallbacks.graph_fault is None  # nothing is captured before it is used
    target.runner.passes[kv][0].capture(0)
    assert re.fullmatch(
        r"no kernel for this \(forward/eager\.py:\d+\)", target.fallbacks.graph_fault
    )


def test_why_a_capture_failed_is_told_though_ending_it_fails_too(graphs):
    """Nothing is captured after that, as PyTorch may refuse it in this process;
    the program runs as it is.
    """
    shared = graphs()
    runs = []

    def broken():
        runs.append("broken")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return len(runs)

    assert shared.capture(broken)() == 4
    assert shared.failure.startswith(
        "operation not permitted when stream is capturing (forward/cuda/graphs.py:"
    )
    assert "process" in shared.failure
    shared.capture(lambda: runs.append("another"))
    assert "another" not in runs


def test_a_capture_that_fails_is_told_before_the_first_step(graphs, monkeypatch):
    """And the text is plain decoding's all the same."""
    target = target_of(graphs)
    right = target.compute_static

    def waits(*given):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return right(*given)

    monkeypatch.setattr(target, "compute_static", waits)
    decoding = Decoding(target, random_prompt(90), PARAMS, 3, Drafter(), 30)
    with pytest.warns(SlowWarning) as told:
        decoding.prefill()
    (line,) = (str(each.message) for each in told)
    said = "decoding is slower than it could be: no CUDA graphs, as operation not permitted when"
    assert line.startswith(said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens_of(list(decoding.steps())) == on_the_host(90, 30)


def test_what_waits_is_found_before_a_capture(graphs):
    """So that the process is sound, and other programs are captured."""
    shared = graphs()
    tensor = torch.ones(3)

    def waits():
        if torch.cuda.get_sync_debug_mode() == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    shared.capture(waits)()
    assert "called a synchronizing CUDA operation" in shared.failure
    assert torch.cuda.get_sync_debug_mode() != "error"
    assert not shared.spoiled
    replay = shared.capture(lambda: tensor.add_(1))
    tensor.fill_(1)
    replay()
    assert tensor.tolist() == [2, 2, 2]


def captured(graphs, run):
    """A function as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=graphs.pool):
        out = run()
    return graph, out


def test_a_replay_destroys_what_other_graphs_gave(graphs):
    shared = graphs()
    given = torch.tensor([1.0])
    one, first = captured(shared, lambda: given * 2)
    two, second = captured(shared, lambda: given.long() + 3)
    alone, apart = captured(graphs(), lambda: given * 7)
    assert first.isnan().all()
    for graph in (alone, one, two):
        graph.replay()
    assert second.tolist() == [4]
    assert first.isnan().all()
    assert apart.tolist() == [7]
    one.replay()
    assert first.tolist() == [2]
    assert second.item() < -(1 << 60)


@pytest.mark.parametrize(
    "wait", [lambda x: x.item(), lambda x: x.nonzero(), lambda x: torch.cuda.synchronize()]
)
def test_what_waits_cannot_be_captured(graphs, wait):
    with pytest.raises(RuntimeError, match="previous error during capture") as found:
        captured(graphs(), lambda: wait(torch.ones(1)))
    assert "not permitted when stream is capturing" in str(found.value.__context__)
