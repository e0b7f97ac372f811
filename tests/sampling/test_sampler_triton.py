"""The sampling rule in Triton kernels, interpreted on the CPU, against the rule in PyTorch."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
import torch

from tests.forward.test_passes import LengthOnDevice
from tests.helpers import (
    CPU,
    decode_steps,
    first,
    needs_triton,
    random_prompt,
    random_tree,
    seeded,
    tiny_heads,
    tiny_llama,
    tokens_of,
)
from tswift import checking
from tswift.checking import difference
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.forward.target import Target
from tswift.sampling.kernels import use_kernels
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import NO_TOKEN, Sampler

check = pytest.importorskip("tswift.sampling.sampler_check", reason="triton is not installed")
fused = pytest.importorskip("tswift.sampling.sampler_triton", reason="triton is not installed")
pytestmark = needs_triton


@pytest.fixture
def tried_anew(monkeypatch):
    """Nothing is known of the kernels."""
    monkeypatch.setattr(checking, "KERNELS", {})


def random_params(random: Random, vocab_size: int) -> SamplingParams:
    """Parameters that the kernels serve, with all that is odd."""
    banned = random.choice((0, 0, 1, 5, vocab_size // 2))
    params = SamplingParams(
        temperature=random.choice(
            (0.0, 1.0, 1.0, random.uniform(0.1, 2.0), random.uniform(0.1, 2.0), 1e-100)
        ),
        min_p=random.choice((0.0, 0.1, 0.1, random.random(), 1e-9, 1.0)),
        penalty=random.choice((1.0, 1.2, 1.2, random.uniform(1.0, 3.0), 1e100)),
        window=random.choice((0, 1, 2, random.randint(3, 40), 1024, 1 << 40)),
        banned=tuple(random.sample(range(vocab_size), banned)),
        logit_bias={
            random.randrange(vocab_size): random.uniform(-9, 9)
            for _ in range(random.choice((0, 0, 1, 40)))
        },
        # what is not looked at where the most likely token is taken
        top_k=(top_k := random.choice((0, 3))),
        top_p=random.choice((1.0, 0.5)) if top_k else 1.0,
    )
    return random_params(random, vocab_size) if set(params.filters) - {"min_p"} else params


@pytest.mark.parametrize("dtype", first(1, fused.DTYPES))
def test_the_kernels_draw_what_the_rule_draws(dtype):
    random = Random(3)
    for nodes in (1, 2, 41, 65, 127, 128, 128, 128):
        vocab = random.randint(257, 1030)  # one part of the vocabulary, or a little more
        params = random_params(random, vocab)
        compared = check.drawn(*check.both(params, vocab, nodes, dtype, CPU, random))
        assert difference([compared]) is None, (params, vocab, nodes)


@pytest.mark.usefixtures("tried_anew")
def test_counted_tokens_are_drawn_by_the_kernels_from_lowered_logits():
    """In float64, which a model's own logits have on no GPU that the kernels are for."""
    random = Random(4)
    params = SamplingParams(window=5, presence_penalty=0.7, frequency_penalty=-0.3)
    one, plain = (Sampler(params, 3, 300, CPU, prompt=2) for _ in range(2))
    use_kernels(one, torch.float32, interpreted=True)
    assert one.fault is None
    text = [random.randrange(300) for _ in range(40)]
    for each in (one, plain):
        each.extend(text)
    logits = 2 * torch.randn(128, 300, generator=seeded(0))
    tree = random_tree(128, random, 300)
    where = torch.tensor(tree.tokens), torch.tensor(tree.depths) + 39, tree.ancestors()
    wanted = plain.draw_rows(logits, *where)
    assert torch.equal(one.draw_rows(logits, *where), wanted)
    assert one.draw_nodes(logits, where)[0] == wanted.tolist()
    neither = replace(params, presence_penalty=0.0, frequency_penalty=0.0)
    assert not torch.equal(Sampler(neither, 3, 300, CPU).draw_rows(logits, *where), wanted)


