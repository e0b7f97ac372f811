"""Runs side by side: the grid as the schema says, probes of plain decoding, simulated acceptance, comparisons."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import PLAIN, drafter_of, random_prompt, random_tree, tiny_target
from tswift.benchmarking import config as config_module
from tswift.benchmarking import run as run_module
from tswift.benchmarking.config import (
    FULL,
    SAMPLED,
    BenchConfig,
    BenchOptions,
    Contender,
    Plan,
    Prompt,
    configure,
    encode,
    read_texts,
)
from tswift.benchmarking.gate import bench_schema
from tswift.benchmarking.run import (
    Case,
    Probe,
    Run,
    SimulatedWalk,
    Trial,
    begin_measurement,
    compare,
    integrate,
    measure,
    open_runs,
    probes_differ,
    slice_goals,
)
from tswift.decoding.drafter import DraftTree
from tswift.decoding.loop import Decoding
from tswift.decoding.stats import DecodeStats
from tswift.drafting.options import DraftOptions
from tswift.engine import Generation, MemoryEstimate
from tswift.errors import InputError

LENGTH = 120
SCHEMA = jsonschema.Draft202012Validator(bench_schema())
PROMPTS = [Prompt("p", list(range(1, 9)))]


def run_of(method: str, length: int, seed: int = 3) -> Run:
    target, options = tiny_target(), DraftOptions(budget=64, tree=(1, 2, 2, 2) if method == "tokenswift" else None)
    drafter = drafter_of(method, target, options)
    decoding = Decoding(target, random_prompt(40), PLAIN, seed, drafter, length)
    run = Run(method, method, Generation(decoding, drafter.depth, (), PLAIN, options, MemoryEstimate(0, 0, 0)))
    run.prefill()
    return run


@given(st.integers(1, 10_000), st.lists(st.integers(1, 12_000), max_size=5), st.integers(1, 60))
def test_goals_rise_to_the_length_and_hold_every_stop(length, stops, slices):
    goals = slice_goals(length, stops, slices)
    assert goals == sorted(set(goals))
    assert goals[-1] == length
    assert goals[0] > 0
    assert set(goals) >= {stop for stop in stops if stop <= length}
    assert len(goals) <= slices + len(stops)


def test_probing_changes_neither_text_nor_acceptance():
    left, right = run_of("tokenswift", 80), run_of("tokenswift", 80)
    left.advance(80)
    for goal in range(0, 80, 7):
        right.advance(goal)
        right.probe()
    right.advance(80)
    assert right.tokens == left.tokens
    assert right.stats.accepted == left.stats.accepted
    assert len(right.probes) >= 8
    assert probes_differ(right.tokens, right.probes) is None


def test_a_probe_draws_what_plain_decoding_draws_there():
    plain, run = run_of("ar", 40), run_of("tokenswift", 40)
    plain.advance(40)
    run.advance(10)
    run.probe()
    (taken,) = run.probes
    assert taken.position == run.stats.tokens + 1
    assert list(taken.tokens) == plain.tokens[taken.position - 1 : taken.position - 1 + 1 + 8]
    assert len(taken.seconds) == 8
    assert min(taken.seconds) > 0


def test_a_differing_token_is_found_at_its_index():
    probes = [Probe(11, (5, 6, 7), (0.1, 0.1)), Probe(3, (1, 2, 3), (0.1, 0.1))]
    text = [0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 5, 6, 7]
    assert probes_differ(text, probes) is None
    assert probes_differ([*text[:11], 9, 7], probes) == 11
    assert probes_differ([*text[:4], 9, *text[5:11], 9, 7], probes) == 4
    assert probes_differ(text[:11], probes) is None  # the text has not got that far


def test_a_text_is_compared_with_the_probes_of_its_run():
    run = run_of("tokenswift", 40)
    run.advance(40)
    run.marks = [run.stats.copy()]
    for token, first in ((run.tokens[10], None), (run.tokens[10] + 1, 10)):
        run.probes = [Probe(11, (token,), (0.1,))]
        _, sample = Trial(Case(0, Prompt("p", [1]), 40, 3), [run], [40]).samples()
        found = [sample[name] for name in ("same_as_ar", "first_difference", "compared_tokens")]
        assert found == [first is None, first, 1]


def test_plain_decodings_time_is_for_as_many_tokens():
    plain, drafted = run_of("ar", 40), run_of("tokenswift", 40)
    plain.marks = [DecodeStats(0, passes=10, tokens=10, seconds=2.0)]
    drafted.marks = [DecodeStats(4, passes=4, tokens=12, seconds=1.0)]
    _, sample = Trial(Case(0, PROMPTS[0], 40, 3), [plain, drafted], [10]).samples()
    assert [sample["points"][0][name] for name in ("ar_seconds", "speedup")] == pytest.approx([2.4, 2.4])


@given(st.floats(0.001, 1), st.floats(0, 0.01))
def test_linear_steps_integrate_exactly_inside_the_probes(base, slope):
    probes = [Probe(at, (), (base + slope * at, base + slope * (at + 1))) for at in (0, 10, 41, 99)]
    expected = sum(base + slope * max(place, 0.5) for place in range(100))
    assert integrate(probes, 100) == pytest.approx(expected, rel=1e-9)


def patched(monkeypatch: pytest.MonkeyPatch, method: str, change) -> None:
    """Let the decode of a method be changed before it runs."""
    begin = run_module.begin

    def made(*arguments, **named):
        generation = begin(*arguments, **named)
        if named["method"] == method:
            change(generation)
        return generation

    monkeypatch.setattr(run_module, "begin", made)


def skip_the_penalty(generation) -> None:
    sampler = generation.decoding._context.sampler
    sampler.params = dataclasses.replace(sampler.params, penalty=1.0)


def chain(depth: int) -> DraftTree:
    tree = DraftTree(0)
    tree.add(range(1, depth + 1), "chain")
    return tree


@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 60))
def test_the_share_is_met_to_the_token(percent: int, depth: int, steps: int) -> None:
    walk = SimulatedWalk(percent / 100, depth)
    accepted = 0
    for step in range(1, steps + 1):
        accepted += len(walk(chain(depth), [])) - 1
        assert accepted == percent * depth * step // 100


def test_what_a_shallow_tree_could_not_give_later_ones_do() -> None:
    walk = SimulatedWalk(0.5, 4)
    given_up = [len(walk(chain(depth), [])) - 1 for depth in (4, 1, 0, 4, 4, 4)]
    assert given_up == [2, 1, 0, 4, 3, 2]  # two are owed at every step


@given(st.integers(0, 1000), st.integers(1, 30), st.floats(0.01, 1))
def test_the_path_leads_from_the_root_to_the_first_node_deep_enough(seed: int, nodes: int, alpha: float) -> None:
    tree = random_tree(nodes, random.Random(seed))
    path = SimulatedWalk(alpha, 5)(tree, [])
    assert path[0] == 0
    assert [tree.parents[node] for node in path[1:]] == path[:-1]
    assert len(path) - 1 == min(math.floor(5 * alpha + 1e-9), max(tree.depths))
    assert not any(depth == len(path) - 1 for depth in tree.depths[: path[-1]])


def test_runs_that_draft_are_simulated_and_the_others_are_not(checkpoint):
    options = BenchOptions(("ar", "medusa", "reuse", "ar-reference"), model=str(checkpoint), simulate_alpha=0.5)
    config = configure(options)
    assert config.simulated == {"weights": False, "alpha": 0.5}
    runs = {run.label: run for run in open_runs(config, [1, 2, 3], 40, 0)}
    assert [label for label, run in runs.items() if run.simulated] == ["medusa", "reuse"]
    runs["medusa"].prefill()
    runs["medusa"].advance(40)
    assert runs["medusa"].stats.alpha == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("methods", "trees", "dynamic"),
    [
        (("ar", "medusa", "cascade"), {}, "cascade"),
        (("ar", "recall"), {}, "recall"),
        (("ar", "medusa", "tokenswift"), {"medusa": (2, 2), "tokenswift": "auto"}, "tokenswift"),
    ],
)
def test_a_share_that_dynamic_trees_would_not_meet(checkpoint, methods, trees, dynamic):
    options = BenchOptions(methods, trees=trees, model=str(checkpoint), simulate_alpha=0.5)
    with pytest.raises(InputError, match=f"^simulate_alpha: goes with trees of one shape; {dynamic} chooses here"):
        configure(options)
    configure(dataclasses.replace(options, simulate_alpha=None))


def begun(model, plan: Plan, methods=("ar", "tokenswift", "reuse"), simulate_alpha=None):
    config = configure(BenchOptions(methods, model=str(model), simulate_alpha=simulate_alpha))
    chosen = [Prompt("p", config.model.encode("The ship had lain three days."))]
    return config, chosen, begin_measurement(config, chosen, plan, ["tswift", "bench"])


def measured(model, plan: Plan, *arguments, **named):
    """A measurement, and all calls that reported progress."""
    config, prompts, record = begun(model, plan, *arguments, **named)
    calls, kept = [], []
    measure(record, config, prompts, plan, lambda *call: calls.append(call), lambda: kept.append(record["state"]))
    assert kept == ["running"] * (len(kept) - 1) + ["finished"]
    return record, calls


@pytest.mark.parametrize(("ar", "prefills", "repeats"), [(FULL, (4, 7), 2), (SAMPLED, (7,), 1)])
def test_every_cell_is_measured_and_valid(checkpoint, ar, prefills, repeats):
    plan = Plan(prefills=prefills, lens=(20, 60), seeds=(1, 2), ar=ar, repeats=repeats, warmup=8)
    found, calls = measured(checkpoint, plan)
    SCHEMA.validate(json.loads(json.dumps(found)))
    keys = {tuple(s[name] for name in ("prompt", "prefill", "seed", "repeat", "method")) for s in found["samples"]}
    assert len(keys) == len(found["samples"]) == len(prefills) * 2 * repeats * 3
    for sample in found["samples"]:
        plain = sample["method"] == "ar"
        assert sample["estimated"] is (plain and ar == SAMPLED)
        assert sample["same_as_ar"] is (None if plain else True)
        assert sample["explained"] is (True if ar == SAMPLED and not plain else None)
        assert [point["len"] for point in sample["points"]] == [20, 60]
        for point in sample["points"]:
            assert point["len"] <= point["tokens"] < point["len"] + 6
            assert point["speedup"] == pytest.approx(point["ar_seconds"] / point["seconds"])
            assert point["tokens_per_step"] == pytest.approx(point["tokens"] / point["passes"])
            assert sum(point["accepted"]) == point["passes"]
            assert point["of_floor"] == pytest.approx(point["seconds"] / point["floor_seconds"])
            assert point["floor_seconds"] > 0
            if plain:
                assert point["passes"] == point["tokens"] == point["len"]
                assert point["speedup"] == 1.0
    assert {number for number, *_ in calls} == set(range(len(prefills) * 2 * repeats))


def test_ctrl_c_keeps_the_lengths_that_all_have_reached(checkpoint):
    config = configure(BenchOptions(("ar", "reuse"), model=str(checkpoint)))
    plan = Plan((4,), (20, 60, 90), (1, 2), warmup=0)
    found, kept = begin_measurement(config, PROMPTS, plan, ["tswift"]), []

    def tick(number, cells, cell, run):
        if number == 1 and run.label == "reuse" and run.stats.tokens > 70:
            raise KeyboardInterrupt

    measure(found, config, PROMPTS, plan, tick, lambda: kept.append([len(s["points"]) for s in found["samples"]]))
    SCHEMA.validate(json.loads(json.dumps(found)))
    assert found["state"] == "interrupted"
    assert kept[:3] == [[1, 1], [2, 2], [3, 3]]
    assert kept[-1] == [3, 3, 2, 2]


def test_exact_passes_are_part_of_the_workload(checkpoint, monkeypatch):
    config = configure(BenchOptions(("ar",), model=str(checkpoint)))
    plan, about = Plan((4,), (5,), warmup=0), config.model.about()
    assert "exact" not in begin_measurement(config, PROMPTS, plan, ["tswift"])["workload"]
    monkeypatch.setattr(type(config.model), "about", lambda self: {**about, "exact": {"width": 8, "bits": "x"}})
    assert begin_measurement(config, PROMPTS, plan, ["tswift"])["workload"]["exact"] == 8


def test_a_text_that_differs_is_audited(checkpoint, monkeypatch):
    patched(monkeypatch, "reuse", skip_the_penalty)
    for ar in (FULL, SAMPLED):
        found, _ = measured(checkpoint, Plan((4,), (80,), ar=ar, warmup=0), ("ar", "reuse"))
        plain, drafted = found["samples"]
        assert plain["explained"] is (True if ar == FULL else None)
        assert (drafted["same_as_ar"], drafted["explained"]) == (ar == SAMPLED, False)


def test_ctrl_c_during_the_audit_keeps_the_samples(checkpoint, monkeypatch):
    def press(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(BenchConfig, "audit", press)
    config, plan = configure(BenchOptions(("ar", "reuse"), model=str(checkpoint))), Plan((4,), (20,), ar=SAMPLED)
    found = begin_measurement(config, PROMPTS, plan, ["tswift"])
    measure(found, config, PROMPTS, plan, lambda *tick: None, lambda: None)
    assert found["state"] == "interrupted"
    assert [len(sample["points"]) for sample in found["samples"]] == [1, 1]


def test_counters_are_exact_and_do_not_depend_on_how_ar_is_timed(checkpoint):
    first, _ = measured(checkpoint, Plan((5,), (30, 70), warmup=0))
    second, _ = measured(checkpoint, Plan((5,), (30, 70), ar=SAMPLED, warmup=4))
    counters = ("tokens", "passes", "nodes", "accepted", "reused", "alpha", "beta")

    def read(found, place):
        return [[s["points"][place][name] for name in counters] for s in found["samples"] if s["method"] != "ar"]

    assert read(first, 0) == read(second, 0)
    assert read(first, 1) == read(second, 1)
    assert first["workload"]["hash"] != second["workload"]["hash"]
    *_, again = begun(checkpoint, Plan((5,), (30, 70), warmup=9))
    assert again["workload"]["hash"] == first["workload"]["hash"]


def test_the_gate_still_asks_what_its_baseline_was_asked() -> None:
    """The workload of ``make gate`` has the hash in ``results/baseline.json``, or the gate would refuse to compare."""
    baseline = json.loads((Path(__file__).parents[2] / "results" / "baseline.json").read_text())["workload"]
    methods = ("ar", "medusa", "tokenswift", "cascade", "recall", "standalone", "triforce")
    config = configure(BenchOptions(methods, drafting={"costs": "nominal"}, dtype="float64", device="cpu"))
    prompts = encode(read_texts([]), config.model, 1024)
    found = begin_measurement(config, prompts, Plan((1024,), (500, 1000), (0, 1), warmup=0), ["tswift"])["workload"]
    assert found == baseline


@pytest.mark.slow
@pytest.mark.parametrize("ar", [FULL, SAMPLED])
def test_a_simulated_acceptance_is_met_and_compared_with_nothing(checkpoint, monkeypatch, ar):
    def no_audit(self, *arguments):
        raise AssertionError("a simulated text was audited")

    monkeypatch.setattr(BenchConfig, "audit", no_audit)
    found, _ = measured(checkpoint, Plan((4,), (100, 300), ar=ar, warmup=8), simulate_alpha=0.6)
    SCHEMA.validate(json.loads(json.dumps(found)))
    assert (found["simulated"], found["workload"]["simulated"]) == (True, {"weights": False, "alpha": 0.6})
    for sample in found["samples"]:
        compared = [sample[name] for name in ("same_as_ar", "explained", "first_difference", "compared_tokens")]
        assert compared == [None, None, None, 0]
    plain, drafted, _ = found["samples"]
    assert plain["points"][1]["passes"] == 300
    assert drafted["points"][1]["alpha"] == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lens": ()}, "lens: names nothing"),
        ({"lens": (5, 5)}, "lens: names 5 twice"),
        ({"lens": (0,)}, "lens: must be at least 1, got 0"),
        ({"prefills": (1,)}, "prefills: must be at least 2, got 1"),
        ({"repeats": 0}, "repeats: must be at least 1"),
        ({"warmup": -1}, "warmup: must be at least 0"),
        ({"ar": "guess"}, "ar: must be one of full, sampled, got 'guess'"),
    ],
)
def test_bad_grids_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Plan(**changes)


@pytest.mark.parametrize("methods", [("ar",), ("ar", "ar-reference")])
def test_sampled_needs_a_method_that_drafts(checkpoint, methods):
    with pytest.raises(InputError, match="ar: sampled takes its samples while another method runs"):
        begun(checkpoint, Plan((4,), (10,), ar=SAMPLED), methods)


def test_the_reference_takes_no_samples_of_plain_decoding_and_is_held_against_them(checkpoint):
    plan = Plan((4,), (60,), ar=SAMPLED, warmup=0)
    found, _ = measured(checkpoint, plan, ("ar", "reuse", "ar-reference"))
    _, reuse, reference = found["samples"]
    assert reuse["probes"]
    assert reference["probes"] is None
    assert reference["compared_tokens"] == reuse["compared_tokens"] > 0
    assert reference["same_as_ar"] is True


def test_variants_of_one_method_run_beside_one_plain_decode(checkpoint):
    config = configure(BenchOptions(("ar", "tokenswift"), model=str(checkpoint)))
    plain, drafts = config.contenders
    narrow = Contender("narrow", "tokenswift", dataclasses.replace(drafts.options, tree=(1,), ngrams=0))
    config = dataclasses.replace(config, contenders=(plain, drafts, narrow))
    plan = Plan((4,), (30, 60), warmup=4)
    found = begin_measurement(config, PROMPTS, plan, ["tswift"])
    measure(found, config, PROMPTS, plan, lambda *tick: None, lambda: None)
    SCHEMA.validate(json.loads(json.dumps(found)))
    assert found["workload"]["methods"] == ["ar", "tokenswift", "narrow"]
    assert found["workload"]["variants"] == {"narrow": "tokenswift"}
    assert found["workload"]["drafting"]["narrow"]["tree"] == [1]
    assert [sample["same_as_ar"] for sample in found["samples"]] == [None, True, True]
    assert [sample["points"][1]["depth"] for sample in found["samples"]] == [0, 4, 1]


def test_what_does_not_fit_is_refused_before_anything_runs(checkpoint):
    with pytest.raises(InputError, match=r"lens: .* need 5,0"):
        begun(checkpoint, Plan((4,), (10, 5000)))


def test_prompts_from_files_and_folders(tmp_path, checkpoint):
    model = configure(BenchOptions(("ar",), model=str(checkpoint))).model
    (tmp_path / "b.txt").write_text("The captain would not leave the deck.")
    (tmp_path / "a.txt").write_text("Nobody spoke.")
    (tmp_path / "c.md").write_text("not a prompt")
    texts = read_texts([str(tmp_path)])
    assert list(texts) == ["a.txt", "b.txt"]
    assert [prompt.tokens for prompt in encode(texts, model, 1)] == [model.encode(text) for text in texts.values()]
    assert list(read_texts([])) == ["bundled"]
    with pytest.raises(InputError, match=r"prefill: asks for 4,000 tokens, a.txt has"):
        encode(texts, model, 4000)


@pytest.mark.parametrize(
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
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        read_texts([word if ":" in word else str(tmp_path / word) for word in words])


def test_books_come_from_the_test_split(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    for split, titles in (("train", ["no"]), ("test", ["one book", "another", "a third"])):
        table = pyarrow.table({"short_book_title": titles, "text": [f"text of {title}" for title in titles]})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000.parquet")
    monkeypatch.setattr(config_module, "PG19", str(tmp_path))
    assert read_texts(["pg19:2"]) == {"pg19:0": "text of one book", "pg19:1": "text of another"}
    with pytest.raises(InputError, match=r"asks for 4 books, the test split of .* has 3"):
        read_texts(["pg19:4"])


def run(config: BenchConfig, length: int = LENGTH):
    return compare(config, config.model.encode("The ship had lain"), length, 5, lambda run: None, lambda *_: None)


def test_all_methods_write_the_same_text(checkpoint):
    options = BenchOptions(("ar", "medusa", "tokenswift", "reuse", "ar-reference"), model=str(checkpoint))
    comparison = run(configure(options))
    assert comparison["ok"]
    assert not comparison["audits"]
    assert [outcome["method"] for outcome in comparison["outcomes"]] == [
        "ar",
        "medusa",
        "tokenswift",
        "reuse",
        "ar-reference",
    ]
    assert [outcome["first_difference"] for outcome in comparison["outcomes"]] == [None] * 5
    plain, reference = comparison["outcomes"][0], comparison["outcomes"][-1]
    assert plain["speedup"] == 1.0
    assert reference["speedup_over_reference"] == 1.0
    assert plain["speedup_over_reference"] == pytest.approx(1 / reference["speedup"])
    assert plain["passes"] == plain["tokens"] == LENGTH
    assert all(outcome["passes"] < outcome["tokens"] for outcome in comparison["outcomes"][1:3])


def test_a_wrong_method_is_found(checkpoint, monkeypatch):
    patched(monkeypatch, "medusa", skip_the_penalty)
    comparison = run(configure(BenchOptions(("ar", "medusa"), model=str(checkpoint))))
    assert not comparison["ok"]
    assert comparison["outcomes"][0]["explained"] is True
    wrong = comparison["outcomes"][1]
    assert wrong["first_difference"] is not None
    assert wrong["explained"] is False
    assert comparison["audits"]["ar"]["ok"]
    findings = comparison["audits"]["medusa"]["findings"]
    violations = [finding["index"] for finding in findings if finding["kind"] == "violation"]
    assert violations[0] >= wrong["first_difference"]


def test_one_unit_in_the_last_place_is_rounding(checkpoint, monkeypatch):
    config = configure(BenchOptions(("ar", "medusa"), {"temperature": 0.0, "penalty": 1.0}, model=str(checkpoint)))
    target = config.model.target
    half = target.vocab_size // 2
    weight = target.model.get_output_embeddings().weight
    weight[half : 2 * half] = weight[:half]  # every token has a twin that is exactly as likely

    class Nudged:
        """The same target, but for the twins' last bit, once: if it were always, that would be no rounding."""

        nudges = 1

        def __getattr__(self, name):
            return getattr(target, name)

        def logits(self, hidden):
            logits = target.logits(hidden).clone()
            if self.nudges:
                logits[..., half:] = torch.nextafter(logits[..., half:], torch.tensor(torch.inf))
            self.nudges = 0
            return logits

    def nudge(generation):
        generation.decoding._target = Nudged()

    patched(monkeypatch, "medusa", nudge)
    comparison = run(config, 60)
    nudged = comparison["outcomes"][1]
    assert nudged["first_difference"] is not None
    assert nudged["explained"] is True
    assert nudged["margin"] is not None
    assert nudged["margin"] <= comparison["audits"]["medusa"]["bound"]
    assert comparison["ok"]


