"""A published drafter beside heads: tokens per step, milliseconds per step and of drafting, as chains and as trees.

All decode the same text after one prefill, in turns, so that a machine that slows down slows all of them down. Every
text is compared with that of plain decoding.

    python -m benchmarks.drafters --drafter FOLDER --prompt FILE --prefill 4096 --len 600 --out rows.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tswift
from tswift.drafting.options import DraftOptions
from tswift.engine import begin

SLICE = 60  # tokens that each decodes in its turn
COUNTS = {"draft_s": 0.0, "seconds": 0.0, "steps": 0, "tokens": 0, "nodes": 0}


def plans(budget: int, levels: int, heads: int) -> dict[str, tuple[str, DraftOptions]]:
    """Method and options by the name of a row."""
    bound = {"budget": budget, "sinks": 16}
    rows = {
        "ar": ("ar", DraftOptions()),
        "tokenswift": ("tokenswift", DraftOptions()),
        "medusa": ("medusa", DraftOptions()),
        "medusa, chain": ("medusa", DraftOptions(tree=(1,) * heads)),
        "medusa, tree auto": ("medusa", DraftOptions(tree="auto", recall=0, ngrams=0)),
        "block, chain": ("block", DraftOptions(tree=(1,) * levels, **bound)),
        "block, tree auto": ("block", DraftOptions(recall=0, ngrams=0, **bound)),
    }
    alone = ("medusa", "block, chain", "block, tree auto")
    return rows | {
        f"{name}, no shared noise": (rows[name][0], DraftOptions(**{**rows[name][1].changed(), "shared_noise": False}))
        for name in alone
    }


def measure(model: Any, prompt: list[int], length: int, budget: int) -> list[dict[str, Any]]:
    """A row of figures for each plan."""
    levels, heads = model.target.network.spec.count, model.heads.count
    begun = {
        name: begin(model, prompt, length, method=method, options=options, seed=3)
        for name, (method, options) in plans(budget, levels, heads).items()
    }
    first, *others = [each.decoding for each in begun.values()]
    first.prefill(along=others)
    counts = {name: dict(COUNTS) for name in begun}
    for name, each in begun.items():
        drafter: Any = each.decoding._drafter
        drafter.propose = partial(timed, drafter.propose, counts[name])
    steps, texts = {name: each.steps() for name, each in begun.items()}, {name: list[int]() for name in begun}
    for end in range(SLICE, length + SLICE, SLICE):
        for name, found in counts.items():
            started = time.perf_counter()
            while len(texts[name]) < min(end, length):
                step = next(steps[name])
                texts[name] += step.tokens
                found["steps"] += 1
                found["nodes"] += step.nodes
            found["seconds"] += time.perf_counter() - started
            found["tokens"] = len(texts[name])
    rate = {name: found["tokens"] / found["seconds"] for name, found in counts.items()}
    return [
        {"name": name, **found, "equal": texts[name] == texts["ar"], "x": rate[name] / rate["ar"]}
        for name, found in counts.items()
    ]


def timed(propose: Callable[..., Any], found: dict[str, Any], *given: Any) -> Any:
    """Call a drafter and add up its seconds."""
    started = time.perf_counter()
    tree = propose(*given)
    found["draft_s"] += time.perf_counter() - started
    return tree


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True, help="a folder")
    parser.add_argument("--prompt", type=Path, required=True, help="a text")
    parser.add_argument("--prefill", type=int, default=4096, help="its last tokens are continued: %(default)s")
    parser.add_argument("--len", type=int, default=600, help="tokens: %(default)s")
    parser.add_argument("--budget", type=int, default=512, help="window of the drafter: %(default)s")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    args = parser.parse_args()
    model = tswift.load(drafter=args.drafter)
    ids = model.tokenizer(args.prompt.read_text(), add_special_tokens=False)["input_ids"][-args.prefill :]
    rows = measure(model, ids, args.len, args.budget)
    about = {"prefill": len(ids), "len": args.len, "budget": args.budget, "threads": torch.get_num_threads()}
    about |= {"load": os.getloadavg(), "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    print(about)
    print("| | tokens per step | nodes | ms per step | of drafting | tok/s | x | equal |")
    for row in rows:
        steps, ms = row["steps"], [1e3 * row[name] / row["steps"] for name in ("seconds", "draft_s")]
        print(
            f"| {row['name']} | {row['tokens'] / steps:.2f} | {row['nodes'] / steps:.1f} | {ms[0]:.2f} | {ms[1]:.2f} "
            f"| {row['tokens'] / row['seconds']:.0f} | {row['x']:.2f} | {row['equal']} |"
        )
    if args.out is not None:
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
