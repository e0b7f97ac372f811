"""``tswift train-draft``: a small model that drafts for a large one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tswift.cli.train import command
from tswift.training.config import DraftConfig

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid
    from tswift.training.run import Outcome


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


train_draft = command(
    DraftConfig,
    "model.safetensors",
    _grid,
    """Train a small model from random weights that drafts for a model, with that one's vocabulary.

    A folder takes the model, to be given to --draft-model, figures and checkpoints.
    """,
)
