"""Where the time of a decoding step goes: microseconds by phase, operators dispatched, and x against plain decoding.

Methods take turns in slices over one text, so that all see the same machine: first as they are, then with clocks, then
with operators counted. Phases are exclusive: what a function calls that is a phase itself is taken off it.

A method may have a tree after a colon, such as medusa:2x2x1 or medusa:auto.

    python -m benchmarks.step --methods ar,medusa,tokenswift,auto --keys 4096,98304 --len 600
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import tables
from tswift.decoding import loop
from tswift.decoding.drafter import Drafter, DraftTree, Step
from tswift.decoding.drawing import DrawProgram
from tswift.decoding.sampling import Sampler
from tswift.drafting import adaptive, dynamic_tree, fixed_tree, heads, history
from tswift.drafting.options import DraftOptions
from tswift.engine import Generation, begin
from tswift.jobs.config import bundled_prompts
from tswift.kv import FullKV, KVBuffer
from tswift.models import program
from tswift.models.load import load
from tswift.models.target import Target

SLICE = 60  # tokens that each decodes in its turn
KNOWN = 4096  # tokens at the end of a long text whose keys are its own; those before are copies of them
FREE, CLOCKED, COUNTED = "free", "clocked", "counted"  # how a slice runs
_PHASES: dict[str, list[tuple[Any, str]]] = {
    "pass, Python": [(Target, "forward"), (program.PassProgram, "__call__")],
    "LM head": [(Target, "logits")],
    "draw, Python": [(Sampler, "draw_nodes"), (DrawProgram, "rank")],
    "pass, LM head, draw": [(DrawProgram, "follow")],  # one C call where passes are one
    "drafting pass, Python": [(heads.HeadSource, "read")],
    "heads, Python": [(heads.HeadSource, "start")],
    "build tree": [
        *((kind, "propose") for kind in (heads.HeadSource, heads.HeadTreeSource, Drafter)),
        *((kind, "propose") for kind in (dynamic_tree.DynamicTreeDrafter, fixed_tree.FixedTreeDrafter)),
    ],
    "recall": [(history.HistorySource, "propose")],
    "chain": [(dynamic_tree.CascadeSource, "propose")],
    "bandit": [(adaptive.AdaptiveDrafter, "propose"), (adaptive.AdaptiveDrafter, "learn")],
    "ancestors": [(DraftTree, "ancestors")],
    "accept": [(DraftTree, "walk")],
    "KV keep": [(KVBuffer, "commit")],
    "learn, keep up": [(Drafter, "committed"), (Sampler, "extend")],
    "rest of the step": [(loop, "decode_step")],
}
_C = {"tswift_forward": "pass, C", "tswift_guess": "heads, C"}


class Clock:
    """Exclusive nanoseconds by phase, while it runs."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner = [0]

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, whose time counts for the phase."""

        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            self._inner.append(0)
            started = time.perf_counter_ns()
            try:
                return function(*given, **named)
            finally:
                took = time.perf_counter_ns() - started
                self.spent[phase] += took - self._inner.pop()
                self._inner[-1] += took

        return run

    @contextmanager
    def on(self) -> Iterator[None]:
        """Time all phases meanwhile."""
        places = [(phase, *place) for phase, places in _PHASES.items() for place in places]
        library = program.library()
        with ExitStack() as stack:
            for phase, owner, name in places:
                if name in vars(owner):
                    stack.enter_context(patch.object(owner, name, self.timed(vars(owner)[name], phase)))
            for name, phase in _C.items() if library else ():
                stack.enter_context(patch.object(library, name, self.timed(getattr(library, name), phase)))
            yield


class Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and go on."""
        self.number += 1
        return func(*args, **(kwargs or {}))


def fill(decode: Generation, keys: int) -> None:
    """Prefill a decode whose text is longer than :data:`KNOWN`: keys before those are copies, as only time matters."""
    target: Any = decode.decoding._target
    real = target.chunks

    def chunks(text: Sequence[int], cache: FullKV) -> Iterator[Any]:
        known = min(KNOWN, len(text))
        yield from real(text[:known], cache)
        while cache.length < len(text) - 64:
            more = min(cache.length, len(text) - 64 - cache.length)
            for buffer in (cache.keys, cache.values):
                buffer[:, :, cache.length : cache.length + more] = buffer[:, :, :more]
            cache.length += more
        if len(text) > known:
            yield from real(text[cache.length :], cache)

    with patch.object(target, "chunks", chunks):
        decode.decoding.prefill()
    assert decode.decoding._kv.length == keys - 1


