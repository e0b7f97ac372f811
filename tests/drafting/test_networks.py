"""Published drafters decode: the text is plain decoding's, whatever they say,
over any window and in any tree.
"""

from __future__ import annotations

import functools
import time
from copy import deepcopy
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.cuda import capture
from tests.drafters import HIDDEN, LAYOUTS, VOCAB, Dense, drafter_folder, qwen3, target_of
from tests.helpers import (
    CPU,
    NO_PROGRAM,
    decode,
    decode_steps,
    first,
    random_prompt,
    refused,
    tokens_of,
)
from tswift.attention.sdpa import BatchInvariantAttention, TreeAttention
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.pass_costs import NOMINAL
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.forward.cuda.graphs import Graphs
from tswift.forward.exact_passes import choose_fixed_rows
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.drafter_files import find_drafter

SAMPLED, PENALISED = (
    SamplingParams(min_p=0.02, penalty=1.0),
    SamplingParams(min_p=0.02, penalty=1.2, window=32),
)
KINDS = ("dspark", "dflash", "eagle-safeai")
PROMPT = random_prompt(90, 6, VOCAB)


@functools.cache
def drafted(layout: str) -> Target:
    """A target with a drafter."""
    with TemporaryDirectory() as folder:
        return find_drafter(drafter_folder(Path(folder), layout)).load(target_of()).target


@functools.cache
def plain(params: SamplingParams, prompt: int = len(PROMPT), length: int = 40) -> list[int]:
    return decode(target_of(), Drafter(), PROMPT[:prompt], params, 3, length)


def method_of(layout: str) -> str:
    return "eagle" if "eagle" in layout else "block"


def options_of(**options) -> DraftOptions:
    return DraftOptions(**{"budget": 64, "sinks": 4, "costs": "nominal", **options})


def drafter_of(layout: str, target: Target, tree: str = "alone") -> Drafter:
    return make_drafter(method_of(layout), target, None, TREES[tree])


TREES = {
    "auto": options_of(),
    "alone": options_of(recall=0, nodes=20),
    "chain": options_of(tree=(1, 1, 1), costs=None),
    "noise not shared": options_of(recall=0, shared_noise=False, gamma=2),
    "fixed": options_of(tree=(3, 2, 2), nodes=11, sinks=0, costs=None),
}
TWICE = [*zip(LAYOUTS * 2, [*TREES] * 3, strict=False)]


@pytest.mark.parametrize(("layout", "tree"), first(2, TWICE))
def test_the_text_is_plain_decodings(layout, tree):
    target = drafted(layout)
    params = PENALISED if tree in ("alone", "chain") else SAMPLED
    drafter: Any = drafter_of(layout, target, tree)
    steps = decode_steps(target, drafter, PROMPT, params, 3, 40)
    assert tokens_of(steps) == plain(params)
    nodes = [step.nodes for step in steps[:5]]
    assert nodes == {"chain": [4] * 5, "fixed": [1 + 3 + 5 + 2] * 5}.get(tree, nodes)
    assert max(nodes) > 1
    if NO_PROGRAM is None or tree != "auto":  # what is recalled goes as deep as there are nodes
        assert drafter.depth == {"auto": 31, "noise not shared": 2}.get(tree, drafter.depth)
    source = drafter.sources[0]
    # it has seen all but the last token
    assert source._first + len(source._new) == len(PROMPT) + 40 - 1


def test_a_host_counts_the_seconds_of_the_last_round(monkeypatch):
    target = drafted("eagle-safeai")
    drafter: Any = drafter_of("eagle-safeai", target, "chain")
    source = drafter.sources[0]
    computed = source._round

    def slowly():
        time.sleep(0.02)
        return computed()

    monkeypatch.setattr(source, "_round", slowly)
    assert source.draft_seconds(NOMINAL, None) == 0
    decode(target, drafter, PROMPT, SAMPLED, 3, 8)
    assert source._on_host
    assert 0.02 < source.draft_seconds(NOMINAL, None) < 1


