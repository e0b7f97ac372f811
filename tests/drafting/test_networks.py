"""Published drafters decode: the text is plain decoding's, whatever they say, over any window and in any tree."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.cuda import capture
from tests.drafters import HIDDEN, LAYOUTS, VOCAB, Dense, drafter_folder, qwen3, target_of
from tests.helpers import decode, decode_steps, random_prompt, tokens_of
from tswift.attention.sdpa import ChunkedAttention
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.kv import FullKV
from tswift.models.adapting import set_width
from tswift.models.drafters_io import find_drafter
from tswift.models.passes import Graphs
from tswift.models.target import Target

SAMPLED, PENALISED = SamplingParams(min_p=0.02, penalty=1.0), SamplingParams(min_p=0.02, penalty=1.2, window=32)
KINDS = ("dspark-rnn", "dflash", "eagle-safeai")
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


def options_of(**options: object) -> DraftOptions:
    return DraftOptions(**{"budget": 64, "sinks": 4, **options})  # type: ignore[arg-type]


TREES = {
    "auto": options_of(costs="nominal"),
    "alone": options_of(recall=0, nodes=20, costs="nominal"),
    "chain": options_of(tree=(1, 1, 1)),
    "noise not shared": options_of(recall=0, shared_noise=False, gamma=2),
    "fixed": options_of(tree=(3, 2, 2), nodes=11, sinks=0),
}
TWICE = [*zip(LAYOUTS * 2, [*TREES] * 3, strict=False)]


@pytest.mark.parametrize(
    ("layout", "tree"), [*TWICE[:7], *(pytest.param(*each, marks=pytest.mark.slow) for each in TWICE[7:])]
)
def test_the_text_is_plain_decodings(layout: str, tree: str) -> None:
    target, options, params = drafted(layout), TREES[tree], PENALISED if tree in ("alone", "chain") else SAMPLED
    steps = decode_steps(target, make_drafter(method_of(layout), target, None, options), PROMPT, params, 3, 40)
    assert tokens_of(steps) == plain(params)
    nodes = [step.nodes for step in steps[:5]]
    assert nodes == {"chain": [4] * 5, "fixed": [11] * 5}.get(tree, nodes)
    assert max(nodes) > 1


@pytest.mark.parametrize("layout", KINDS)
def test_it_goes_on_where_it_stopped(layout: str) -> None:
    target, whole = drafted(layout), plain(SAMPLED)
    drafter = make_drafter(method_of(layout), target, None, TREES["auto"])
    rest = Decoding(target, PROMPT, SAMPLED, 3, drafter, 40, written=whole[:23]).steps()
    assert whole[:23] + tokens_of([*rest]) == whole


@pytest.mark.parametrize("layout", KINDS)
def test_a_prompt_of_a_token(layout: str) -> None:
    for length in (1, 2):
        drafter = make_drafter(method_of(layout), drafted(layout), None, TREES["alone"])
        assert decode(drafted(layout), drafter, PROMPT[:length], SAMPLED, 3, 12) == plain(SAMPLED, length, 12)


@pytest.mark.parametrize(("layout", "how"), [*zip(KINDS, ("nan", "zeros", "huge"), strict=True)])
def test_drafters_that_lie_change_nothing(layout: str, how: str, tmp_path: Path) -> None:
    target = find_drafter(drafter_folder(tmp_path, layout)).load(target_of()).target
    for weight in target.network.parameters():
        weight.data = {"zeros": weight * 0, "nan": weight * torch.nan, "huge": weight * 1e200}[how]
    for options in (TREES["auto"], TREES["chain"]):
        drafter = make_drafter(method_of(layout), target, None, options)
        assert decode(target, drafter, PROMPT, SAMPLED, 3, 20) == plain(SAMPLED)[:20]


@pytest.mark.parametrize("layout", ["dspark", "dspark-rnn", "dflash", "eagle-safeai", "eagle-speculators"])
def test_after_many_rounds_it_offers_what_a_dense_recomputation_ranks_first(layout: str) -> None:
    """Paths of any length are accepted, on the best branches and beside them; the window is smaller than the text."""
    target = drafted(layout)
    drafter = make_drafter(method_of(layout), target, None, options_of(tree=(4, 4, 4), nodes=40))
    source, dense, random, checked = drafter.sources[0], Dense(layout, qwen3()), Random(4), []
    propose = source.propose

    def seen(tree, context) -> None:  # type: ignore[no-untyped-def]
        propose(tree, context)
        if len(context.text) % 3:
            return
        text, sampler = list(context.text), context.sampler
        window = dense.window(len(text) - 1, 64, 4)
        block = None if "eagle" in layout else dense.block(text, window)
        below = [node for node in range(1, len(tree)) if tree.depths[node] > 1]
        for node in (0, *{tree.parents[node] for node in below}):
            path = tree.path(node)
            logits = dense.eagle(text, path, window) if block is None else dense.biased(block, [text[-1], *path])
            logits = logits.clamp(min=-1e4)
            wanted = sampler.scores(logits[None], None, [len(text) + len(path)])[0].topk(4)
            offered = [tree.tokens[each] for each in range(1, len(tree)) if tree.parents[each] == node]
            assert offered == wanted.indices[wanted.values > -torch.inf].tolist()
            checked.append(len(path))

    source.propose = seen
    decoding = Decoding(target, PROMPT, SAMPLED, 3, drafter, 40, lambda tree, drawn: _any_path(tree, random))
    accepted = [step.accepted for step in decoding.steps()]
    assert {0, 1, 2, 3} <= {*accepted}
    assert checked.count(0) > 3
    assert min(checked.count(1), checked.count(2)) > 12


def _any_path(tree, random: Random) -> list[int]:  # type: ignore[no-untyped-def]
    path = [0]
    while below := [node for node in range(1, len(tree)) if tree.parents[node] == path[-1]]:
        if random.random() < 0.3:
            break
        path.append(random.choice(below))
    return path


def test_the_wrong_kind_of_drafter_or_none_is_refused(tmp_path: Path) -> None:
    target = target_of()
    with pytest.raises(InputError, match="drafter: block drafts with a drafter of kind dspark or dflash, and there is"):
        make_drafter("block", target, None, DraftOptions())
    find_drafter(drafter_folder(tmp_path, "dflash")).load(target)
    with pytest.raises(InputError, match="drafter: eagle drafts with a drafter of kind eagle3, and this one is dflash"):
        make_drafter("eagle", target, None, DraftOptions())
    with pytest.raises(InputError, match="tree: block can draft 3 levels with this drafter, got 4"):
        make_drafter("block", target, None, options_of(tree=(1, 1, 1, 1)))
    with pytest.raises(InputError, match="gamma: must be between 1 and 3 for block, got 4"):
        make_drafter("block", target, None, options_of(gamma=4))


@pytest.mark.parametrize("layout", [*(pytest.param(each, marks=pytest.mark.slow) for each in KINDS[:2]), KINDS[2]])
def test_a_round_is_a_graph(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are emulated on the CPU: what would wait for the device within a round is refused there."""
    steps = []
    for captured in (False, True):
        target = Target(deepcopy(qwen3()), capture.StaticAttention)
        if captured:
            capture.emulate(monkeypatch.setattr)
            target._graphs = Graphs(torch.device("cpu"))
        find_drafter(drafter_folder(tmp_path, layout)).load(target)
        drafter = make_drafter(method_of(layout), target, None, TREES["alone"])
        steps.append(decode_steps(target, drafter, PROMPT, PENALISED, 3, 16))
        assert target.graphs is None
    assert [step.tokens for step in steps[1]] == [step.tokens for step in steps[0]]
    assert [step.nodes for step in steps[1]] == [step.nodes for step in steps[0]]
    assert tokens_of(steps[1]) == plain(PENALISED)[:16]


