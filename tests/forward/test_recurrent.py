"""Layers with states: the logits of transformers, and one text whatever is drafted, rejected,
taken back or resumed.

That trees, chunks and single tokens leave the same bits, those of the states too, is in
tests/lossless/test_bits.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
import transformers

from benchmarks.architectures import ARCHITECTURES, checkpoint, stock
from tests.helpers import (
    PLAIN,
    Proposals,
    decode_steps,
    first,
    needs_program,
    options_for,
    random_prompt,
    refused,
    seeded,
    tokens_of,
)
from tests.jobs.killing import killed_before
from tests.lossless.models import exact_target, network, state_of
from tswift.caches import FullKV
from tswift.decoding.audit import audit
from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.loop import Decoding
from tswift.engine import generate
from tswift.forward import recurrent
from tswift.forward.adapting import wrap_model
from tswift.forward.cpu.recurrence import recurrence_library
from tswift.forward.exact_passes import choose_fixed_rows, fingerprint
from tswift.forward.passes import Nodes
from tswift.forward.recurrence import Rows
from tswift.forward.recurrent import step_states
from tswift.forward.target import Target
from tswift.forward.text import chunks, prefill
from tswift.jobs import folder as files
from tswift.jobs import job, resuming
from tswift.jobs.config import RunConfig
from tswift.loading.model import load
from tswift.options import changed

CONVOLVED, DELTA, SCANNED = (
    "LFM2 (short convolutions)",
    "Qwen3.5 to 3.8 (gated delta nets)",
    "Bamba (Mamba2)",
)
KINDS = [
    kind
    for kind in (
        DELTA,
        CONVOLVED,
        SCANNED,
        "Granite 4-H (Mamba2)",
        "Qwen3-Next (gated delta nets)",
        "LFM2 MoE (short convolutions)",
    )
    if ARCHITECTURES[kind].there
]
LENGTH = 40
BY_C = f"{DELTA}, one C program"
DECODED = [DELTA, CONVOLVED, SCANNED, pytest.param(BY_C, marks=needs_program)]
WRONG = 96  # a token that no text below has
SAMPLED = PLAIN.__class__(min_p=0.0, penalty=1.0, temperature=0.5, banned=(WRONG,))


class Wide:
    """PyTorch, whose single precision is double precision."""

    float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.mark.parametrize("kind", first(3, KINDS))
def test_logits_are_those_of_the_stock_model(kind, monkeypatch):
    """Which computes its recurrence in single precision whatever the model's: here it does not,
    nor does a norm.

    Mamba2's it does.
    """
    made = stock(ARCHITECTURES[kind].make(97))
    monkeypatch.setattr(sys.modules[type(made).__module__], "torch", Wide())
    text = torch.tensor(random_prompt(600, 2))  # more than a chunk
    with torch.inference_mode():
        expected = made(text.unsqueeze(0), use_cache=False).logits[0]
    target = Target(made)
    kv = FullKV(target.kv_shape, len(text) + 1)
    found = [forwarded.hidden for forwarded in chunks(target, text[:590].tolist(), kv)]
    for at in range(590, 600):
        found.append(target.forward(Nodes(text[at : at + 1], torch.tensor([at]), kv, None)).hidden)
        kv.commit([0])
    apart = (target.logits(torch.cat(found)) - expected).abs().max() / expected.std()
    assert apart < (1e-4 if "Mamba2" in kind else 1e-6)


def random_rows(count: int, heads: int, keys: int, values: int) -> tuple[Rows, torch.Tensor]:
    """Rows, by two heads of queries and keys, and a state."""
    source = seeded(keys)
    sizes = {
        "queries": (2, keys),
        "keys": (2, keys),
        "contents": (heads, values),
        "decays": (heads,),
        "rates": (heads,),
    }
    made = {name: torch.rand(count, *size, generator=source) - 0.5 for name, size in sizes.items()}
    keys_of = made["keys"] / made["keys"].norm(dim=-1, keepdim=True)
    rows = Rows(**made | {"keys": keys_of}, corrects=heads != 2)
    return rows, torch.randn(heads, keys, values, generator=source)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("heads", "keys", "values"), first(2, [(4, 24, 80), (2, 16, 16), (6, 128, 128)])
)
def test_a_tree_a_path_and_single_steps_have_the_same_bits(
    compiled, heads, keys, values, monkeypatch
):
    """By parents' states, as a chain, and one by one; in C,
    which gives nearly what PyTorch does.
    """
    if compiled and recurrence_library() is None:
        pytest.skip("no compiler")
    count = 30
    rows, state = random_rows(count, heads, keys, values)
    other = step_states(rows, state, range(count), range(-1, count - 1))
    if not compiled:
        monkeypatch.setattr(recurrent, "recurrence_library", lambda: None)
    chosen = Random(1)
    parents = [-1, *(chosen.randrange(-1, node) for node in range(1, count))]
    tree = step_states(rows, state, range(count), parents)
    for leaf in range(count):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = torch.empty_like(state)
        single = state.clone()
        found = step_states(rows, state, path, range(-1, len(path) - 1), chain)
        singly = torch.cat([step_states(rows, single, [node], [-1], single) for node in path])
        assert torch.equal(found, tree[path])
        assert torch.equal(found, singly)
        assert torch.equal(chain, single)
    torch.testing.assert_close(step_states(rows, state, range(count), range(-1, count - 1)), other)


def target_of(kind: str, dtype: torch.dtype) -> Target:
    """A model whose rows are exact; a C program's is in float32 whatever is asked for."""
    if kind != BY_C:
        return exact_target(kind, dtype)
    target = wrap_model(network(DELTA, torch.float32), kind, "native", kv_dtype=torch.int16)
    assert target.runner.program is not None
    assert choose_fixed_rows(target, "native", None) is None
    fingerprint(target)
    return target


