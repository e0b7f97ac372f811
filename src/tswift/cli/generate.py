"""``tswift generate``: continue a text."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options, ranks
from tswift.cli.streams import CLOSED_PIPE, FAILED, INTERRUPTED, abandon_stdout, complain, loading, one_line
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.config import RunConfig
from tswift.models.config import ModelConfig

if TYPE_CHECKING:
    from tswift.cli.progress import Display
    from tswift.jobs.job import Job, Signals


@options.takes(RunConfig, SamplingParams, DraftOptions)
def generate(
    typed: options.Typed,
    resume: Annotated[
        Path | None,
        options.option("Output", "Go on with the run in this folder; --len may be raised.", "--resume"),
    ] = None,
    discard_damaged: Annotated[
        bool,
        options.option(
            "Output", "With --resume: where a file is damaged, go on from the last sound token.", "--discard-damaged"
        ),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Audit the text at the end, as tswift verify does.")] = False,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Continue a text. The text goes to stdout as it is made; text, tokens and figures to a folder."""
    if discard_damaged and resume is None:
        raise InputError("goes with --resume", "discard_damaged")
    if resume is not None and "out" in typed.values:
        raise InputError("cannot be given together with --resume", "out")
    if verify and ranks.several():
        raise InputError("works in one process; tswift verify does it afterwards", "verify")
    # what is mistyped is refused before torch is imported, which takes seconds
    config = RunConfig.of(**typed.values) if resume is None else None
    device = typed.make(ModelConfig).device
    if ranks.following():
        raise typer.Exit(ranks.follow(device))
    text = None if config is None else config.read(config.model)
    what = f"the model of {resume}" if config is None else config.model
    with ExitStack() as stack:
        with loading(what, quiet):
            from tswift.cli.progress import Display
            from tswift.jobs.job import Signals
            from tswift.jobs.start import resume as resumed
            from tswift.jobs.start import start

            signals, all_of_them = stack.enter_context(Signals()), stack.enter_context(ranks.leading(device))
            job: Job | None
            if config is not None:
                job = start(config, typed.command, all_of_them, text)
            else:
                assert resume is not None
                job = resumed(resume, typed.values, discard_damaged, typed.command, all_of_them)
        if job is not None:
            _run(job, Display(job.length, quiet, not no_progress), signals)
        elif not quiet:
            done = one_line(f"the run in {resume} is finished; a larger --len goes on with it")
            print(f"tswift: {done}", file=sys.stderr)
    if verify:
        from tswift.cli.verify import verify_folder

        path = resume if job is None else job.folder.path
        assert path is not None
        loaded = None if job is None else job.model
        del job  # and with it the KV cache; the audit needs one of its own
        verify_folder(loaded, path, typed.command, quiet, not no_progress)


def _run(job: Job, display: Display, signals: Signals) -> None:
    """Run a job, and say how it ended.

    Raises:
        Exit: something stopped it; what was made is saved.
    """
    for line in job.statement():
        display.say(line)
    try:
        with display:
            job.run(display.show, display.show_prefill, signals)
    except BrokenPipeError:
        abandon_stdout()
        raise typer.Exit(CLOSED_PIPE) from None
    except OSError as error:  # the folder's own errors are told by the job
        abandon_stdout()
        complain(f"stdout cannot be written to ({error.strerror}); {job.saved()}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt as stop:
        with suppress(OSError):  # a terminal that was closed
            display.summary(job)
            display.say(f"{stop or 'interrupted'}; {job.saved()}")
        raise typer.Exit(getattr(stop, "code", INTERRUPTED)) from None
    display.summary(job)
