"""Where the time goes: memory rates, kernels of a pass, tiles of the attention, products, the sampler, idle gaps."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu.run import ALPHA, Run, at_context
from benchmarks.gpu.timing import covered, interleaved, kernels, replayed
from tswift.attention.layout import Layout
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.kv.full import FullKV
from tswift.models.shapes import PREFIX, shape_config

_NAMED = 14  # kernels told of by name
_PROFILED = 10  # steps whose kernels are recorded
_BEYOND_CACHE = 200 << 20  # bytes of weights that no L2 holds


def measure(run: Run) -> None:
    """All parts, the most telling first; one that fails does not take the rest along."""
    for part in (idle, by_kernel, memory, attention, products, sampler):
        if run.late:
            return run.fill_up()
        try:
            part(run)
        except Exception as error:
            traceback.print_exc()
            run.note("left out", why=f"{part.__name__}: {type(error).__name__}: {str(error)[:200]}")
        run.tidy()
    return None


def idle(run: Run) -> None:
    """How much of a real step the device has nothing to do."""
    model, context, count = run.model(run.scale.main), run.scale.contexts[-1], run.scale.steps
    for method in ("tokenswift", "ar"):
        steps = at_context(model, method, context, 24 * count, simulated=method != "ar").steps()
        _take(steps, count)
        started = time.perf_counter()
        _take(steps, count)
        wall = (time.perf_counter() - started) / count
        figures = {}
        if run.device.type == "cuda":
            seen = kernels(partial(_take, steps, _PROFILED), run.device)
            busy = covered((start, end) for _, start, end in seen) / 1e6 / _PROFILED
            figures = {"busy ms": 1e3 * busy, "idle ms": 1e3 * (wall - busy), "kernels": len(seen) / _PROFILED}
        run.note("idle", method=method, context=context, alpha=ALPHA, ms=1e3 * wall, **figures)


def _take(steps: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(steps)


def by_kernel(run: Run) -> None:
    """What a pass consists of: microseconds by kernel."""
    from benchmarks.gpu.measure import one_pass

    target = run.model(run.scale.main).target
    few, many = min(run.scale.contexts), max(run.scale.contexts)
    kv = FullKV(target.kv_shape, many + run.scale.tree)
    kv.keys.normal_()
    kv.values.normal_()
    target.prepare(kv, run.scale.tree)
    for context, nodes in ((many, run.scale.tree), (many, 1), (few, 1)):
        step = one_pass(target, kv, nodes, context)
        seconds = interleaved({"": step}, run.scale.rounds, run.device)[""]
        run.note("pass", context=context, nodes=nodes, ms=1e3 * seconds)
        if run.device.type != "cuda":
            continue
        times, often = Counter[str](), Counter[str]()
        for name, start, end in kernels(step, run.device):
            times[name] += end - start
            often[name] += 1
        for name, microseconds in times.most_common(_NAMED):
            run.note(
                "kernels", context=context, nodes=nodes, kernel=name[:80], count=often[name], us=round(microseconds, 1)
            )


def memory(run: Run) -> None:
    """Rates of reading: from memory, and again and again from the L2."""
    cuda = run.device.type == "cuda"
    big = torch.ones(1 << (30 if cuda else 18), device=run.device)
    run.note("memory", what="DRAM, sum", TBps=big.nbytes / replayed(big.sum, run.device) / 1e12)
    del big
    for megabytes in (8, 16, 24, 32):
        part = torch.ones(megabytes << (18 if cuda else 8), device=run.device).expand(64, -1)
        rate = 4 * part.numel() / replayed(lambda part=part: part.sum(1), run.device) / 1e12
        run.note("memory", what=f"L2, {megabytes} MB read 64 times", TBps=rate)


def attention(run: Run) -> None:
    """One layer's attention of the main shape by nodes, context and configuration of the kernel."""
    from tswift.attention.triton import TritonAttention

    config = shape_config(PREFIX + run.scale.main)
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    groups = config.num_attention_heads // heads
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    layout = Layout(heads, groups, dtype, run.device)
    contexts = (max(run.scale.contexts), min(run.scale.contexts))
    keys, values = torch.randn(2, heads, contexts[0] + 128, size, device=run.device).to(dtype)
    for nodes in run.scale.nodes:
        query = torch.randn(nodes, heads * groups, size, device=run.device).to(dtype).transpose(0, 1)
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool, device=run.device).tril()
        for name, settings in configurations(TritonAttention, layout, nodes, size).items():
            for context in contexts:
                if run.late:
                    return run.fill_up()
                length = torch.tensor(context, dtype=torch.int32, device=run.device)
                about = {"nodes": nodes, "configuration": name, "context": context}
                try:
                    attend = TritonAttention(layout, length, nodes, ancestors, **settings)
                    seconds = replayed(partial(attend, query, keys, values, size**-0.5), run.device)
                except Exception as error:  # a tile that does not fit: the next one may
                    run.note("attention", **about, error=f"{type(error).__name__}: {str(error)[:100]}")
                    break
                moved = 2 * context * heads * size * dtype.itemsize
                run.note("attention", **about, us=1e6 * seconds, TBps=moved / seconds / 1e12)
    return None