@dataclass
class Lane:
    """A method's decode, and its steps by how they ran."""

    steps: Iterator[Step]
    clock: Clock = field(default_factory=Clock)
    operators: Operators = field(default_factory=Operators)
    tokens: list[int] = field(default_factory=list)
    taken: dict[str, list[Step]] = field(default_factory=lambda: {FREE: [], CLOCKED: [], COUNTED: []})
    wall: float = 0.0  # seconds of the free slices, with what is between their steps

    def advance(self, goal: int, how: str) -> None:
        """Decode up to so many tokens."""
        with {FREE: nullcontext(), CLOCKED: self.clock.on(), COUNTED: self.operators}[how]:
            started = time.perf_counter()
            while len(self.tokens) < goal:
                step = next(self.steps)
                self.tokens += step.tokens
                self.taken[how].append(step)
            self.wall += (time.perf_counter() - started) * (how == FREE)

    def row(self, plain: Lane) -> dict[str, Any]:
        """Its figures."""

        def per_token(lane: Lane) -> float:
            return sum(step.seconds for step in lane.taken[FREE]) / sum(len(step.tokens) for step in lane.taken[FREE])

        free, own = self.taken[FREE], per_token(self)
        seconds, count = sum(step.seconds for step in free), len(free)
        return {
            "tokens per step": sum(len(step.tokens) for step in free) / count,
            "nodes per step": sum(step.nodes for step in free) / count,
            "ms per step": 1e3 * seconds / count,
            "us per token": 1e6 * own,
            "us between steps": 1e6 * (self.wall - seconds) / count,
            "x": per_token(plain) / own,
            "operators": self.operators.number / len(self.taken[COUNTED]),
            "same text": all(a == b for a, b in zip(self.tokens, plain.tokens, strict=False)),
            "choices": " ".join(f"{name} {often}" for name, often in Counter(s.choice for s in free).items() if name),
            **{f"us {phase}": ns / 1e3 / len(self.taken[CLOCKED]) for phase, ns in self.clock.spent.most_common()},
        }


def measure(model: Any, prompt: list[int], methods: Sequence[str], length: int, seed: int) -> dict[str, Lane]:
    """A lane for each method: ``length`` tokens free, half as many with clocks, and 200 with operators counted."""
    lanes = {}
    for name in methods:
        method, _, tree = name.partition(":")
        shape = tuple(map(int, tree.split("x"))) if tree[:1].isdigit() else tree or None
        decode = begin(model, prompt, 3 * length, method=method, options=DraftOptions(tree=shape), seed=seed)
        fill(decode, len(prompt))
        lanes[name] = Lane(iter(decode.steps()))
    half = length + length // 2
    goals = [(goal, FREE if goal <= length else CLOCKED) for goal in range(SLICE, half + 1, SLICE)]
    for goal, how in [*goals, (half + 200, COUNTED)]:
        for lane in lanes.values():
            lane.advance(goal, how)
    return lanes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="ar,medusa,tokenswift,auto")
    parser.add_argument("--keys", default="4096")
    parser.add_argument("--len", type=int, default=600)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--prompt", type=Path, default=bundled_prompts() / "long-novel.txt")
    given = parser.parse_args()
    model = load()
    ids = model.tokenizer.encode(given.prompt.read_text())
    for keys in map(int, given.keys.split(",")):
        prompt = (ids * (keys // len(ids) + 1))[:keys]
        lanes = measure(model, prompt, given.methods.split(","), given.len, given.seed)
        plain = next(iter(lanes.values()))
        rows = {name: lane.row(plain) for name, lane in lanes.items()}
        names = dict.fromkeys(name for row in rows.values() for name in row)
        print(f"\n{keys:,} keys, {torch.get_num_threads()} threads\n")
        print(
            tables.markdown([{"": name, **{method: row.get(name) for method, row in rows.items()}} for name in names])
        )


if __name__ == "__main__":
    main()
