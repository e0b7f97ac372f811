"""A metric is added in two places: where it is computed, and its entry in ``METRICS``. Everything else follows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import jsonschema

from tests.rows import every_row
from tswift.benchmarking.gate import bench_schema
from tswift.benchmarking.plots import acceptance_figure
from tswift.benchmarking.summary import METRICS, Metric
from tswift.decoding.stats import DecodeStats

WASTE = Metric(
    "waste",
    "nodes verified / tokens",
    exact=True,
    gate="waste",
    lower_is_better=True,
    column=True,
    plot="nodes / token",
)
WORDS = ("bench", "--prefill", 4, "--lens", "10,25", "--methods", "medusa", "--warmup", 0, "--no-plots")


def test_a_made_up_metric_is_everywhere(tswift, checkpoint, prompt, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def bench(*words: object):  # type: ignore[no-untyped-def]
        return tswift(*WORDS, "--model", checkpoint, "--prompts", prompt, *words)

    assert bench("--out", "before").code == 0
    monkeypatch.setattr(DecodeStats, "waste", property(lambda stats: stats.nodes / stats.tokens), raising=False)
    monkeypatch.setitem(METRICS, "waste", WASTE)
    lacking = bench("--out", "a", "--against", "before/bench.json", "--fail-on", "waste")
    assert (lacking.code, lacking.err) == (2, "tswift: error: --against: the baseline holds no waste\n")
    first = bench("--out", "a")
    assert first.code == 0, first.err
    record = json.loads(Path("a/bench.json").read_text())
    jsonschema.validate(record, bench_schema())
    points = [point for sample in record["samples"] for point in sample["points"]]
    assert [point["waste"] for point in points] == [point["nodes"] / point["tokens"] for point in points]
    lines = list(csv.DictReader(Path("a/bench.csv").read_text().splitlines()))
    by_length = [points[0], points[2], points[1], points[3]]
    assert [line["waste_mean"] for line in lines] == [f"{point['waste']:.9g}" for point in by_length]
    rows = [line.split() for line in first.out.decode().splitlines()]
    assert ["method", "prefill", "length", "alpha", "x"] in [row[:5] for row in rows if row and row[-1] == "waste"]
    assert [row[-1] for row in rows if row and row[0] == "medusa"][-2:] == [f"{p['waste']:.3f}" for p in points[2:]]
    assert "nodes / token" in [axes.get_ylabel() for axes in acceptance_figure(record).axes]
    assert bench("--out", "b", "--against", "a/bench.json", "--fail-on", "waste").code == 0
    for point in points:
        point["waste"] -= 0.5
    Path("a/bench.json").write_text(json.dumps(record))
    failed = bench("--out", "c", "--against", "a/bench.json", "--fail-on", "waste")
    assert failed.code == 1
    assert "4 of 4 comparisons regressed" in failed.out.decode()


@every_row("name", METRICS)
def test_entries_fit_together(name: str) -> None:
    metric = METRICS[name]
    assert metric.heading
    assert metric.meaning
    assert metric.source != "stats" or name in dir(DecodeStats(1))
