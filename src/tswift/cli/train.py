"""``tswift train``: heads for a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options, schedule

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid
    from tswift.training.course import Outcome

_HEADS = "Heads"
_PLAN = (*schedule.PLAN, "kind", "heads_count", "objective", "alpha_tokens")


def train(
    context: typer.Context,
    corpus: schedule.Corpus = None,
    seq_len: Annotated[
        int | None,
        options.option(schedule.TEXT, "Tokens of a row; only longer documents are used. (default: 8192)", "--seq-len"),
    ] = None,
    documents: schedule.Documents = None,
    held_out: schedule.HeldOut = None,
    kind: Annotated[
        str | None, options.option(_HEADS, "conditioned or chained. (default: conditioned)", "--kind")
    ] = None,
    heads_count: Annotated[
        int | None,
        options.option(_HEADS, "How many. (default: 3)", "--heads-count"),
    ] = None,
    objective: Annotated[
        str | None,
        options.option(_HEADS, "text, or distill: the model's own distribution there. (default: text)", "--objective"),
    ] = None,
    steps: schedule.Steps = None,
    minutes: schedule.Minutes = None,
    batch: Annotated[
        int | None, options.option(schedule.SCHEDULE, "Rows forwarded together. (default: 3)", "--batch")
    ] = None,
    accumulate: Annotated[
        int | None,
        options.option(schedule.SCHEDULE, "Batches of a step, for each process. (default: 10)", "--accumulate"),
    ] = None,
    lr: Annotated[
        float | None, options.option(schedule.SCHEDULE, "Highest learning rate. (default: 0.005)", "--lr")
    ] = None,
    warmup: schedule.Warmup = None,
    weight_decay: Annotated[
        float | None, options.option(schedule.SCHEDULE, "AdamW's. (default: 0.1)", "--weight-decay")
    ] = None,
    seed: schedule.Seed = None,
    model: schedule.Model = None,
    device: schedule.Device = None,
    dtype: schedule.Dtype = None,
    attention: schedule.Attention = None,
    out: Annotated[
        Path | None,
        options.option(schedule.OUTPUT, "Folder for it all. (default: ./runs/<UTC time>-train)", "--out"),
    ] = None,
    resume: schedule.Resume = None,
    eval_every: schedule.EvalEvery = None,
    save_every: schedule.SaveEvery = None,
    save_minutes: schedule.SaveMinutes = None,
    alpha_tokens: Annotated[
        int | None,
        options.option(
            schedule.OUTPUT,
            "Tokens decoded after each held-out text for alpha, before and after; 0 is none. (default: 256)",
            "--alpha-tokens",
        ),
    ] = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Train heads that draft for a model, whose own weights stay as they are; what is not said is the paper's.

    A folder takes heads.safetensors, figures and checkpoints. Under torchrun, gradients of all processes are averaged.
    """
    given = options.given(context, _PLAN)
    schedule.refuse_unclear(corpus, out, resume)

    from tswift.cli import tables
    from tswift.training import train as training
    from tswift.training.loop import Show
    from tswift.training.plan import TrainPlan

    def work(show: Show) -> Outcome:
        if resume is None:
            return training.train(TrainPlan(**given), out, show, context.obj)
        return training.resume(resume, given, show, context.obj)

    schedule.run("train", "heads.safetensors", work, lambda outcome: tables.show(_grid(outcome)), quiet, no_progress)


def _grid(outcome: Outcome) -> Grid:
    from tswift.benchmarking.grid import Grid
    from tswift.training.plan import TrainPlan

    before, after, plan = outcome.before, outcome.after, outcome.plan
    assert isinstance(plan, TrainPlan)
    rows = [
        [
            str(head + 1),
            f"{head + 2} on",
            f"{before.loss[head]:.3f} -> {after.loss[head]:.3f}",
            *(f"{old:.3f} -> {new:.3f}" for old, new in zip(before.top[head], after.top[head], strict=True)),
        ]
        for head in range(plan.heads_count)
    ]
    notes = []
    if before.alpha is not None and after.alpha is not None:
        notes = [
            f"alpha {before.alpha:.3f} -> {after.alpha:.3f}, "
            f"tokens per step {before.tokens_per_step:.2f} -> {after.tokens_per_step:.2f}: "
            f"{plan.alpha_tokens:,} tokens after each held-out text, by tokenswift with its defaults."
        ]
    title = f"{plan.heads_count} {plan.kind} heads on held-out text, untrained -> after {outcome.steps:,} steps"
    return Grid(title, ["head", "token", "loss", "top-1", "top-2", "top-3"], rows, notes=notes)
