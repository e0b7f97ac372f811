"""A suite's run in process: Ctrl-C, several draws, what is left out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tswift.benchmarking.measure import Plan
from tswift.benchmarking.prompts import Prompt
from tswift.benchmarking.quality import quality
from tswift.benchmarking.suites.catalogue import SUITES
from tswift.benchmarking.suites.lineups import Asked, nodes_of, prepare
from tswift.benchmarking.suites.report import write_reports
from tswift.benchmarking.suites.run import begin_record, run
from tswift.benchmarking.suites.suite import Choice
from tswift.benchmarking.suites.tables import table
from tswift.errors import InputError

PROMPTS = [Prompt("p", list(range(1, 9)))]


def made(checkpoint: Path, name: str, **changes: Any):  # type: ignore[no-untyped-def]
    return prepare(dataclasses.replace(SUITES[name], **changes), Asked({"model": str(checkpoint)}), Plan((4,), (6,)))


def test_ctrl_c_keeps_what_was_measured(checkpoint: Path, tmp_path: Path) -> None:
    prepared = made(checkpoint, "table12")
    plan = Plan((4,), (6, 12), warmup=0)
    record, kept = begin_record(prepared, PROMPTS, plan, ["tswift"]), []

    def tick(label, number, rounds, place, lane) -> None:  # type: ignore[no-untyped-def]
        if label == "min-p 0.1" and lane.stats.tokens > 8:
            raise KeyboardInterrupt

    run(record, prepared, PROMPTS, plan, tick, lambda: kept.append(record["state"]))
    assert record["state"] == "interrupted"
    assert kept[-1] == "interrupted"
    assert [group["measurement"]["state"] for group in record["groups"]] == ["finished", "interrupted", "running"]
    assert {(row["axis"], row["length"]) for row in record["rows"]} == {
        ("top-p 0.9", 6),
        ("top-p 0.9", 12),
        ("min-p 0.1", 6),
    }
    assert any(note.startswith("The suite did not run to its end") for note in table(record).notes)
    assert len(write_reports(record, tmp_path, plots=False)) == 3


def test_every_text_has_its_own_figures(checkpoint: Path) -> None:
    prepared = made(checkpoint, "case-study")
    plan = Plan((4,), (30, 150), (1, 2), warmup=0)
    record = begin_record(prepared, PROMPTS, plan, ["tswift"])
    run(record, prepared, PROMPTS, plan, lambda *tick: None, lambda: None)
    assert [(text["label"], text["seed"]) for text in record["texts"]] == [
        *(("with penalty", seed) for seed in (1, 2)),
        *(("without", seed) for seed in (1, 2)),
    ]
    samples = [sample for group in record["groups"] for sample in group["measurement"]["samples"]]
    for text, plain, drafted in zip(record["texts"], samples[::2], samples[1::2], strict=True):
        assert (plain["method"], plain["seed"]) == ("ar", text["seed"])
        for length, ours, theirs in zip((30, 150), plain["points"], drafted["points"], strict=True):
            expected = quality(text["tokens"][:length], "".join(text["pieces"][:length]))
            # a character may be cut in two at the end of a part
            assert {**ours["quality"], "compression": 0} == pytest.approx({**expected, "compression": 0})
            assert ours["quality"] == theirs["quality"]
    (first, second) = (row for row in record["rows"] if row["axis"] == "without")
    assert first["figures"]["distinct"]["n"] == 2
    assert second["figures"]["self_bleu"]["std"] is not None


def test_what_cannot_run_is_left_out_and_said(checkpoint: Path, tmp_path: Path) -> None:
    choices = (Choice("short", "tokenswift", {"tree": (1, 1)}), Choice("long", "tokenswift", {"tree": (1,) * 9}))
    prepared = made(checkpoint, "table7", choices=choices)
    assert [variant.label for variant in prepared.groups[0].lineup.variants] == ["ar", "short"]
    assert prepared.missing == (("long", "tokenswift can draft 4 levels with these heads, got 9"),)
    record = begin_record(prepared, PROMPTS, Plan((4,), (6,), warmup=0), ["tswift"])
    assert "Left out: long, since tokenswift can draft 4 levels with these heads, got 9." in table(record).notes
    with pytest.raises(InputError, match=r"^--suite: table7 cannot run on this model: tokenswift can draft 4 levels"):
        made(checkpoint, "table7", choices=choices[1:])


def test_nodes_of_trees() -> None:
    assert nodes_of((1, 3, 3, 3), conditioned=False) == 1 + 1 + 3 + 9 + 27
    assert nodes_of((3, 3, 3, 3), conditioned=False) == 1 + 3 + 9 + 27 + 81
    assert nodes_of((1, 9, 9, 9), conditioned=True) == 1 + 1 + 9 + 9 + 9


def test_a_tree_of_a_suite_has_room_for_all_of_its_nodes(checkpoint: Path) -> None:
    variants = made(checkpoint, "table7").groups[0].lineup.variants
    assert [variant.options.nodes for variant in variants[1:]] == [121, 821, 41]  # the heads are chained