def test_ctrl_c_leaves_the_outcomes_so_far(checkpoint):
    config = configure(BenchOptions(("ar", "medusa"), model=str(checkpoint)))

    def press(run):
        if run.stats.tokens > 40:
            raise KeyboardInterrupt

    comparison = compare(config, [1, 2, 3], LENGTH, 5, press, lambda *_: None)
    assert comparison["interrupted"]
    assert comparison["ok"]
    assert all(30 < each["tokens"] < 60 for each in comparison["outcomes"])

    def press_at_once(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(config, [1, 2, 3], LENGTH, 5, press_at_once, lambda *_: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BenchOptions(("ar",), drafting={"budget": 100}), "budget: ar does not use it"),
        (BenchOptions(("ar", "medusa"), drafting={"ngrams": 3}), "ngrams: none of ar, medusa uses it"),
        (BenchOptions(("ar", "reuse"), trees={"": (2, 2)}), "tree: none of ar, reuse uses it"),
        (BenchOptions(("ar", "medusa"), trees={"tokenswift": (2, 2)}), "tree: is given for tokenswift"),
        (BenchOptions(("ar", "tokenswift"), {}, {"ngrams": 20}, {"": "auto"}), "ngrams: none of .* with tree"),
        (BenchOptions(("ar", "tokenswift"), {}, {"ngrams": 20}, {"tokenswift": "auto"}), "ngrams: none of ar, "),
        (BenchOptions(("ar", "reuse"), heads="chained"), "heads: none of ar, reuse uses it"),
        (BenchOptions(("ar", "medusa"), sampling={"min_p": 3.0}), "min_p: must be between"),
    ],
)
def test_no_option_is_ignored(options, message):
    with pytest.raises(InputError, match=message):
        configure(options)


