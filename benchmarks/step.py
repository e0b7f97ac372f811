"""Where the time of a decoding step goes: microseconds by phase, operators dispatched, and x against plain decoding.

Methods take turns in slices over one text, so that all see the same machine. Phases are exclusive: what a function
calls that is a phase itself is taken off it. Operators are those that PyTorch dispatches.

A method may have a tree after a colon, such as medusa:2x2x1 or medusa:auto.

    python -m benchmarks.step --methods ar,medusa,tokenswift,auto --keys 4096,98304 --len 600
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tswift.attention import native
from tswift.decoding import loop
from tswift.decoding.drafter import Drafter, DraftTree
from tswift.decoding.drawing import DrawProgram
from tswift.decoding.sampling import Sampler
from tswift.drafting import adaptive, chains, dynamic_tree, fixed_tree, heads, history
from tswift.drafting.options import DraftOptions
from tswift.engine import begin
from tswift.jobs.prompt import bundled_prompts
from tswift.kv.cache import FullKV, KVBuffer
from tswift.models import program
from tswift.models.load import load
from tswift.models.target import Target

SLICE = 60  # tokens that each decodes in its turn
KNOWN = 4096  # tokens at the end of a long text whose keys are its own; those before are copies of them
_WRAPPED: list[tuple[Any, str, str]] = [
    (Target, "forward", "pass, Python"),
    (program.PassProgram, "__call__", "pass, Python"),
    (Target, "logits", "LM head"),
    (Sampler, "draw_nodes", "draw, Python"),
    (DrawProgram, "rank", "draw, Python"),
    (DrawProgram, "follow", "pass, LM head, draw"),  # one C call where passes are one
    (heads.DraftingPass, "read", "drafting pass, Python"),
    (heads.HeadSource, "start", "heads, Python"),
    (heads.HeadSource, "propose", "build tree"),
    (heads.HeadTreeSource, "propose", "build tree"),
    (history.HistorySource, "propose", "recall"),
    (chains.CascadeSource, "propose", "chain"),
    (Drafter, "propose", "build tree"),
    (dynamic_tree.DynamicTreeDrafter, "propose", "build tree"),
    (fixed_tree.FixedTreeDrafter, "propose", "build tree"),
    (adaptive.AdaptiveDrafter, "propose", "bandit"),
    (adaptive.AdaptiveDrafter, "learn", "bandit"),
    (DraftTree, "ancestors", "ancestors"),
    (DraftTree, "walk", "accept"),
    (KVBuffer, "commit", "KV keep"),
    (Drafter, "committed", "learn, keep up"),
    (Sampler, "extend", "learn, keep up"),
    (loop, "decode_step", "rest of the step"),
]
_C = {"tswift_forward": "pass, C", "tswift_guess": "heads, C", "tswift_rank": "draw, C"}


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
        held = [(owner, name, vars(owner)[name]) for owner, name, _ in _WRAPPED if name in vars(owner)]
        for owner, name, phase in _WRAPPED:
            if name in vars(owner):
                setattr(owner, name, self.timed(vars(owner)[name], phase))
        try:
            yield
        finally:
            for owner, name, function in held:
                setattr(owner, name, function)


class Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and go on."""
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def fill(decoding: Any, keys: int) -> None:
    """Prefill a decode whose text is longer than :data:`KNOWN`: keys before those are copies, as only time matters."""
    target, kv = decoding._target, decoding._kv
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

    target.chunks = chunks
    try:
        decoding.prefill()
    finally:
        del target.chunks
    assert kv.length == keys - 1