def configurations(attention: Any, layout: Layout, nodes: int, size: int) -> dict[str, dict[str, Any]]:
    """Configurations of the kernel to try, by name: further arguments of the attention, which may offer none."""
    offered: Callable[..., dict[str, dict[str, Any]]] | None = getattr(attention, "configurations", None)
    return {"default": {}} if offered is None else {"default": {}, **offered(layout, nodes, size)}


def products(run: Run) -> None:
    """Every product of a layer by rows, alone and with weights joined, and the LM head."""
    config = shape_config(PREFIX + run.scale.main)
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    sizes = {
        "gate+up": (2 * inner, hidden),
        "down": (hidden, inner),
        "qkv": (hidden + 2 * kv, hidden),
        "o": (hidden, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "gate": (inner, hidden),
    }
    for name, (out, width) in sizes.items():
        copies = max(1, _BEYOND_CACHE // (2 * out * width)) if run.device.type == "cuda" else 1
        weights = torch.randn(copies, out, width, device=run.device).to(torch.bfloat16)
        for rows in run.scale.rows:
            if run.late:
                return run.fill_up()
            x = torch.randn(rows, width, device=run.device).to(torch.bfloat16)
            seconds = replayed(lambda w=weights, x=x: [linear(x, each) for each in w], run.device) / copies
            rate = 2 * out * width / seconds / 1e12
            run.note("products", product=name, rows=rows, us=1e6 * seconds, TBps=rate)
    return None


def sampler(run: Run) -> None:
    """Microseconds of drawing a token after every node of a tree: by the wall with its wait, and on the device."""
    vocabulary = shape_config(PREFIX + run.scale.main).vocab_size
    for nodes in run.scale.nodes:
        sampler = Sampler(SamplingParams(banned=(3,)), 0, vocabulary, run.device)
        sampler.extend(list(range(min(400, vocabulary))))
        logits = torch.randn(nodes, vocabulary, device=run.device).to(torch.bfloat16)
        tokens = torch.arange(nodes, device=run.device)
        ancestors = torch.eye(nodes, dtype=torch.bool, device=run.device)
        draw = partial(_draw, sampler, logits, tokens, ancestors)
        for _ in range(3):
            draw()
        started = time.perf_counter()
        for _ in range(run.scale.rounds):
            draw()
        wall = (time.perf_counter() - started) / run.scale.rounds
        run.note("sampler", nodes=nodes, what="draw, wall", us=1e6 * wall)
        if not hasattr(sampler, "draw_rows"):
            continue
        for what in ("eager", "fused"):
            if what == "fused":
                sampler.fuse(torch.bfloat16)
            rows = partial(sampler.draw_rows, logits, tokens, tokens, ancestors)
            run.note(
                "sampler", nodes=nodes, what=f"rows, {what}", us=1e6 * replayed(rows, run.device), why=sampler.fault
            )


def _draw(sampler: Sampler, logits: Tensor, tokens: Tensor, ancestors: Tensor) -> None:
    sampler.draw(logits, sampler.seen(tokens, tokens, ancestors), [7] * len(tokens))