def plain(target: Target, prompt: Sequence[int], length: int = LENGTH) -> list[int]:
    return tokens_of(decode_steps(target, Drafter(), prompt, SAMPLED, 4, length))


# by step: how many right tokens are drafted, and whether beside each there is a wrong one, and one
# below that
SCRIPT = [
    (0, True),
    (6, False),
    (0, False),
    (3, True),
    (0, True),
    (0, True),
    (4, True),
    (0, False),
    (1, False),
]


def scripted(right: Sequence[int], prompt: int) -> Drafter:
    """Drafts of these kinds in turn: a step rejects its first node, accepts all,
    drafts nothing or branches.
    """
    turns = iter(SCRIPT * LENGTH)

    def paths(context: Context) -> list[list[int]]:
        count, wrong = next(turns)
        at = len(context.text) - prompt
        known = list(right[at : at + count])
        aside = (
            [[*known[:depth], WRONG, right[0]] for depth in range(len(known) + 1)] if wrong else []
        )
        return [*aside, known]  # the right one is the last child

    return Drafter([Proposals(paths)], depth=8, limit=16)


@pytest.mark.parametrize("kind", DECODED)
@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float32]))
def test_rejected_accepted_and_undrafted_steps_in_any_order(kind, dtype):
    """Bit for bit. A step without a draft after one that accepted reads the states after that one,
    not before.

    That is vLLM's #52942; llama.cpp's #26695 needs a second rejection in a row.
    """
    target = target_of(kind, dtype)
    prompt = random_prompt(21, 3, WRONG)
    wanted = plain(target, prompt)
    assert len({*wanted}) > 10
    taken = []
    decoding = Decoding(target, prompt, SAMPLED, 4, scripted(wanted, len(prompt)), LENGTH)
    for step in decoding.steps():
        taken.append(step)
        decoding.plain(2)  # and whatever is taken back leaves no trace
    assert tokens_of(taken) == wanted
    assert [step.accepted for step in taken[: len(SCRIPT)]] == [count for count, _ in SCRIPT]
    kv = FullKV(target.kv_shape, len(prompt) + LENGTH)
    prefill(target, [*prompt, *wanted][: decoding._kv.length], kv, len(prompt) - 1)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(state_of(decoding._kv), state_of(kv), strict=True)
    )


