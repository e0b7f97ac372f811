"""Runs side by side: the grid and its record, probes of plain decoding, simulated acceptance,
comparisons.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from copy import copy
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarking.helpers import typed
from tests.helpers import (
    PLAIN,
    drafter_of,
    first,
    needs_program,
    random_prompt,
    random_tree,
    read_json,
    refused,
    tiny_target,
)
from tests.rows import every_row
from tswift.benchmarking import run as run_module
from tswift.benchmarking import workloads
from tswift.benchmarking.comparison import Comparison
from tswift.benchmarking.config import (
    FULL,
    SAMPLED,
    BenchConfig,
    BenchOptions,
    Contender,
    Plan,
    configure,
    parse_methods,
    parse_trees,
)
from tswift.benchmarking.record import to_json
from tswift.benchmarking.report import csv_text, tables
from tswift.benchmarking.run import (
    BenchRun,
    Case,
    Probe,
    SimulatedWalk,
    Trial,
    begin_measurement,
    integrate,
    measure,
    open_runs,
    probes_differ,
    slice_goals,
)
from tswift.benchmarking.workloads import Prompt, Text, encode, read_texts
from tswift.decoding.drafter import DraftTree
from tswift.decoding.loop import Decoding
from tswift.decoding.stats import DecodeStats
from tswift.decoding.text import TextRules
from tswift.drafting.options import DraftOptions
from tswift.engine import Generation
from tswift.memory import MemoryEstimate

pytestmark = pytest.mark.usefixtures("load_once")

LENGTH = 80
PROMPTS = [Prompt("p", list(range(1, 9)))]
CASE = Case(repeat=0, prompt="p", prefill=8, seed=3, tokens=PROMPTS[0].tokens)


def options(checkpoint, *methods: str, trees=None, **changes) -> BenchOptions:
    return BenchOptions.of(
        trees or {}, {"methods": ("ar", *methods), "model": str(checkpoint), **changes}
    )


def run_of(method: str, length: int, seed: int = 3) -> BenchRun:
    target = tiny_target()
    drafting = DraftOptions(budget=64, tree=(1, 2, 2, 2) if method == "tokenswift" else None)
    drafter = drafter_of(method, target, drafting)
    decoding = Decoding(target, random_prompt(40), PLAIN, seed, drafter, length)
    run = BenchRun(
        method,
        method,
        Generation(decoding, drafter.depth, TextRules(), PLAIN, drafting, MemoryEstimate(0)),
    )
    run.prefill()
    return run


@given(st.integers(1, 10_000), st.lists(st.integers(1, 12_000), max_size=5))
def test_goals_rise_to_the_length_and_hold_every_stop(length, stops):
    goals = slice_goals(length, stops)
    assert goals == sorted(set(goals))
    assert (goals[0] > 0, goals[-1]) == (True, length)
    assert set(goals) >= {stop for stop in stops if stop <= length}
    assert len(goals) <= 50 + len(stops)


def test_probes_change_no_text_and_draw_what_plain_decoding_draws():
    plain, left, right = run_of("ar", 100), run_of("tokenswift", 80), run_of("tokenswift", 80)
    plain.advance(100)
    left.advance(80)
    for goal in range(0, 80, 7):
        right.advance(goal)
        right.probe()
    right.advance(80)
    assert right.tokens == left.tokens
    assert right.stats.accepted == left.stats.accepted
    assert len(right.probes) >= 8
    assert len(right.probes[0].tokens) == len(right.probes[0].seconds) + 1 == 9
    for probe in right.probes:
        assert list(probe.tokens) == plain.tokens[probe.position - 1 :][: len(probe.tokens)]
        assert min(probe.seconds) > 0
    assert probes_differ(right.tokens, right.probes) is None


def test_a_differing_token_is_found_at_its_index():
    probes = [Probe(11, (5, 6, 7), (0.1, 0.1)), Probe(3, (1, 2, 3), (0.1, 0.1))]
    text = [0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 5, 6, 7]
    # a text need not get that far
    assert probes_differ(text, probes) is probes_differ(text[:11], probes) is None
    assert probes_differ([*text[:11], 9, 7], probes) == 11
    assert probes_differ([*text[:4], 9, *text[5:11], 9, 7], probes) == 4


def made_up(label: str, **stats) -> BenchRun:
    """A run that has ended, with one mark."""
    run = BenchRun(label, label, None)
    run.tokens = list(range(20))
    run.marks = [DecodeStats(4, **stats)]
    return run


def test_a_text_is_compared_with_the_probes_of_its_run():
    run = made_up("tokenswift", passes=4, tokens=20, seconds=1.0)
    for token, differs in ((10, None), (11, 10)):
        run.probes = [Probe(11, (token,), (0.1,))]
        _, sample = Trial(None, CASE, [run], [20]).samples()
        assert (sample.same_as_ar, sample.first_difference, sample.compared_tokens) == (
            differs is None,
            differs,
            1,
        )


def test_plain_decodings_time_is_for_as_many_tokens():
    runs = [
        made_up("ar", passes=10, tokens=10, seconds=2.0),
        made_up("tokenswift", passes=4, tokens=12, seconds=1.0),
    ]
    _, sample = Trial(None, CASE, runs, [10]).samples()
    assert (sample.points[0].ar_seconds, sample.points[0].speedup) == pytest.approx((2.4, 2.4))


@given(st.floats(0.001, 1), st.floats(0, 0.01))
def test_linear_steps_integrate_exactly_inside_the_probes(base, slope):
    probes = [Probe(at, (), (base + slope * at, base + slope * (at + 1))) for at in (0, 10, 41, 99)]
    expected = sum(base + slope * max(place, 0.5) for place in range(100))
    assert integrate(probes, 100) == pytest.approx(expected, rel=1e-9)


def chain(depth: int) -> DraftTree:
    tree = DraftTree(0)
    tree.add(range(1, depth + 1), "chain")
    return tree


@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 60))
def test_the_share_is_met_to_the_token(percent, depth, steps):
    walk = SimulatedWalk(percent / 100, depth)
    accepted = 0
    for step in range(1, steps + 1):
        accepted += len(walk(chain(depth), [])) - 1
        assert accepted == percent * depth * step // 100


def test_what_a_shallow_tree_could_not_give_later_ones_do():
    walk = SimulatedWalk(0.5, 4)
    accepted = [len(walk(chain(depth), [])) - 1 for depth in (4, 1, 0, 4, 4, 4)]
    assert accepted == [2, 1, 0, 4, 3, 2]  # two are owed at every step


@given(st.integers(0, 1000), st.integers(1, 30), st.floats(0.01, 1))
def test_the_path_leads_from_the_root_to_the_first_node_deep_enough(seed, nodes, alpha):
    tree = random_tree(nodes, random.Random(seed))
    path = SimulatedWalk(alpha, 5)(tree, [])
    assert [tree.parents[node] for node in path[1:]] == path[:-1]
    depth = min(math.floor(5 * alpha + 1e-9), max(tree.depths))
    assert (path[0], path[-1]) == (0, tree.depths.index(depth))


def finish(record, config, plan: Plan, prompts=PROMPTS, on_progress=lambda *at: None):
    """The record, measured, as a file has it."""
    kept = []
    keep = lambda: kept.append(record.state)  # noqa: E731
    measure({"": config}, record, prompts, plan, lambda label, *at: on_progress(*at), keep)
    assert kept == ["running"] * (len(kept) - 1) + [record.state]
    content = json.loads(json.dumps(to_json(record)))
    assert typed(content) == record
    return content


def measured(checkpoint, plan: Plan, *methods: str, **changes):
    config = configure(options(checkpoint, *methods, **changes))
    return finish(begin_measurement(config, PROMPTS, plan, ["tswift", "bench"]), config, plan)


@pytest.fixture(scope="module")
def grids(checkpoint):
    """The same grid with plain decoding run and sampled."""
    methods = ("tokenswift", "reuse", "ar-reference")
    plans = [
        Plan((4, 7), (10, 40), (1,), ar=ar, repeats=n, warmup=2 * n)
        for ar, n in ((FULL, 2), (SAMPLED, 1))
    ]
    return {plan.ar: measured(checkpoint, plan, *methods) for plan in plans}


COUNTERS = ("tokens", "passes", "nodes", "accepted", "reused", "alpha", "beta")


@pytest.mark.slow
def test_every_cell_is_measured_and_its_counters_do_not_depend_on_how_ar_is_timed(grids):
    counted = {}
    for ar, record in grids.items():
        samples = record["samples"]
        keys = {
            tuple(s[name] for name in ("prompt", "prefill", "seed", "repeat", "method"))
            for s in samples
        }
        assert len(keys) == len(samples) == 2 * 4 * len({sample["repeat"] for sample in samples})
        for sample in samples:
            plain = sample["method"] == "ar"
            assert sample["estimated"] is (plain and ar == SAMPLED)
            assert sample["same_as_ar"] is (None if plain else True)
            assert sample["explained"] is (True if ar == SAMPLED and not plain else None)
            assert bool(sample["probes"]) is (
                ar == SAMPLED and sample["method"] in ("tokenswift", "reuse")
            )
            assert [point["len"] for point in sample["points"]] == [10, 40]
            for point in sample["points"]:
                assert point["len"] <= point["tokens"] < point["len"] + 6
                assert point["speedup"] == pytest.approx(point["ar_seconds"] / point["seconds"])
                accepted = sum(count * steps for count, steps in enumerate(point["accepted"]))
                assert (sum(point["accepted"]), accepted + point["passes"]) == (
                    point["passes"],
                    point["tokens"],
                )
                assert ("of_floor" in point) == plain
                if plain:
                    share = pytest.approx(point["seconds"] / point["floor_seconds"])
                    assert point["of_floor"] == share
                    assert (point["passes"], point["speedup"]) == (point["len"], 1.0)
        counted[ar] = [
            [point[name] for point in sample["points"] for name in COUNTERS]
            for sample in samples
            if sample["method"] != "ar" and sample["repeat"] == 0
        ]
    assert counted[FULL] == counted[SAMPLED]
    assert grids[FULL]["workload"]["hash"] != grids[SAMPLED]["workload"]["hash"]
    # the reference takes no probes, and is held against those of the others
    compared = [sample["compared_tokens"] for sample in grids[SAMPLED]["samples"][:4]]
    assert compared[3] == compared[1] + compared[2] > 0


def test_texts_that_end_by_themselves_are_recorded_as_long_as_they_are(checkpoint):
    """The end-of-text token is one that plain decoding draws first as its 31st: later lengths
    have the figures of 31 tokens, by every method.
    """
    asked = options(checkpoint, "tokenswift", "reuse", "ar-reference")
    plan = Plan((4,), (10, 40, 80), (1,), warmup=0)
    config = configure(asked)
    (run,) = open_runs(
        dataclasses.replace(config, contenders=config.contenders[:1]), [*range(1, 5)], 80, 1
    )
    run.prefill()
    run.advance(80)
    first_seen = {token: index for index, token in reversed([*enumerate(run.tokens, 1)])}
    (end,) = [token for token, index in first_seen.items() if index == 31]
    model = dataclasses.replace(config.model, eos_ids=(end,))
    config = dataclasses.replace(config, model=model, stop_at_eos=True)
    record = finish(begin_measurement(config, PROMPTS, plan, ["tswift"]), config, plan)
    assert record["workload"]["stop_at_eos"] is True
    assert len(record["samples"]) == 4
    for sample in record["samples"]:
        assert sample["ended"] is True
        assert sample["same_as_ar"] is (None if sample["method"] == "ar" else True)
        assert [point["len"] for point in sample["points"]] == [10, 40, 80]
        assert [point["tokens"] for point in sample["points"][1:]] == [31, 31]
        assert 10 <= sample["points"][0]["tokens"] < 16
        assert sample["slices"][-1][0] == 31
        assert [tokens for tokens, _ in sample["slices"]].count(31) == 1
    (table,) = tables(typed(record))
    assert [row[table.columns.index("tokens")] for row in table.rows[-4:]] == ["31.0"] * 4
    assert any("4 of 4 did" in note for note in table.notes)
    header, *lines = csv_text(typed(record)).splitlines()
    column = header.split(",").index("tokens_mean")
    assert {line.split(",")[column] for line in lines[-4:]} == {"31"}


def test_ctrl_c_during_the_audit_keeps_the_samples(checkpoint, monkeypatch):
    monkeypatch.setattr(run_module, "audit", Mock(side_effect=KeyboardInterrupt))
    record = measured(checkpoint, Plan((4,), (20,), ar=SAMPLED), "reuse")
    assert record["state"] == "interrupted"
    assert [len(sample["points"]) for sample in record["samples"]] == [1, 1]


def patched(monkeypatch, method: str, change):
    """Let the decode of a method be changed before it runs."""
    begin = run_module.begin

    def changed(model, request, **named):
        generation = begin(model, request, **named)
        if request.method == method:
            change(generation)
        return generation

    monkeypatch.setattr(run_module, "begin", changed)


def skip_the_penalty(generation):
    sampler = generation.decoding._context.sampler
    sampler.params = dataclasses.replace(sampler.params, penalty=1.0)


@pytest.mark.slow
def test_a_text_that_differs_is_audited(checkpoint, monkeypatch):
    patched(monkeypatch, "reuse", skip_the_penalty)
    for ar in (FULL, SAMPLED):
        plain, drafted = measured(checkpoint, Plan((4,), (80,), ar=ar, warmup=0), "reuse")[
            "samples"
        ]
        assert plain["explained"] is (True if ar == FULL else None)
        assert (drafted["same_as_ar"], drafted["explained"]) == (ar == SAMPLED, False)


def test_exact_passes_are_part_of_the_workload(checkpoint, monkeypatch):
    config = configure(options(checkpoint))
    plan = Plan((4,), (5,), warmup=0)
    about = config.model.about()
    assert "exact" not in to_json(begin_measurement(config, PROMPTS, plan, ["tswift"]).workload)
    monkeypatch.setattr(
        type(config.model), "about", lambda self: {**about, "exact": {"width": 8, "bits": "x"}}
    )
    assert begin_measurement(config, PROMPTS, plan, ["tswift"]).workload.exact == 8
    monkeypatch.setattr(type(config.model), "about", lambda self: {**about, "kv_dtype": "float16"})
    record = begin_measurement(config, PROMPTS, plan, ["tswift"])
    assert record.workload.kv_dtype == "float16"
    assert typed(json.loads(json.dumps(to_json(record)))) == record


@needs_program
def test_the_gate_still_asks_what_its_baseline_was_asked():
    """The workload of ``make gate`` has the hash in ``results/baseline.json``,
    or the gate would refuse to compare.
    """
    baseline = read_json(Path(__file__).parents[2] / "results" / "baseline.json")["workload"]
    methods = ("ar", "medusa", "tokenswift", "cascade", "recall", "standalone", "triforce")
    config = configure(
        BenchOptions.of(
            {}, {"methods": methods, "costs": "nominal", "dtype": "float64", "device": "cpu"}
        )
    )
    prompts = encode(read_texts([]), config.model, 1024)
    plan = Plan((1024,), (500, 1000), (0, 1), warmup=0)
    assert to_json(begin_measurement(config, prompts, plan, ["tswift"]).workload) == baseline


@pytest.mark.parametrize("ar", first(1, [FULL, SAMPLED]))
def test_a_simulated_acceptance_is_compared_with_nothing(checkpoint, monkeypatch, ar):
    plan = Plan((4,), (60,), ar=ar, warmup=0)
    if ar == SAMPLED:  # of plain decoding as references do it, texts are still what they should be
        monkeypatch.setattr(
            run_module, "audit", lambda *arguments: pytest.fail("a simulated text was audited")
        )
        record = measured(checkpoint, plan, "tokenswift", simulate_alpha=0.6)
    else:
        record = measured(checkpoint, plan, "tokenswift", "ar-reference", simulate_alpha=0.6)
    assert (record["simulated"], record["workload"]["simulated"]) == (
        True,
        {"weights": False, "alpha": 0.6},
    )
    assert [sample["same_as_ar"] for sample in record["samples"]] == [None, None, True][
        : len(record["samples"])
    ]
    assert all(sample["simulated"] for sample in record["samples"])
    drafted = record["samples"][1]
    assert [drafted[name] for name in ("explained", "first_difference", "compared_tokens")] == [
        None,
        None,
        0,
    ]
    assert drafted["points"][0]["alpha"] == pytest.approx(0.6, abs=0.05)


def test_variants_of_one_method_run_beside_one_plain_decode(checkpoint):
    config = configure(options(checkpoint, "tokenswift"))
    plan = Plan((4,), (30, 60), warmup=4)
    plain, drafts = config.contenders
    narrow = Contender(
        "narrow", "tokenswift", dataclasses.replace(drafts.options, tree=(1,), ngrams=0)
    )
    config = dataclasses.replace(config, contenders=(plain, drafts, narrow))
    record = finish(begin_measurement(config, PROMPTS, plan, ["tswift"]), config, plan)
    assert record["workload"]["methods"] == ["ar", "tokenswift", "narrow"]
    assert record["workload"]["variants"] == {"narrow": "tokenswift"}
    assert record["workload"]["drafting"]["narrow"]["tree"] == [1]
    assert [sample["same_as_ar"] for sample in record["samples"]] == [None, True, True]
    assert [sample["points"][1]["depth"] for sample in record["samples"]] == [0, 4, 1]


@every_row(
    ("make", "message"),
    [
        (lambda: Plan(lens=()), "lens: names nothing"),
        (lambda: Plan(lens=(5, 5)), "lens: names 5 twice"),
        (lambda: Plan(lens=(0,)), "lens: must be at least 1, got 0"),
        (lambda: Plan(warmup=-1), "warmup: must be at least 0"),
        (lambda: Plan(ar="guess"), "ar: must be one of full, sampled, got 'guess'"),
        (
            lambda: Plan(workload=("prose",), prompts=("x.txt",)),
            "workload: cannot be given together with --prompts",
        ),
        (lambda: parse_methods("ar,ar"), "methods: names a method twice: ar,ar"),
        (lambda: parse_methods("nope"), "methods: no method 'nope'"),
        (lambda: parse_trees(["1,2", "3"]), "tree: is given twice for all methods"),
        (lambda: parse_trees(["=1,2"]), "tree: names no method before the =, got '=1,2'"),
        *[
            (
                lambda methods=methods, changes=changes: options(
                    "unread", *methods, **changes
                ).check(),
                message,
            )
            for methods, changes, message in [
                ((), {"budget": 100}, "budget: ar does not use it"),
                (("medusa",), {"ngrams": 3}, "ngrams: none of ar, medusa uses it"),
                # its default, but it was typed
                (("medusa",), {"inner_gamma": 2}, "inner_gamma: none of ar, medusa uses it"),
                (("reuse",), {"trees": {"": (2, 2)}}, "tree: none of ar, reuse uses it"),
                (("medusa",), {"trees": {"tokenswift": (2, 2)}}, "tree: is given for tokenswift"),
                (
                    ("tokenswift",),
                    {"ngrams": 20, "trees": {"": "auto"}},
                    "ngrams: none of .* with tree",
                ),
                (
                    ("tokenswift",),
                    {"ngrams": 20, "trees": {"tokenswift": "auto"}},
                    "ngrams: none of ar, ",
                ),
                (("reuse",), {"heads": "chained"}, "heads: none of ar, reuse uses it"),
                (("medusa",), {"min_p": 3.0}, "min_p: must be between"),
                (
                    ("medusa",),
                    {"simulate_alpha": 0.5, "stop_at_eos": True},
                    "stop_at_eos: cannot be given together with --simulate-alpha",
                ),
                ((), {"simulate_alpha": 0.5}, "simulate_alpha: none of the methods drafts"),
                (
                    ("recall",),
                    {"simulate_alpha": 0.5},
                    "simulate_alpha: goes with trees of one shape; recall chooses",
                ),
                (
                    ("medusa", "tokenswift"),
                    {"trees": {"tokenswift": "auto"}, "simulate_alpha": 0.5},
                    "simulate_alpha: .* shape; tokenswift ",
                ),
            ]
        ],
    ],
)
def test_what_is_refused_before_a_model_is_loaded(make, message):
    with refused(f"^{message}"):
        make()


def test_what_cannot_be_measured_is_refused_before_it_runs(checkpoint, monkeypatch):
    for methods in ((), ("ar-reference",)):
        config = configure(options(checkpoint, *methods))
        with refused("ar: sampled takes its samples while another method runs"):
            begin_measurement(config, PROMPTS, Plan((4,), (10,), ar=SAMPLED), ["tswift"])
    config = dataclasses.replace(configure(options(checkpoint, "reuse")), stop_at_eos=True)
    with refused("ar: sampled needs texts of a set length"):
        begin_measurement(config, PROMPTS, Plan((4,), (10,), ar=SAMPLED), ["tswift"])
    with refused(r"lens: .* need 5,0"):
        begin_measurement(config, PROMPTS, Plan((4,), (10, 5000)), ["tswift"])
    need = sum(run.generation.need.kv_bytes for run in open_runs(config, [1, 2, 3], 50, 0))
    for free in (need, need - 1):
        monkeypatch.setattr(run_module, "available_bytes", lambda device, free=free: free)
        if free == need:
            open_runs(config, [1, 2, 3], 50, 0)
            continue
        with refused("methods: 2 methods side by side need"):
            open_runs(config, [1, 2, 3], 50, 0)
    monkeypatch.setattr(
        "tswift.loading.model.load_model", lambda config: pytest.fail("it was loaded")
    )
    with refused(r"^lens: at least 100 prompt tokens and 4,000 new ones need 4,100 positions"):
        configure(options(checkpoint, "reuse"), 100, 4000, "lens")


def test_a_tree_goes_to_its_method(checkpoint):
    mixed = {"tokenswift": (1, 3), "medusa": "auto"}
    config = configure(options(checkpoint, *mixed, ngrams=20, trees=mixed))
    assert {contender.label: contender.options.tree for contender in config.contenders} == {
        "ar": None,
        **mixed,
    }
    assert "ngrams" in config.drafting()["tokenswift"]
    drafting = configure(
        options(checkpoint, "medusa", "reuse", ngrams=7, trees={"": (2, 2)})
    ).drafting()
    assert (drafting["ar"], drafting["medusa"]["tree"], drafting["reuse"]["ngrams"]) == (
        {},
        (2, 2),
        7,
    )


def test_prompts_from_files_and_folders(tmp_path, checkpoint):
    model = configure(options(checkpoint)).model
    (tmp_path / "b.txt").write_text("The captain would not leave the deck.")
    (tmp_path / "a.txt").write_text("Nobody spoke.")
    (tmp_path / "c.md").write_text("not a prompt")
    texts = read_texts([str(tmp_path)])
    assert [text.name for text in texts] == ["a.txt", "b.txt"]
    assert [prompt.tokens for prompt in encode(texts, model, 1)] == [
        model.encode(text.text) for text in texts
    ]
    assert [text.name for text in read_texts([])] == ["bundled"]
    with refused(r"prefill: asks for 4,000 tokens, a.txt has"):
        encode(texts, model, 4000)


@every_row(
    ("words", "message"),
    [
        (["none.txt"], "prompts: there is no file"),
        (["", "a.txt"], "two prompts are called a.txt"),
        (["empty"], "there is no .txt file in"),
        (["pg19:x"], "prompts: wants pg19:N"),
        (["pg19:0"], "prompts: wants pg19:N"),
        (["pg19:2"], "cannot be loaded from the hub"),
    ],
)
def test_prompts_that_are_refused(tmp_path, words, message):
    (tmp_path / "a.txt").write_text("Nobody spoke.")
    (tmp_path / "empty").mkdir(exist_ok=True)
    with refused(message):
        read_texts([word if ":" in word else str(tmp_path / word) for word in words])


def test_books_come_from_the_test_split(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    for split, titles in (("train", ["no"]), ("test", ["one book", "another", "a third"])):
        table = pyarrow.table(
            {"short_book_title": titles, "text": [f"text of {title}" for title in titles]}
        )
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000.parquet")
    monkeypatch.setattr(workloads, "PG19", str(tmp_path))
    assert read_texts(["pg19:2"]) == [
        Text("pg19:0", "text of one book"),
        Text("pg19:1", "text of another"),
    ]
    with refused(r"asks for 4 books, the test split of .* has 3"):
        read_texts(["pg19:4"])


def compared(config: BenchConfig, length: int = LENGTH):
    ids = config.model.encode("The ship had lain")
    comparison = Comparison(config, "prompt_text", ids, length, 5)
    comparison.run(lambda run: None, lambda *_: None)
    return comparison


def test_all_methods_write_the_same_text(checkpoint):
    comparison = compared(configure(options(checkpoint, "tokenswift", "ar-reference")))
    assert (comparison.ok, comparison.audits) == (True, {})
    plain, drafted, reference = comparison.as_dict()["outcomes"]
    assert [outcome["method"] for outcome in (plain, drafted, reference)] == [
        "ar",
        "tokenswift",
        "ar-reference",
    ]
    assert {outcome["first_difference"] for outcome in (plain, drafted, reference)} == {None}
    assert plain["speedup"] == reference["speedup_over_reference"] == 1.0
    assert plain["speedup_over_reference"] == pytest.approx(1 / reference["speedup"])
    assert plain["passes"] == plain["tokens"] == LENGTH > drafted["passes"]


def test_one_unit_in_the_last_place_is_rounding(checkpoint, monkeypatch):
    config = configure(options(checkpoint, "medusa", temperature=0.0, penalty=1.0, exact=False))
    target = config.model.target
    half = target.vocab_size // 2
    weight = target.model.get_output_embeddings().weight
    weight[half : 2 * half] = weight[:half]  # every token has a twin that is exactly as likely

    nudged_target = copy(target)

    def nudged_logits(hidden):
        """The same, but for the twins' last bit, once: if it were always, that would be no
        rounding.
        """
        nudged_target.logits = target.logits
        logits = target.logits(hidden).clone()
        logits[..., half:] = torch.nextafter(logits[..., half:], torch.tensor(torch.inf))
        return logits

    nudged_target.logits = nudged_logits

    def nudge(generation):
        generation.decoding._target = nudged_target

    patched(monkeypatch, "medusa", nudge)
    comparison = compared(config, 60)
    nudged = comparison.outcomes[1]
    assert nudged["first_difference"] is not None
    assert nudged["explained"] is True
    assert nudged["margin"] <= comparison.audits["medusa"].bound
    assert comparison.ok


def test_ctrl_c_leaves_the_outcomes_so_far(checkpoint):
    config = configure(options(checkpoint, "medusa"))

    def press(run):
        if run.stats.tokens > 40:
            raise KeyboardInterrupt

    comparison = Comparison(config, "prompt_text", [1, 2, 3], LENGTH, 5)
    comparison.run(press, lambda *_: None)
    assert comparison.interrupted
    assert comparison.ok
    assert all(30 < outcome["tokens"] < 60 for outcome in comparison.outcomes)

    def press_at_once(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comparison.run(press_at_once, lambda *_: None)
