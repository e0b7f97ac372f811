"""``tswift bench``: tables of alpha, x and wall time, a gate for CI, and with ``--suite`` the paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.benchmarking import gate, records
from tswift.benchmarking.config import BenchOptions, Plan, parse_trees
from tswift.benchmarking.suites import SUITES, Suite, find_suite
from tswift.benchmarking.summary import simulation
from tswift.benchmarking.workloads import KINDS, read_workloads
from tswift.cli import options, output
from tswift.cli.progress import Bars
from tswift.cli.streams import FAILED, INTERRUPTED, loading
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.config import fields_of
from tswift.jobs.folder import FINISHED, default_path, lock_folder, made_folder
from tswift.models.config import SHAPE_PREFIX, refuse_shape

if TYPE_CHECKING:
    from tswift.benchmarking.run import Case, Groups, OnTrial, Run


# what bench does and a suite does not
_OF_BENCH = ("methods", "simulate_alpha", "workload", "peers", *records.JUDGED)


def _refuse(suite: Suite, typed: Sequence[str]) -> None:
    """No option is silently ignored."""
    for name in typed:
        if name in suite.own:
            raise InputError(f"suite {suite.name} sets it itself", name)
        if name in _OF_BENCH:
            raise InputError("cannot be given together with --suite", name)


def _refuse_together(judging: gate.Judging, plan: Plan) -> None:
    """Refuse options of a bench that do not go together."""
    if plan.workload and plan.prompts:
        raise InputError("cannot be given together with --prompts", "workload")
    if plan.workload and judging.paper:
        raise InputError("cannot be given together with --workload: the paper has none", "paper")
    if (judging.against is None) != (not judging.rules):
        raise InputError("wants both: what to hold against, and what fails", "--against and --fail-on")
    if judging.force and not judging.against:
        raise InputError("goes with --against", "force")
    if judging.against and plan.shard:
        raise InputError("wants the whole grid, as --merge makes it of shards", "against")


def _kept(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a record keeps them: files are named so that they are found from another working directory."""
    files = {name: [_absolute(word) for word in given[name]] for name in ("prompts", "workload") if name in given}
    baseline = {"against": str(Path(given["against"]).absolute())} if "against" in given else {}
    return {**given, **files, **baseline}


def _absolute(word: str) -> str:
    kind = word.partition(":")[0]
    return word if kind in ("pg19", *KINDS) else str(Path(word).expanduser().absolute())


def _merged(folders: Sequence[Path], given: Sequence[str], command: Sequence[str]) -> tuple[records.Record, list[str]]:
    """The record of shards, and which cells none of them has."""
    if not folders:
        raise InputError("names no folder", "merge")
    if given:
        raise InputError("cannot be given together with --merge: the folders say what was measured", given[0])
    return records.merge({folder: records.read_record(folder, "merge") for folder in folders}, command)


_OUTPUT = "Output"


