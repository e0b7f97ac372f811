"""One step of the decode loop: draft a tree, verify it in one pass, keep what the sampling rule would have drawn.

At every node of the tree the rule is applied once, at the node's own position and with its own penalty window; the walk
from the root follows the drawn tokens. So the text is that of plain decoding whatever is drafted. A draft that is
itself decoded, by another model or over another cache, takes the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.sampling import NO_TOKEN
from tswift.decoding.tree import DraftTree
from tswift.models.passes import Forwarded
from tswift.models.target import Target

AcceptFn = Callable[[DraftTree, Sequence[int]], list[int]]  # as DraftTree.walk: the nodes accepted, root first


@dataclass(frozen=True)
class Step:
    """What one verification pass added to the text.

    Attributes:
        tokens: the new tokens: the accepted draft and the one drawn after it.
        accepted: drafted tokens accepted by the verification.
        source: the draft source of the last accepted token; empty if none was accepted.
        nodes: nodes of the draft tree, the root included.
        seconds: wall time of the step, drafting included.
        leads: for each token the runner-up, and its lead over that in score; where they were asked for.
        choice: which of several drafters drafted; empty where there is but one.
    """

    tokens: tuple[int, ...]
    accepted: int
    source: str
    nodes: int
    seconds: float
    leads: tuple[tuple[int, float], ...] = ()
    choice: str = ""


class NoTokenLeft(Exception):
    """There is nothing to draw after the root; the text and the cache are as they were.

    Attributes:
        logits: ``[V]``, of which that is so.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__("nothing to draw")
        self.logits = logits


def decode_step(
    target: Target,
    context: Context,
    drafter: Drafter,
    wanted: int,
    stop: Collection[int] = (),
    walk: AcceptFn | None = None,
    leads: bool = False,
) -> Step:
    """Take a step: at least one token is added to the text, and what was forwarded to the cache.

    Args:
        target: whose tokens are wanted.
        context: the decode; it is moved on.
        drafter: what is drafted from.
        wanted: most tokens to add.
        stop: tokens that end the text.
        walk: as for :class:`~tswift.decoding.loop.Decoding`.
        leads: whether the step is to tell them.

    Raises:
        NoTokenLeft: there is none to add.
    """
    started = time.perf_counter()
    with torch.inference_mode():
        tree = drafter.propose(context, wanted)
        forwarded, drawn, path, others = _verify(target, context, tree, walk, leads)
        if len(tree) > 1 and any(drawn[node] == NO_TOKEN for node in path):
            # not yet a fault: a drafted token can be too much for the model, and its NaN spreads in the pass
            tree = DraftTree(context.text[-1], limit=1)
            forwarded, drawn, path, others = _verify(target, context, tree, walk, leads)
        if drawn[path[-1]] == NO_TOKEN:
            raise NoTokenLeft(target.logits(forwarded.hidden)[0])
        new = [tree.tokens[node] for node in path[1:]] + [drawn[path[-1]]]
        context.kv.commit(path)
        context.text += new
        context.sampler.extend(new)
        context.last, context.path = forwarded, path
        drafter.committed(context)
    ends = [index for index, token in enumerate(new) if token in stop]
    kept = new[: ends[0] + 1] if ends else new
    accepted = min(len(path) - 1, len(kept))
    source = tree.sources[path[accepted]]
    near = tuple(others[node] for node in path[: len(kept)]) if leads else ()
    return Step(tuple(kept), accepted, source, len(tree), time.perf_counter() - started, near, drafter.choice)


def _verify(
    target: Target, context: Context, tree: DraftTree, walk: AcceptFn | None, leads: bool
) -> tuple[Forwarded, list[int], list[int], list[tuple[int, float]]]:
    """One pass over a tree, the token drawn after each of its nodes, the nodes accepted, and the leads if asked for."""
    tokens = torch.tensor(tree.tokens).to(target.device, non_blocking=True)
    positions = torch.tensor(tree.depths).to(target.device, non_blocking=True) + context.position
    ancestors = tree.ancestors().to(target.device, non_blocking=True)
    forwarded = target.forward(tokens, positions, context.kv, ancestors)
    logits, others = target.logits(forwarded.hidden), list[tuple[int, float]]()
    context.logits = logits
    if leads:
        seen = context.sampler.seen(tokens, positions, ancestors)
        drawn, others = context.sampler.draw_with_runner_up(logits, seen, positions + 1)
    else:
        drawn = context.sampler.draw_nodes(logits, tokens, positions, ancestors)
    return forwarded, drawn, walk(tree, drawn) if walk else tree.walk(drawn), others