@pytest.mark.parametrize("layout", first(1, KINDS))
def test_any_prompt_and_what_was_written_before(layout):
    target = drafted(layout)
    whole = plain(SAMPLED)
    rest = Decoding(
        target, PROMPT, SAMPLED, 3, drafter_of(layout, target, "auto"), 40, written=whole[:23]
    ).steps()
    assert whole[:23] + tokens_of([*rest]) == whole
    for length in (1, 2):
        drafter = drafter_of(layout, target)
        assert decode(target, drafter, PROMPT[:length], SAMPLED, 3, 12) == plain(
            SAMPLED, length, 12
        )


@pytest.mark.parametrize(
    ("layout", "how"), first(1, [*zip(KINDS, ("nan", "zeros", "huge"), strict=True)])
)
def test_drafters_that_lie_change_nothing(layout, how, tmp_path):
    target = find_drafter(drafter_folder(tmp_path, layout)).load(target_of()).target
    for weight in target.speculator.parameters():
        weight.data = {"zeros": weight * 0, "nan": weight * torch.nan, "huge": weight * 1e200}[how]
    for tree in ("auto", "chain"):
        assert (
            decode(target, drafter_of(layout, target, tree), PROMPT, SAMPLED, 3, 20)
            == plain(SAMPLED)[:20]
        )


@pytest.mark.parametrize(
    ("layout", "params"),
    first(
        1,
        [
            ("dspark", SAMPLED),
            ("dspark", PENALISED),
            ("dflash", SAMPLED),
            ("eagle-safeai", PENALISED),
            ("eagle-speculators", SAMPLED),
        ],
    ),
)
def test_after_many_rounds_it_offers_what_a_dense_recomputation_ranks_first(layout, params):
    """Paths of any length are accepted, on the best branches and beside them;
    the window is smaller than the text.
    """
    target = drafted(layout)
    drafter: Any = make_drafter(
        method_of(layout), target, None, options_of(tree=(4, 3, 4), nodes=40, costs=None)
    )
    source = drafter.sources[0]
    dense = Dense(layout, qwen3())
    random = Random(4)
    checked = []
    propose = source.propose

    def seen(tree, context):
        propose(tree, context)
        if len(context.text) % 3:
            return
        text = list(context.text)
        sampler = context.sampler
        window = dense.window(len(text) - 1, 64, 4)
        block = None if "eagle" in layout else dense.block(text, window)
        for node in {tree.parents[node] for node in range(1, len(tree))}:
            path = tree.path(node)
            logits = (
                dense.eagle(text, path, window)
                if block is None
                else dense.biased(block, [text[-1], *path])
            )
            logits = logits.clamp(min=-1e4)
            before = None
            if params.penalises:
                before = torch.zeros(1, VOCAB, dtype=torch.bool)
                # the window of the root serves all levels
                before[0, [*text[-params.window :], *path]] = True
            wanted = sampler.scores(logits[None], before, [len(text) + len(path)])[0].topk(
                (4, 3, 4)[len(path)]
            )
            offered = [
                tree.tokens[each] for each in range(1, len(tree)) if tree.parents[each] == node
            ]
            assert offered == wanted.indices[wanted.values > -torch.inf].tolist()
            checked.append(len(path))

    source.propose = seen
    decoding = Decoding(
        target, PROMPT, params, 3, drafter, 60, lambda tree, drawn: _any_path(tree, random)
    )
    accepted = [step.accepted for step in decoding.steps()]
    assert {0, 1, 2, 3} <= {*accepted}
    assert checked.count(0) > 3
    assert min(checked.count(1), checked.count(2)) > 12


def _any_path(tree, random: Random) -> list[int]:
    path = [0]
    while below := [node for node in range(1, len(tree)) if tree.parents[node] == path[-1]]:
        if random.random() < 0.3:
            break
        path.append(random.choice(below))
    return path


def test_the_wrong_kind_of_drafter_or_none_is_refused(tmp_path):
    target = target_of()
    for method, options, message in (
        (
            "block",
            {},
            "drafter: block drafts with a drafter of kind dspark or dflash or dflash2, "
            "and there is none",
        ),
        (
            "eagle",
            {},
            "drafter: eagle drafts with a drafter of kind eagle3 or assistant, "
            "and this one is dflash",
        ),
        (
            "block",
            {"tree": (1, 1, 1, 1), "costs": None},
            "tree: block can draft 3 levels with this drafter, got 4",
        ),
        ("block", {"gamma": 4}, "gamma: must be between 1 and 3 for block, got 4"),
    ):
        with refused(f"^{message}$"):
            make_drafter(method, target, None, options_of(**options))
        if target.speculator is None:
            find_drafter(drafter_folder(tmp_path, "dflash")).load(target)


