"""``tswift compare``: methods side by side on one prompt.

``tswift bench``: over grids, with a gate and suites.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.benchmarking import gate
from tswift.benchmarking.config import BenchOptions, CompareConfig, Plan, parse_trees
from tswift.benchmarking.suites import SUITES
from tswift.benchmarking.summary import simulation
from tswift.cli import options, output
from tswift.cli.output import FAILED, INTERRUPTED, Bars, loading_notice
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.files import lock_folder
from tswift.jobs.folder import FINISHED, create_folder, default_path
from tswift.models.config import SHAPES, ModelConfig, refuse_missing_heads, refuse_shape
from tswift.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from tswift.benchmarking.record import Measurement, Record
    from tswift.benchmarking.request import Begun, BenchRequest
    from tswift.benchmarking.run import BenchRun, Case
    from tswift.benchmarking.suites import Suite


@options.takes(
    CompareConfig,
    ModelConfig,
    BenchOptions,
    SamplingParams,
    DraftOptions,
    without=("tree", "simulate_alpha"),
)
def compare(
    typed: options.Typed,
    tree: options.Trees = None,
    json: options.Json = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Decode one prompt by several methods side by side: the same text or not, and what each cost.

    Exit code 1 if a text differs from plain decoding's by more than rounding explains.
    """
    text_config = typed.make(CompareConfig)
    bench_options = BenchOptions.of(parse_trees(tree), typed.values)
    model = bench_options.model.model
    refuse_shape(model)
    bench_options.check()
    refuse_missing_heads(bench_options.model.heads)
    text = text_config.read(model)
    with loading_notice(model, quiet):
        from tswift.benchmarking.comparison import Comparison

        found = output.writable(json)
        flexible = "length" not in typed.values
        comparison = Comparison.of(bench_options, text_config, text, flexible)
    bars = Bars(quiet, not no_progress)
    for note in comparison.notes:
        bars.say(note)
    speeds = _Speeds(bars, comparison.length)
    with bars:
        comparison.run(speeds, speeds.audited)
    found.show(comparison.table())
    found.write("compare", typed.command, comparison.as_dict())
    if not comparison.ok:
        raise typer.Exit(FAILED)
    if comparison.interrupted:
        bars.say("interrupted; the table is of what was there")
        raise typer.Exit(INTERRUPTED)


def _show(bars: Bars, run: BenchRun, length: int, more: str = "") -> None:
    """Show how far a run has come, and how fast."""
    tokens = run.stats.tokens
    figures = f"{run.stats.tokens_per_second:,.1f} tokens/s{more}"
    bars.update(run.label, tokens, tokens if run.ended else length, figures)


class _Speeds:
    """A bar for every method, with its speed over plain decoding's."""

    def __init__(self, bars: Bars, length: int) -> None:
        self._bars = bars
        self._length = length
        self._plain = 0.0

    def __call__(self, run: BenchRun) -> None:
        speed = run.stats.tokens_per_second
        self._plain = speed if run.label == "ar" else self._plain
        x = f" x {speed / self._plain:.2f}" if self._plain and run.stats.seconds else ""
        _show(self._bars, run, self._length, x)

    def audited(self, name: str, done: int, total: int) -> None:
        """Show how far an audit has come."""
        self._bars.update(f"audit of {name}", done, total)


_OUTPUT = "Output"