@pytest.mark.parametrize("layout", KINDS[1:])
def test_auto_takes_it_as_one_of_its_arms(layout: str) -> None:
    target = drafted(layout)
    drafter = make_drafter("auto", target, None, options_of(costs="nominal"))
    decoding = Decoding(target, PROMPT, SAMPLED, 3, drafter, 40)
    steps = list(decoding.steps())
    assert tokens_of(steps) == plain(SAMPLED)
    assert method_of(layout) in {step.choice for step in steps}
    network = drafter.arms[method_of(layout)].sources[0]
    assert network._first + len(network._new) == len(PROMPT) + 40 - 1  # it has seen what other arms brought


@pytest.mark.parametrize("params", [SAMPLED, PENALISED])
def test_a_perfect_drafter_is_always_right(params: SamplingParams, tmp_path: Path) -> None:
    """A target that looks at its last token only, and a DSpark whose bias is that target's LM head."""
    network = deepcopy(qwen3())
    for layer in network.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    network.model.embed_tokens.weight.data.mul_(3)
    with torch.no_grad():
        states = network.model.norm(network.model.embed_tokens.weight).float()
    own = {"embed_tokens.weight": network.model.embed_tokens.weight, "norm.weight": torch.zeros(HIDDEN)}
    own |= {"markov_head.markov_w1.weight": states, "markov_head.markov_w2.weight": network.lm_head.weight}
    own |= {"confidence_head.proj.weight": None, "confidence_head.proj.bias": None}
    weights = {name: value if value is None else value.detach().float() for name, value in own.items()}
    said = {"markov_rank": HIDDEN, "enable_confidence_head": False}
    target = find_drafter(drafter_folder(tmp_path, "dspark", said, weights)).load(Target(network)).target
    accepted = {}
    for name, options in {
        "chain": options_of(tree=(1,) * 4),
        "tree": options_of(recall=0, costs="nominal"),
        "noise not shared": options_of(tree=(1,) * 4, shared_noise=False),
    }.items():
        steps = decode_steps(target, make_drafter("block", target, None, options), PROMPT, params, 3, 40)
        accepted[name] = [step.accepted for step in steps]
    assert accepted["chain"] == [4] * 8  # of five tokens a step
    assert sum(accepted["tree"]) >= 30
    assert sum(accepted["noise not shared"]) < 20


def test_exact_passes_give_taps_too() -> None:
    target = Target(deepcopy(qwen3(torch.bfloat16)), ChunkedAttention)
    with TemporaryDirectory() as folder:
        find_drafter(drafter_folder(Path(folder), "dspark")).load(target, any_model=True)
    assert set_width(target, "sdpa", True) is None
    ar = decode(target, Drafter(), PROMPT, SAMPLED, 3, 30)
    steps = decode_steps(target, make_drafter("block", target, None, TREES["alone"]), PROMPT, SAMPLED, 3, 30)
    assert tokens_of(steps) == ar
    assert 1 < max(step.nodes for step in steps) <= target.width


@pytest.mark.slow
def test_compiled_layers_give_taps_too() -> None:
    text, taps = torch.tensor(PROMPT[:7]), []
    for compiled in (False, True):
        target = target_of(torch.float32)
        with TemporaryDirectory() as folder:
            find_drafter(drafter_folder(Path(folder), "dspark")).load(target)
        if compiled:
            assert target.compile("eager") is None
        run = target._pass(torch.arange(7), FullKV(target.kv_shape, 7), None)
        with torch.inference_mode():
            taps.append(target._compute(text, torch.arange(7), run).taps)
    torch._dynamo.reset()
    torch.testing.assert_close(*taps)
