"""The grid: every cell measured, the dict as the schema says, sampled plain decoding beside the full one."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from tests.benchmarking.helpers import MACHINE
from tswift.benchmarking.lineup import Entry, Variant, line_up
from tswift.benchmarking.measure import FULL, SAMPLED, Plan, header, measure
from tswift.benchmarking.prompts import Prompt, encode, read_texts
from tswift.errors import InputError


def measured(model, plan: Plan, methods=("ar", "tokenswift", "reuse"), prompts=2, simulate_alpha=None):
    lineup = line_up(Entry(methods, model=str(model), simulate_alpha=simulate_alpha))
    chosen = [
        Prompt(f"p{index}", lineup.model.encode(f"{index} The ship had lain three days.")) for index in range(prompts)
    ]
    ticks = []
    found, kept = header(lineup, chosen, plan, ["tswift", "bench"]), []
    measure(found, lineup, chosen, plan, lambda *tick: ticks.append(tick), lambda: kept.append(found["state"]))
    assert kept == ["running"] * (len(kept) - 1) + ["finished"]
    return found, ticks


@pytest.fixture(scope="module")
def schema():
    return json.loads(resources.files("tswift.benchmarking").joinpath("bench.schema.json").read_text())


@pytest.mark.parametrize(("ar", "prefills"), [(FULL, (4, 7)), (SAMPLED, (7,))])
def test_every_cell_is_measured_and_valid(checkpoint, schema, ar, prefills):
    plan = Plan(prefills=prefills, lens=(20, 60), seeds=(1, 2), ar=ar, repeats=2, warmup=8)
    found, ticks = measured(checkpoint, plan, prompts=1)
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    keys = {tuple(s[name] for name in ("prompt", "prefill", "seed", "repeat", "method")) for s in found["samples"]}
    assert len(keys) == len(found["samples"]) == len(prefills) * 2 * 2 * 3
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
    assert {number for number, *_ in ticks} == set(range(len(prefills) * 4))


def test_what_drafting_reads_is_said_but_where_there_was_no_choice_once(checkpoint):
    for kv in ("dynamic", "snapkv"):
        lineup = line_up(Entry(("ar", "tokenswift", "magicdec"), drafting={"kv": kv}, model=str(checkpoint)))
        plan = Plan((4,), (5,), warmup=0)
        drafting = header(lineup, [Prompt("p", [1, 2, 3, 4])], plan, ["tswift"], MACHINE)["workload"]["drafting"]
        assert drafting["magicdec"]["kv"] == kv
        assert drafting["tokenswift"].get("kv") == (None if kv == "dynamic" else kv)


def test_ctrl_c_keeps_the_lengths_that_all_have_reached(checkpoint, schema):
    lineup = line_up(Entry(("ar", "reuse"), model=str(checkpoint)))
    plan, prompts = Plan((4,), (20, 60, 90), (1, 2), warmup=0), [Prompt("p", list(range(1, 9)))]
    found, kept = header(lineup, prompts, plan, ["tswift"]), []

    def tick(number, cells, cell, lane):
        if number == 1 and lane.name == "reuse" and lane.stats.tokens > 70:
            raise KeyboardInterrupt

    measure(found, lineup, prompts, plan, tick, lambda: kept.append([len(s["points"]) for s in found["samples"]]))
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    assert found["state"] == "interrupted"
    assert kept[:3] == [[1, 1], [2, 2], [3, 3]]
    assert kept[-1] == [3, 3, 2, 2]


def test_a_text_that_differs_is_audited(checkpoint, monkeypatch):
    from tswift.benchmarking.lineup import Lineup

    lanes = Lineup.lanes

    def made(self, *arguments):
        found = lanes(self, *arguments)
        decoding = found[-1].generation.decoding
        decoding._context.sampler.params = dataclasses.replace(self.params, penalty=1.0)
        return found

    monkeypatch.setattr(Lineup, "lanes", made)
    for ar in (FULL, SAMPLED):
        found, _ = measured(checkpoint, Plan((4,), (80,), ar=ar, warmup=0), ("ar", "reuse"), prompts=1)
        plain, drafted = found["samples"]
        assert plain["explained"] is (True if ar == FULL else None)
        assert (drafted["same_as_ar"], drafted["explained"]) == (ar == SAMPLED, False)


def test_ctrl_c_during_the_audit_keeps_the_round(checkpoint, monkeypatch):
    from tswift.benchmarking.lineup import Lineup

    def press(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Lineup, "audit", press)
    lineup = line_up(Entry(("ar", "reuse"), model=str(checkpoint)))
    plan, prompts = Plan((4,), (20,), ar=SAMPLED, warmup=0), [Prompt("p", list(range(1, 9)))]
    found = header(lineup, prompts, plan, ["tswift"])
    measure(found, lineup, prompts, plan, lambda *tick: None, lambda: None)
    assert found["state"] == "interrupted"
    assert [len(sample["points"]) for sample in found["samples"]] == [1, 1]


def test_counters_are_exact_and_do_not_depend_on_how_ar_is_timed(checkpoint):
    first, _ = measured(checkpoint, Plan((5,), (30, 70), warmup=0), prompts=1)
    second, _ = measured(checkpoint, Plan((5,), (30, 70), ar=SAMPLED, warmup=4), prompts=1)
    counters = ("tokens", "passes", "nodes", "accepted", "reused", "alpha", "beta")

    def read(found, place):
        return [[s["points"][place][name] for name in counters] for s in found["samples"] if s["method"] != "ar"]

    assert read(first, 0) == read(second, 0)
    assert read(first, 1) == read(second, 1)
    assert first["workload"]["hash"] != second["workload"]["hash"]
    again, _ = measured(checkpoint, Plan((5,), (30, 70), warmup=9), prompts=1)
    assert again["workload"]["hash"] == first["workload"]["hash"]


def test_the_gate_still_asks_what_its_baseline_was_asked() -> None:
    """The workload of ``make gate`` has the hash in ``results/baseline.json``, or the gate would refuse to compare."""
    baseline = json.loads((Path(__file__).parents[2] / "results" / "baseline.json").read_text())["workload"]
    methods = ("ar", "medusa", "tokenswift", "cascade", "recall", "standalone", "triforce")
    lineup = line_up(Entry(methods, drafting={"costs": "nominal"}, dtype="float64", device="cpu"))
    prompts = encode(read_texts([]), lineup.model, 1024)
    found = header(lineup, prompts, Plan((1024,), (500, 1000), (0, 1), warmup=0), ["tswift"])["workload"]
    assert found == baseline


def test_what_is_not_simulated_has_the_workload_that_it_has_always_had(checkpoint):
    found, _ = measured(checkpoint, Plan((4,), (10,), warmup=0), ("ar",), prompts=1)
    assert found["simulated"] is False
    assert "simulated" not in found["workload"]
    assert found["machine"] == dataclasses.asdict(MACHINE)


@pytest.mark.parametrize("ar", [FULL, SAMPLED])
def test_a_given_acceptance_is_met_and_compared_with_nothing(checkpoint, schema, monkeypatch, ar):
    from tswift.benchmarking.lineup import Lineup

    def no_audit(self, *arguments):
        raise AssertionError("a simulated text was audited")

    monkeypatch.setattr(Lineup, "audit", no_audit)
    found, _ = measured(checkpoint, Plan((4,), (100, 300), ar=ar, warmup=8), prompts=1, simulate_alpha=0.6)
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    assert (found["simulated"], found["workload"]["simulated"]) == (True, {"weights": False, "alpha": 0.6})
    for sample in found["samples"]:
        compared = [sample[name] for name in ("same_as_ar", "explained", "first_difference", "compared_tokens")]
        assert compared == [None, None, None, 0]
    plain, drafted, _ = found["samples"]
    assert plain["points"][1]["passes"] == 300
    assert drafted["points"][1]["alpha"] == pytest.approx(0.6, abs=0.02)
    others = [measured(checkpoint, Plan((4,), (10,), warmup=0), prompts=1, simulate_alpha=x)[0] for x in (0.6, 0.7)]
    assert len({each["workload"]["hash"] for each in others}) == 2


def test_random_weights_are_simulated_and_compared(tiny_shapes, schema):
    plan = Plan((4,), (40,), warmup=0)
    found, _ = measured("shape:tiny", plan, ("ar", "medusa"), prompts=1)
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    assert (found["simulated"], found["workload"]["simulated"]) == (True, {"weights": True, "alpha": None})
    assert (found["workload"]["model"], found["workload"]["dtype"]) == ("shape:tiny", "bfloat16")
    assert found["samples"][1]["compared_tokens"] == 40
    again, _ = measured("shape:tiny", plan, ("ar", "medusa"), prompts=1)
    assert again["workload"]["hash"] == found["workload"]["hash"]


def test_ar_time_is_scaled_to_the_same_tokens(checkpoint):
    found, _ = measured(checkpoint, Plan((5,), (40,), warmup=0), prompts=1)
    plain, drafted = (
        next(s for s in found["samples"] if s["method"] == name)["points"][0] for name in ("ar", "tokenswift")
    )
    assert drafted["ar_seconds"] == pytest.approx(plain["seconds"] * drafted["tokens"] / 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lens": ()}, "--lens: names nothing"),
        ({"lens": (5, 5)}, "--lens: names 5 twice"),
        ({"lens": (0,)}, "--lens: must be at least 1, got 0"),
        ({"prefills": (1,)}, "--prefill: must be at least 2, got 1"),
        ({"repeats": 0}, "--repeats: must be at least 1"),
        ({"warmup": -1}, "--warmup: must be at least 0"),
        ({"ar": "guess"}, "--ar: is full or sampled, got guess"),
    ],
)
def test_bad_grids_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Plan(**changes)


@pytest.mark.parametrize("methods", [("ar",), ("ar", "ar-reference")])
def test_sampled_needs_a_method_that_drafts(checkpoint, methods):
    with pytest.raises(InputError, match="--ar: sampled takes its samples while another method runs"):
        measured(checkpoint, Plan((4,), (10,), ar=SAMPLED), methods=methods)


def test_the_reference_takes_no_samples_of_plain_decoding_and_is_held_against_them(checkpoint):
    plan = Plan((4,), (60,), ar=SAMPLED, warmup=0)
    found, _ = measured(checkpoint, plan, ("ar", "reuse", "ar-reference"), prompts=1)
    _, reuse, reference = found["samples"]
    assert reuse["probes"]
    assert reference["probes"] is None
    assert reference["compared_tokens"] == reuse["compared_tokens"] > 0
    assert reference["same_as_ar"] is True


def test_variants_of_one_method_run_beside_one_plain_decode(checkpoint, schema):
    lineup = line_up(Entry(("ar", "tokenswift"), model=str(checkpoint)))
    plain, drafts = lineup.variants
    narrow = Variant("narrow", "tokenswift", dataclasses.replace(drafts.options, tree=(1,), ngrams=0))
    lineup = dataclasses.replace(lineup, variants=(plain, drafts, narrow))
    plan, prompts = Plan((4,), (30, 60), warmup=4), [Prompt("p", list(range(1, 9)))]
    found = header(lineup, prompts, plan, ["tswift"])
    measure(found, lineup, prompts, plan, lambda *tick: None, lambda: None)
    jsonschema.validate(json.loads(json.dumps(found)), schema)
    assert found["workload"]["methods"] == ["ar", "tokenswift", "narrow"]
    assert found["workload"]["variants"] == {"narrow": "tokenswift"}
    assert found["workload"]["drafting"]["narrow"]["tree"] == [1]
    assert [sample["same_as_ar"] for sample in found["samples"]] == [None, True, True]
    assert [sample["points"][1]["depth"] for sample in found["samples"]] == [0, 4, 1]


def test_what_does_not_fit_is_refused_before_anything_runs(checkpoint):
    with pytest.raises(InputError, match=r"--lens: .* need 5,0"):
        measured(checkpoint, Plan((4,), (10, 5000)))


def test_prompts_from_files_and_folders(tmp_path, checkpoint):
    model = line_up(Entry(("ar",), model=str(checkpoint))).model
    (tmp_path / "b.txt").write_text("The captain would not leave the deck.")
    (tmp_path / "a.txt").write_text("Nobody spoke.")
    (tmp_path / "c.md").write_text("not a prompt")
    texts = read_texts([str(tmp_path)])
    assert list(texts) == ["a.txt", "b.txt"]
    assert [prompt.tokens for prompt in encode(texts, model, 1)] == [model.encode(text) for text in texts.values()]
    assert list(read_texts([])) == ["bundled"]
    with pytest.raises(InputError, match=r"--prefill: asks for 4,000 tokens, a.txt has"):
        encode(texts, model, 4000)
    for words, message in (
        ([str(tmp_path / "none.txt")], "--prompts: there is no file"),
        ([str(tmp_path), str(tmp_path / "a.txt")], "two prompts are called a.txt"),
        (["pg19:x"], "--prompts: wants pg19:N"),
        (["pg19:0"], "--prompts: wants pg19:N"),
        (["pg19:2"], "cannot be loaded from the hub"),
    ):
        with pytest.raises(InputError, match=message):
            read_texts(words)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"there is no .txt file in"):
        read_texts([str(tmp_path / "empty")])


def test_books_come_from_the_test_split(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    import tswift.benchmarking.prompts as module

    for split, titles in (("train", ["no"]), ("test", ["one book", "another", "a third"])):
        table = pyarrow.table({"short_book_title": titles, "text": [f"text of {title}" for title in titles]})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000.parquet")
    monkeypatch.setattr(module, "PG19", str(tmp_path))
    assert read_texts(["pg19:2"]) == {"pg19:0": "text of one book", "pg19:1": "text of another"}
    with pytest.raises(InputError, match=r"asks for 4 books, the test split of .* has 3"):
        read_texts(["pg19:4"])
