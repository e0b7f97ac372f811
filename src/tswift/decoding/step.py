"""One step of a decode, the same for every method: draft a tree, verify it in one pass, keep what the rule draws."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch

from tswift.decoding.drafter import AcceptFn, Context, Drafter, Step, TruncateFn
from tswift.decoding.tree import DraftTree
from tswift.forward.passes import Forwarded
from tswift.forward.target import Target
from tswift.sampling.rule import NO_TOKEN, NoTokenLeft
from tswift.sampling.sampler_c import Drawn


def decode_step(
    target: Target,
    context: Context,
    drafter: Drafter,
    max_new: int,
    truncate: TruncateFn = len,
    accept: AcceptFn | None = None,
    with_runner_up: bool = False,
) -> Step:
    """Take a step: at least one token is added to the context's text, and what was forwarded to its cache.

    Args:
        target, context, drafter: the model that draws, the decode, which moves on, and what proposes the draft tree.
        max_new: most tokens to add.
        truncate: how many of the tokens drawn belong to the text.
        accept: as for :class:`Decoding`.
        with_runner_up: whether to give each token's runner-up and its lead over that.

    Raises:
        NoTokenLeft: nothing can be drawn.
    """
    started = time.perf_counter()
    with torch.inference_mode():
        tree = drafter.propose(context, max_new)
        forwarded, drawn, path, others = _verify(target, context, tree, accept, with_runner_up)
        if len(tree) > 1 and any(drawn[node] == NO_TOKEN for node in path):
            # not yet a fault: a drafted token may overflow in the model, and its NaN spreads in the pass
            tree = DraftTree(context.text[-1], limit=1)
            forwarded, drawn, path, others = _verify(target, context, tree, accept, with_runner_up)
        if drawn[path[-1]] == NO_TOKEN:
            raise NoTokenLeft(target.logits(forwarded.hidden)[0])
        new = [tree.tokens[node] for node in path[1:]] + [drawn[path[-1]]]
        kept = new[: truncate(new)]
        logprobs = None
        if context.recorder is not None and context.logits is not None:
            logprobs = context.recorder.record(context.logits[path[: len(kept)]], kept)
        context.kv.commit(path)
        context.text += new
        context.sampler.extend(new)
        context.last, context.path = forwarded, path
        drafter.committed(context)
    accepted = min(len(path) - 1, len(kept))
    source = tree.sources[path[accepted]]
    near = tuple(others[node] for node in path[: len(kept)]) if with_runner_up else ()
    drafted = max(tree.depths) if drafter.varies else None
    seconds = time.perf_counter() - started
    return Step(tuple(kept), accepted, source, len(tree), seconds, near, drafter.choice, logprobs, drafted)


def _verify(
    target: Target, context: Context, tree: DraftTree, accept: AcceptFn | None, with_runner_up: bool
) -> tuple[Forwarded, list[int], list[int], list[tuple[int, float]]]:
    """One pass over a tree, the token drawn after each node, the accepted nodes, and the leads if asked for."""
    places = [context.position + depth for depth in tree.depths]
    tokens, positions = torch.from_numpy(np.array([tree.tokens, places])).to(target.device, non_blocking=True)
    ancestors = tree.ancestors().to(target.device, non_blocking=True)
    sampler, nodes, parents = context.sampler, (tokens, positions, ancestors), None if accept else tree.parents
    found: Drawn | None = None
    verified = None
    if parents and sampler.program(torch.float32):
        follow = partial(sampler.follow, nodes=nodes, parents=parents, with_runner_up=with_runner_up)
        verified = target.verify(tokens, positions, context.kv, ancestors, follow)
    if verified is not None:
        forwarded, logits, found = verified
    else:
        forwarded = target.forward(tokens, positions, context.kv, ancestors)
        logits = target.logits(forwarded.hidden)
    context.logits, context.digest = logits, None
    drawn, others = found or sampler.draw_nodes(logits, nodes, parents, with_runner_up)
    return forwarded, drawn, accept(tree, drawn) if accept else tree.walk(drawn), others