@options.takes(
    Plan,
    ModelConfig,
    BenchOptions,
    SamplingParams,
    DraftOptions,
    gate.Judging,
    without=("tree",),
    texts={
        "model": "demo, a folder, a hub id, or shape:NAME: random weights in a published model's "
        f"shape ({', '.join(SHAPES)}). (default: demo)"
    },
)
def bench(
    typed: options.Typed,
    suite: Annotated[
        list[str] | None,
        options.option(
            "",
            "One of the paper's tables or figures, beside what was published: "
            f"{', '.join(SUITES)}.",
        ),
    ] = None,
    tree: options.Trees = None,
    plots: Annotated[
        bool, options.option(_OUTPUT, "PNG and SVG (needs matplotlib).", "--plots/--no-plots")
    ] = True,
    out: Annotated[
        Path | None,
        options.option(
            _OUTPUT, "Folder for the outputs. (default: ./runs/<UTC time>-bench)", "--out"
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        options.option(
            _OUTPUT,
            "Go on with the benchmark in this folder: measure what is missing; --seeds may name "
            "more than it had.",
            "--resume",
        ),
    ] = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Measure methods over generated lengths, in interleaved slices: bench.json, bench.csv,
    bench.md and plots.

    With --suite one of the paper's tables or figures: suite.json, suite.csv, suite.md and a plot.

    Exit code 1 if a text is not plain decoding's, or on a regression against --against.
    """
    given = {
        **typed.values,
        **({"suite": options.once("suite", suite)} if suite else {}),
        **({"tree": tree} if tree else {}),
    }
    judged = {name: given.pop(name) for name in gate.JUDGED if name in given}
    with ExitStack() as stack:
        from tswift.benchmarking.record import load_measurement
        from tswift.benchmarking.request import BenchRequest, absolute_paths
        from tswift.benchmarking.resume import add_seeds, open_record, refuse_changes

        earlier = None
        if resume:
            if out:
                raise InputError("cannot be given together with --resume", "out")
            earlier = open_record(resume, "resume", stack)
            add_seeds(earlier, given.get("seeds", ()))
            refuse_changes(earlier, absolute_paths(given))
        known = (earlier.options or {}) if earlier else given
        request = BenchRequest.of({**known, **judged}, earlier)
        judging = request.judging
        baseline = load_measurement(judging.against) if judging.against else None
        texts = request.read_texts()
        folder = resume or out or default_path(request.name)
        bars = Bars(quiet, not no_progress)
        with loading_notice(request.options.model.model, quiet):
            from tswift.benchmarking import report
            from tswift.benchmarking.plots import available

            if not resume:
                stack.enter_context(create_folder(folder))
            request = request.fitted()
            begun = request.begin(texts, typed.command, folder)
            if not earlier:
                stack.enter_context(lock_folder(folder, "out"))
            if baseline:
                gate.refuse_foreign(
                    begun.record.parts[""],
                    baseline,
                    judging.rules,
                    request.plan.repeats,
                    judging.force,
                )
        for note in _notes(request, begun, plots and not available()):
            bars.say(note)
        _measure(request, begun, folder, bars)
        for table in report.tables(begun.record, judging.paper):
            output.show(table)
        written = report.write_report(begun.record, folder, judging.paper, plots and available())
        bars.say(f"written: {', '.join(str(path) for path in written)}")
        _judge(request, begun.record, baseline, folder, bars)


def _notes(request: BenchRequest, begun: Begun, plotless: bool) -> Iterator[str]:
    """What is said before anything is measured."""
    yield from begun.notes
    if request.simulated:
        yield f"simulated: {simulation(begun.record.parts[''])}"
    if plotless:
        yield "no plots: matplotlib is not installed (pip install 'tswift[plot]')"


class _Progress:
    """A line for every cell, a bar for every run of it."""

    def __init__(self, bars: Bars, suite: Suite | None, length: int) -> None:
        self._bars = bars
        self._suite = suite
        self._length = length
        self._shown = ""

    def __call__(self, label: str, number: int, cells: int, case: Case, run: BenchRun) -> None:
        lead = f"{self._suite.name}: " if self._suite else ""
        lead += f"{self._suite.axis} {label}, " if self._suite and label else ""
        cell = f"{lead}{number + 1} of {cells}: {case}"
        if cell != self._shown:
            self._shown = cell
            self._bars.clear()
            self._bars.say(cell)
        _show(self._bars, run, self._length)


def _measure(request: BenchRequest, begun: Begun, folder: Path, bars: Bars) -> None:
    """Measure what is left, and keep the record up to date."""
    from tswift.benchmarking.report import write_report

    def keep() -> None:
        """Write the record, if it can be written: what comes may still be shown."""
        try:
            write_report(begun.record, folder, whole=False)
        except InputError as error:
            bars.say(str(error))

    if begun.measure:
        keep()
        with bars:
            progress = _Progress(bars, request.suite, max(request.plan.lens))
            begun.record.state = begun.measure(progress, keep)


def _judge(
    request: BenchRequest, record: Record, baseline: Measurement | None, folder: Path, bars: Bars
) -> None:
    """Show what regressed; leave with an exit code unless all is well."""
    whole = record.state == FINISHED
    verdicts = (
        gate.compare(record.parts[""], baseline, request.judging.rules)
        if baseline and whole
        else []
    )
    if verdicts:
        output.show(gate.changes_table(verdicts, request.simulated))
    wrong = sum(
        sample.explained is False for one in record.parts.values() for sample in one.samples
    )
    if wrong:
        bars.say(f"{wrong} texts differ from plain decoding beyond rounding")
    if wrong or any(not verdict.ok for verdict in verdicts):
        raise typer.Exit(FAILED)
    if not whole:
        again = f"tswift bench --resume {shlex.quote(str(folder))}"
        bars.say(f"interrupted; what was measured is in {folder}; {again} goes on")
        raise typer.Exit(INTERRUPTED)
