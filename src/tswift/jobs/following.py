"""What the ranks but the first do while it runs a job: the same, without a prompt, a folder or a word of their own."""

from __future__ import annotations

from collections.abc import Callable

from tswift.engine import begin
from tswift.models.loading import load
from tswift.models.ranks import Ranks


def follow(ranks: Ranks, stopping: Callable[[], bool]) -> None:
    """Load what the first rank loads, decode what it decodes, and end when it does.

    Args:
        ranks: all of them.
        stopping: whether this rank was asked to stop; all end then, once the step under way is finished.

    Raises:
        InputError: what it asks for cannot be done.
        Gone: another rank is not there any more.
    """
    model = load(ranks=ranks)
    with ranks.together():
        generation = begin(model, (), 0)
        generation.decoding.prefill()
    for _ in generation.steps():
        if stopping():
            break
