"""Where the time goes: idle gaps, kernels of a pass, memory rates, tiles of the attention,
the sampler.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.clocks import covered, interleaved, kernels, replayed
from benchmarks.gpu.run import Run, at_context, noisy
from tswift.attention.sdpa import Layout
from tswift.caches import FullKV, KVBuffer
from tswift.decoding.drafter import DraftTree
from tswift.forward.target import Target
from tswift.models.checkpoint import shape_config
from tswift.models.config import SHAPE_PREFIX
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler

_NAMED = 14  # kernels listed by name
_PROFILED = 10  # steps whose kernels are recorded
# Of the attention kernel: rows and keys of a tile, warps, stages, registers.
_CONFIGURATIONS = [
    (16, 32, 4, 3),
    (16, 64, 4, 3),
    (16, 64, 4, 4),
    (32, 64, 4, 3),
    (64, 32, 4, 2),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 32, 8, 3),
    (128, 32, 8, 4, 128),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (256, 32, 8, 3),
    (256, 32, 16, 3),
]
_CANDIDATES = 3  # per row


def measure(run: Run) -> None:
    """All parts, the most telling first; one that fails does not take the rest along."""
    for part in (idle, by_kernel, memory, attention, sampler, tiles):
        if run.late():
            return
        try:
            part(run)
        except Exception as error:
            traceback.print_exc()
            run.note("left out", why=f"{part.__name__}: {type(error).__name__}: {str(error)[:200]}")
        run.tidy()


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
        target.logits(target.forward(tokens, positions, kv, ancestors).hidden)

    return forward


def idle(run: Run) -> None:
    """How much of a real step the device has nothing to do."""
    model = run.model(run.scale.main)
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
    target = run.model(run.scale.main).target
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


def attention(run: Run) -> None:
    """One layer's attention of the main shape, by nodes and context."""
    _attention(run, run.scale.nodes, [None])


def tiles(run: Run) -> None:
    """The same with other configurations of the kernel."""
    nodes = (run.scale.tree, *(count for count in run.scale.nodes if count != run.scale.tree))
    _attention(run, nodes, _CONFIGURATIONS if run.device.type == "cuda" else _CONFIGURATIONS[:1])


def _attention(run: Run, counts: Sequence[int], tried: Sequence[tuple[int, ...] | None]) -> None:
    from tswift.attention import triton as backend

    config = shape_config(SHAPE_PREFIX + run.scale.main)
    heads = config.num_key_value_heads
    size = config.hidden_size // config.num_attention_heads
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    layout = Layout(heads, config.num_attention_heads // heads, dtype, run.device)
    contexts = (
        (max(run.scale.contexts), min(run.scale.contexts)) if run.device.type == "cuda" else (60,)
    )
    made = {"dtype": dtype, "device": run.device}
    keys, values = torch.randn(2, heads, contexts[0] + 128, size, **made)
    for nodes, tile in product(counts, tried):
        rows = nodes * layout.groups
        if tile and not (rows <= tile[0] <= 2 * max(8, rows) or 64 <= tile[0] < rows):
            continue
        query = torch.randn(nodes, config.num_attention_heads, size, **made).transpose(0, 1)
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool, device=run.device).tril()
        for context in contexts:
            if run.late():
                return
            length = torch.tensor(context, dtype=torch.int32, device=run.device)
            about = {"nodes": nodes, "configuration": str(tile or "in use"), "context": context}
            chosen = (
                (lambda *_, tile=tile: backend.Configuration(*tile))
                if tile
                else backend.configuration
            )
            try:
                with patch.object(backend, "configuration", chosen):
                    attend = backend.TritonAttention(layout, length, nodes, ancestors)
                    seconds = replayed(partial(attend, query, keys, values, size**-0.5), run.device)
            except Exception as error:  # a tile that does not fit: the next one may
                run.note("attention", **about, error=f"{type(error).__name__}: {str(error)[:100]}")
                break
            rate = 2 * context * heads * size * dtype.itemsize / seconds / 1e12
            run.note("attention", **about, us=1e6 * seconds, TBps=rate)


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
                sampler.fuse(torch.bfloat16)
            rows = partial(sampler.draw_rows, logits, tokens, tokens, ancestors)
            run.note(
                "sampler",
                nodes=nodes,
                what=f"rows, {what}",
                us=1e6 * replayed(rows, run.device),
                why=sampler.fault,
            )