@pytest.mark.parametrize(("nodes", "vocab"), [(1, 5000), (6, 2049)])
def test_the_tiles_of_a_gpu(monkeypatch, nodes, vocab):
    monkeypatch.setattr(fused, "INTERPRETED", False)
    random = Random(nodes)
    for params in (
        SamplingParams(window=5),
        SamplingParams(temperature=0.8, min_p=0.0, banned=(4,)),
    ):
        compared = check.drawn(*check.both(params, vocab, nodes, torch.bfloat16, CPU, random))
        assert difference([compared]) is None


@pytest.mark.slow
def test_a_large_vocabulary(monkeypatch):
    monkeypatch.setattr(fused.TritonSampler, "BLOCK", 1 << 15)  # fewer programs for the interpreter
    params = SamplingParams(window=3)
    compared = check.drawn(*check.both(params, 128_256, 3, torch.bfloat16, CPU, Random(5)))
    assert difference([compared]) is None


CHANGES = {
    "seed": lambda params, seed: (params, seed + 1),
    "window": lambda params, seed: (replace(params, window=params.window + 1), seed),
    "penalty": lambda params, seed: (replace(params, penalty=1.0), seed),
    "min-p": lambda params, seed: (replace(params, min_p=0.0), seed),
    "temperature": lambda params, seed: (replace(params, temperature=0.5), seed),
    "banned": lambda params, seed: (replace(params, banned=()), seed),
    "bias": lambda params, seed: (replace(params, logit_bias={}), seed),
}


@pytest.mark.parametrize("change", first(1, CHANGES))
def test_the_comparison_sees_kernels_that_are_asked_for_something_else(change, monkeypatch):
    right = fused.TritonSampler
    monkeypatch.setattr(
        check,
        "TritonSampler",
        lambda params, seed, *rest: right(*CHANGES[change](params, seed), *rest),
    )
    params = SamplingParams(
        window=3, banned=tuple(range(0, 300, 2)), penalty=2.0, logit_bias={5: 4.0, 7: 3.0}
    )
    random = Random(1)
    given = params, 300, 128, torch.float32, CPU, random
    said = difference(check.drawn(*check.both(*given)) for _ in range(3))
    assert said.startswith("tokens drawn in 128-node trees differ from plain ones by up to ")
    if change in ("seed", "penalty", "bias"):
        compared = check.ranked(*check.both(params, 300, 32, torch.float32, CPU, random), 3)
        assert difference(compared) == "candidates differ from plain ones by up to 1"


def test_the_comparison_sees_a_path_that_is_not_penalised(monkeypatch):
    call = fused.TritonSampler.draw

    def blind(self, logits, tokens, positions, ancestors, newest):
        return call(
            self, logits, tokens, positions, torch.eye(len(tokens), dtype=torch.bool), newest
        )

    monkeypatch.setattr(fused.TritonSampler, "draw", blind)
    params = SamplingParams(penalty=1.3)
    random = Random(1)
    given = params, 300, 128, torch.float32, CPU, random
    assert "tokens drawn" in difference(check.drawn(*check.both(*given)) for _ in range(5))


@pytest.mark.parametrize("dtype", first(1, fused.DTYPES))
def test_the_kernels_rank_candidates_by_the_rule(dtype):
    random = Random(8)
    for rows, count in ((1, 1), (2, 4), (31, 7), (1, 16)):
        vocab = random.randint(257, 1030) if count < 16 else 14
        params = random_params(random, vocab)
        compared = check.ranked(
            *check.both(params, vocab, rows, dtype, CPU, random), min(count, vocab)
        )
        assert difference(compared) is None, (params, vocab, rows, count)


