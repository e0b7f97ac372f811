"""The process that measures: sections in the order given, each until its time is up.

python -m benchmarks.gpu.measure --folder runs/gpu passes=60 steps=70
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from benchmarks.gpu import LEAST, probe
from benchmarks.gpu.estimate import estimate
from benchmarks.gpu.run import ALPHA, DRY, TOKENS, Run, Scale, add_tiny_shapes, at_context
from benchmarks.gpu.timing import interleaved
from benchmarks.passes import grown
from tswift.benchmarking.machine import measured
from tswift.benchmarking.roofline import MACHINES, pass_seconds
from tswift.decoding.generation import Generation
from tswift.decoding.params import SamplingParams
from tswift.jobs.environment import environment
from tswift.kv.buffer import KVBuffer
from tswift.kv.full import FullKV
from tswift.kv.partial import PartialKV
from tswift.models.dummy import random_network
from tswift.models.memory import available_bytes
from tswift.models.shapes import PREFIX, shape_config, shape_of
from tswift.models.target import Target

GREEDY = SamplingParams(temperature=0.0, min_p=0.0, penalty=1.0)
_ROOM = 4e9  # bytes left free beside the caches
_PER_STEP = 6  # tokens for which there is room, per step
_PEER_TOKENS = 32


def passes(run: Run) -> None:
    """Passes of the main shape."""
    _passes(run, run.scale.main, run.scale.contexts, run.scale.nodes)


def shapes(run: Run) -> None:
    """A few passes of the other shapes."""
    for name in run.scale.others:
        if run.left < run.scale.load:
            return run.fill_up()
        _passes(run, name, run.scale.contexts[:3], run.scale.nodes[:1] + run.scale.nodes[2:5:2])
    return None


def _passes(run: Run, name: str, contexts: tuple[int, ...], nodes: tuple[int, ...]) -> None:
    """Milliseconds of a pass and its logits beside its floor, and of the draft pass over a partial cache."""
    target = run.model(name).target
    free = available_bytes(target.device)
    each, room = target.kv_shape.bytes_per_token, _ROOM if target.device.type == "cuda" else 0.0
    contexts = tuple(
        context
        for context in contexts
        if context + max(nodes) <= target.max_positions
        and (free is None or (context + max(nodes)) * each + room <= free)
    )
    if not contexts:
        return run.note("left out", why=f"{name}: no context fits")
    full, partial = FullKV(target.kv_shape, max(contexts) + max(nodes)), PartialKV(target.kv_shape, run.scale.budget)
    for kv in (full, partial):
        kv.keys.normal_()
        kv.values.normal_()
    started = time.perf_counter()
    target.prepare(full, max(nodes))
    target.prepare(partial, 1)
    target.synchronize()
    run.note("prepared", shape=name, seconds=time.perf_counter() - started, graphs=target.graphs)
    shape = shape_of(target.model, target.dtype.itemsize)
    for context in contexts:
        if run.late:
            return run.fill_up()
        runs: dict[tuple[str, int, int], Callable[[], Any]] = {
            ("verify", context, count): one_pass(target, full, count, context) for count in nodes
        }
        if context == contexts[0]:
            runs["draft", run.scale.budget, 1] = one_pass(target, partial, 1, run.scale.budget)
        for (kind, held, count), seconds in interleaved(runs, run.scale.rounds, run.device).items():
            floor = float(pass_seconds(shape, run.machine, held, 1))
            published = float(pass_seconds(shape, MACHINES["h200"], held, 1))
            figures = {"ms": 1e3 * seconds, "floor ms": 1e3 * floor, "x": seconds / floor}
            run.note("passes", shape=name, kind=kind, context=held, nodes=count, **figures, h200=1e3 * published)
    return None


def one_pass(target: Target, kv: KVBuffer, nodes: int, length: int) -> Callable[[], Any]:
    """A pass of so many nodes over the first ``length`` tokens of a cache, and its logits; ready to be queued."""
    tree = grown(nodes)
    tokens = torch.tensor(tree.tokens, device=target.device)
    positions = torch.tensor(tree.depths, device=target.device) + length
    ancestors = tree.ancestors().to(target.device)

    def forward() -> None:
        kv.length = length
        target.logits(target.forward(tokens, positions, kv, ancestors).hidden)

    return forward


def steps(run: Run) -> None:
    """Real steps at several contexts, and what they come to over the whole text."""
    run.note("estimate", markdown=estimate(run.scale.main, ALPHA).markdown())
    model = run.model(run.scale.main)
    for method, nodes in (("ar", None), *(("tokenswift", count) for count in run.scale.step_nodes)):
        found: dict[int, float] = {}
        for context in run.scale.contexts:
            if run.late:
                break
            simulated = method != "ar"
            room = (2 * run.scale.steps) * _PER_STEP
            decode = at_context(model, method, context, room, nodes=nodes, simulated=simulated)
            figures = _timed(run, decode)
            found[context] = figures["ms"] / 1e3 / figures["tokens"]
            run.note("steps", method=method, nodes=nodes or "default", context=context, simulated=simulated, **figures)
            del decode
            run.tidy()
        if len(found) > 1:
            seconds = integrated(found, run.scale.prefill, TOKENS)
            about = {"tokens": TOKENS, "prefill": run.scale.prefill, "contexts": len(found), "alpha": ALPHA}
            run.note("integrated from steps", method=method, nodes=nodes or "default", seconds=seconds, **about)
    if run.late:
        run.fill_up()


def _timed(run: Run, decode: Generation) -> dict[str, float]:
    """Median milliseconds of a decode's next steps, after some that are not counted, and means of what they did."""
    steps = decode.steps()
    for _ in range(max(2, run.scale.steps // 3)):
        next(steps)
    taken, seconds, before = [], [], time.perf_counter()
    for _ in range(run.scale.steps):
        taken.append(next(steps))
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    tokens = mean(len(step.tokens) for step in taken)
    return {"ms": 1e3 * median(seconds), "tree": mean(step.nodes for step in taken), "tokens": tokens}


def integrated(per_token: Mapping[int, float], prefill: int, tokens: int) -> float:
    """Seconds of a text from those per token at some contexts: straight lines between them, and beyond the last one."""
    contexts = sorted(per_token)
    seconds = [per_token[context] for context in contexts]
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (contexts[-1] - contexts[-2]))
    places = prefill + tokens * (np.arange(1000) + 0.5) / 1000
    beyond = np.maximum(0, places - contexts[-1])
    return float(tokens * np.mean(np.interp(places, contexts, seconds) + slope * beyond))


def simulated(run: Run) -> None:
    """A text with simulated acceptance, step by step, as far as it comes."""
    scale = run.scale
    steps = at_context(run.model(scale.main), "tokenswift", scale.prefill, scale.text, simulated=True).steps()
    started, tokens, count, shown = time.perf_counter(), 0, 0, 0
    for step in steps:
        tokens, count = tokens + len(step.tokens), count + 1
        last = tokens >= scale.text or run.late
        if last or tokens - shown >= scale.text // 10:
            shown, seconds = tokens, time.perf_counter() - started
            run.note("simulated", alpha=ALPHA, tokens=tokens, steps=count, seconds=seconds, rate=tokens / seconds)
        if last:
            break
    if tokens < scale.text:
        run.fill_up()


class _Watch(BaseStreamer):
    """Notes when each token of ``generate`` arrives; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(run: Run) -> None:
    """Our greedy plain decoding, then transformers' own generate, unmodified and not compiled, at the same context."""
    scale = run.scale
    decode = at_context(run.model(scale.main), "ar", scale.peer, 2 * scale.steps * _PER_STEP, params=GREEDY)
    ours = _timed(run, decode)["ms"]
    run.note("generate", what="tswift, ar", context=scale.peer, ms=ours, x=1.0)
    del decode
    run._model = None
    run.tidy()
    config, name = shape_config(PREFIX + scale.main), PREFIX + scale.main
    network = random_network(config, torch.bfloat16, run.device, name).eval()
    network.generation_config.eos_token_id = None  # random weights must not end the text early
    ids = torch.randint(config.vocab_size, (1, scale.peer), generator=torch.Generator().manual_seed(1)).to(run.device)
    watch = _Watch()
    network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_PEER_TOKENS,
        do_sample=False,
        disable_compile=True,
        streamer=watch,
    )
    times = watch.times[-_PEER_TOKENS // 2 :]
    theirs = 1e3 * mean(after - before for before, after in pairwise(times))
    run.note("generate", what="transformers, generate", context=scale.peer, ms=theirs, x=theirs / ours)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "probe": probe.measure,
    "passes": passes,
    "steps": steps,
    "simulated": simulated,
    "shapes": shapes,
    "generate": generate,
}


def main() -> int:
    """Measure; what a section raises is noted, and the next one begins."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.measure")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("sections", nargs="+", help="NAME=SECONDS")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    if args.dry:
        add_tiny_shapes()
    device = torch.device("cpu" if args.dry else "cuda")
    run = Run(args.folder, DRY if args.dry else Scale(), device)
    run.section = "about"
    run.machine = measured(device, torch.bfloat16)
    run.note("environment", **environment(device))
    run.note("rates", **asdict(run.machine))
    for name, seconds in (section.split("=") for section in args.sections):
        if args.until - time.time() < LEAST:
            break
        run.section, run.until = name, min(args.until, time.time() + float(seconds))
        run.note("begun", until=run.until)
        started, why = time.time(), None
        try:
            SECTIONS[name](run)
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
        run.note("ended", seconds=time.time() - started, why=why)
        try:
            run.tidy()
        except RuntimeError:  # after an illegal access every call fails: a new process goes on
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
