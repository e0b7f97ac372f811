"""What a step of the real loop takes beyond its device: the host's share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import mean, median
from typing import Any

import torch

from benchmarks.gpu.passes import one_pass
from benchmarks.gpu.session import Session
from benchmarks.gpu.timing import busy_seconds, interleaved
from tswift.benchmarking.published import published_rows
from tswift.benchmarking.simulated import SimulatedWalk
from tswift.decoding.generation import Generation, begin
from tswift.decoding.params import SamplingParams
from tswift.decoding.step import Step
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load
from tswift.models.shapes import PREFIX

GREEDY = "ar, greedy"  # what transformers' generate is held against
_PROMPT = 64
_SPARE = 16  # tokens for which there is room, per step


def published_alpha() -> float:
    """The paper's acceptance of TokenSwift on LLaMA3.1-8b, 100,000 tokens after a prompt of 4,096 (its table 3)."""
    wanted = (3, "tokenswift", "LLaMA3.1-8b", 4096, 100_000)
    rows = published_rows()
    return next(row.alpha for row in rows if (row.table, row.method, row.model, row.prefill, row.length) == wanted)


def measure(session: Session) -> str | None:
    """Time steps of plain decoding, sampled and greedy, and of tokenswift; what was found goes to ``loop`` by name."""
    model = load(PREFIX + session.scale.main, device=str(session.device))
    session.content["loop"] = {"shape": session.scale.main, "context": session.scale.place, "methods": {}}
    for name, method, params, alpha in (
        ("ar", "ar", SamplingParams(), None),
        ("tokenswift", "tokenswift", SamplingParams(), published_alpha()),
        (GREEDY, "ar", SamplingParams(temperature=0.0, min_p=0.0, penalty=1.0), None),
    ):
        session.content["loop"]["methods"][name] = _steps(session, model, method, params, alpha)
        session.keep()
    return None


def at_context(model: LoadedModel, method: str, context: int, steps: int, **settings: Any) -> Generation:
    """A decode that stands at so many tokens without having made them.

    Text and cache length are set by hand and the cache is filled with noise: after random weights a real text would
    mean no more, and a prefill of this length takes longer than what is measured.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.target.vocab_size, (context + 1,), generator=generator).tolist()
    run = begin(model, ids[:_PROMPT], context - _PROMPT + _SPARE * steps, method=method, **settings)
    decoding = run.decoding
    state = decoding._context
    state.kv.keys.normal_()
    state.kv.values.normal_()
    decoding.prefill()
    with torch.inference_mode():
        state.text += ids[_PROMPT:]
        state.sampler.extend(ids[_PROMPT:])
        state.kv.length = context
        decoding._drafter.committed(state)  # fills a partial cache from the full one
    return run


def timed(steps: Iterator[Step], count: int) -> tuple[list[Step], list[float]]:
    """The next steps, and the wall time from each one's end to the next one's."""
    taken, seconds, before = [], [], time.perf_counter()
    for _ in range(count):
        taken.append(next(steps))
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    return taken, seconds


def _steps(
    session: Session, model: LoadedModel, method: str, params: SamplingParams, alpha: float | None
) -> dict[str, Any]:
    scale, device, target = session.scale, session.device, model.target
    walk = None if alpha is None else partial(SimulatedWalk, alpha)
    run = at_context(model, method, scale.place, 3 * scale.steps, params=params, walk=walk)
    steps = run.steps()
    timed(steps, scale.steps // 2)  # not counted: graphs' first replays, the allocator's first blocks
    taken, seconds = timed(steps, scale.steps)
    target.synchronize()
    found: dict[str, Any] = {
        "simulated_alpha": alpha,
        "seconds": seconds,
        "median": median(seconds),
        "mean": mean(seconds),
        "nodes": mean(step.nodes for step in taken),
        "tokens_per_step": mean(len(step.tokens) for step in taken),
    }
    state = run.decoding._context
    position = state.kv.length
    passes = {"verify": one_pass(target, state.kv, round(found["nodes"]), position, position)}
    for source in run.decoding._drafter.sources[:1]:  # the one that drafts with a pass of its own
        drafting: Any = source
        kept = drafting._reader._level.kv
        passes["draft"] = one_pass(target, kept, 1, kept.length, position)
    device_seconds = interleaved(passes, scale.rounds, scale.warmups, device)
    found["passes"] = {name: median(each) for name, each in device_seconds.items()}
    found["beyond_passes"] = found["median"] - sum(found["passes"].values())
    count = max(1, scale.steps // 4)
    try:  # last, for a profiler may slow down what comes after it
        busy = busy_seconds(lambda: timed(steps, count), device)
    except Exception:
        busy = None
        session.omit(f"device time of {method}'s steps", session.blame("profiler"))
    found["busy"] = None if busy is None else busy / count
    found["beyond_device"] = None if busy is None else found["median"] - found["busy"]
    return found
