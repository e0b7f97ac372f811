"""``tswift generate``: continue a text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options
from tswift.cli.output import (
    FAILED,
    Bars,
    abandon_stdout,
    complain,
    figures,
    loading_notice,
    tell,
    writing_stdout,
)
from tswift.drafting.options import DraftOptions
from tswift.errors import DecodeError, InputError, renaming
from tswift.jobs.batch import MOST_TEXTS, Batch, Task, is_batch, reopen
from tswift.jobs.config import RunConfig, TextConfig
from tswift.jobs.folder import read_record
from tswift.models.config import ModelConfig, refuse_missing_heads
from tswift.options import Option, checked, parse_shard
from tswift.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from tswift.cli.output import Display
    from tswift.decoding.stats import DecodeStats
    from tswift.jobs.job import Job, Signals


@options.takes(ModelConfig, TextConfig, RunConfig, SamplingParams, DraftOptions)
def generate(
    typed: options.Typed,
    resume: Annotated[
        Path | None,
        options.option(
            "Output", "Go on with the run in this folder; --len may be raised.", "--resume"
        ),
    ] = None,
    discard_damaged: Annotated[
        bool,
        options.option(
            "Output",
            "With --resume: where a file is damaged, go on from the last sound token.",
            "--discard-damaged",
            rare=True,
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        options.option(
            "", "JSONL or parquet: a text of each line, all of them in --out.", "--prompts"
        ),
    ] = None,
    shard: Annotated[
        str | None,
        options.option(
            "", "With --prompts: I/N, every Nth line from the Ith on.", "--shard", rare=True
        ),
    ] = None,
    skip_too_long: Annotated[
        bool,
        options.option(
            "",
            "With --prompts: leave out texts for which the model has not enough positions.",
            "--skip-too-long",
            rare=True,
        ),
    ] = False,
    parallel: Annotated[
        int | None,
        options.option(
            "",
            "With --prompts: texts made at once, in passes that they share; each is the same as "
            "alone. By default 8, where passes can be shared.",
            "--parallel",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Audit the text at the end, as tswift verify does.")
    ] = False,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Continue a text.

    The text goes to stdout as it is made; text, tokens and figures to a folder.
    """
    if prompts is not None or (resume is not None and is_batch(resume)):
        refused = {"verify": verify, "discard_damaged": discard_damaged}
        alone = [name for name, asked in refused.items() if asked]
        bars = Bars(quiet, not no_progress)
        _many(typed, prompts, resume, shard, skip_too_long, parallel, bars, alone)
        return
    many = {"shard": shard, "skip_too_long": skip_too_long or None, "parallel": parallel}
    for name, asked in many.items():
        if asked is not None:
            raise InputError("goes with --prompts", name)
    if discard_damaged and resume is None:
        raise InputError("goes with --resume", "discard_damaged")
    if resume is not None and "out" in typed.values:
        raise InputError("cannot be given together with --resume", "out")
    # what is mistyped is refused before torch is imported, which takes seconds
    config = RunConfig.of(**typed.values) if resume is None else None
    if resume is not None:
        with renaming("resume"):
            read_record(resume)
    refuse_missing_heads(typed.values.get("heads"))
    said = None if config is None else config.read()
    what = f"the model of {resume}" if config is None else config.model.model
    with ExitStack() as stack:
        with loading_notice(what, quiet):
            from tswift.cli.output import Display
            from tswift.jobs.job import Signals, start
            from tswift.jobs.resuming import resume as resumed

            signals = stack.enter_context(Signals())
            job: Job | None
            if config is not None:
                job = start(config, typed.command, said)
            else:
                assert resume is not None
                job = resumed(resume, typed.values, discard_damaged, typed.command)
        if job is not None:
            _run(job, Display(job, quiet, not no_progress), signals)
        else:
            tell(f"the run in {resume} is finished; a larger --len goes on with it", quiet)
    if verify:
        from tswift.cli.verify import verify_folder

        path = resume if job is None else job.folder.path
        assert path is not None
        loaded = None if job is None else job.model
        del job  # and with it the KV cache; the audit needs one of its own
        verify_folder(loaded, path, typed.command, quiet, not no_progress)


_OF_ONE = ("prompt", "prompt_text", "prefill")  # text


def _many(
    typed: options.Typed,
    prompts: Path | None,
    resume: Path | None,
    shard: str | None,
    skip: bool,
    parallel: int | None,
    bars: Bars,
    refused: Sequence[str],
) -> None:
    """Make the texts of a file of prompts; each goes to stdout as a line of JSON when it ends."""
    if prompts is not None and resume is not None:
        raise InputError("cannot be given together with --prompts", "resume")
    for name in (*refused, *(name for name in _OF_ONE if name in typed.values)):
        raise InputError("is for one text; with --prompts there are many", name)
    if resume is not None and typed.values:
        raise InputError("its options are those that it was begun with", next(iter(typed.values)))
    if resume is None and "out" not in typed.values:
        raise InputError("is required with --prompts", "out")
    chosen = parse_shard(shard or "1/1")
    checked(int | None, parallel, "parallel", Option("", least=1, most=MOST_TEXTS))
    if resume is None:
        assert prompts is not None
        batch = Batch(prompts, typed.values["out"], typed.values)
    else:
        batch = reopen(resume)
    batch.skips = skip
    refuse_missing_heads(batch.config.model.heads)
    batch.claim()
    with loading_notice(batch.config.model.model, bars.quiet):
        from tswift.jobs.job import Signals, Stopped
    made = 0

    def deliver(task: Task, line: str) -> None:
        nonlocal made
        made += 1
        bars.clear(task.text.name)
        bars.write(f"{line}\n")

    def on_step(task: Task, stats: DecodeStats) -> None:
        bars.update(task.text.name, stats.tokens, task.config.text.length, figures(stats))

    again = f"tswift generate --resume {shlex.quote(str(batch.out))}"
    again += f" --shard {shard}" if shard else ""
    try:
        with writing_stdout(), bars, Signals() as signals:
            tasks = batch.of_shard(*chosen)
            batch.make(tasks, typed.command, signals, deliver, on_step, again, parallel)
            gathered = batch.gather()
    except (Stopped, DecodeError, InputError, OSError) as error:
        why = f"{error}; " if isinstance(error, Stopped) else ""
        if made or not isinstance(error, InputError):
            bars.say(f"{why}{made:,} texts were made, {again} makes the rest")
        raise
    rest = (
        "other shards have some left"
        if gathered is None
        else f"all {len(batch.tasks):,} are in {gathered}"
    )
    bars.say(f"{made:,} texts were made; {rest}")


def _run(job: Job, display: Display, signals: Signals) -> None:
    """Run a job, and say how it ended.

    Raises:
        Exit, KeyboardInterrupt: something stopped it; what was made is saved.
    """
    for line in job.statement():
        display.say(line)
    try:
        with writing_stdout(), display:
            job.run(display.show, display.show_prefill, signals)
    except OSError as error:  # the folder's own errors are told by the job
        abandon_stdout()
        complain(f"stdout cannot be written to ({error.strerror}); {job.saved()}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt as stop:
        with suppress(OSError):  # a terminal that was closed
            display.summary(job)
            display.say(f"{str(stop) or 'interrupted'}; {job.saved()}")
        raise
    display.summary(job)
