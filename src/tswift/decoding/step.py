"""One step of a decode, whoever computes it: propose, forward, draw, walk, commit.

:class:`Stepper` has the order of a step, and what follows from it for the text.
``loop.HostStepper`` and ``device_step.DeviceStepper`` say how each part is done. A step is
:data:`~tswift.decoding.work.Work`: it stops where it wants a pass, which other texts may share.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tswift.decoding.drafter import Context, Drafter, Step, TruncateFn, WalkFn
from tswift.decoding.work import Work, alone
from tswift.forward.passes import Forwarded
from tswift.forward.target import Target
from tswift.sampling.rule import NoTokenLeft, Sampler

T = TypeVar("T")  # a proposal: the draft tree, or where it is on the device


class Walked(NamedTuple):
    """What a verification of a draft tree came to.

    Attributes:
        path: the accepted nodes, root first; none if there was nothing to draw after one of them.
        tokens: the accepted draft, and the token drawn after it.
        sources: the name of each node's draft source.
        nodes: how many nodes carried a token.
        forwarded, logits: the pass and its logits ``[n, V]``.
        leads: of each node its token's runner-up, and the lead over that; none if not asked for.
        drafted: as for :class:`~tswift.decoding.drafter.Step`.
    """

    path: Sequence[int]
    tokens: list[int]
    sources: Sequence[str]
    nodes: int
    forwarded: Forwarded
    logits: Tensor
    leads: Sequence[tuple[int, float]] = ()
    drafted: int | None = None


class Stepper(ABC, Generic[T]):
    """Takes the steps of one prefilled decode.

    Args:
        target, context, drafter: the model that draws, the decode, which moves on, and what
            proposes the draft trees.
        simulate: as for :class:`~tswift.decoding.loop.Decoding`.

    Attributes:
        runs_ahead: whether the device may know of a token that the text has not yet.
    """

    runs_ahead = False
    _propose: Callable[[int], T]  # drafts a tree for a step of at most so many tokens

    def __init__(
        self,
        target: Target,
        context: Context,
        drafter: Drafter,
        simulate: WalkFn | None = None,
    ) -> None:
        self._target = target
        self._context = context
        self._drafter = drafter
        self._simulate = simulate
        self._elsewhere = 0.0  # seconds of the step under way that went to other texts

    def step(self, max_new: int, truncate: TruncateFn = len) -> Step:
        """Take a step whose passes nobody shares; see :meth:`stepping`."""
        return alone(self.stepping(max_new, truncate))

    @torch.inference_mode()
    def stepping(self, max_new: int, truncate: TruncateFn = len) -> Work[Step]:
        """Take a step: at least one token is added to the context's text,
        and what was forwarded to its cache.

        Args:
            max_new: most tokens to add.
            truncate: how many of the tokens drawn belong to the text.

        Raises:
            NoTokenLeft: nothing can be drawn.
        """
        started = time.perf_counter()
        context = self._context
        drafter = self._drafter
        proposed = self._propose(max_new)
        drafted = time.perf_counter()
        self._elsewhere = 0.0
        walked = yield from self._walk(proposed)
        if not walked.path and (root := self._without_draft(proposed)) is not None:
            # not yet a fault: a drafted token may overflow in the model, and its NaN spreads in the
            # pass
            walked = yield from self._walk(root)
        if not walked.path:
            raise NoTokenLeft(walked.logits[0])
        new = walked.tokens
        kept = new[: truncate(new)]
        path = walked.path[: len(kept)]
        logprobs = None
        if context.recorder is not None:
            logprobs = context.recorder.record(walked.logits[path], kept)
        self._commit(walked)
        context.text += new
        context.last = walked.forwarded
        context.path = walked.path
        context.logits = walked.logits
        context.drafting = drafted - started
        context.passing = time.perf_counter() - drafted - self._elsewhere
        drafter.committed(context)
        self._look_ahead()
        accepted = min(len(walked.path) - 1, len(kept))
        return Step(
            tuple(kept),
            accepted,
            walked.sources[walked.path[accepted]],
            walked.nodes,
            time.perf_counter() - started,
            tuple(walked.leads[node] for node in path) if walked.leads else (),
            drafter.choice,
            logprobs,
            walked.drafted,
        )

    def restart(self, text: list[int], sampler: Sampler) -> None:
        """Continue another decode with the same prompt and cache: its text, which grows,
        and a copy of its sampler.
        """
        self._context.text = text
        self._context.sampler = sampler
        self._context.last = None

    @abstractmethod
    def _walk(self, proposed: T) -> Work[Walked]:
        """Forward a tree, draw a token after each node, and walk along what was drawn."""

    @abstractmethod
    def _without_draft(self, proposed: T) -> T | None:
        """The proposal's root alone; None if there is no more of it."""

    @abstractmethod
    def _commit(self, walked: Walked) -> None:
        """Keep the accepted nodes in the cache, and tell the sampler of the new tokens."""

    def _look_ahead(self) -> None:
        """Begin what the next step needs, if it can be known."""