@options.takes(
    Plan,
    BenchOptions,
    SamplingParams,
    DraftOptions,
    gate.Judging,
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
        options.option("", f"One of the paper's tables or figures, beside what was published: {', '.join(SUITES)}."),
    ] = None,
    tree: options.Trees = None,
    plots: Annotated[bool, options.option(_OUTPUT, "PNG and SVG (needs matplotlib).", "--plots/--no-plots")] = True,
    out: Annotated[
        Path | None, options.option(_OUTPUT, "Folder for the outputs. (default: ./runs/<UTC time>-bench)", "--out")
    ] = None,
    resume: Annotated[
        Path | None,
        options.option(_OUTPUT, "Go on with the benchmark in this folder: measure what is missing.", "--resume"),
    ] = None,
    merge: Annotated[bool, options.option(_OUTPUT, "Make one result of the FOLDERS of shards.", "--merge")] = False,
    folders: Annotated[
        list[Path] | None, typer.Argument(help="With --merge: what the shards wrote.", show_default=False)
    ] = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Measure methods over generated lengths, in interleaved slices: bench.json, bench.csv, bench.md and plots.

    With --suite one of the paper's tables or figures: suite.json, suite.csv, suite.md and a plot.

    Exit code 1 if a text is not plain decoding's, or on a regression against --against.
    """
    given = {**typed.values, **({"suite": suite} if suite else {}), **({"tree": tree} if tree else {})}
    judged = {name: given.pop(name) for name in records.JUDGED if name in given}
    with ExitStack() as stack:
        earlier, missing = None, list[str]()
        if merge:
            earlier, missing = _merged(folders or (), [*given, *["resume"] * bool(resume)], typed.command)
        elif folders:
            raise InputError("go with --merge", "FOLDERS")
        elif resume:
            if out:
                raise InputError("cannot be given together with --resume", "out")
            earlier = records.open_record(resume, "resume", stack)
            records.refuse_changes(earlier, _kept(given))
        given = {**(earlier["options"] if earlier else given), **judged}
        judging = gate.Judging(**fields_of(gate.Judging, given))
        chosen = find_suite(given["suite"]) if "suite" in given else None
        plan = records.plan_of(given)
        trees = parse_trees(given.get("tree"))
        bench_options = BenchOptions.of(trees, {name: value for name, value in given.items() if name != "tree"})
        baseline = None
        if chosen:
            _refuse(chosen, [*given])
            refuse_shape(bench_options.model)
        else:
            _refuse_together(judging, plan)
            bench_options.check()
            baseline = gate.load_measurement(judging.against) if judging.against else None
        simulated = bench_options.simulate_alpha is not None or bench_options.model.startswith(SHAPE_PREFIX)
        longest, length = max(plan.prefills), max(plan.lens)
        name = f"bench-{chosen.name}" if chosen else "bench-simulated" if simulated else "bench"
        folder = resume or out or default_path(name)
        bars, notes = Bars(quiet, not no_progress), []
        shown: list[tuple[str, Case]] = []  # the cell whose bars are shown

        def show(label: str, number: int, cells: int, case: Case, run: Run) -> None:
            """A line for every cell, a bar for every run of it."""
            if shown != [(label, case)]:
                shown[:] = [(label, case)]
                bars.clear()
                lead = f"{chosen.name}: " + f"{chosen.axis} {label}, " * bool(label) if chosen else ""
                bars.say(f"{lead}{number + 1} of {cells}: {case}")
            bars.update(run.label, run.stats.tokens, length, f"{run.stats.tokens_per_second:,.1f} tokens/s")

        def keep() -> None:
            """Write the record, if it can be written: what comes may still be shown."""
            try:
                report.write_report(record, folder, whole=False)
            except InputError as error:
                bars.say(str(error))

        run: Callable[[], str] | None = None
        groups: Groups
        on_trial: OnTrial | None
        with loading(bench_options.model, quiet):
            from tswift.benchmarking import plots as drawing
            from tswift.benchmarking import report

            if not resume:
                stack.enter_context(made_folder(folder))
            if earlier and (merge or earlier["state"] == FINISHED):
                record = earlier
                record["options"] = _kept(given)
            else:
                from tswift.benchmarking.config import configure, encode, read_texts
                from tswift.benchmarking.run import begin_measurement, measure
                from tswift.benchmarking.suite_run import begin_suite, groups_of, judge_texts, prepare

                texts = read_workloads(plan.workload) if plan.workload else read_texts(plan.prompts)
                if chosen:
                    prepared = prepare(chosen, bench_options, plan)
                    selected = encode(texts, prepared.model, longest)
                    record = begin_suite(prepared, selected, plan, typed.command)
                    groups, on_trial = groups_of(record, prepared), partial(judge_texts, record, prepared)
                    notes += [f"{label} is left out: {why}" for label, why in prepared.missing.items()]
                else:
                    least = 1 if plan.workload else longest
                    config = configure(bench_options, least, length, "prefills" if least > length else "lens")
                    selected = encode(texts, config.model, longest)
                    record = begin_measurement(config, selected, plan, typed.command)
                    groups, on_trial = {"": (config, record)}, None
                    notes += [config.note] if config.note else []
                record["options"] = _kept(given)
                if earlier:
                    records.go_on(record, earlier, folder)
                else:
                    stack.enter_context(lock_folder(folder, "out"))
                run = partial(measure, groups, selected, plan, show, keep, on_trial)
            if baseline:
                gate.refuse_foreign(record, baseline, judging.rules, plan.repeats, judging.force)
        if simulated:
            notes.append(f"simulated: {simulation(record)}")
        if plots and not drawing.available():
            notes.append("no plots: matplotlib is not installed (pip install 'tswift[plot]')")
        for note in notes:
            bars.say(note)
        if run:
            keep()
            with bars:
                record["state"] = run()
        for table in report.tables(record, judging.paper):
            output.show(table)
        written = report.write_report(record, folder, judging.paper, plots and drawing.available())
        bars.say(f"written: {', '.join(str(path) for path in written)}")
        whole = record["state"] == FINISHED
        verdicts = gate.compare(record, baseline, judging.rules) if baseline and whole else []
        if verdicts:
            output.show(gate.moved(verdicts, simulated))
        wrong = sum(sample["explained"] is False for one in records.parts(record).values() for sample in one["samples"])
        if wrong:
            bars.say(f"{wrong} texts are not plain decoding's, and not by rounding")
        if wrong or any(not verdict.ok for verdict in verdicts):
            raise typer.Exit(FAILED)
        if not whole:
            for name in missing:
                bars.say(f"missing: {name}")
            bars.say(f"interrupted; what was measured is in {folder}; bench --resume {folder} goes on")
            raise typer.Exit(INTERRUPTED)
