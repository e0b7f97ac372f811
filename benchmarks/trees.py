"""Which draft tree pays on this machine? (development only)

For a context of N tokens taken from a finished run, decode the same next tokens with every tree, in interleaved slices,
and print tokens per step, nodes per step, time per token, and the speedup over plain decoding in the same slices.

    python benchmarks/trees.py RUN_FOLDER --context 50000 --tokens 400
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import tswift
from tswift.decoding.loop import Decoding
from tswift.decoding.stats import DecodeStats
from tswift.decoding.step import Step
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions

DEFAULT = [
    "tokenswift:1:2:0",
    "tokenswift:1,1,1,1:5:0",
    "tokenswift:1,2,2,2:8:20",
    "tokenswift:1,2,2,2:12:20",
    "tokenswift:1,3,3,3:11:20",
    "tokenswift:1,3,3,3:128:20",
    "medusa:1,1,1:4:0",
    "medusa:2,2,2:8:0",
    "medusa:3,3,3:128:0",
]


def main() -> None:
    """Parse, decode in slices, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder of `tswift generate`")
    parser.add_argument("--cases", nargs="+", default=DEFAULT, help="METHOD:TREE:NODES:NGRAMS (default: %(default)s)")
    parser.add_argument("--context", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    model = tswift.load()
    prompt = np.fromfile(args.run / "tokens.u32", dtype="<u4")[: args.context].tolist()
    if len(prompt) < args.context:
        parser.error(f"{args.run} has {len(prompt)} tokens, --context wants {args.context}")
    params = tswift.SamplingParams(banned=tuple(model.eos_ids))
    running: dict[str, tuple[Decoding, Iterator[Step], DecodeStats]] = {}
    for case in ["ar:1:1:0", *args.cases]:
        method, tree, nodes, ngrams = case.split(":")
        widths = tuple(int(width) for width in tree.split(","))
        options = DraftOptions(tree=widths, nodes=max(2, int(nodes)), ngrams=int(ngrams))
        drafter = make_drafter(method, model.target, model.heads, options)
        decoding = Decoding(model.target, prompt, params, args.seed, drafter, args.tokens)
        print(f"{case}: prefill {decoding.prefill():.1f} s", file=sys.stderr)
        running[case] = (decoding, decoding.steps(), DecodeStats(drafter.depth))
    for part in range(1, args.slices + 1):
        for _, steps, stats in running.values():
            while stats.tokens < args.tokens * part // args.slices:
                stats.add(next(steps))
    baseline = next(iter(running.values()))[2].tokens_per_second
    print(f"context {args.context}, {args.tokens} tokens")
    print(f"{'method:tree:nodes:ngrams':32} {'alpha':>6} {'tok/step':>8} {'nodes':>6} {'ms/step':>8} {'x':>6}")
    for case, (_, _, stats) in running.items():
        per_step = 1e3 * stats.seconds / stats.passes
        print(
            f"{case:32} {stats.alpha:6.3f} {stats.tokens_per_step:8.2f} {stats.nodes / stats.passes:6.1f} "
            f"{per_step:8.2f} {stats.tokens_per_second / baseline:6.2f}"
        )


if __name__ == "__main__":
    main()
