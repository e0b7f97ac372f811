"""``tswift generate``: continue a text.

Under torchrun, rank 0 runs the command as ever; the other ranks work in lockstep with it and print
nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.cli import options
from tswift.cli.options import as_typed
from tswift.cli.output import (
    BAD_INPUT,
    FAILED,
    OK,
    abandon_stdout,
    complain,
    loading_notice,
    tell,
    writing_stdout,
)
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.batch import Batch, is_batch, reopen
from tswift.jobs.config import RunConfig, TextConfig
from tswift.jobs.folder import read_record
from tswift.models.config import ModelConfig, refuse_missing_heads
from tswift.options import parse_shard
from tswift.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from tswift.cli.output import Display
    from tswift.distributed import Dist
    from tswift.jobs.job import Job, Signals


_TOGETHER = ("generate", "train")


def several() -> bool:
    """Whether torchrun has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def following() -> bool:
    """Whether this is a rank other than 0."""
    return several() and os.environ["RANK"] != "0"


def refuse_copies(command: str) -> None:
    """Refuse a command that would do the same work once per rank."""
    if several() and command not in _TOGETHER:
        raise InputError(f"tswift {command} works in one process; start it without torchrun")


@contextmanager
def leading(device: str) -> Iterator[Dist]:
    """The ranks, connected, for rank 0; a single process without torchrun.

    Raises:
        InputError: they cannot have such devices.
        Gone: one of the others has died.
    """
    from tswift.distributed import ALONE, guard, join

    if not several():
        yield ALONE
        return
    ranks = join(device)
    try:
        with guard():
            yield ranks
    except BaseException:
        ranks.report()
        raise
    ranks.disconnect()


def follow(device: str, parameters: Sequence[Any]) -> int:
    """Load the same model and decode in lockstep with rank 0, with no output; returns an exit code.

    An error is printed by one rank: by rank 0, if it has the same. It names ``parameters`` of the
    command as they are typed.
    """
    from tswift import engine
    from tswift.distributed import Gone, guard, join
    from tswift.jobs.job import Signals
    from tswift.loading import model as load

    ranks = None
    try:
        with Signals() as signals:
            # torchrun passes a signal on to all ranks: rank 0 must not tear a step apart that they
            # make together
            signals.patience = 1
            ranks = join(device)
            model = load.load_model(ModelConfig(), ranks)  # rank 0 says what; so for begin
            with guard():
                generation = engine.begin(model, engine.Request(prompt=(), length=0))
                generation.decoding.prefill()
            for _ in generation.steps():
                if signals.number:
                    break
            ranks.disconnect()
    except Gone as error:
        if ranks is None:
            complain(f"rank {os.environ['RANK']}: {error}")
        return OK if ranks and ranks.left() else FAILED
    except Exception as error:
        # before they have connected, all ranks of a machine find the same
        if not (ranks.reported() if ranks else os.environ["LOCAL_RANK"] != "0"):
            kind = (
                "" if isinstance(error, (InputError, RuntimeError)) else f"{type(error).__name__}: "
            )
            told = as_typed(error, parameters) if isinstance(error, InputError) else str(error)
            complain(f"rank {os.environ['RANK']}: {kind}{told}")
        return BAD_INPUT if isinstance(error, InputError) else FAILED
    return OK


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
        refused = {
            "verify": verify,
            "discard_damaged": discard_damaged,
            "no_progress": no_progress,  # none is shown
        }
        _many(
            typed, prompts, resume, shard, quiet, [name for name, asked in refused.items() if asked]
        )
        return
    if shard is not None:
        raise InputError("goes with --prompts", "shard")
    if discard_damaged and resume is None:
        raise InputError("goes with --resume", "discard_damaged")
    if resume is not None and "out" in typed.values:
        raise InputError("cannot be given together with --resume", "out")
    if verify and several():
        raise InputError("works in one process; tswift verify does it afterwards", "verify")
    # what is mistyped is refused before torch is imported, which takes seconds
    config = RunConfig.of(**typed.values) if resume is None else None
    device = typed.make(ModelConfig).device
    if following():
        raise typer.Exit(follow(device, typed.parameters))
    if resume is not None:
        try:
            read_record(resume)
        except InputError as error:
            raise InputError(error.message, error.field or "resume") from None
    refuse_missing_heads(typed.values.get("heads"))
    said = None if config is None else config.read()
    what = f"the model of {resume}" if config is None else config.model.model
    with ExitStack() as stack:
        with loading_notice(what, quiet):
            from tswift.cli.output import Display
            from tswift.jobs.job import Signals, start
            from tswift.jobs.resuming import resume as resumed

            signals = stack.enter_context(Signals())
            all_of_them = stack.enter_context(leading(device))
            job: Job | None
            if config is not None:
                job = start(config, typed.command, all_of_them, said)
            else:
                assert resume is not None
                job = resumed(resume, typed.values, discard_damaged, typed.command, all_of_them)
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
    quiet: bool,
    refused: Sequence[str],
) -> None:
    """Make the texts of a file of prompts; each goes to stdout as a line of JSON when it ends."""
    if prompts is not None and resume is not None:
        raise InputError("cannot be given together with --prompts", "resume")
    for name in (*refused, *(name for name in _OF_ONE if name in typed.values)):
        raise InputError("is for one text; with --prompts there are many", name)
    if several():
        raise InputError("works in one process", "prompts")
    if resume is not None and typed.values:
        raise InputError("its options are those that it was begun with", next(iter(typed.values)))
    if resume is None and "out" not in typed.values:
        raise InputError("is required with --prompts", "out")
    chosen = parse_shard(shard or "1/1")
    if resume is None:
        assert prompts is not None
        batch = Batch(prompts, typed.values["out"], typed.values)
    else:
        batch = reopen(resume)
    refuse_missing_heads(batch.config.model.heads)
    batch.claim()
    with loading_notice(batch.config.model.model, quiet):
        from tswift.jobs.job import Signals, Stopped
    made = 0
    again = f"tswift generate --resume {shlex.quote(str(batch.out))}"
    again += f" --shard {shard}" if shard else ""
    try:
        with writing_stdout(), Signals() as signals:
            for line in batch.make(batch.of_shard(*chosen), typed.command, signals):
                made += 1
                sys.stdout.buffer.write(f"{line}\n".encode())
                sys.stdout.buffer.flush()
            gathered = batch.gather()
    except Stopped as stop:
        if not quiet:
            complain(f"{stop}; {made:,} texts were made, {again} makes the rest")
        raise
    rest = (
        "other shards have some left"
        if gathered is None
        else f"all {len(batch.tasks):,} are in {gathered}"
    )
    tell(f"{made:,} texts were made; {rest}", quiet)


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
