"""Where the time goes: kernels of a pass, idle gaps, rates of memory, the sampler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.clocks import covered, interleaved, kernels, replayed
from benchmarks.gpu.run import Run, at_context, noisy
from tswift.caches import FullKV, KVBuffer
from tswift.decoding.drafter import DraftTree
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.models.checkpoint import shape_config
from tswift.models.config import SHAPE_PREFIX
from tswift.sampling.kernels import use_kernels
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler

_NAMED = 14  # kernels listed by name
_PROFILED = 10  # steps whose kernels are recorded


def one_pass(target: Target, kv: KVBuffer, nodes: int, length: int) -> Callable[[], Any]:
    """A pass of so many nodes over the first ``length`` tokens of a cache, and its logits;
    ready to be queued.
    """
    tree = DraftTree(5)
    for node in range(1, nodes):  # two to a level
        tree.grow(max(0, node - 1 - (node - 1) % 2), 6 + node, "given")
    tokens = torch.tensor(tree.tokens, device=target.device)
    positions = torch.tensor(tree.depths, device=target.device) + length
    ancestors = tree.ancestors().to(target.device)

    def forward() -> None:
        kv.length = length
        target.logits(target.forward(Nodes(tokens, positions, kv, ancestors)).hidden)

    return forward


def idle(run: Run) -> None:
    """How much of a real step the device has nothing to do."""
    model = run.model
    count = run.scale.steps
    context = sorted(run.scale.contexts)[len(run.scale.contexts) // 2]
    for method in ("tokenswift", "ar"):
        steps = at_context(model, method, context, 24 * count).steps()
        _take(steps, count)
        started = time.perf_counter()
        _take(steps, count)
        wall = (time.perf_counter() - started) / count
        figures = {}
        if run.device.type == "cuda":
            seen = kernels(partial(_take, steps, _PROFILED), run.device)
            busy = covered((start, end) for _, start, end in seen) / 1e6 / _PROFILED
            figures = {
                "busy ms": 1e3 * busy,
                "idle ms": 1e3 * (wall - busy),
                "kernels": len(seen) / _PROFILED,
            }
        run.note(
            "idle", method=method, context=context, ms=1e3 * wall, **figures, layers=model.layers
        )


def _take(steps: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(steps)


def by_kernel(run: Run) -> None:
    """What a pass consists of: microseconds by kernel."""
    target = run.model.target
    few = min(run.scale.contexts)
    many = max(run.scale.contexts)
    kv = FullKV(target.kv_shape, many + run.scale.tree)
    noisy(kv)
    target.prepare(kv, run.scale.tree)
    for context, nodes in ((many, run.scale.tree), (many, 1), (few, 1)):
        step = one_pass(target, kv, nodes, context)
        seconds = interleaved({"": step}, run.scale.rounds, run.device)[""]
        run.note("pass", context=context, nodes=nodes, ms=1e3 * seconds)
        times, often = Counter[str](), Counter[str]()
        for name, start, end in kernels(step, run.device) if run.device.type == "cuda" else ():
            times[name] += end - start
            often[name] += 1
        for name, us in times.most_common(_NAMED):
            run.note(
                "kernels", context=context, nodes=nodes, kernel=name[:80], count=often[name], us=us
            )


def memory(run: Run) -> None:
    """Rates of reading: from memory, and again and again from the L2."""
    million = 1 << (20 if run.device.type == "cuda" else 10)
    big = torch.ones(1024 * million, device=run.device)
    run.note("memory", what="DRAM, sum", TBps=big.nbytes / replayed(big.sum, run.device) / 1e12)
    for megabytes in (8, 16, 24, 32):
        part = big[: megabytes * million // 4].expand(64, -1)
        rate = 4 * part.numel() / replayed(partial(part.sum, 1), run.device) / 1e12
        run.note("memory", what=f"L2, {megabytes} MB read 64 times", TBps=rate)


def sampler(run: Run) -> None:
    """Microseconds of drawing a token after every node of a tree: by the wall with its wait,
    and on the device.
    """
    vocabulary = shape_config(SHAPE_PREFIX + run.scale.main).vocab_size
    for nodes in (*run.scale.nodes[:1], 4, *run.scale.nodes[1:]):  # 4: levels of a tree
        sampler = Sampler(SamplingParams(banned=(3,)), 0, vocabulary, run.device)
        sampler.extend(list(range(min(400, vocabulary))))
        logits = torch.randn(nodes, vocabulary, device=run.device).to(torch.bfloat16)
        tokens = torch.arange(nodes, device=run.device)
        ancestors = torch.eye(nodes, dtype=torch.bool, device=run.device)
        for timed in range(2):
            started = time.perf_counter()
            for _ in range(run.scale.rounds):
                sampler.draw(logits, sampler.seen(tokens, tokens, ancestors), [7] * nodes)
            if timed:
                wall = (time.perf_counter() - started) / run.scale.rounds
                run.note("sampler", nodes=nodes, what="draw, wall", us=1e6 * wall)
        for what in ("eager", "fused"):
            if what == "fused":
                use_kernels(sampler, torch.bfloat16)
            rows = partial(sampler.draw_rows, logits, tokens, tokens, ancestors)
            run.note(
                "sampler",
                nodes=nodes,
                what=f"rows, {what}",
                us=1e6 * replayed(rows, run.device),
                why=sampler.fault,
            )