def test_a_tree_goes_to_its_method(checkpoint):
    trees = {"tokenswift": (1, 3), "medusa": (3,)}
    config = configure(BenchOptions(("ar", "medusa", "tokenswift"), trees=trees, model=str(checkpoint)))
    assert {each.label: each.options.tree for each in config.contenders} == {"ar": None, **trees}
    mixed = {"tokenswift": (1, 3), "medusa": "auto"}
    config = configure(BenchOptions(("ar", *mixed), drafting={"ngrams": 20}, trees=mixed, model=str(checkpoint)))
    assert "ngrams" in config.drafting()["tokenswift"]
    config = configure(
        BenchOptions(("ar", "medusa", "reuse"), drafting={"ngrams": 7}, trees={"": (2, 2)}, model=str(checkpoint))
    )
    assert config.drafting()["ar"] == {}
    assert config.drafting()["medusa"]["tree"] == (2, 2)
    assert config.drafting()["reuse"]["ngrams"] == 7


def test_what_cannot_fit_is_refused_before_the_model_is_loaded(checkpoint, monkeypatch):
    monkeypatch.setattr("tswift.models.load.load", lambda *given, **how: pytest.fail("it was loaded"))
    options = BenchOptions(("ar", "reuse"), model=str(checkpoint))
    with pytest.raises(InputError, match=r"^lens: at least 100 prompt tokens and 4,000 new ones need 4,100 positions"):
        configure(options, 100, 4000, "lens")


def test_what_does_not_fit_together_is_refused(checkpoint, monkeypatch):
    config = configure(BenchOptions(("ar", "reuse"), model=str(checkpoint)))
    need = sum(run.generation.need.kv_bytes for run in open_runs(config, [1, 2, 3], 50, 0))
    monkeypatch.setattr(run_module, "available_bytes", lambda device: need)
    open_runs(config, [1, 2, 3], 50, 0)
    monkeypatch.setattr(run_module, "available_bytes", lambda device: need - 1)
    with pytest.raises(InputError, match="methods: 2 methods side by side need"):
        open_runs(config, [1, 2, 3], 50, 0)
