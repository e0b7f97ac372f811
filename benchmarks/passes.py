"""What does a pass cost on this machine? (development only)

Times one verification pass of the bundled model and its logits, for trees of several sizes over caches of several
lengths, interleaved; prints the 33rd percentile in milliseconds, in Markdown. The caches hold random numbers, which
cost what real ones cost.

    python benchmarks/passes.py --contexts 100 4096 25000 50000 100000
"""

from __future__ import annotations

import argparse
import time

import torch

import tswift
from tswift.decoding.tree import DraftTree
from tswift.kv.full import FullKV


def grown(nodes: int) -> DraftTree:
    """A tree of so many nodes, two to a level."""
    tree = DraftTree(5)
    for node in range(1, nodes):
        tree.grow(max(0, node - 1 - (node - 1) % 2), 6 + node, "given")
    return tree


def main() -> None:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 4096, 25_000, 50_000, 100_000])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 5, 8, 12, 16])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--attention", default="auto")
    args = parser.parse_args()
    target = tswift.load(attention=args.attention).target
    trees = [grown(nodes) for nodes in args.nodes]
    print("| context | " + " | ".join(map(str, args.nodes)) + " |")
    print("| --- |" + " --- |" * len(trees))
    for context in args.contexts:
        kv = FullKV(target.kv_shape, context + max(args.nodes))
        kv.keys.normal_()
        kv.values.normal_()
        kv.length = context
        times: list[list[float]] = [[] for _ in trees]
        for _ in range(args.repeat):
            for tree, taken in zip(trees, times, strict=True):
                tokens, positions = torch.tensor(tree.tokens), torch.tensor(tree.depths) + context
                started = time.perf_counter()
                target.logits(target.forward(tokens, positions, kv, tree.ancestors()).hidden)
                taken.append(time.perf_counter() - started)
        shown = " | ".join(f"{1e3 * sorted(taken)[len(taken) // 3]:.1f}" for taken in times)
        print(f"| {context:,} | {shown} |")


if __name__ == "__main__":
    main()
