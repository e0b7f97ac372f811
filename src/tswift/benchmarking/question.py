"""What can be asked of a model and a machine before a job is started."""

from __future__ import annotations

from dataclasses import dataclass

from tswift.errors import InputError
from tswift.models.quantizing import DRAFT_OPTION, KINDS

NODES = (1, 41)  # a plain pass, and the paper's draft tree with its root
_MOST = 1_000_000_000


@dataclass(frozen=True)
class Question:
    """What is to be told.

    Attributes:
        contexts: tokens in the KV cache, to tell a pass's floor at; None for the usual ones as far as the model goes.
        nodes: nodes of a pass; the most of them are the draft tree's.
        prefill: prompt tokens of the decode.
        length: tokens that it generates.
        alpha: the share of drafted tokens that is accepted; None leaves the drafting method out.
        depth: tokens drafted along a path: the paper's gamma + 1, by which alpha is divided.
        budget: tokens of the partial KV cache.
        draft_weights: also tell of a draft with such weights, as for :func:`tswift.load`; None does not.

    Raises:
        InputError: a value outside its range.
    """

    contexts: tuple[int, ...] | None = None
    nodes: tuple[int, ...] = NODES
    prefill: int = 4096
    length: int = 100_000
    alpha: float | None = None
    depth: int = 4
    budget: int = 4096
    draft_weights: str | None = None

    def __post_init__(self) -> None:
        for option, values in (
            ("--context", self.contexts or (1,)),
            ("--nodes", self.nodes),
            ("--prefill", (self.prefill,)),
            ("--len", (self.length,)),
            ("--depth", (self.depth,)),
            ("--budget", (self.budget,)),
        ):
            if min(values) < 1:
                raise InputError(f"must be at least 1, got {min(values)}", option)
            if max(values) > _MOST and option in ("--nodes", "--depth", "--budget"):  # the model bounds the others
                raise InputError(f"must be at most {_MOST:,}, got {max(values):,}", option)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise InputError(f"must be between 0 and 1, got {self.alpha}", "--alpha")
        if self.draft_weights is not None and self.draft_weights not in KINDS:
            raise InputError(f"no {self.draft_weights!r}; there are {', '.join(KINDS)}", DRAFT_OPTION)
