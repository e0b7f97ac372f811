"""``tswift train-draft``: a small model that drafts for a large one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options, schedule

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid
    from tswift.training.course import Outcome

_DRAFT = "Draft model"
_PLAN = (*schedule.PLAN, "shape", "reach", "objective")


def train_draft(
    context: typer.Context,
    corpus: schedule.Corpus = None,
    seq_len: Annotated[
        int | None,
        options.option(schedule.TEXT, "Tokens of a row; only longer documents are used. (default: 512)", "--seq-len"),
    ] = None,
    documents: schedule.Documents = None,
    held_out: schedule.HeldOut = None,
    shape: Annotated[
        str | None,
        options.option(_DRAFT, "demo (as the bundled one), or 205m (the paper's table 11). (default: demo)", "--shape"),
    ] = None,
    reach: Annotated[
        int | None,
        options.option(
            _DRAFT,
            "Positions it is made for; rows jump up to there. (default: the shape's; 131072 for demo, 2048 for 205m)",
            "--reach",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        options.option(_DRAFT, "text, or distill: the large model's distribution. (default: text)", "--objective"),
    ] = None,
    steps: schedule.Steps = None,
    minutes: schedule.Minutes = None,
    batch: Annotated[
        int | None, options.option(schedule.SCHEDULE, "Rows forwarded together. (default: 16)", "--batch")
    ] = None,
    accumulate: Annotated[
        int | None,
        options.option(schedule.SCHEDULE, "Batches of a step, for each process. (default: 1)", "--accumulate"),
    ] = None,
    lr: Annotated[
        float | None,
        options.option(
            schedule.SCHEDULE, "Muon's highest learning rate; 0.15 of it is AdamW's. (default: 0.02)", "--lr"
        ),
    ] = None,
    warmup: schedule.Warmup = None,
    weight_decay: Annotated[
        float | None, options.option(schedule.SCHEDULE, "Muon's. (default: 0.01)", "--weight-decay")
    ] = None,
    seed: schedule.Seed = None,
    model: schedule.Model = None,
    device: schedule.Device = None,
    dtype: schedule.Dtype = None,
    attention: schedule.Attention = None,
    out: Annotated[
        Path | None,
        options.option(schedule.OUTPUT, "Folder for it all. (default: ./runs/<UTC time>-train-draft)", "--out"),
    ] = None,
    resume: schedule.Resume = None,
    eval_every: schedule.EvalEvery = None,
    save_every: schedule.SaveEvery = None,
    save_minutes: schedule.SaveMinutes = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Train a small model from random weights that drafts for a model, with that one's vocabulary.

    A folder takes the model, to be given to --draft-model, figures and checkpoints.
    """
    given = options.given(context, _PLAN)
    schedule.refuse_unclear(corpus, out, resume)

    from tswift.cli import tables
    from tswift.training import draft
    from tswift.training.draft_plan import DraftPlan
    from tswift.training.loop import Show

    def work(show: Show) -> Outcome:
        if resume is None:
            return draft.train(DraftPlan(**given), out, show, context.obj)
        return draft.resume(resume, given, show, context.obj)

    schedule.run("train-draft", draft.MODEL, work, lambda outcome: tables.show(_grid(outcome)), quiet, no_progress)


def _grid(outcome: Outcome) -> Grid:
    from tswift.benchmarking.grid import Grid

    before, after = outcome.before, outcome.after
    rows = [
        ["loss on held-out text", f"{before.loss:.3f}", f"{after.loss:.3f}", f"{after.target_loss:.3f}"],
        ["draws the same token", f"{before.agreement:.3f}", f"{after.agreement:.3f}", "1.000"],
    ]
    notes = ["Same token: both draw by the defaults of generate, with the same noise, after the same held-out text."]
    title = f"A draft model after {outcome.steps:,} steps, and the model that it drafts for"
    return Grid(title, ["", "untrained", "trained", "the model"], rows, notes=notes)
