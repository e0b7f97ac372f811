"""What exact passes cost: milliseconds of a step with and without, interleaved in one process.

python -m benchmarks.exact_cost --out results/exact-cpu

The cache is filled with noise up to each context, and drafts are accepted at a given rate, so only times mean anything.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import tables
from benchmarks.gpu.run import at_context
from tswift.jobs.environment import environment, now
from tswift.models.load import load

_METHODS = ("ar", "tokenswift")
_ROOM = 12  # tokens for which there is room, per timed step


def main() -> int:
    """Measure and print; with --out also write ``cost.md`` and every sample in ``cost.json``."""
    parser = argparse.ArgumentParser(prog="benchmarks.exact_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--contexts", default="4096,50000")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for dtype in args.dtypes.split(","):
        models = {exact: load(args.model, dtype=dtype, exact=exact) for exact in (False, True)}
        for context in map(int, args.contexts.split(",")):
            decodes = {
                key: at_context(models[key[1]], key[0], context, _ROOM * (args.steps + 5)).steps()
                for key in product(_METHODS, models)
            }
            seconds: dict[tuple[str, bool], list[float]] = {key: [] for key in decodes}
            for number in range(args.steps + 5):
                for key, steps in decodes.items():
                    started = time.perf_counter()
                    next(steps)
                    if number >= 5:  # the first ones warm up
                        seconds[key].append(time.perf_counter() - started)
            samples += [
                {"dtype": dtype, "context": context, "method": method, "exact": exact, "seconds": taken}
                for (method, exact), taken in seconds.items()
            ]
            for method in _METHODS:
                loose, exact = (1e3 * median(seconds[method, width]) for width in (False, True))
                row = {"dtype": dtype, "context": f"{context:,}", "method": method}
                times = {"ms a step, as wide as needed": loose, "exact": exact, "ratio": exact / loose}
                rows.append(row | {name: f"{value:.2f}" for name, value in times.items()})
            del decodes
    print(tables.markdown(rows))
    about = environment(torch.device("cpu"))
    command = shlex.join(["python", "-m", "benchmarks.exact_cost", *sys.argv[1:]])
    machine = f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}"
    how = f"`{command}`, {machine}, {now()}; medians of {args.steps} steps"
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cost.json").write_text(json.dumps({"command": command, **about, "samples": samples}))
        (args.out / "cost.md").write_text(f"# What exact passes cost\n\n{how}\n\n{tables.markdown(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
