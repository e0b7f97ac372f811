"""``tswift generate``: continue a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tswift.cli.codes import CLOSED_PIPE, FAILED, INTERRUPTED
from tswift.errors import InputError

_SAMPLING, _DRAFTING, _MODEL, _OUTPUT = "Sampling", "Drafting", "Model", "Output"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def generate(
    context: typer.Context,
    length: Annotated[int, typer.Option("--len", help="Tokens to generate, exactly.")] = 100_000,
    method: Annotated[str, typer.Option(help="ar, medusa, tokenswift or reuse: how to draft.")] = "tokenswift",
    prompt: Annotated[
        str | None,
        typer.Option(
            help="File to continue, - for stdin. (default: the first 1,024 tokens of the bundled novel)",
            show_default=False,
        ),
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(help="Use the prompt's first N tokens only.", metavar="N", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Any integer; with the prompt and the sampling it fixes the text.")] = 0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Stop at an end-of-text token instead of never drawing one.")
    ] = False,
    temperature: Annotated[
        float | None, _option(_SAMPLING, "0 takes the most likely token. (default: 1)", "--temperature")
    ] = None,
    top_k: Annotated[int | None, _option(_SAMPLING, "Keep the K most likely. (default: 0, all)", "--top-k")] = None,
    top_p: Annotated[
        float | None, _option(_SAMPLING, "Keep the likeliest up to this probability. (default: 1, all)", "--top-p")
    ] = None,
    min_p: Annotated[
        float | None, _option(_SAMPLING, "Drop what is below this share of the likeliest. (default: 0.1)", "--min-p")
    ] = None,
    eta: Annotated[float | None, _option(_SAMPLING, "Epsilon of eta sampling. (default: 0, off)", "--eta")] = None,
    penalty: Annotated[
        float | None, _option(_SAMPLING, "Contextual penalty; 1 is none. (default: 1.2)", "--penalty")
    ] = None,
    window: Annotated[int | None, _option(_SAMPLING, "Tokens it looks back on. (default: 1024)", "--window")] = None,
    tree: Annotated[
        str | None, _option(_DRAFTING, "Candidates per drafted level, as 1,3,3,3. (default: by device)", "--tree")
    ] = None,
    gamma: Annotated[
        int | None, _option(_DRAFTING, "Heads to use of the default tree, instead of --tree.", "--gamma")
    ] = None,
    nodes: Annotated[
        int | None, _option(_DRAFTING, "Most nodes of a draft tree. (default: 8 on CPU, 128 on CUDA)", "--nodes")
    ] = None,
    ngrams: Annotated[int | None, _option(_DRAFTING, "4-grams reused per token. (default: 20)", "--ngrams")] = None,
    reuse_recent: Annotated[
        bool | None,
        _option(_DRAFTING, "Reuse text in the penalty window too. (default: no)", "--reuse-recent/--no-reuse-recent"),
    ] = None,
    budget: Annotated[
        int | None, _option(_DRAFTING, "Tokens of the partial KV cache. (default: 4096)", "--budget")
    ] = None,
    sinks: Annotated[int | None, _option(_DRAFTING, "First tokens it always holds. (default: 16)", "--sinks")] = None,
    shared_noise: Annotated[
        bool | None,
        _option(_DRAFTING, "Draft with the noise of the draw. (default: yes)", "--shared-noise/--no-shared-noise"),
    ] = None,
    heads: Annotated[
        str | None,
        _option(_DRAFTING, "chained, conditioned or a file. (default: heads.safetensors beside the model)", "--heads"),
    ] = None,
    model: Annotated[
        str, typer.Option(help="demo (the bundled model), a folder or a hub id.", rich_help_panel=_MODEL)
    ] = "demo",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...", rich_help_panel=_MODEL)] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, float64, bfloat16 or float16.", rich_help_panel=_MODEL)
    ] = "auto",
    attention: Annotated[str, typer.Option(help="auto or sdpa.", rich_help_panel=_MODEL)] = "auto",
    out: Annotated[
        Path | None, _option(_OUTPUT, "Folder for the run. (default: ./runs/<UTC time>-<method>)", "--out")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Nothing on stderr but errors.", rich_help_panel=_OUTPUT)
    ] = False,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="No progress bar and no progress lines.", rich_help_panel=_OUTPUT)
    ] = False,
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
        sampling=_given(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, eta=eta, penalty=penalty, window=window
        ),
        drafting=_given(
            tree=_widths(tree),
            nodes=nodes,
            ngrams=ngrams,
            reuse_recent=reuse_recent,
            budget=budget,
            sinks=sinks,
            shared_noise=shared_noise,
        ),
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
        display.abandon_stdout()
        raise typer.Exit(CLOSED_PIPE) from None
    except OSError as error:  # a full disk, as a rule
        display.abandon_stdout()
        message = f"writing failed ({error.strerror}); what was made is in {job.folder.path}"
        print(f"tswift: error: {message}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    display.summary(job)
    if job.state == STOPPED:
        display.say(f"interrupted; {job.stats.tokens:,} tokens are kept in {job.folder.path}")
        raise typer.Exit(INTERRUPTED)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were typed."""
    return {name: value for name, value in options.items() if value is not None}


def _widths(tree: str | None) -> tuple[int, ...] | None:
    if tree is None:
        return None
    try:
        return tuple(int(width) for width in tree.split(","))
    except ValueError:
        raise InputError(f"wants numbers and commas, such as 1,3,3,3, got {tree!r}", "--tree") from None
