"""The process that measures, alone: sections in order, each until its time is up.

python -m benchmarks.gpu.measure --folder runs/gpu --until 1700000000
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.gpu import HELD, SECTIONS, probe
from benchmarks.gpu.clocks import interleaved
from benchmarks.gpu.run import ALPHA, DRY, TOKENS, Run, Scale, at_context, noisy
from benchmarks.peers import Clock
from tswift.benchmarking.roofline import measure_machine, pass_seconds
from tswift.caches import FullKV, PartialKV
from tswift.engine import Generation
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.machine import environment, synchronize
from tswift.models.checkpoint import shape_config
from tswift.models.config import SHAPE_PREFIX
from tswift.models.shapes import random_weights, shape_of
from tswift.sampling.parameters import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, min_p=0.0, penalty=1.0)
_PER_STEP = 40  # tokens for which there is room, per timed step
_PEER_TOKENS = 32


def passes(run: Run, **how: str) -> None:
    """Milliseconds of a pass and its logits beside its floor,
    and of the draft pass over a partial cache.
    """
    target = run.model.target
    contexts = run.scale.contexts[:2]
    full = FullKV(target.kv_shape, max(contexts) + max(run.scale.nodes))
    part = PartialKV(target.kv_shape, run.scale.budget)
    for kv, limit in ((full, max(run.scale.nodes)), (part, 1)):
        noisy(kv)
        target.prepare(kv, limit)
    shape = shape_of(target.model, target.dtype.itemsize, target.kv_shape.dtype.itemsize)
    for context in contexts:
        if run.late():
            return
        runs = {
            ("verify", context, count): probe.one_pass(target, full, count, context)
            for count in run.scale.nodes
        }
        if context == contexts[0]:
            runs["draft", run.scale.budget, 1] = probe.one_pass(target, part, 1, run.scale.budget)
        for (kind, held, count), seconds in interleaved(runs, run.scale.rounds, run.device).items():
            floor = float(pass_seconds(shape, run.machine, held, 1))
            about = {"kind": kind, "context": held, "nodes": count, **how}
            run.note("passes", **about, ms=1e3 * seconds, floor=1e3 * floor, x=seconds / floor)


def steps(run: Run) -> None:
    """A prompt, real steps at several contexts, and what they come to over the whole text."""
    contexts = run.scale.contexts
    for written in (False, True):
        _prompt(run, run.model.target, min(contexts), written)
    _steps(
        run,
        ("ar", None, True, contexts),
        ("tokenswift", None, True, contexts),
        ("medusa", None, True, contexts[:2]),
        ("auto", None, True, contexts[:2]),
        ("cascade", None, True, contexts[:2]),
        ("tokenswift", run.scale.tree // 2, True, contexts),
        ("ar", None, False, contexts[:1]),
    )


def codes(run: Run) -> None:
    """Passes and steps of a model of which something is held in 4 or 8 bits."""
    if run.device.type != "cuda":
        return  # a CPU has other products
    try:
        for how in HELD:
            run.drop_model()
            if run.late():
                return
            run.take(**how)
            _held(run, **how)
    finally:  # what follows measures the model as it is
        run.drop_model()


def _held(run: Run, **how: str) -> None:
    contexts = run.scale.contexts[:2]
    if "weights" in how:
        for written in (False, True):
            _prompt(run, run.model.target, min(contexts), written, **how)
    passes(run, **how)
    methods = ("ar", "auto", "tokenswift")
    _steps(run, *((method, None, True, contexts) for method in methods), **how)


def _steps(run: Run, *kinds: tuple[str, int | None, bool, Sequence[int]], **how: str) -> None:
    """Steps of methods, with so many nodes, exact or not, after so many tokens."""
    contexts = run.scale.contexts
    for method, nodes, exact, some in kinds:
        per_token: dict[int, float] = {}
        about = {"method": method, "nodes": nodes, "exact": exact, **how}
        about["simulated alpha"] = None if method == "ar" else ALPHA
        for context in some:
            if run.late():
                break
            with patch.object(
                run.model.target, "fixed_rows", run.model.target.fixed_rows if exact else None
            ):
                decode = at_context(run.model, method, context, _PER_STEP * run.scale.steps, nodes)
            figures = _timed(run, decode)
            per_token[context] = figures["ms"] / 1e3 / figures["tokens"]
            run.note("steps", **about, context=context, **figures)
            del decode
            run.tidy()
        if len(per_token) > 1:
            seconds = integrated(per_token, min(contexts), TOKENS)
            run.note("integrated", **about, contexts=len(per_token), seconds=seconds)


def _prompt(run: Run, target: Target, tokens: int, written: bool, **how: str) -> None:
    """Seconds of forwarding a prompt, or a text that was written before, the second time."""
    ids = [index * 7919 % target.vocab_size for index in range(tokens)]
    for _ in range(2):
        kv = FullKV(target.kv_shape, tokens)
        synchronize(target.device)
        started = time.perf_counter()
        prefill(target, ids, kv, 0 if written else None)
        synchronize(target.device)
        seconds = time.perf_counter() - started
    wide = target.chunked_text is True
    run.note("prompt", tokens=tokens, written=written, wide=wide, seconds=seconds, **how)


def _timed(run: Run, decode: Generation) -> dict[str, float]:
    """Median milliseconds of a decode's next steps, after some that are not counted,
    and means of what they did.
    """
    steps = decode.steps()
    for _ in range(max(2, run.scale.steps // 3)):
        next(steps)
    marks, taken = [time.perf_counter()], []
    for _ in range(run.scale.steps):
        taken.append(next(steps))
        marks.append(time.perf_counter())
    seconds = median(after - before for before, after in pairwise(marks))
    tokens = mean(len(step.tokens) for step in taken)
    return {"ms": 1e3 * seconds, "tree": mean(step.nodes for step in taken), "tokens": tokens}


def integrated(per_token: Mapping[int, float], prefill: int, tokens: int) -> float:
    """Seconds of a text from those per token at some contexts: straight lines between them,
    and beyond the last one.
    """
    contexts = sorted(per_token)
    seconds = [per_token[context] for context in contexts]
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (contexts[-1] - contexts[-2]))
    places = prefill + tokens * (np.arange(1000) + 0.5) / 1000
    beyond = np.maximum(0, places - contexts[-1])
    return float(tokens * np.mean(np.interp(places, contexts, seconds) + slope * beyond))


def simulated(run: Run) -> None:
    """A text with simulated acceptance, step by step, as far as it comes."""
    length = run.scale.text
    prefill = min(run.scale.contexts)
    steps = at_context(run.model, "tokenswift", prefill, length).steps()
    started = time.perf_counter()
    tokens = 0
    shown = 0
    for count, step in enumerate(steps, 1):
        tokens += len(step.tokens)
        last = tokens >= length or run.late()
        if last or tokens - shown >= length // 10:
            shown = tokens
            seconds = time.perf_counter() - started
            run.note(
                "simulated",
                alpha=ALPHA,
                tokens=tokens,
                steps=count,
                seconds=seconds,
                rate=tokens / seconds,
            )
        if last:
            break


def generate(run: Run) -> None:
    """Our greedy plain decoding, then transformers' own generate, unmodified and not compiled,
    at the same context.
    """
    name = SHAPE_PREFIX + run.scale.main
    context = run.scale.peer
    decode = at_context(run.model, "ar", context, _PER_STEP * run.scale.steps, params=_GREEDY)
    ours = _timed(run, decode)["ms"]
    run.note("generate", what="tswift, ar", context=context, ms=ours, x=1.0)
    del decode
    run.drop_model()
    config = shape_config(name)
    network = random_weights(config, torch.bfloat16, run.device, name).eval()
    network.generation_config.eos_token_id = None  # random weights must not end the text early
    ids = torch.randint(config.vocab_size, (1, context), device=run.device)
    own = {"do_sample": False, "disable_compile": True, "attention_mask": torch.ones_like(ids)}
    clock = Clock()
    network.generate(ids, max_new_tokens=_PEER_TOKENS + 1, streamer=clock, **own)
    half = _PEER_TOKENS // 2  # warm then
    theirs = 1e3 * (clock.times[-1] - clock.times[half]) / (len(clock.times) - 1 - half)
    run.note("generate", what="transformers, generate", context=context, ms=theirs, x=theirs / ours)


def parts(run: Run) -> None:
    """What a pass and a step consist of; one that fails does not take the rest along."""
    for part in (probe.by_kernel, probe.idle, probe.memory, probe.sampler):
        if run.late():
            return
        try:
            part(run)
        except Exception as error:
            traceback.print_exc()
            run.note("left out", why=f"{part.__name__}: {type(error).__name__}: {str(error)[:200]}")
        run.tidy()


_SECTIONS = {each.__name__: each for each in (steps, passes, parts, generate, simulated, codes)}


def main() -> int:
    """Measure; what a section raises is noted, and the next one begins."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.measure")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since the epoch")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    device = torch.device("cpu" if args.dry else "cuda")
    run = Run(args.folder, DRY if args.dry else Scale(), device, "about")
    run.machine = measure_machine(run.device, torch.bfloat16)
    run.note("environment", **{**environment(run.device), **asdict(run.machine)})
    faulthandler.dump_traceback_later(args.until - time.time(), exit=True)  # something hangs then
    failed = False
    for name, seconds in SECTIONS.items():
        run.section = name
        run.until = min(args.until, time.time() + seconds)
        started = time.time()
        state = "done"
        try:
            if not run.late():
                _SECTIONS[name](run)
            run.tidy()
        except Exception as error:
            traceback.print_exc()
            state = f"failed: {type(error).__name__}: {str(error).strip()[:300]}"
            failed = True
        run.note("ended", state=state, seconds=time.time() - started)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
