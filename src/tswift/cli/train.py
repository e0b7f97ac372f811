"""``tswift train``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options, output
from tswift.cli.output import BAD_INPUT, Bars
from tswift.errors import InputError
from tswift.options import Values
from tswift.training.config import TIMES, HeadsConfig, corpus_files

if TYPE_CHECKING:
    from tswift.tables import Table
    from tswift.training.run import Outcome


Out = Annotated[
    Path | None,
    options.option("Options", "Folder for it all. (default: ./runs/<UTC time>-<command>)", "--out"),
]
Resume = Annotated[
    Path | None, options.option("Options", "Go on with the training in this folder.", "--resume")
]


@options.takes(HeadsConfig)
def train(
    typed: options.Typed,
    out: Out = None,
    resume: Resume = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Train heads that draft for a model, whose own weights stay as they are.
    Required: --corpus, or --resume.

    Defaults are the paper's on a GPU, and smaller on a CPU. A folder takes heads.safetensors,
    figures and checkpoints. Under torchrun, gradients of all processes are averaged.
    """
    if resume is not None and out is not None:
        raise InputError("goes on in the folder of --resume", "out")
    if resume is None and "corpus" not in typed.values:
        message = (
            "is required: a folder of .parquet or .txt files, or a hub id such as emozilla/pg19"
        )
        raise InputError(message, "corpus")
    # what is mistyped is refused before torch is imported
    config = HeadsConfig(**typed.of(HeadsConfig)) if resume is None else None
    if config is not None:
        corpus_files(config.corpus)
    elif not os.path.isdir(str(resume)):  # no error of a name that no file has
        raise InputError(f"there is no folder {str(resume)[:80]}", "resume")

    from tswift.models.devices import find_device
    from tswift.training import run as training
    from tswift.training.ranks import find_ranks
    from tswift.training.tasks import HEADS

    first = find_ranks()[0] == 0
    bars = Bars(quiet or not first, not no_progress, single=True)
    try:
        with bars:
            if config is not None:
                on_cpu = find_device(config.device).type == "cpu"
                chosen = HeadsConfig.cpu_defaults(typed.values) if on_cpu else {}
                config = HeadsConfig(**typed.of(HeadsConfig), **chosen)
                words = [f"--{name.replace('_', '-')} {value}" for name, value in chosen.items()]
                note = "on a CPU, to end in minutes rather than days, the defaults are "
                note = note + " ".join(words) if words else ""
                outcome = training.train(config, out, bars, typed.command, note)
            else:
                assert resume is not None
                outcome = training.resume(resume, typed.values, bars, typed.command)
    except InputError:
        if first:
            raise
        raise typer.Exit(BAD_INPUT) from None  # the first process says it
    if first and outcome.after:
        output.show(_grid(outcome))
    if outcome.signum is not None:
        bars.say(
            f"interrupted after step {outcome.steps:,}; tswift train --resume "
            f"{shlex.quote(str(outcome.folder))} goes on"
        )
        raise typer.Exit(128 + outcome.signum)
    bars.say(f"written: {outcome.folder / HEADS}")
    if first:
        _tell_use(outcome.config, outcome.folder / HEADS, bars)


def _tell_use(config: HeadsConfig, heads: Path, bars: Bars) -> None:
    """Say how heads are used; install them, if that is wanted."""
    from tswift.speculators.heads_files import install_heads

    use = f"tswift generate --model {shlex.quote(config.model)}"
    if config.install:
        bars.say(f"installed: {install_heads(config.model, heads)}")
        bars.say(f"{use} drafts with them; --heads none does not")
    else:
        bars.say(f"{use} --heads {shlex.quote(str(heads))} drafts with them")
        folder = shlex.quote(str(heads.parent))
        bars.say(f"tswift train --resume {folder} --install puts them where --model finds them")


def _grid(outcome: Outcome) -> Table:
    from tswift.tables import Table

    before = outcome.before or {}
    after = outcome.after or {}
    config = outcome.config
    notes = []
    if before["alpha"] is not None and after["alpha"] is not None:
        notes = [
            f"alpha {before['alpha']:.3f} -> {after['alpha']:.3f}, "
            f"tokens per step {before['tokens_per_step']:.2f} -> {after['tokens_per_step']:.2f}: "
            f"{config.alpha_tokens:,} tokens after each held-out text, by tokenswift with its "
            "defaults.",
            *_gain(before, after),
        ]
    levels = (
        [(loss, *top) for loss, top in zip(scores["loss"], scores["top"], strict=True)]
        for scores in (before, after)
    )
    rows = [
        [
            str(number),
            f"{number + 1} on",
            *(f"{old:.3f} -> {new:.3f}" for old, new in zip(*level, strict=True)),
        ]
        for number, level in enumerate(zip(*levels, strict=True), 1)
    ]
    title = f"{config.heads_count} {config.kind} heads on held-out text, untrained -> after "
    title += f"{outcome.steps:,} steps"
    return Table(title, ["head", "token", "loss", "top-1", "top-2", "top-3"], rows, notes=notes)


def _gain(before: Values, after: Values) -> list[str]:
    """What was gained in seconds of decoding; nothing for a training that was begun before those
    were measured.
    """
    from tswift.tables import duration

    known = [scores.get(name) for scores in (before, after) for name in TIMES]
    times = [float(seconds) for seconds in known if seconds is not None]
    if len(times) < len(known):
        return []
    old, plain_before, new, plain = times
    faster = plain / new
    notes = [
        f"Decoding took {duration(old)} before and takes {duration(new)} now; plain decoding of "
        f"as many tokens, measured beside it, {duration(plain)}: x {plain_before / old:.2f} -> "
        f"{faster:.2f}."
    ]
    if faster < 1:
        notes.append("Drafting with these heads does not pay here yet: plain decoding is quicker.")
    return notes