@pytest.mark.slow
def test_a_draft_is_drawn_with_the_kernels_where_the_host_proposes_it(
    monkeypatch,
):
    """As the chain of a cascade is: the token after every node, and with leads its runner-up."""
    # on CUDA there is no C program
    monkeypatch.setattr(Sampler, "program", lambda self, dtype: None)
    one, plain = sampler(SamplingParams(window=4)), sampler(SamplingParams(window=4))
    use_kernels(one, torch.float32, candidates=2, interpreted=True)
    calls = []
    for name in ("draw", "candidates"):
        run = getattr(fused.TritonSampler, name)
        monkeypatch.setattr(
            fused.TritonSampler,
            name,
            lambda *given, run=run, name=name: calls.append(name) or run(*given),
        )
    logits = torch.randn(3, 50, generator=seeded(0))
    logits[2, 7] = math.nan
    nodes = (
        torch.tensor([1, 2, 3]),
        torch.tensor([4, 5, 6]),
        torch.ones(3, 3, dtype=torch.bool).tril(),
    )
    for leads in (False, True):
        (drawn, others), (wanted, known) = (
            each.draw_nodes(logits, nodes, None, leads) for each in (one, plain)
        )
        assert drawn == wanted
        assert drawn[2] == NO_TOKEN
        for (token, lead), (other, by) in zip(others[:2], known[:2], strict=True):
            assert (token, lead) == (other, pytest.approx(by))
    assert calls == ["draw", "candidates"]


def test_a_sampler_ranks_with_the_kernels(monkeypatch):
    one, plain = sampler(SamplingParams(window=4)), sampler(SamplingParams(window=4))
    use_kernels(one, torch.float32, candidates=3, interpreted=True)
    assert one.fault is None
    calls = []
    ranking = fused.TritonSampler.candidates
    monkeypatch.setattr(
        fused.TritonSampler,
        "candidates",
        lambda self, *given: calls.append(given[3]) or ranking(self, *given),
    )
    logits = torch.randn(2, 50, generator=seeded(0))
    places = torch.tensor([4, 5])
    seen = torch.arange(100).view(2, 50) % 3 == 0
    for mask, positions in ((None, places), (seen[:1], None), (seen, places)):
        expected = plain.candidates(logits, mask, positions, 3)
        found = one.candidates(logits, mask, positions, 3)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
    # of which the kernels know nothing: another number, one position or row for all
    assert one.candidates(logits, None, places, 4)[0].shape == (2, 4)
    assert one.candidates(logits[:1], seen, None, 3)[0].shape == (2, 3)
    assert calls == [3] * 3
    use_kernels(one, torch.float32, candidates=17, interpreted=True)
    assert one.fault == "the kernels rank at most 16 candidates"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "tokenswift"])
def test_a_decode_with_the_kernels_is_one_without(method, monkeypatch):
    params = SamplingParams(min_p=0.02, window=24)
    options = DraftOptions(nodes=20, budget=64)
    faults = []
    steps = []

    def interpreted(sampler, dtype, candidates=0):
        use_kernels(sampler, dtype, max(1, candidates), interpreted=True)
        faults.append(sampler.fault)

    for _ in range(2):
        target = Target(tiny_llama("gqa", torch.float32), LengthOnDevice)
        drafter = make_drafter(method, target, tiny_heads(torch.float32), options)
        steps.append(decode_steps(target, drafter, random_prompt(30), params, 3, 30))
        for place in ("decoding.loop", "decoding.device_step", "drafting.fixed_tree"):
            monkeypatch.setattr(f"tswift.{place}.use_kernels", interpreted)
    assert set(faults) == {None}
    assert tokens_of(steps[0]) == tokens_of(steps[1])
    assert [step.accepted for step in steps[0]] == [step.accepted for step in steps[1]]


def test_rows_of_nothing_and_ties():
    rule = fused.TritonSampler(SamplingParams(temperature=0, banned=(2,)), 1, 5, CPU)
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[1, 3, 9, 3, 2], [1, nan, 0, 0, 0], [0, 0, nan, 1, 1], [-inf] * 5, [0, inf, 0, 0, 0]]
    )
    tokens, positions = torch.tensor([4, NO_TOKEN, NO_TOKEN, 1, 1]), torch.tensor([7, 8, 8, 8, 8])
    newest = torch.full((5,), -(1 << 62))
    drawn = rule.draw(logits, tokens, positions, torch.eye(5, dtype=torch.bool), newest)
    assert drawn.tolist() == [1, NO_TOKEN, 3, NO_TOKEN, NO_TOKEN]


