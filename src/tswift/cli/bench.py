"""``tswift bench``: tables of alpha, x and wall time over lengths, prefills, prompts and seeds; and a gate for CI.

With ``--suite`` it is one of the paper's tables or figures: see ``suites``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tswift.benchmarking.gate import METRICS
from tswift.benchmarking.suites import SUITES
from tswift.cli import options
from tswift.cli.suites import Progress, empty_folder, finish, plan_of, plotted, suite_bench
from tswift.errors import InputError

_GATE, _GRID, _OUTPUT = "Gate", "Grid", "Output"


def bench(
    context: typer.Context,
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"One of the paper's tables or figures, beside what was published: {', '.join(SUITES)}.",
            show_default=False,
        ),
    ] = None,
    prefill: Annotated[
        list[int] | None, options.option(_GRID, "Prompt tokens; repeatable. (default: 4096)", "--prefill")
    ] = None,
    lens: Annotated[
        str, typer.Option(help="Generated lengths; one run goes to the longest.", rich_help_panel=_GRID)
    ] = "20000,40000,60000,80000,100000",
    methods: options.Methods = "ar,medusa,tokenswift",
    with_reference_ar: options.ReferenceAr = False,
    seeds: Annotated[str, typer.Option(help="A run for each.", rich_help_panel=_GRID)] = "0",
    prompts: Annotated[
        list[str] | None,
        options.option(
            _GRID, "File, folder of .txt, or pg19:N (needs the hub); repeatable. (default: bundled novel)", "--prompts"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of the whole grid.", rich_help_panel=_GRID)] = 1,
    ar: Annotated[
        str, typer.Option(help="full runs plain decoding; sampled times some of its steps.", rich_help_panel=_GRID)
    ] = "full",
    warmup: Annotated[int, typer.Option(help="Tokens generated before measuring.", rich_help_panel=_GRID)] = 32,
    simulate_alpha: Annotated[
        float | None,
        options.option(
            _GRID,
            "Accept this share of the drafted tokens whatever is drawn: times are real, texts are not.",
            "--simulate-alpha",
        ),
    ] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    eta: options.Eta = None,
    penalty: options.Penalty = None,
    window: options.Window = None,
    tree: options.Trees = None,
    nodes: options.Nodes = None,
    ngrams: options.Ngrams = None,
    reuse_recent: options.ReuseRecent = None,
    gamma: options.Gamma = None,
    inner_gamma: options.InnerGamma = None,
    kv: options.Kv = None,
    budget: options.Budget = None,
    sinks: options.Sinks = None,
    shared_noise: options.SharedNoise = None,
    costs: options.Costs = None,
    recall: options.Recall = None,
    heads: options.HeadsFile = None,
    draft_model: options.DraftModel = None,
    draft_weights: options.DraftWeights = None,
    model: options.ModelOrShape = "demo",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    exact: options.Exact = None,
    against: Annotated[
        Path | None, options.option(_GATE, "bench.json to hold the figures against.", "--against")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        options.option(
            _GATE,
            f"METRIC:TOLERANCE that fails, as speedup:10% or alpha:0; repeatable. Metrics: {', '.join(METRICS)}.",
            "--fail-on",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Hold times of another machine against ours.", rich_help_panel=_GATE)
    ] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Put the published rows beside ours.", rich_help_panel=_OUTPUT)
    ] = False,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="PNG and SVG (needs matplotlib).", rich_help_panel=_OUTPUT)
    ] = True,
    out: Annotated[
        Path | None, options.option(_OUTPUT, "Folder for the outputs. (default: ./runs/<UTC time>-bench)", "--out")
    ] = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Measure methods over generated lengths, in interleaved slices: bench.json, bench.csv, bench.md and plots.

    With --suite one of the paper's tables or figures: suite.json, suite.csv, suite.md and a plot.

    Exit code 1 if a text is not plain decoding's, or on a regression against --against.
    """
    if suite is not None:
        return suite_bench(context, suite)
    from tswift.benchmarking import gate, report
    from tswift.benchmarking.config import configure, encode, read_texts
    from tswift.benchmarking.run import begin_measurement, measure
    from tswift.benchmarking.summary import FINISHED, simulation
    from tswift.cli import tables
    from tswift.cli.bars import Bars
    from tswift.jobs.folder import default_path
    from tswift.models.shapes import PREFIX

    plan = plan_of(context, (4096,))
    asked = options.entry(context)
    rules = [gate.parse_rule(rule) for rule in fail_on or ()]
    if (against is None) != (not rules):
        raise InputError("wants both: what to hold against, and what fails", "--against and --fail-on")
    if force and not against:
        raise InputError("goes with --against", "--force")
    baseline = gate.load_measurement(against) if against else None
    texts = read_texts(prompts or ())
    simulated = simulate_alpha is not None or model.startswith(PREFIX)
    folder = out or default_path("bench-simulated" if simulated else "bench")
    longest, length = max(plan.prefills), max(plan.lens)
    with empty_folder(folder):
        config = configure(asked, longest, length, "--prefill" if longest > length else "--lens")
        chosen = encode(texts, config.model, longest)
        measurement = begin_measurement(config, chosen, plan, context.obj)
        if baseline:
            gate.refuse_foreign(measurement, baseline, rules, force)
            gate.refuse_single(rules, repeats, baseline)
    bars = Bars(quiet, not no_progress)
    if simulated:
        bars.say(f"simulated: {simulation(measurement)}")
    draw = plotted(bars, plots)
    progress = Progress(bars, length, lambda: report.write_bench(measurement, folder, whole=False))
    with bars:
        measure(measurement, config, chosen, plan, lambda *at: progress.show("", *at), progress.keep)
    for grid in report.bench_grids(measurement, paper):
        tables.show(grid)
    written = report.write_bench(measurement, folder, paper, draw)
    bars.say(f"written: {', '.join(str(path) for path in written)}")
    whole = measurement["state"] == FINISHED
    verdicts = gate.compare(measurement, baseline, rules, force) if baseline and whole else []
    if verdicts:
        tables.show(gate.moved(verdicts, simulated))
    regressed = any(not verdict.ok for verdict in verdicts)
    finish(bars, measurement["samples"], whole, folder, regressed)
