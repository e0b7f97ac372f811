"""``tswift bench --suite``: one of the paper's tables or figures, and whether its ordering holds here."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tswift.cli import options
from tswift.cli.codes import FAILED, INTERRUPTED
from tswift.errors import InputError

if TYPE_CHECKING:
    from tswift.benchmarking.lanes import Lane
    from tswift.benchmarking.round import Place
    from tswift.benchmarking.suites.suite import Suite

# what bench does and a suite does not
_OF_BENCH = ("methods", "simulate_alpha", "against", "fail_on", "force", "paper")


def run_suite(context: typer.Context, name: str) -> None:
    """Run a suite with the options of ``tswift bench``.

    Raises:
        InputError: no such suite, or an option that it sets itself or has no use for.
    """
    from tswift.benchmarking import look
    from tswift.benchmarking.measure import Plan
    from tswift.benchmarking.measurement import FINISHED
    from tswift.benchmarking.prompts import encode, read_texts
    from tswift.benchmarking.suites import report
    from tswift.benchmarking.suites.catalogue import find_suite
    from tswift.benchmarking.suites.lineups import Asked, prepare
    from tswift.benchmarking.suites.run import begin_record, run
    from tswift.benchmarking.suites.tables import table
    from tswift.cli import tables
    from tswift.cli.bars import Bars
    from tswift.jobs.folder import default_path, new_folder
    from tswift.models.shapes import refuse_shape

    suite, asked_for, typed = find_suite(name), context.params, options.typed(context)
    _refuse(suite, typed)
    plan = Plan(
        prefills=tuple(asked_for["prefill"] or suite.prefills),
        lens=options.numbers(asked_for["lens"], "--lens") if "lens" in typed else suite.lens,
        seeds=options.numbers(asked_for["seeds"], "--seeds"),
        ar=asked_for["ar"],
        repeats=asked_for["repeats"],
        warmup=asked_for["warmup"],
    )
    asked = Asked(
        model=options.model(context),
        sampling=options.sampling(context),
        drafting=options.drafting(context),
        trees=options.trees(asked_for["tree"]),
        reference=asked_for["with_reference_ar"],
    )
    refuse_shape(asked.model["model"])
    texts = read_texts(asked_for["prompts"] or ())
    folder: Path = asked_for["out"] or default_path(f"bench-{suite.name}")
    made = new_folder(folder)
    try:
        prepared = prepare(suite, asked, plan)
        chosen = encode(texts, prepared.groups[0].lineup.model, max(plan.prefills))
        record = begin_record(prepared, chosen, plan, context.obj)
    except BaseException:
        with suppress(OSError):  # somebody else has put something there meanwhile
            for each in made:
                each.rmdir()
        raise
    bars = Bars(asked_for["quiet"], not asked_for["no_progress"])
    for label, why in prepared.missing:
        bars.say(f"{label} is left out: {why}")
    plots = asked_for["plots"]
    if plots and not look.available():
        bars.say("no plots: matplotlib is not installed (pip install 'tswift[plot]')")
    shown: list[tuple[str, Place]] = []

    def tick(label: str, number: int, rounds: int, place: Place, lane: Lane) -> None:
        if shown != [(label, place)]:
            shown[:] = [(label, place)]
            bars.clear()
            setting = f"{suite.axis} {label}, " if label else ""
            bars.say(f"{suite.name}: {setting}{number + 1} of {rounds}: {place}")
        stats = lane.stats
        bars.update(lane.name, stats.tokens, max(plan.lens), f"{stats.tokens_per_second:,.1f} tokens/s")

    def keep() -> None:
        try:
            report.write_suite(record, folder)
        except InputError as error:  # what comes may still be shown
            bars.say(str(error))

    with bars:
        run(record, prepared, chosen, plan, tick, keep)
    tables.show(table(record))
    _show_texts(record["texts"])
    written = report.write_reports(record, folder, plots)
    bars.say(f"written: {', '.join(str(path) for path in written)}")
    samples = [sample for group in record["groups"] for sample in group["measurement"]["samples"]]
    wrong = sum(sample["explained"] is False for sample in samples)
    if wrong:
        bars.say(f"{wrong} texts are not plain decoding's, and not by rounding")
        raise typer.Exit(FAILED)
    if record["state"] != FINISHED:
        bars.say(f"interrupted; what was measured is in {folder}")
        raise typer.Exit(INTERRUPTED)


def _refuse(suite: Suite, typed: dict[str, object]) -> None:
    """No option is silently ignored."""
    for name in typed:
        option = f"--{name.replace('_', '-')}"
        if name in suite.own:
            raise InputError(f"suite {suite.name} sets it itself", option)
        if name in _OF_BENCH:
            raise InputError("cannot be given together with --suite", option)


def _show_texts(kept: list[dict[str, object]]) -> None:
    """The ends of the texts that a suite keeps, side by side on a terminal."""
    from rich.console import Console

    from tswift.benchmarking.suites import texts
    from tswift.cli.streams import write_stdout

    for pair in texts.pairs_of(kept):
        if sys.stdout.isatty():
            Console(highlight=False).print(texts.side_by_side(pair))
        else:
            write_stdout(f"\n{texts.plain(pair)}")