@pytest.mark.parametrize("layout", KINDS[1:])
def test_auto_takes_it_as_one_of_its_arms(layout):
    # fewer than others bring meanwhile
    drafter: Any = make_drafter("auto", drafted(layout), None, options_of(nodes=6))
    steps = decode_steps(drafted(layout), drafter, PROMPT, SAMPLED, 3, 40)
    assert tokens_of(steps) == plain(SAMPLED)
    assert method_of(layout) in {step.choice for step in steps}
    network = drafter.arms[method_of(layout)].sources[0]
    # it has seen what other arms brought
    assert network._first + len(network._new) == len(PROMPT) + 40 - 1


@pytest.mark.parametrize("distrusted", [False, True])
def test_a_round_is_not_captured_where_passes_are_not_replayed(distrusted, monkeypatch, tmp_path):
    """The attention has no static passes, or steps on the device were found to differ."""
    target = Target(deepcopy(qwen3()), capture.StaticAttention if distrusted else TreeAttention)
    target.fallbacks.note("steps", "another text" if distrusted else None)
    capture.emulate(monkeypatch.setattr)
    target.runner.graphs = Graphs(CPU)
    captures: list[object] = []
    monkeypatch.setattr(target.runner.graphs, "capture", lambda run: captures.append(run) or run)
    find_drafter(drafter_folder(tmp_path, "dflash")).load(target)
    steps = decode_steps(target, drafter_of("dflash", target), PROMPT, SAMPLED, 3, 40)
    assert tokens_of(steps) == plain(SAMPLED)
    assert not captures


@pytest.mark.parametrize("params", first(1, [SAMPLED, PENALISED]))
def test_a_perfect_drafter_is_always_right(params, tmp_path):
    """A target that looks at its last token only,
    and a DSpark whose bias is that target's LM head.
    """
    network = deepcopy(qwen3())
    for layer in network.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    network.model.embed_tokens.weight.data.mul_(3)
    with torch.no_grad():
        states = network.model.norm(network.model.embed_tokens.weight).float()
    own = {
        "embed_tokens.weight": network.model.embed_tokens.weight,
        "norm.weight": torch.zeros(HIDDEN),
    }
    own |= {
        "markov_head.markov_w1.weight": states,
        "markov_head.markov_w2.weight": network.lm_head.weight,
    }
    own |= {"confidence_head.proj.weight": None, "confidence_head.proj.bias": None}
    weights = {
        name: value if value is None else value.detach().float() for name, value in own.items()
    }
    said = {"markov_rank": HIDDEN, "enable_confidence_head": False}
    target = (
        find_drafter(drafter_folder(tmp_path, "dspark", said, weights)).load(Target(network)).target
    )
    accepted = {}
    for name, options in {
        "chain": options_of(tree=(1,) * 4),
        "tree": options_of(recall=0, costs="nominal"),
        "noise not shared": options_of(tree=(1,) * 4, shared_noise=False),
    }.items():
        steps = decode_steps(
            target, make_drafter("block", target, None, options), PROMPT, params, 3, 40
        )
        accepted[name] = [step.accepted for step in steps]
    assert accepted["chain"] == [4] * 8  # of five tokens a step
    assert sum(accepted["tree"]) >= 30
    assert sum(accepted["noise not shared"]) < 20


@pytest.mark.slow
def test_exact_passes_give_taps_too():
    target = Target(deepcopy(qwen3(torch.bfloat16)), BatchInvariantAttention)
    with TemporaryDirectory() as folder:
        find_drafter(drafter_folder(Path(folder), "dspark")).load(target, any_model=True)
    assert choose_fixed_rows(target, "sdpa", True) is None
    steps = decode_steps(target, drafter_of("dspark", target), PROMPT, SAMPLED, 3, 30)
    assert tokens_of(steps) == decode(target, Drafter(), PROMPT, SAMPLED, 3, 30)
    assert 1 < max(step.nodes for step in steps) <= target.fixed_rows