@pytest.mark.parametrize(
    "kind", [DELTA, DECODED[3], pytest.param(CONVOLVED, marks=pytest.mark.slow)]
)
def test_a_run_killed_after_any_step_goes_on_the_same(kind):
    """After a rejection, after all of a draft was accepted, and before anything was generated."""
    target = target_of(kind, torch.bfloat16)
    prompt = random_prompt(21, 3, WRONG)
    wanted = plain(target, prompt)
    ends = [0]
    for step in decode_steps(target, scripted(wanted, len(prompt)), prompt, SAMPLED, 4, LENGTH)[
        : len(SCRIPT)
    ]:
        ends.append(ends[-1] + len(step.tokens))
    for end in ends:
        rest = scripted(wanted, len(prompt))
        steps = Decoding(target, prompt, SAMPLED, 4, rest, LENGTH, written=wanted[:end]).steps()
        assert [*wanted[:end], *tokens_of(list(steps))] == wanted, end
    found = audit(target, prompt, wanted, SAMPLED, 4)
    assert (found.exact, found.violations) == (LENGTH, [])
    assert not audit(
        target, prompt, [*wanted[:30], (wanted[30] + 1) % WRONG, *wanted[31:]], SAMPLED, 4
    ).ok


@needs_program
def test_a_run_killed_within_its_prompt_goes_on_the_same(tmp_path, monkeypatch):
    """In its first process and in one that resumed it, between two chunks of the prompt."""
    known = ARCHITECTURES[DELTA]
    longer = replace(known, settings={**known.settings, "max_position_embeddings": 4096})
    checkpoint(longer, tmp_path / "model")
    asked = RunConfig.of(
        prompt_text="The ship had lain three days becalmed. " * 100,
        length=60,
        method="reuse",
        model=str(tmp_path / "model"),
        out=tmp_path / "run",
    )
    loaded = load(asked.model.model, device="cpu")
    for module in (job, resuming):
        monkeypatch.setattr(module, "load_model", lambda config: loaded)
    monkeypatch.setattr(files, "_TOKENS", 5)

    def run(begun):
        assert begun is not None
        begun.run(lambda text, stats: None)

    def go_on():
        run(resuming.resume(asked.out, {}, False, []))

    def tokens(folder):
        return (folder / "tokens.u32").read_bytes()

    whole = tmp_path / "whole"
    run(job.start(changed(asked, {"method": "ar", "out": whole}), []))
    of_chunks = FullKV, ("commit",)
    assert killed_before(3, lambda: run(job.start(asked, [])), *of_chunks)
    assert tokens(asked.out) == b""
    assert killed_before(20, go_on, *of_chunks)
    assert 0 < len(tokens(asked.out)) < len(tokens(whole))
    assert killed_before(3, go_on, *of_chunks)
    go_on()
    assert tokens(asked.out) == tokens(whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("recurrent")
    checkpoint(ARCHITECTURES[DELTA], made)
    return str(made)


def test_a_checkpoint_is_served_and_audited_without_exact_passes(folder):
    model = load(folder, device="cpu", attention="sdpa")
    assert model.target.kv_shape.layers == 1
    prompt = model.encode("The ship had lain")
    options = options_for("auto", costs="nominal")
    texts = [tokens_of([*generate(model, prompt, 50, method=name)]) for name in ("ar", "reuse")]
    texts.append(tokens_of([*generate(model, prompt, 50, method="auto", options=options)]))
    assert texts[0] == texts[1] == texts[2]
    params = PLAIN.__class__(banned=model.eos_ids)
    found = audit(model.target, prompt, texts[0], params, 0)
    assert found.ok
    assert found.measured > 0


@pytest.mark.parametrize(
    ("options", "method", "match"),
    [
        ({}, "magicdec", "magicdec drafts by the model itself, whose recurrent layers"),
        ({}, "tokenswift", "tokenswift drafts by the model itself, whose recurrent layers"),
        (
            {"draft_model": "itself"},
            "standalone",
            "has recurrent layers, and what they have seen cannot be taken back",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(folder, options, method, match):
    options = {name: folder if value == "itself" else value for name, value in options.items()}
    with refused(match):
        generate(
            load(folder, device="cpu", attention="sdpa", **options), "The ship", 5, method=method
        )


def test_functions_of_transformers_stay_the_same_elsewhere(folder):
    """A model that is wrapped gives its own logits when transformers calls it,
    and so does another one.
    """
    target = exact_target(DELTA, torch.float32)
    ids = torch.tensor([random_prompt(30)])
    other = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before = other(ids, use_cache=False).logits
    kv = FullKV(target.kv_shape, 30)
    prefill(target, ids[0].tolist(), kv)
    assert torch.equal(other(ids, use_cache=False).logits, before)