def measure(model: Any, prompt: list[int], methods: Sequence[str], length: int, seed: int) -> list[dict[str, Any]]:
    """A row for each method: seconds without clocks first, then phases, then operators; each in a third of the text."""
    runs = {}
    for name in methods:
        method, _, tree = name.partition(":")
        shape = tuple(map(int, tree.split("x"))) if tree[:1].isdigit() else tree or None
        options = DraftOptions(tree=shape)
        runs[name] = begin(model, prompt, 3 * length, method=method, options=options, seed=seed)
    for each in runs.values():
        fill(each.decoding, len(prompt))
    steps = {name: iter(each.steps()) for name, each in runs.items()}
    rows: dict[str, dict[str, Any]] = {name: defaultdict(float, method=name, keys=len(prompt)) for name in methods}
    texts: dict[str, list[int]] = {name: [] for name in methods}

    def advance(name: str, goal: int, kind: str) -> None:
        row, started = rows[name], time.perf_counter()
        while len(texts[name]) < goal:
            step = next(steps[name])
            texts[name] += step.tokens
            row[f"{kind}_steps"] += 1
            row[f"{kind}_tokens"] += len(step.tokens)
            row[f"{kind}_s"] += step.seconds
            if kind == "free":
                row["nodes"] += step.nodes
                row.setdefault("choices", Counter())[step.choice] += 1
                row.setdefault("sizes", Counter())[step.nodes] += 1
        row[f"{kind}_all_s"] += time.perf_counter() - started

    for goal in range(SLICE, length + 1, SLICE):
        for name in methods:
            advance(name, goal, "free")
    clocks = {name: Clock() for name in methods}
    for goal in range(length + SLICE, length + length // 2 + 1, SLICE):
        for name in methods:
            library = program.library()
            held = {c: getattr(library, c) for c in ("tswift_forward", "tswift_guess")}
            for c, function in held.items():
                setattr(library, c, clocks[name].timed(function, _C[c]))
            with clocks[name].on():
                advance(name, goal, "clocked")
            for c, function in held.items():
                setattr(library, c, function)
    for name in methods:
        with Operators() as counted:
            advance(name, length + length // 2 + 200, "counted")
        rows[name]["operators"] = sum(counted.names.values()) / rows[name]["counted_steps"]
        rows[name]["by_operator"] = {
            o: round(n / rows[name]["counted_steps"], 2) for o, n in counted.names.most_common(25)
        }
        rows[name]["phases"] = {
            phase: ns / 1e3 / rows[name]["clocked_steps"] for phase, ns in clocks[name].spent.most_common()
        }
        rows[name]["same"] = all(a == b for a, b in zip(texts[name], texts[methods[0]], strict=False))
    return [dict(row) for row in rows.values()]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each number of keys."""
    plain = rows[0]["free_s"] / rows[0]["free_tokens"]
    print(f"\n{rows[0]['keys']:,} keys")
    print(f"{'':24}" + "".join(f"{row['method']:>15.14}" for row in rows))
    lines: dict[str, list[str]] = {
        "tokens per step": [f"{row['free_tokens'] / row['free_steps']:.2f}" for row in rows],
        "nodes per step": [f"{row['nodes'] / row['free_steps']:.1f}" for row in rows],
        "ms per step": [f"{row['free_s'] / row['free_steps'] * 1e3:.3f}" for row in rows],
        "us per token": [f"{row['free_s'] / row['free_tokens'] * 1e6:.0f}" for row in rows],
        "us between steps": [f"{(row['free_all_s'] - row['free_s']) / row['free_steps'] * 1e6:.1f}" for row in rows],
        "x": [f"{plain / (row['free_s'] / row['free_tokens']):.3f}" for row in rows],
        "operators": [f"{row['operators']:.1f}" for row in rows],
        "same text": [str(row["same"]) for row in rows],
    }
    for phase in dict.fromkeys(phase for row in rows for phase in row["phases"]):
        lines["us " + phase] = [f"{row['phases'].get(phase, 0):.1f}" for row in rows]
    for name, values in lines.items():
        print(f"{name:24}" + "".join(f"{value:>15}" for value in values))
    for row in rows:
        print(
            row["method"], dict(row["choices"]) if len(row["choices"]) > 1 else "", dict(sorted(row["sizes"].items()))
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="ar,medusa,tokenswift,auto")
    parser.add_argument("--keys", default="4096")
    parser.add_argument("--len", type=int, default=600)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--prompt", type=Path, default=bundled_prompts() / "long-novel.txt")
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = load()
    ids = model.tokenizer.encode(given.prompt.read_text())
    found = []
    print(time.strftime("%Y-%m-%d %H:%M"), os.uname().nodename, torch.get_num_threads(), "threads", native.__name__)
    for keys in map(int, given.keys.split(",")):
        prompt = (ids * (keys // len(ids) + 1))[:keys]
        rows = measure(model, prompt, given.methods.split(","), given.len, given.seed)
        found += rows
        show(rows)
        if given.operators:
            for row in rows:
                print(row["method"], row["by_operator"])
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