def sampler(params: SamplingParams, vocab: int = 50) -> Sampler:
    return Sampler(params, 3, vocab, CPU)


@pytest.mark.usefixtures("tried_anew")
def test_a_sampler_uses_the_kernels_once_they_agree(monkeypatch):
    calls = []
    call = fused.TritonSampler.draw
    monkeypatch.setattr(
        fused.TritonSampler,
        "draw",
        lambda self, *given: calls.append(len(given[0])) or call(self, *given),
    )
    one, plain = sampler(SamplingParams(window=4)), sampler(SamplingParams(window=4))
    use_kernels(one, torch.float32)
    assert (one.fault, calls) == (None, [])  # on the CPU it is not asked for
    use_kernels(one, torch.float32, interpreted=True)
    assert one.fault is None
    assert sum(calls) == sum(check.TRIED)
    rules = dict(one.kernels)
    use_kernels(one, torch.float32, interpreted=True)
    use_kernels(one.copy(), torch.float32, interpreted=True)
    assert one.kernels == rules  # what a captured graph reads stays where it is
    assert len(calls) == len(check.TRIED)  # once for all
    for each in (one, plain):
        each.extend([3, 4, 5])
    calls.clear()
    logits = torch.randn(3, 50, generator=seeded(0))
    where = (
        torch.tensor([5, 9, 9]),
        torch.tensor([2, 3, 4]),
        torch.ones(3, 3, dtype=torch.bool).tril(),
    )
    for drawer in (one, one.copy()):
        assert torch.equal(drawer.draw_rows(logits, *where), plain.draw_rows(logits, *where))
    one.draw_rows(logits.double(), *where)  # not what was asked for
    assert calls == [3, 3]


@pytest.mark.usefixtures("tried_anew")
def test_a_sampler_leaves_what_the_kernels_get_wrong_or_have_not(
    monkeypatch,
):
    for params, dtype, reason in (
        (SamplingParams(top_k=3), torch.float32, "no kernel has top_k"),
        (SamplingParams(), torch.float64, "the kernels do not read float64"),
    ):
        one = sampler(params)
        use_kernels(one, dtype, interpreted=True)
        assert one.fault == reason
    with monkeypatch.context() as patch:
        patch.setattr(
            fused.TritonSampler, "draw", lambda self, logits, *given: torch.zeros(len(logits))
        )
        one = sampler(SamplingParams())
        use_kernels(one, torch.float32, interpreted=True)
        assert one.fault is not None
        assert one.fault.startswith("tokens drawn in 1-node trees differ from plain ones by up to ")

    def broken(self, *given):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(fused.TritonSampler, "draw", broken)
    one = sampler(SamplingParams(temperature=0))
    use_kernels(one, torch.float32, interpreted=True)
    assert re.fullmatch(r"no such instruction \(sampling/sampler_check\.py:\d+\)", one.fault or "")
    node = torch.tensor([0])
    assert one.draw_rows(
        torch.eye(1, 50), node, node, torch.ones(1, 1, dtype=torch.bool)
    ).tolist() == [0]


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="compiles for real anyway")
def test_the_kernels_compile_for_gpus_that_are_not_here():
    cases = ["80,bfloat16,41", "90,bfloat16,1", "90,float16,4", "90,float32,128", "90,float64,41"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.sampling.compiled", *cases]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == (len(cases) + 2) * (2 * 3 + 2 * 2)  # with min-p there is one more
    for kernel in found:
        assert kernel["spills"] == kernel["stack"] == 0, kernel
        # with more than 128 a multiprocessor would hold one program of 8 warps, and three of 4
        assert kernel["registers"] <= 128, kernel
        assert kernel["shared"] <= 32_768, kernel
        # divided as PyTorch divides, and nothing rounded once where it rounds twice: only
        # logarithms fuse
        assert kernel["div.full"] == kernel["div.approx"] == kernel[".ftz.f32"] == 0, kernel
        assert kernel["kernel"] == "rank_parts" or kernel["fma.rn.f64"] == 0, kernel
