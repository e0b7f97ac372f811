"""A decoding step whose state stays on the device: two programs, drafting and verification,
and one wait of the host.

The step of :mod:`tswift.decoding.loop` sends a tree, waits for the drawn tokens and commits them by
many launches. Here the verification program does all of that: pass, sampling rule, walk, commit. On
CUDA each program is one graph, and the state that it reads and writes stays in place, so that it
serves every step of a decode. A step::

    host    look up n-grams, send a block | launch both programs | wait | read the result
    device  ... the draft                 | verification         | the next draft ...

In plain decoding the host has no part in a step but to read it: the next one is launched before it
does.

A program is warmed up and captured with ``max_new`` = 0 in the block from the host, for which
nothing is committed.

A kernel or a captured graph may be wrong on a card, driver or library that nobody has tried it on.
So device steps are compared with the rule on the host once per model
(``device_step_check.try_steps``). Where they differ, the model's passes are not replayed: decoding
is slower then and not wrong, and the reason is in every record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tswift.decoding import device_tree
from tswift.decoding.device_state import DeviceState, HostBlock
from tswift.decoding.device_tree import Path
from tswift.decoding.drafter import (
    Context,
    DeviceDraft,
    Drafter,
    DraftTree,
    LogitReader,
    WalkFn,
)
from tswift.decoding.step import Stepper, Walked
from tswift.decoding.work import Work
from tswift.forward.cuda.graphs import sizes
from tswift.forward.notes import warn_of_fallbacks
from tswift.forward.passes import Forwarded, Nodes
from tswift.forward.target import Target
from tswift.machine import synchronize
from tswift.sampling.kernels import use_kernels
from tswift.sampling.rule import Sampler

# numbers of the block's first section: tokens wanted, and the node to accept up to (or _BY_RULE)
_CONTROL = 2
_BY_RULE = -1


@torch.inference_mode()
def load_state(state: DeviceState, context: Context) -> None:
    """Take over a decode from the host."""
    if context.last is not None:
        state.hidden[0] = context.last.hidden[context.node]
        if state.pre_norm is not None and context.last.pre_norm is not None:
            state.pre_norm[0] = context.last.pre_norm[context.node]
    state.tokens[0].fill_(context.text[-1])
    state.position.fill_(context.position)
    state.length.fill_(context.kv.length)
    state.last.zero_()


class _Launched(NamedTuple):
    """A verification that has been launched."""

    forwarded: Forwarded
    logits: Tensor
    answer: Tensor  # on the host, what the program leaves; written when the event has come
    event: torch.cuda.Event | None


def _answers(result: Tensor) -> list[tuple[Tensor, torch.cuda.Event | None]]:
    """Two buffers on the host, as one is read while the other may be written."""
    cuda = result.is_cuda
    return [
        (
            torch.zeros(len(result), dtype=torch.int64, pin_memory=cuda),
            torch.cuda.Event() if cuda else None,
        )
        for _ in range(2)
    ]


class _Proposed(NamedTuple):
    """A tree, and the program that verifies it."""

    nodes: int  # that the program verifies
    drafted: bool  # by the device, else sent with the block
    control: tuple[int, int]
    sources: Sequence[str]  # of each node
    more: bool  # whether a step may follow


class DeviceStepper(Stepper[_Proposed]):
    """Takes the steps of one prefilled decode,
    whose cache the target :meth:`serves`, by programs on the device.

    If the drafter gives a :class:`~tswift.decoding.drafter.DeviceDraft`, drafting is a program,
    too; otherwise, and where the drafter says so, the host proposes a tree, which is sent with the
    block.

    Attributes:
        runs_ahead: whether the device may know of a token that the text has not yet: where
            ``ahead`` allows it, a plain step is launched before the host has read the one before.
    """

    @torch.inference_mode()
    def __init__(
        self,
        target: Target,
        context: Context,
        drafter: Drafter,
        simulate: WalkFn | None = None,
        ahead: bool = False,
    ) -> None:
        super().__init__(target, context, drafter, simulate)
        self._kv = context.kv
        self._limit = drafter.limit
        self._depth = drafter.depth
        self._sampler = context.sampler
        self.state = DeviceState(target, self._limit)
        self._draft: DeviceDraft | None = drafter.on_device(self.state)
        own = self._draft.sections() if self._draft else {}
        # whether the host proposes trees, at times
        by_host = self._draft is None or drafter.host_proposes_too
        if by_host:
            own |= {"tokens": self._limit - 1, "parents": self._limit - 1}
        self._block = HostBlock({"control": _CONTROL, **own}, target.device)
        self._longest = longest = min(self._depth + 1, self._limit)
        readers = [each for each in drafter.histories if isinstance(each, LogitReader)]
        self._reader = readers[0] if readers and target.on_cuda else None
        columns = self._reader.columns if self._reader else 0
        # how many tokens, nodes that carried one, the tokens, their nodes, and a digest of the
        # logits as its bits
        self._result = torch.zeros(
            2 + (2 + columns) * longest, dtype=torch.int64, device=target.device
        )
        self._digest = self._result[2 + 2 * longest :].view(torch.float64).view(longest, columns)
        self._answers = cycle(_answers(self._result))
        self._launched: _Launched | None = None  # a plain step ahead of the host
        # states cannot be taken back by the token that the host does not know of yet
        self.runs_ahead = (
            ahead
            and self._limit == 1
            and context.recorder is None
            and not drafter.histories
            and self._kv.states is None
        )
        self._path = Path(longest, self._result)
        self._trees = _tree_operators(target)
        self._drafted = False
        self._block.host["control"][:] = 0, _BY_RULE  # captured programs commit nothing
        load_state(self.state, context)
        use_kernels(context.sampler, target.dtype)
        self._run_draft: Callable[[], None] | None = None
        if self._draft is not None:
            self._draft.begin(context, self._block.host, self._block.device)
            self._run_draft = self._draft.target.capture(self._draft.draft)
        self._block.send()
        if self._draft is not None:
            # the first step sends another block, and a program need not have run by then
            self._draft.complete()
        self._programs = self._capture(by_host)
        load_state(self.state, context)  # a warm-up leaves its hidden states
        synchronize(target.device)  # the block is free to be written again
        for each in [target] if self._draft is None else [target, self._draft.target]:
            warn_of_fallbacks(each)

    def _walk(self, proposed: _Proposed) -> Work[Walked]:
        yield from ()  # nobody shares its passes
        launched = self._launched or self._launch(proposed)
        self._launched = None
        self._drafted = False
        if proposed.nodes > 1 and self._drafts_ahead():
            self._launch_draft()
        elif self.runs_ahead and proposed.more:
            self._launched = self._launch(proposed)
        return self._read(launched, proposed)

    def _without_draft(self, proposed: _Proposed) -> _Proposed | None:
        control = proposed.control[0], _BY_RULE
        return proposed._replace(nodes=1, control=control) if proposed.nodes > 1 else None

    def _commit(self, walked: Walked) -> None:
        count = len(walked.path)
        self._kv.advance(count)
        self._sampler.length += count
        if self._draft is not None:
            self._draft.committed(count)

    def _look_ahead(self) -> None:
        if self._draft is not None and self._drafter.device_drafts() and not self._drafted:
            self._launch_draft()

    def _capture(
        self, by_host: bool
    ) -> dict[tuple[int, bool], Callable[[], tuple[Forwarded, Tensor]]]:
        """A verification for each size of tree, by its nodes and by whether the device drafts."""
        drafted = [(nodes, True) for nodes in (self._draft.sizes if self._draft else ())]
        sent = [(nodes, False) for nodes in (sizes(self._limit) if by_host else ())]
        # not a bound method: where graphs fail, it would hold this object and the cache until
        # garbage is collected
        own_self = weakref.proxy(self)
        return {
            key: self._target.capture(partial(DeviceStepper._verify, own_self, *key))
            for key in drafted + sent
        }

    @torch.inference_mode()
    def restart(self, text: list[int], sampler: Sampler) -> None:
        """Continue another decode with the same prompt and cache: its text, which grows,
        and a copy of its sampler.
        """
        context = self._context
        context.text = text
        context.sampler.length = sampler.length
        context.last = None
        context.sampler.newest.copy_(sampler.newest)
        if sampler.counting:
            context.sampler.counts.copy_(sampler.counts)
        load_state(self.state, context)
        self._launched = None

    def _drafts_ahead(self) -> bool:
        """Whether the next draft may begin before the host has seen what this step accepts.

        A replayed draft may overwrite logits and queries of the verification, so nobody may want
        these.
        """
        if (
            self._draft is None
            or not self._drafter.device_drafts(on=True)
            or self._context.recorder is not None
        ):
            return False
        return self._draft.ready(self._depth + 1)

    def _launch_draft(self) -> None:
        assert self._run_draft is not None
        self._run_draft()
        self._drafted = True

    def _propose(self, max_new: int) -> _Proposed:
        more = max_new > 1
        max_new = min(max_new, self._depth + 1)
        if self._draft is not None and self._drafter.begin_device_step(self._context):
            if not self._drafted:
                self._launch_draft()
            self._draft.prepare(self._context)  # the device is drafting meanwhile
            nodes = 1 if max_new == 1 else self._draft.sizes[-1]
            tree, sources, drafted = self._draft.shape(nodes), self._draft.sources, True
        else:
            tree = self._drafter.propose(self._context, max_new)
            tokens = self._block.host["tokens"]
            parents = self._block.host["parents"]
            count = len(tree)
            tokens[: count - 1] = tree.tokens[1:]
            tokens[count - 1 :] = -1
            parents[: count - 1] = tree.parents[1:]
            parents[count - 1 :] = 0
            nodes = next(
                size for size, by_device in self._programs if size >= count and not by_device
            )
            sources, drafted = tree.sources, False
        return _Proposed(
            nodes, drafted, (max_new, _forced(self._simulate, tree, max_new)), sources, more
        )

    def _launch(self, proposed: _Proposed) -> _Launched:
        """Launch a verification program, whose answer comes to the host."""
        self._block.host["control"][:] = proposed.control
        self._block.send()
        forwarded, logits = self._programs[proposed.nodes, proposed.drafted]()
        answer, event = next(self._answers)
        answer.copy_(self._result, non_blocking=True)
        if event is not None:
            # the default is the current device's
            event.record(torch.cuda.current_stream(self._target.device))
        return _Launched(forwarded, logits, answer, event)

    def _read(self, launched: _Launched, proposed: _Proposed) -> Walked:
        """Wait for a verification; its logits are good until the next program."""
        if launched.event is not None:
            launched.event.synchronize()  # the one wait of a step
        found = launched.answer.numpy()
        count, live, *rest = found[: 2 + 2 * self._longest].tolist()
        tokens = rest[:count]
        path = rest[self._longest :][:count]
        if self._reader is not None:
            digest = found[2 + 2 * self._longest :].view(np.float64).reshape(self._longest, -1)
            self._context.digest = digest[:count].copy()
        state = self.state
        nodes = proposed.nodes
        pre_norm = None if state.pre_norm is None else state.pre_norm[:nodes]
        forwarded = replace(launched.forwarded, hidden=state.hidden[:nodes], pre_norm=pre_norm)
        return Walked(path, tokens, proposed.sources, live, forwarded, launched.logits)

    def _verify(self, nodes: int, drafted: bool) -> tuple[Forwarded, Tensor]:
        """The verification program for trees of ``nodes`` nodes: pass, sampling rule, walk, commit.

        The tree was ``drafted`` by the device, or is in the block. Returns the pass and the logits
        ``[nodes, V]``, good until the next program runs.
        """
        state = self.state
        target = self._target
        sampler = self._sampler
        if self._draft is not None and drafted:
            self._draft.complete()
        else:
            state.tokens[1:].copy_(self._block.device["tokens"])
            state.parents[1:].copy_(self._block.device["parents"])
        kv = self._kv
        path = self._path
        tree = self._trees.lay_out(state, nodes, self._depth)
        own = Nodes(tree.tokens, tree.positions, kv, tree.ancestors)
        forwarded = target.compute_static(own, state.length)
        # what need not be padded again
        rows = forwarded.hidden if forwarded.padded is None else forwarded.padded
        logits = target.logits(rows)[:nodes]
        drawn = sampler.draw_rows(logits, state.tokens[:nodes], tree.positions, tree.ancestors)
        self._trees.walk(state, tree, drawn, self._block.device["control"], sampler, path)
        steps = slice(min(self._longest, nodes))
        sampler.count_rows(path.tokens[steps], path.count)
        if nodes > 1:
            for pair in kv.pairs:
                target.backend.append(pair, pair, path.places[steps], path.slots[steps], path.count)
        if kv.states is not None:
            kv.states.commit_path(path.nodes[steps], path.count)
        if self._draft is not None:
            self._draft.append(kv, path.slots[steps], path.count)
        state.hidden[:nodes].copy_(forwarded.hidden)
        if state.pre_norm is not None and forwarded.pre_norm is not None:
            state.pre_norm[:nodes].copy_(forwarded.pre_norm)
        if self._reader is not None:
            self._digest[steps].copy_(
                self._reader.digest(logits.index_select(0, path.nodes[steps]))
            )
        return forwarded, logits


def _tree_operators(target: Target) -> ModuleType:
    """What lays trees out and walks them: kernels on CUDA,
    if they do what PyTorch's operators do.
    """
    if not target.on_cuda:
        return device_tree
    try:
        from tswift.decoding import device_tree_check, device_tree_triton
    except ImportError:
        return device_tree
    fault = device_tree_check.fault(target.device)
    target.fallbacks.note("trees", fault)
    return device_tree if fault else device_tree_triton


def _forced(simulate: WalkFn | None, tree: DraftTree, max_new: int) -> int:
    """Last node of a simulated path, no deeper than tokens are wanted;
    ``_BY_RULE`` if nothing is simulated.
    """
    if simulate is None:
        return _BY_RULE
    path = simulate(tree, ())
    return path[min(len(path), max_new) - 1]
