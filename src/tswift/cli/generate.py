"""``tswift generate``: continue a text."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options, ranks
from tswift.cli.streams import CLOSED_PIPE, FAILED, INTERRUPTED, abandon_stdout, complain, one_line
from tswift.errors import InputError

if TYPE_CHECKING:
    from tswift.cli.display import Display
    from tswift.jobs.job import Job, Signals
    from tswift.models.ranks import Ranks

_ASKED = (
    *("length", "method", "prompt", "prefill", "seed", "stop_at_eos", "chat", "system", "preset"),
    *("heads", "draft_model", "draft_weights", "device", "dtype", "attention", "exact", "quantize", "out"),
)
_NOT_OF_A_RUN = ("out", "resume", "discard_damaged", "verify", "quiet", "no_progress")


def generate(
    context: typer.Context,
    length: Annotated[int, typer.Option("--len", help="Tokens to generate, exactly.")] = 100_000,
    method: Annotated[
        str,
        typer.Option(
            help="ar, medusa, tokenswift, cascade, recall, reuse, magicdec, standalone, triforce, auto or ar-reference."
        ),
    ] = "tokenswift",
    prompt: options.Prompt = None,
    prefill: options.Prefill = None,
    seed: options.Seed = 0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Stop at an end-of-text token instead of never drawing one.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says: put it into the model's chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: file with a system prompt.", metavar="FILE", show_default=False)
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="The paper's settings, where nothing else is typed: llama3.1-8b, yarn-llama2-7b-128k, qwen2.5-1.5b, "
            "qwen2.5-7b or qwen2.5-14b.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    eta: options.Eta = None,
    penalty: options.Penalty = None,
    window: options.Window = None,
    tree: Annotated[
        str | None,
        options.option("Drafting", "Candidates per drafted level, as 1,3,3,3. (default: by device)", "--tree"),
    ] = None,
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
    model: options.Model = "demo",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    exact: options.Exact = None,
    quantize: options.Quantize = None,
    out: Annotated[
        Path | None, options.option("Output", "Folder for the run. (default: ./runs/<UTC time>-<method>)", "--out")
    ] = None,
    resume: Annotated[
        Path | None,
        options.option("Output", "Go on with the run in this folder; --len may be raised.", "--resume"),
    ] = None,
    discard_damaged: Annotated[
        bool,
        typer.Option(
            "--discard-damaged",
            help="With --resume: where a file is damaged, go on from the last sound token.",
            rich_help_panel="Output",
        ),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Audit the text at the end, as tswift verify does.")] = False,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Continue a text. The text goes to stdout as it is made; text, tokens and figures to a folder."""
    from tswift.cli.display import Display
    from tswift.jobs.job import Signals

    if discard_damaged and resume is None:
        raise InputError("goes with --resume", "--discard-damaged")
    if verify and ranks.several():
        raise InputError("works in one process; tswift verify does it afterwards", "--verify")
    if ranks.following():
        raise typer.Exit(ranks.follow(device))
    with Signals() as signals, ranks.leading(device) as all_of_them:
        if resume is None:
            job: Job | None = _start(context, all_of_them)
        else:
            job = _resume(context, resume, discard_damaged, all_of_them)
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
        verify_folder(loaded, path, context.obj, quiet, not no_progress)


def _start(context: typer.Context, all_of_them: Ranks) -> Job:
    from tswift.jobs.settings import Settings, start

    asked = {name: context.params[name] for name in _ASKED}
    asked["model"] = options.typed(context).get("model")  # or a preset's counts
    tree = context.params["tree"]
    drafting = options.drafting(context) | ({} if tree is None else {"tree": options.widths(tree)})
    settings = Settings(**asked, sampling=options.sampling(context), drafting=drafting)
    return start(settings, context.obj, all_of_them)


def _resume(context: typer.Context, path: Path, discard_damaged: bool, all_of_them: Ranks) -> Job | None:
    from tswift.jobs.resume import resume

    asked = {name: value for name, value in options.typed(context).items() if name not in _NOT_OF_A_RUN}
    if context.params["out"] is not None:
        raise InputError("cannot be given together with --resume", "--out")
    if "tree" in asked:
        asked["tree"] = options.widths(asked["tree"])
    return resume(path, asked, discard_damaged, context.obj, all_of_them)


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
