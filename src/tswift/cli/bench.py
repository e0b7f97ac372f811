"""``tswift compare``: methods side by side on one prompt. ``tswift bench``: over grids, with a gate and suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.benchmarking import gate
from tswift.benchmarking.config import DRAFTLESS, BenchOptions, CompareConfig, Plan, parse_trees
from tswift.benchmarking.suites import SUITES, find_suite
from tswift.benchmarking.summary import parts, simulation
from tswift.benchmarking.workloads import KINDS, Text, encode, read_texts, read_workloads
from tswift.cli import options, output
from tswift.cli.output import FAILED, INTERRUPTED, Bars, loading
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.config import fields_of
from tswift.jobs.folder import FINISHED, default_path, lock_folder, made_folder
from tswift.models.config import SHAPE_PREFIX, refuse_missing_heads, refuse_shape

if TYPE_CHECKING:
    from tswift.benchmarking.run import Case, Run
    from tswift.benchmarking.summary import Table


@options.takes(CompareConfig, BenchOptions, SamplingParams, DraftOptions, without=("tree", "simulate_alpha", "peers"))
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
    text_config, bench_options = typed.make(CompareConfig), BenchOptions.of(parse_trees(tree), typed.values)
    refuse_shape(bench_options.model)
    bench_options.check()
    refuse_missing_heads(bench_options.heads)
    text = text_config.read(bench_options.model)
    with loading(bench_options.model, quiet):
        from tswift.benchmarking.config import configure
        from tswift.benchmarking.run import compare as run_all
        from tswift.benchmarking.run import open_runs
        from tswift.jobs.config import BUNDLED_PREFILL, fingerprint, take
        from tswift.models.devices import environment

        found = output.writable(json)
        length, prefill, seed = text_config.length, text_config.prefill, text_config.seed
        least = prefill or (BUNDLED_PREFILL if text_config.bundled else 1)
        config = configure(bench_options, least, length, "prefill" if prefill and prefill > length else "length")
        ids = take(config.model.encode(text), prefill, bundled=text_config.bundled)
        # allocated and freed: what does not fit is refused before anything is said
        open_runs(config, ids, length, seed)
    bars, device = Bars(quiet, not no_progress), config.model.target.device
    if config.note is not None:
        bars.say(config.note)
    name = f"model {bench_options.model}, {device}{config.model.besides()}"
    bars.say(f"{name}, prompt {len(ids):,} tokens, {length:,} to generate, seed {seed}")
    plain_speed = 0.0

    def on_progress(run: Run) -> None:
        nonlocal plain_speed
        speed = run.stats.tokens_per_second
        plain_speed = speed if run.label == "ar" else plain_speed
        x = f" x {speed / plain_speed:.2f}" if plain_speed and run.stats.seconds else ""
        bars.update(run.label, run.stats.tokens, length, f"{speed:,.1f} tokens/s{x}")

    with bars:
        comparison = run_all(
            config, ids, length, seed, on_progress, lambda name, *done: bars.update(f"audit of {name}", *done)
        )
    found.show(_table(comparison))
    about = {
        "environment": environment(device),
        "model": config.model.about(),
        "prompt": {"source": text_config.source, "tokens": len(ids), "sha256": fingerprint(ids)},
        "length": length,
        "seed": seed,
        "sampling": config.params,
        "drafting": config.drafting(),
    }
    found.write("compare", typed.command, {**about, **comparison})
    if not comparison["ok"]:
        raise typer.Exit(FAILED)
    if comparison["interrupted"]:
        bars.say("interrupted; the table is of what was there")
        raise typer.Exit(INTERRUPTED)


_SHOWN = {  # by figure: heading and format
    "alpha": ("alpha", ".3f"),
    "beta": ("beta", ".3f"),
    "tokens_per_step": ("tokens/step", ".2f"),
    "passes": ("passes", ","),
    "tokens_per_second": ("tokens/s", ",.1f"),
    "seconds": ("decode time, s", ",.2f"),
    "speedup": ("x", ".2f"),
    "speedup_over_reference": ("x over reference style", ".2f"),
}


def _table(comparison: Mapping[str, Any]) -> Table:
    from tswift.benchmarking.summary import NOTHING, Table, method_name

    outcomes, cut = comparison["outcomes"], ", interrupted" if comparison["interrupted"] else ""
    shown = {name: each for name, each in _SHOWN.items() if outcomes[0][name] is not None}

    def text(outcome: Mapping[str, Any], name: str) -> str:
        undrafted = outcome["method"] in DRAFTLESS and name in ("alpha", "beta")
        return NOTHING if undrafted else format(outcome[name], shown[name][1])

    return Table(
        f"{min(outcome['tokens'] for outcome in outcomes):,} tokens, in interleaved slices{cut}",
        ["method", "same text as AR", *(heading for heading, _ in shown.values())],
        [[method_name(each["method"]), _same(each), *(text(each, name) for name in shown)] for each in outcomes],
        left=2,
        notes=["x: AR's time / the method's, prefill apart."],
    )


def _same(outcome: Mapping[str, Any]) -> str:
    if outcome["first_difference"] is None:
        if outcome["explained"] is False:  # plain decoding's own text, audited since another one differs
            return "not what the rule draws"
        return "-" if outcome["method"] == "ar" else "yes"
    margin = "no margin found" if outcome["margin"] is None else f"margin {outcome['margin']:.2g}"
    why = "rounding" if outcome["explained"] else "NOT rounding"
    return f"to token {outcome['first_difference']:,}, then {why} ({margin})"


# what bench does and a suite does not
_OF_BENCH = ("methods", "simulate_alpha", "workload", "peers", *gate.JUDGED)


def _kept(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a record keeps them: files are named so that they are found from another working directory."""
    files = {name: [_absolute(word) for word in given[name]] for name in ("prompts", "workload") if name in given}
    baseline = {"against": str(Path(given["against"]).absolute())} if "against" in given else {}
    return {**given, **files, **baseline}


