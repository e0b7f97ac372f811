"""``tswift generate``: continue a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tswift.cli import options
from tswift.cli.codes import CLOSED_PIPE, FAILED, INTERRUPTED
from tswift.cli.streams import abandon_stdout


def generate(
    context: typer.Context,
    length: Annotated[int, typer.Option("--len", help="Tokens to generate, exactly.")] = 100_000,
    method: Annotated[str, typer.Option(help="ar, medusa, tokenswift or reuse: how to draft.")] = "tokenswift",
    prompt: options.Prompt = None,
    prefill: options.Prefill = None,
    seed: options.Seed = 0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Stop at an end-of-text token instead of never drawing one.")
    ] = False,
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
    gamma: Annotated[
        int | None, options.option("Drafting", "Heads to use of the default tree, instead of --tree.", "--gamma")
    ] = None,
    nodes: options.Nodes = None,
    ngrams: options.Ngrams = None,
    reuse_recent: options.ReuseRecent = None,
    budget: options.Budget = None,
    sinks: options.Sinks = None,
    shared_noise: options.SharedNoise = None,
    heads: options.HeadsFile = None,
    model: options.Model = "demo",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    out: Annotated[
        Path | None, options.option("Output", "Folder for the run. (default: ./runs/<UTC time>-<method>)", "--out")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Audit the text at the end, as tswift verify does.")] = False,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Continue a text. The text goes to stdout as it is made; text, tokens and figures to a folder."""
    from tswift.cli.display import Display
    from tswift.jobs.job import INTERRUPTED as STOPPED
    from tswift.jobs.settings import Settings, start

    settings = Settings(
        length=length,
        method=method,
        prompt=prompt,
        prefill=prefill,
        seed=seed,
        stop_at_eos=stop_at_eos,
        sampling=options.sampling(context),
        drafting=options.drafting(context) | ({} if tree is None else {"tree": options.widths(tree)}),
        gamma=gamma,
        heads=heads,
        model=model,
        device=device,
        dtype=dtype,
        attention=attention,
        out=out,
    )
    job = start(settings, context.obj)
    display = Display(length, quiet, not no_progress)
    for line in job.statement():
        display.say(line)
    try:
        with display:
            job.run(display.show)
    except BrokenPipeError:
        abandon_stdout()
        raise typer.Exit(CLOSED_PIPE) from None
    except OSError as error:  # a full disk, as a rule
        abandon_stdout()
        message = f"writing failed ({error.strerror}); what was made is in {job.folder.path}"
        print(f"tswift: error: {message}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    display.summary(job)
    if job.state == STOPPED:
        display.say(f"interrupted; {job.stats.tokens:,} tokens are kept in {job.folder.path}")
        raise typer.Exit(INTERRUPTED)
    if verify:
        from tswift.cli.verify import verify_folder

        loaded, path = job.model, job.folder.path
        del job  # and with it the KV cache; the audit needs one of its own
        verify_folder(loaded, path, context.obj, quiet, not no_progress)
