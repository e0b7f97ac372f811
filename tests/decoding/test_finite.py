"""NaN and infinity: they end a decode with their place named,
and those of a draft change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.decoding.test_loop import BLIND, PAPER, WIDE, parameters
from tests.helpers import (
    CPU,
    VOCAB,
    Proposals,
    decode,
    decode_method,
    drafter_of,
    first,
    random_prompt,
    seeded,
    tiny_heads,
    tiny_llama,
    tiny_target,
    tokens_of,
)
from tests.rows import every_row
from tswift.caches import PartialKV
from tswift.decoding.audit import audit
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding, NotFinite
from tswift.drafting.methods import make_drafter
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import NO_TOKEN, Sampler
from tswift.speculators.heads import Heads

NAN, INF = torch.nan, torch.inf
CHAINS = ("magicdec", "triforce")
METHODS = ("ar", "medusa", "tokenswift", "reuse", *CHAINS)
FILTERS = {
    "greedy": parameters(temperature=0),
    "greedy, penalty": parameters(temperature=0, penalty=1.3),
    "T 1": parameters(),
    "temperature": parameters(temperature=0.3),
    "penalty": parameters(penalty=1.3),
    "min-p": parameters(min_p=0.1),
    "min-p 1": parameters(min_p=1.0),
    "eta": parameters(eta=0.01),
    "top-k": parameters(top_k=5),
    "top-k 1": parameters(top_k=1),
    "top-p": parameters(top_p=0.9),
    "top-p, next to nothing": parameters(top_p=1e-9),
    "all": SamplingParams(0.7, 20, 0.9, 0.02, 0.001, 1.3, 5, banned=(0, 3)),
}


# -------------------------------------------------------------------------------------------------
# a row that is not finite shows, whatever the filters


@every_row("name", FILTERS)
def test_a_row_with_nan_or_infinity_draws_nothing(name):
    params = FILTERS[name]
    vocab = 700 if "top-p" in name or name == "all" else 40
    fine = torch.randn(6, vocab, generator=seeded(1))
    seen = torch.rand(6, vocab, generator=seeded(2)) < 0.3 if params.penalises else None
    plain = Sampler(params, 3, vocab, CPU).draw(fine, seen, range(6))
    assert NO_TOKEN not in plain
    best, worst = int(fine[2].argmax()), int(fine[2, 4:].argmin()) + 4  # below are banned ids
    for values in (
        {best: NAN},
        {worst: NAN},
        {worst: INF},
        {best: INF, worst: INF},
        {best: NAN, worst: INF},
    ):
        logits = fine.clone()
        for token, value in values.items():
            logits[2, token] = value
        wanted = [*plain[:2], NO_TOKEN, *plain[3:]]  # the other rows are as they were
        assert Sampler(params, 3, vocab, CPU).draw(logits, seen, range(6)) == wanted, values
    for value in (NAN, INF, -INF):
        logits = fine.clone()
        logits[2] = value
        assert Sampler(params, 3, vocab, CPU).draw(logits, seen, range(6)) == wanted


def test_of_equal_logits_the_first_is_drawn():
    logits = torch.zeros(3, 3000).bfloat16()
    logits[1, [20, 40, 2999]] = 1
    assert Sampler(parameters(temperature=0), 1, 3000, CPU).draw(logits, None, range(3)) == [
        0,
        20,
        0,
    ]


# -------------------------------------------------------------------------------------------------
# where it comes from


def broken_target(
    change: Callable[[nn.Module], None], dtype: torch.dtype = torch.float64
) -> Target:
    model = tiny_llama("gqa", dtype, layers=3)
    target = Target(model)
    with torch.no_grad():
        change(model)
    return target


def weight(name: str, value: float, row: int = 0) -> Callable[[nn.Module], None]:
    def change(model: nn.Module):
        model.get_parameter(name).view(-1, model.get_parameter(name).shape[-1])[row, 3] = value

    return change


PLACES = {
    "model.layers.1.mlp.down_proj.weight": "model.layers.1",
    "model.layers.0.self_attn.k_proj.weight": "model.layers.0",
    "model.layers.2.input_layernorm.weight": "model.layers.2",
    "model.norm.weight": "model.norm",
    "lm_head.weight": "lm_head",
}


@pytest.mark.parametrize(("name", "value"), zip(PLACES, (NAN, INF, NAN, INF, NAN), strict=True))
def test_a_broken_weight_is_found(name, value):
    target = broken_target(weight(name, value))
    prompt = random_prompt(20)
    params = parameters(min_p=0.1, penalty=1.2)
    for method in ("ar", "tokenswift", "magicdec"):
        run = Decoding(target, prompt, params, 1, drafter_of(method, target, PAPER), 30)
        with pytest.raises(NotFinite) as caught:
            next(run.steps())
        message = str(caught.value)
        assert re.search(r"^the logits for position 20 are (NaN|infinite); ", message)
        assert (
            f"the first output that is not finite is that of {PLACES[name]} at position " in message
        )
        assert "float64" in message
        assert run._context.text == prompt
        assert run._context.kv.length == 19
    with pytest.raises(NotFinite, match=f"that of {PLACES[name]} at position "):
        audit(target, prompt, random_prompt(40, 1), params, 1)


def test_a_broken_embedding_in_the_prompt_is_found_where_it_stands():
    prompt = [token for token in random_prompt(820) if token != 11]
    prompt[777] = 11
    target = broken_target(weight("model.embed_tokens.weight", NAN, row=11))
    for method in ("ar", "tokenswift"):
        with pytest.raises(NotFinite) as caught:
            decode_method(method, target, prompt, parameters(), 1, 5)
        assert str(caught.value).startswith(
            f"the logits for position {len(prompt):,} are NaN; the first output that is not "
            "finite is that of model.embed_tokens at position 777: "
        )
    with pytest.raises(NotFinite, match=r"are NaN; .* model\.embed_tokens at position 777: "):
        audit(target, prompt, random_prompt(40, 1), parameters(), 1)


class Bad:
    """A hook after which a layer gives NaN: from its n-th pass over few nodes on, or once."""

    def __init__(self, after: int, once: bool = False):
        self.calls = 0
        self._after = after
        self._once = once

    def __call__(self, module: nn.Module, given, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        bad = self.calls == self._after if self._once else self.calls >= self._after
        return out * NAN if bad else out


def run_until_broken(run: Decoding) -> tuple[list[int], str]:
    written: list[int] = []
    steps = run.steps()
    while True:
        try:
            written += next(steps).tokens
        except NotFinite as error:
            return written, str(error)


@pytest.mark.parametrize("method", first(1, ["tokenswift", "ar", "reuse", "magicdec"]))
def test_what_was_written_before_stays(method):
    prompt = random_prompt(20)
    params = parameters(temperature=0.5, penalty=1.2, window=9)
    plain = decode_method("ar", broken_target(lambda model: None), prompt, params, 5, 60)
    broken = 41 if method in CHAINS else 21  # a chain takes many passes
    target = broken_target(lambda model: model.model.layers[1].register_forward_hook(Bad(broken)))
    run = Decoding(target, prompt, params, 5, drafter_of(method, target, PAPER), 60)
    written, message = run_until_broken(run)
    assert len(written) >= 8
    assert written == plain[: len(written)]
    assert run._context.text == prompt + written
    assert run._context.kv.length == len(run._context.text) - 1
    place = 20 + len(written)
    assert message.startswith(
        f"the logits for position {place} are NaN; the first output that is not finite is that of "
        f"model.layers.1 at position {place - 1}: "
    )
    well = broken_target(lambda model: None)
    rest = Decoding(
        well, prompt, params, 5, drafter_of(method, well, PAPER), 60, written=written
    ).steps()
    # what is left of the text can still be had
    assert tokens_of(list(rest)) == plain[len(written) :]


def test_a_fault_that_does_not_come_again():
    prompt = random_prompt(20)
    params = parameters(temperature=0.5, penalty=1.2, window=9)
    plain = decode_method("ar", broken_target(lambda model: None), prompt, params, 5, 40)

    def once(method):
        target = broken_target(
            lambda model: model.model.layers[1].register_forward_hook(Bad(21, once=True))
        )
        return Decoding(target, prompt, params, 5, drafter_of(method, target, PAPER), 40)

    written, message = run_until_broken(once("ar"))
    assert written == plain[:19]
    assert message == (
        "the logits for position 39 are NaN; a second pass gave finite ones: the memory or the "
        "device may be faulty"
    )
    run = once("ar")
    run.prefill()
    run._context.kv.buffers[1][2, :, 7] = NAN
    assert run_until_broken(run) == (
        [],
        (
            "the logits for position 20 are NaN, and keys or values of position 7 are not finite; "
            "a second pass gave finite ones: the memory or the device may be faulty"
        ),
    )
    for method in ("medusa", "tokenswift"):
        # the step is taken again without a draft, which may have been the cause
        assert tokens_of(list(once(method).steps())) == plain


def test_a_node_that_is_not_on_the_path_is_no_fault():
    """Plain decoding would never have come there."""
    prompt = random_prompt(20)
    params = parameters()
    plain = decode_method("ar", tiny_target(), prompt, params, 5, 40)
    right = Target.logits
    calls = []

    class Poisoned(Target):
        def logits(self, hidden):
            calls.append(len(hidden))
            logits = right(self, hidden).clone()
            logits[1:] = NAN
            return logits

    target = Poisoned(tiny_llama("gqa", torch.float64))
    wrong = Drafter(
        [Proposals(lambda context: [[(plain[len(context.text) - 20] + 1) % VOCAB]])], 1, 2
    )
    assert decode(target, wrong, prompt, params, 5, 40) == plain
    assert calls == [2] * 39 + [1]


def test_a_drafted_token_that_spoils_the_whole_pass_is_no_fault():
    """What is masked still counts where it is NaN: nothing times NaN is NaN."""
    prompt = [token for token in random_prompt(20) if token != 11]
    params = parameters(banned=(11,))
    target = broken_target(weight("model.embed_tokens.weight", NAN, row=11))
    plain = decode_method("ar", target, prompt, params, 5, 40)
    done = len(prompt)
    for draft in ([[11]], [[11, 5], [3]]):
        truth = Proposals(lambda context: [plain[len(context.text) - done :][:2], *draft])  # noqa: B023
        assert decode(target, Drafter([truth], 2, 9), prompt, params, 5, 40) == plain
    alone = Drafter([Proposals(lambda context: [plain[len(context.text) - done :][:2]])], 2, 9)
    assert len(list(Decoding(target, prompt, params, 5, alone, 40).steps())) < 15


def test_parameters_that_leave_nothing_to_draw():
    target = tiny_target()
    says = r"^there is nothing to draw at position 9: the logits are finite; temperature "
    with pytest.raises(NotFinite, match=says):
        decode_method("ar", target, random_prompt(9), parameters(banned=tuple(range(VOCAB))), 1, 5)


# -------------------------------------------------------------------------------------------------
# what drafts may be as broken as it likes


def broken_heads(value: float, kind: str) -> Heads:
    heads = tiny_heads.__wrapped__(torch.float64, 3, kind)
    with torch.no_grad():
        heads.heads[1].linear.weight[2, 2] = value
    return heads


@pytest.mark.parametrize(("kind", "value"), [("chained", NAN), ("conditioned", INF)])
def test_broken_heads_change_nothing(value, kind):
    target = tiny_target()
    prompt = random_prompt(70)
    heads = broken_heads(value, kind)
    params = parameters(0.7, top_p=0.9, top_k=30, min_p=0.05, penalty=1.3)
    plain = decode_method("ar", target, prompt, params, 8, 40)
    for method, options in (("medusa", BLIND), ("tokenswift", PAPER)):
        drafter = make_drafter(method, target, heads, replace(options, tree=options.tree[:3]))
        assert decode(target, drafter, prompt, params, 8, 40) == plain


@pytest.mark.slow
def test_a_broken_drafting_pass_changes_nothing(monkeypatch):
    prompt = random_prompt(70)
    params = parameters(top_p=0.9, penalty=1.2, window=30)
    plain = decode_method("ar", tiny_target(), prompt, params, 3, 90)
    right = Target.forward
    broken = []

    def forward(self, nodes):
        if not isinstance(nodes.kv, PartialKV):
            return right(self, nodes)
        nodes.kv.buffers[0].fill_(NAN)
        broken.append(right(self, nodes))
        return broken[-1]

    monkeypatch.setattr(Target, "forward", forward)
    for options in (PAPER, WIDE):
        assert decode_method("tokenswift", tiny_target(), prompt, params, 3, 90, options) == plain
    assert len(broken) > 60
    assert all(one.hidden.isnan().all() for one in broken)