def _absolute(word: str) -> str:
    kind = word.partition(":")[0]
    return word if kind in ("pg19", *KINDS) else str(Path(word).expanduser().absolute())


def _merged(folders: Sequence[Path], given: Sequence[str], command: Sequence[str]) -> tuple[gate.Record, list[str]]:
    """The record of shards, and which cells none of them has."""
    if not folders:
        raise InputError("names no folder", "merge")
    if given:
        raise InputError("cannot be given together with --merge: the folders say what was measured", given[0])
    return gate.merge({folder: gate.read_record(folder, "merge") for folder in folders}, command)


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
        list[str] | None,
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
    given = {
        **typed.values,
        **({"suite": options.once("suite", suite)} if suite else {}),
        **({"tree": tree} if tree else {}),
    }
    judged = {name: given.pop(name) for name in gate.JUDGED if name in given}
    with ExitStack() as stack:
        earlier, missing = None, list[str]()
        if merge:
            earlier, missing = _merged(folders or (), [*given, *["resume"] * bool(resume)], typed.command)
        elif folders:
            raise InputError("go with --merge", "FOLDERS")
        elif resume:
            if out:
                raise InputError("cannot be given together with --resume", "out")
            earlier = gate.open_record(resume, "resume", stack)
            gate.refuse_changes(earlier, _kept(given))
        given = {**(earlier["options"] if earlier else given), **judged}
        chosen = find_suite(given["suite"]) if "suite" in given else None
        for name in given:  # no option is silently ignored
            if chosen and name in chosen.own:
                raise InputError(f"suite {chosen.name} sets it itself", name)
            if chosen and name in _OF_BENCH:
                raise InputError("cannot be given together with --suite", name)
        judging, plan = gate.Judging(**fields_of(gate.Judging, given)), gate.plan_of(given)
        trees = parse_trees(given.get("tree"))
        bench_options = BenchOptions.of(trees, {name: value for name, value in given.items() if name != "tree"})
        if plan.workload and judging.paper:
            raise InputError("cannot be given together with --workload: the paper has none", "paper")
        if plan.shard and judging.against:
            raise InputError("wants the whole grid, as --merge makes it of shards", "against")
        if chosen:
            refuse_shape(bench_options.model)
        else:
            bench_options.check()
        baseline = gate.load_measurement(judging.against) if judging.against else None
        measured, texts = earlier is not None and (merge or earlier["state"] == FINISHED), list[Text]()
        if not measured:
            refuse_missing_heads(bench_options.heads)
            texts = read_workloads(plan.workload) if plan.workload else read_texts(plan.prompts)
        simulated = bench_options.simulate_alpha is not None or bench_options.model.startswith(SHAPE_PREFIX)
        longest, length = max(plan.prefills), max(plan.lens)
        name = f"bench-{chosen.name}" if chosen else "bench-simulated" if simulated else "bench"
        folder = resume or out or default_path(name)
        bars, notes, shown = Bars(quiet, not no_progress), list[str](), ""

        def show(label: str, number: int, cells: int, case: Case, run: Run) -> None:
            """A line for every cell, a bar for every run of it."""
            nonlocal shown
            lead = f"{chosen.name}: " + f"{chosen.axis} {label}, " * bool(label) if chosen else ""
            cell = f"{lead}{number + 1} of {cells}: {case}"
            if cell != shown:
                shown = cell
                bars.clear()
                bars.say(cell)
            bars.update(run.label, run.stats.tokens, length, f"{run.stats.tokens_per_second:,.1f} tokens/s")

        def keep() -> None:
            """Write the record, if it can be written: what comes may still be shown."""
            try:
                report.write_report(record, folder, whole=False)
            except InputError as error:
                bars.say(str(error))

        run: Callable[[], str] | None = None
        with loading(bench_options.model, quiet):
            from tswift.benchmarking import plots as drawing
            from tswift.benchmarking import report

            if not resume:
                stack.enter_context(made_folder(folder))
            if earlier and measured:
                record = earlier
                record["options"] = _kept(given)
            else:
                from tswift.benchmarking.config import configure
                from tswift.benchmarking.run import begin_measurement, measure
                from tswift.benchmarking.suite_run import begin_suite, judge_texts, prepare

                least = 1 if plan.workload else longest
                if chosen:
                    groups, left_out = prepare(chosen, bench_options, plan)
                    notes += [f"{label} is left out: {why}" for label, why in left_out.items()]
                else:
                    option = "prefills" if least > length else "lens"
                    groups = {"": configure(bench_options, least, length, option)}
                config = next(iter(groups.values()))
                notes += [config.note] if config.note else []
                prompts, on_trial = encode(texts, config.model, longest), None
                if chosen:
                    record = begin_suite(chosen, groups, left_out, prompts, plan, typed.command)
                    on_trial = partial(judge_texts, record, config.model.tokenizer)
                else:
                    record = begin_measurement(config, prompts, plan, typed.command)
                record["options"] = _kept(given)
                if earlier:
                    gate.go_on(record, earlier, folder)
                else:
                    stack.enter_context(lock_folder(folder, "out"))
                run = partial(measure, groups, record, prompts, plan, show, keep, on_trial)
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
        wrong = sum(sample["explained"] is False for one in parts(record).values() for sample in one["samples"])
        if wrong:
            bars.say(f"{wrong} texts are not plain decoding's, and not by rounding")
        if wrong or any(not verdict.ok for verdict in verdicts):
            raise typer.Exit(FAILED)
        if not whole:
            for name in missing:
                bars.say(f"missing: {name}")
            bars.say(f"interrupted; what was measured is in {folder}; bench --resume {folder} goes on")
            raise typer.Exit(INTERRUPTED)
