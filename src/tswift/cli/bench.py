"""``tswift bench``: tables of alpha, x and wall time, a gate for CI, and with ``--suite`` the paper's tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.benchmarking import gate
from tswift.benchmarking.config import BenchOptions, Plan, parse_trees
from tswift.benchmarking.suites import SUITES, Suite, find_suite
from tswift.benchmarking.summary import gated
from tswift.cli import options
from tswift.cli.streams import FAILED, INTERRUPTED, loading
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.models.config import SHAPE_PREFIX, refuse_shape

if TYPE_CHECKING:
    from tswift.benchmarking.run import Case, Run
    from tswift.cli.bars import Bars


# what bench does and a suite does not
_OF_BENCH = ("methods", "simulate_alpha", "against", "fail_on", "force", "paper")


@dataclass
class Progress:
    """Progress of a benchmark on a terminal, and its record on the disk.

    Attributes:
        longest: tokens of a run.
        write: writes the record.
    """

    bars: Bars
    longest: int
    write: Callable[[], object]
    shown: list[tuple[str, Case]] = field(default_factory=list)

    def show(self, what: str, number: int, trials: int, case: Case, run: Run) -> None:
        """A line for every trial, a bar for every run of it."""
        if self.shown != [(what, case)]:
            self.shown = [(what, case)]
            self.bars.clear()
            self.bars.say(f"{what}{number + 1} of {trials}: {case}")
        stats = run.stats
        self.bars.update(run.label, stats.tokens, self.longest, f"{stats.tokens_per_second:,.1f} tokens/s")

    def keep(self) -> None:
        """Write the record, if it can be written: what comes may still be shown."""
        try:
            self.write()
        except InputError as error:
            self.bars.say(str(error))


@contextmanager
def empty_folder(folder: Path) -> Iterator[None]:
    """Make a folder; an error takes it away again, unless somebody else has put something there meanwhile."""
    from tswift.jobs.folder import new_folder

    made = new_folder(folder)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in made:
                each.rmdir()
        raise


def plotted(bars: Bars, plots: bool) -> bool:
    """Whether to plot: if asked to, and matplotlib is there."""
    from tswift.benchmarking.plots import available

    if plots and not available():
        bars.say("no plots: matplotlib is not installed (pip install 'tswift[plot]')")
    return plots and available()


def finish(
    bars: Bars, samples: Sequence[Mapping[str, Any]], whole: bool, folder: Path, regressed: bool = False
) -> None:
    """Exit with 1 if a text is wrong or something regressed, with 130 if the benchmark was interrupted."""
    wrong = sum(sample["explained"] is False for sample in samples)
    if wrong:
        bars.say(f"{wrong} texts are not plain decoding's, and not by rounding")
    if wrong or regressed:
        raise typer.Exit(FAILED)
    if not whole:
        bars.say(f"interrupted; what was measured is in {folder}")
        raise typer.Exit(INTERRUPTED)


def suite_bench(
    suite: Suite,
    asked: BenchOptions,
    plan: Plan,
    prompts: Sequence[str],
    out: Path | None,
    bars: Bars,
    plots: bool,
    command: Sequence[str],
) -> None:
    """Run a suite with the options of ``tswift bench``."""
    from tswift.benchmarking import report
    from tswift.benchmarking.config import encode, read_texts
    from tswift.benchmarking.suite_run import begin_suite, prepare, run_suite
    from tswift.benchmarking.summary import FINISHED
    from tswift.cli import output
    from tswift.jobs.folder import default_path

    texts = read_texts(prompts)
    folder = out or default_path(f"bench-{suite.name}")
    with empty_folder(folder):
        prepared = prepare(suite, asked, plan)
        model = next(iter(prepared.groups.values())).model
        chosen = encode(texts, model, max(plan.prefills))
        record = begin_suite(prepared, chosen, plan, command)
    for label, why in prepared.missing.items():
        bars.say(f"{label} is left out: {why}")
    draw = plotted(bars, plots)
    progress = Progress(bars, max(plan.lens), lambda: report.write_suite(record, folder, whole=False))

    def show(label: str, *at: Any) -> None:
        progress.show(f"{suite.name}: {suite.axis} {label}, " if label else f"{suite.name}: ", *at)

    with bars:
        run_suite(record, prepared, chosen, plan, show, progress.keep)
    for grid in report.suite_tables(record):
        output.show(grid)
    _show_texts(record["texts"])
    written = report.write_suite(record, folder, draw)
    bars.say(f"written: {', '.join(str(path) for path in written)}")
    samples = [sample for group in record["groups"] for sample in group["measurement"]["samples"]]
    finish(bars, samples, record["state"] == FINISHED, folder)


def _refuse(suite: Suite, typed: Sequence[str]) -> None:
    """No option is silently ignored."""
    for name in typed:
        if name in suite.own:
            raise InputError(f"suite {suite.name} sets it itself", name)
        if name in _OF_BENCH:
            raise InputError("cannot be given together with --suite", name)


def _show_texts(kept: Sequence[Mapping[str, Any]]) -> None:
    """The ends of the texts that a suite keeps, side by side on a terminal."""
    from rich.console import Console

    from tswift.benchmarking.quality import paired, texts_plain, texts_table
    from tswift.cli.streams import write_stdout

    for pair in paired(kept):
        if sys.stdout.isatty():
            Console(highlight=False).print(texts_table(pair))
        else:
            write_stdout(f"\n{texts_plain(pair)}")


_GATE, _GRID, _OUTPUT = "Gate", "Grid", "Output"


@options.takes(
    Plan,
    BenchOptions,
    SamplingParams,
    DraftOptions,
    without=("tree",),
    texts={
        "model": "demo, a folder, a hub id, or shape:NAME: random weights in a published model's shape (llama3.1-8b, "
        "yarn-llama2-7b-128k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-14b). (default: demo)"
    },
)
def bench(
    typed: options.Typed,
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"One of the paper's tables or figures, beside what was published: {', '.join(SUITES)}.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        options.option(
            _GRID,
            "File, folder of .txt, or pg19:N (needs the hub); repeatable. (default: bundled novel)",
            "--prompts",
            "--prompt",
        ),
    ] = None,
    tree: options.Trees = None,
    against: Annotated[
        Path | None, options.option(_GATE, "bench.json to hold the figures against.", "--against")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        options.option(
            _GATE,
            f"METRIC:TOLERANCE that fails, as speedup:10% or alpha:0; repeatable. Metrics: {', '.join(gated())}.",
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
    asked = BenchOptions.of(parse_trees(tree), typed.values)
    if suite is not None:
        chosen_suite = find_suite(suite)
        own = {"against": against, "fail_on": fail_on, "force": force, "paper": paper, "tree": tree}
        _refuse(chosen_suite, [*typed.values, *(name for name, value in own.items() if value)])
        refuse_shape(asked.model)
        plan = Plan(**{"prefills": chosen_suite.prefills, "lens": chosen_suite.lens, **typed.of(Plan)})
        with loading(asked.model, quiet):
            from tswift.cli.bars import Bars

        return suite_bench(
            chosen_suite, asked, plan, prompts or (), out, Bars(quiet, not no_progress), plots, typed.command
        )
    plan = typed.make(Plan)
    rules = [gate.parse_rule(rule) for rule in fail_on or ()]
    if (against is None) != (not rules):
        raise InputError("wants both: what to hold against, and what fails", "--against and --fail-on")
    if force and not against:
        raise InputError("goes with --against", "force")
    asked.check()
    baseline = gate.load_measurement(against) if against else None
    with loading(asked.model, quiet):
        from tswift.benchmarking import report
        from tswift.benchmarking.config import configure, encode, read_texts
        from tswift.benchmarking.run import begin_measurement, measure
        from tswift.benchmarking.summary import FINISHED, simulation
        from tswift.cli import output
        from tswift.cli.bars import Bars
        from tswift.jobs.folder import default_path

        texts = read_texts(prompts or ())
        simulated = asked.simulate_alpha is not None or asked.model.startswith(SHAPE_PREFIX)
        folder = out or default_path("bench-simulated" if simulated else "bench")
        longest, length = max(plan.prefills), max(plan.lens)
        with empty_folder(folder):
            config = configure(asked, longest, length, "prefills" if longest > length else "lens")
            chosen = encode(texts, config.model, longest)
            measurement = begin_measurement(config, chosen, plan, typed.command)
            if baseline:
                gate.refuse_foreign(measurement, baseline, rules, force)
                gate.refuse_single(rules, plan.repeats, baseline)
    bars = Bars(quiet, not no_progress)
    if config.note is not None:
        bars.say(config.note)
    if simulated:
        bars.say(f"simulated: {simulation(measurement)}")
    draw = plotted(bars, plots)
    progress = Progress(bars, length, lambda: report.write_bench(measurement, folder, whole=False))
    with bars:
        measure(measurement, config, chosen, plan, lambda *at: progress.show("", *at), progress.keep)
    for grid in report.bench_tables(measurement, paper):
        output.show(grid)
    written = report.write_bench(measurement, folder, paper, draw)
    bars.say(f"written: {', '.join(str(path) for path in written)}")
    whole = measurement["state"] == FINISHED
    verdicts = gate.compare(measurement, baseline, rules) if baseline and whole else []
    if verdicts:
        output.show(gate.moved(verdicts, simulated))
    regressed = any(not verdict.ok for verdict in verdicts)
    finish(bars, measurement["samples"], whole, folder, regressed)
