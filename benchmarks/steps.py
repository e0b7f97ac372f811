"""Where does the time of a decode step go? (development only)

Decodes with the bundled model after a context of random tokens, which cost what real ones cost, and prints the
milliseconds per step that each phase took by itself, what it called not counted; in Markdown.

    python benchmarks/steps.py --context 50000 --method tokenswift --steps 200
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import tswift
from tswift.attention.native import NativeAttention
from tswift.attention.sdpa import TreeAttention
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.sampling import Sampler
from tswift.decoding.tree import DraftTree
from tswift.drafting.heads import DraftingPass, HeadSource
from tswift.drafting.ngrams import ReuseSource
from tswift.drafting.options import DraftOptions
from tswift.engine import begin
from tswift.kv.full import FullKV
from tswift.kv.partial import PartialKV
from tswift.models.heads import ChainedHeads, ConditionedHeads
from tswift.models.target import Target

# a phase within another takes its name as a prefix: attention while drafting is not attention while verifying
PHASES: list[tuple[type, str, str]] = [
    (Decoding, "_step", "step"),
    (Drafter, "propose", "draft"),
    (DraftingPass, "read", "draft"),
    (DraftingPass, "committed", "partial cache"),
    (PartialKV, "select", "selection"),
    (HeadSource, "start", "draft"),
    (HeadSource, "propose", "tree"),
    (ReuseSource, "start", "n-grams"),
    (ReuseSource, "propose", "n-grams"),
    (ChainedHeads, "step", "heads"),
    (ConditionedHeads, "step", "heads"),
    (Target, "forward", "pass"),
    (Target, "logits", "LM head"),
    (Target, "embed", "heads"),
    (TreeAttention, "__init__", "attention"),
    (TreeAttention, "__call__", "attention"),
    (NativeAttention, "__init__", "attention"),
    (NativeAttention, "__call__", "attention"),
    (Sampler, "draw", "sampling"),
    (Sampler, "seen", "sampling"),
    (Sampler, "noise", "sampling"),
    (DraftTree, "ancestors", "tree"),
    (FullKV, "commit", "commit"),
]


class Stopwatch:
    """Times methods of classes, each without what it calls that is timed too."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._within: list[list[Any]] = []  # name, seconds of what was called from there

    def watch(self, owner: type, method: str, name: str) -> None:
        """Replace a method by one that is timed."""
        inner: Callable[..., Any] = getattr(owner, method)

        @wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            drafting = any(frame[0] == "draft" for frame in self._within)
            full = f"draft: {name}" if drafting and name != "draft" else name
            self._within.append([name, 0.0])
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                taken = time.perf_counter() - started
                self.seconds[full] += taken - self._within.pop()[1]
                self.calls[full] += 1
                if self._within:
                    self._within[-1][1] += taken

        setattr(owner, method, timed)


def main() -> None:
    """Parse, prefill, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--method", default="tokenswift")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--nodes", type=int)
    args = parser.parse_args()
    model = tswift.load(dtype=args.dtype, attention=args.attention)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(model.target.vocab_size, (args.context,), generator=generator).tolist()
    run = begin(model, prompt, 8 * args.steps, method=args.method, options=DraftOptions(nodes=args.nodes))
    run.decoding.prefill()
    steps = run.steps()
    for _ in range(10):
        next(steps)
    watch = Stopwatch()
    for phase in PHASES:
        watch.watch(*phase)
    taken = [next(steps) for _ in range(args.steps)]
    tokens, nodes = (
        sum(counts) / args.steps for counts in zip(*((len(s.tokens), s.nodes) for s in taken), strict=True)
    )
    print(f"{args.method}, context {args.context:,}: {tokens:.2f} tokens and {nodes:.1f} nodes per step\n")
    print("| phase | ms | calls |\n| --- | ---: | ---: |")
    for name, seconds in watch.seconds.most_common():
        print(f"| {name} | {1e3 * seconds / args.steps:.2f} | {watch.calls[name] / args.steps:.1f} |")
    print(f"| all | {1e3 * sum(watch.seconds.values()) / args.steps:.2f} | |")


if __name__ == "__main__":
    main()
