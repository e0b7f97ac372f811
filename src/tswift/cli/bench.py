"""``tswift bench``: tables of alpha, x and wall time, a gate for CI, and with ``--suite`` the paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.benchmarking import gate
from tswift.benchmarking.config import BenchOptions, Plan, parse_trees
from tswift.benchmarking.suites import SUITES, Suite, find_suite
from tswift.benchmarking.summary import gated
from tswift.cli import options
from tswift.cli.streams import FAILED, INTERRUPTED, loading, visible, write_stdout
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.models.config import SHAPE_PREFIX, refuse_shape

if TYPE_CHECKING:
    from tswift.benchmarking.run import Case, Run
    from tswift.cli.progress import Bars


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
    shown: tuple[str, Case] | None = None

    def show(self, what: str, number: int, trials: int, case: Case, run: Run) -> None:
        """A line for every trial, a bar for every run of it."""
        if self.shown != (what, case):
            self.shown = (what, case)
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
            for path in made:
                path.rmdir()
        raise


def _refuse(suite: Suite, typed: Sequence[str]) -> None:
    """No option is silently ignored."""
    for name in typed:
        if name in suite.own:
            raise InputError(f"suite {suite.name} sets it itself", name)
        if name in _OF_BENCH:
            raise InputError("cannot be given together with --suite", name)


def _show_texts(kept: Sequence[Mapping[str, Any]]) -> None:
    """The ends of the texts that a suite keeps."""
    from tswift.benchmarking.quality import paired, texts_plain

    for texts in paired(kept):
        lines = map(visible, texts_plain(texts).split("\n"))
        write_stdout("\n".join(["", *lines]))


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
    bench_options = BenchOptions.of(parse_trees(tree), typed.values)
    chosen = None if suite is None else find_suite(suite)
    rules = [gate.parse_rule(rule) for rule in fail_on or ()] if chosen is None else []
    baseline = None
    if chosen:
        own = {"against": against, "fail_on": fail_on, "force": force, "paper": paper, "tree": tree}
        _refuse(chosen, [*typed.values, *(name for name, value in own.items() if value)])
        refuse_shape(bench_options.model)
        plan = Plan(**{"prefills": chosen.prefills, "lens": chosen.lens, **typed.of(Plan)})
    else:
        plan = typed.make(Plan)
        if (against is None) != (not rules):
            raise InputError("wants both: what to hold against, and what fails", "--against and --fail-on")
        if force and not against:
            raise InputError("goes with --against", "force")
        bench_options.check()
        baseline = gate.load_measurement(against) if against else None
    simulated = bench_options.simulate_alpha is not None or bench_options.model.startswith(SHAPE_PREFIX)
    longest, length = max(plan.prefills), max(plan.lens)
    with loading(bench_options.model, quiet):
        from tswift.benchmarking import plots as drawing
        from tswift.benchmarking import report
        from tswift.benchmarking.config import configure, encode, read_texts
        from tswift.benchmarking.run import begin_measurement, measure
        from tswift.benchmarking.suite_run import begin_suite, prepare, run_suite
        from tswift.benchmarking.summary import FINISHED, simulation
        from tswift.cli import output
        from tswift.cli.progress import Bars
        from tswift.jobs.folder import default_path

        texts = read_texts(prompts or ())
        name = f"bench-{chosen.name}" if chosen else "bench-simulated" if simulated else "bench"
        folder = out or default_path(name)
        with empty_folder(folder):
            if chosen:
                prepared = prepare(chosen, bench_options, plan)
                config = next(iter(prepared.groups.values()))
                selected = encode(texts, config.model, longest)
                record = begin_suite(prepared, selected, plan, typed.command)
                notes = [f"{label} is left out: {why}" for label, why in prepared.missing.items()]
            else:
                config = configure(bench_options, longest, length, "prefills" if longest > length else "lens")
                selected = encode(texts, config.model, longest)
                record = begin_measurement(config, selected, plan, typed.command)
                notes = [config.note] if config.note else []
                notes += [f"simulated: {simulation(record)}"] if simulated else []
            if baseline:
                gate.refuse_foreign(record, baseline, rules, plan.repeats, force)
    bars = Bars(quiet, not no_progress)
    if plots and not drawing.available():
        notes.append("no plots: matplotlib is not installed (pip install 'tswift[plot]')")
    for note in notes:
        bars.say(note)
    progress = Progress(bars, length, lambda: report.write_report(record, folder, whole=False))

    def show(label: str = "") -> Callable[..., None]:
        lead = f"{suite}: {chosen.axis} {label}, " if chosen and label else f"{suite}: " if chosen else ""
        return lambda *at: progress.show(lead, *at)

    with bars:
        if chosen:
            run_suite(record, prepared, selected, plan, show, progress.keep)
        else:
            measure(record, config, selected, plan, show(), progress.keep)
    for table in report.tables(record, paper):
        output.show(table)
    if chosen:
        _show_texts(record["texts"])
    written = report.write_report(record, folder, paper, plots and drawing.available())
    bars.say(f"written: {', '.join(str(path) for path in written)}")
    whole = record["state"] == FINISHED
    verdicts = gate.compare(record, baseline, rules) if baseline and whole else []
    if verdicts:
        output.show(gate.moved(verdicts, simulated))
    measurements = [group["measurement"] for group in record["groups"]] if chosen else [record]
    wrong = sum(sample["explained"] is False for one in measurements for sample in one["samples"])
    if wrong:
        bars.say(f"{wrong} texts are not plain decoding's, and not by rounding")
    if wrong or any(not verdict.ok for verdict in verdicts):
        raise typer.Exit(FAILED)
    if not whole:
        bars.say(f"interrupted; what was measured is in {folder}")
        raise typer.Exit(INTERRUPTED)
