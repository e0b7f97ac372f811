"""The sampling rule in Triton kernels against the rule in PyTorch, on random rows: how many, and how many differ.

On CUDA with the kernels as they run there, without it in Triton's interpreter (set TRITON_INTERPRET=1), where it is the
number of launches that takes long: more nodes and smaller parts of the vocabulary make it bearable. Every tree has
sampling parameters, a text and a vocabulary of its own:

    python -m benchmarks.sampler --rows 1000000 --vocab 257-600 --nodes 1024 --block 512
    python -m benchmarks.sampler --rows 250 --vocab 128256 --nodes 16 --block 65536
"""

from __future__ import annotations

import argparse
import platform
import time
from random import Random

import torch
import triton

from tswift.decoding.fused import DTYPES, FusedRule, mismatches, unserved
from tswift.decoding.params import SamplingParams


def random_params(random: Random, vocab_size: int) -> SamplingParams:
    """Parameters that the kernels serve, with all that is odd."""
    banned = random.choice((0, 0, 1, 5, vocab_size // 2))
    params = SamplingParams(
        temperature=random.choice((0.0, 1.0, 1.0, random.uniform(0.1, 2.0), random.uniform(0.1, 2.0), 1e-100)),
        min_p=random.choice((0.0, 0.1, 0.1, random.random(), 1e-9, 1.0)),
        penalty=random.choice((1.0, 1.2, 1.2, random.uniform(1.0, 3.0), 1e100)),
        window=random.choice((0, 1, 2, random.randint(3, 40), 1024, 1 << 40)),
        banned=tuple(random.sample(range(vocab_size), banned)),
        # what is not looked at where the most likely token is taken
        top_k=(top_k := random.choice((0, 3))),
        top_p=random.choice((1.0, 0.5)) if top_k else 1.0,
    )
    return random_params(random, vocab_size) if unserved(params) else params


def main() -> None:
    """Try them, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--vocab", default="257-1024", help="number of token ids, or the least and the most of it")
    parser.add_argument("--nodes", type=int, default=128, help="most nodes of a tree")
    parser.add_argument("--block", type=int, default=FusedRule.BLOCK, help="tokens of a part of the vocabulary")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    FusedRule.BLOCK, FusedRule.MOST_NODES = options.block, triton.next_power_of_2(options.nodes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    least, *most = (int(word) for word in options.vocab.split("-"))
    random, started = Random(options.seed), time.perf_counter()
    rows, wrong = dict.fromkeys(DTYPES, 0), dict.fromkeys(DTYPES, 0)
    while sum(rows.values()) < options.rows:
        vocab_size, dtype = random.randint(least, (most or [least])[0]), random.choice(DTYPES)
        nodes = random.choice((options.nodes, options.nodes, options.nodes, random.randint(1, options.nodes), 1))
        params = random_params(random, vocab_size)
        differ = mismatches(params, vocab_size, nodes, dtype, device, random)
        rows[dtype] += nodes
        wrong[dtype] += differ
        if differ:
            print(f"{differ} of {nodes} rows: {params}, vocabulary {vocab_size}, {dtype}", flush=True)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, Triton's interpreter"
    print(f"torch {torch.__version__}, triton {triton.__version__}, {where}, seed {options.seed}")
    for dtype in DTYPES:
        print(f"{str(dtype).removeprefix('torch.'):10} {rows[dtype]:>11,} rows {wrong[dtype]:>7,} mismatches")
    print(f"vocabulary {options.vocab}: {sum(rows.values()):,} rows, {sum(wrong.values()):,} mismatches, ", end="")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
