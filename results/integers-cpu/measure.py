"""What a model of codes costs here: passes by nodes and keys, a prompt, and plain decoding.

The best or median of turns.

python measure.py MODEL [BITS,BITS]: a GGUF file, or another model, with inputs of 16 bits, of 8, or
of both in turn; on an idle machine.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line has it

import torch
from tswift.forward.products import PackedLinear

from tswift.caches import FullKV
from tswift.decoding.loop import Decoding
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.loading.model import load
from tswift.models.codes import PackedCodes
from tswift.sampling.parameters import SamplingParams

NODES, LENGTHS, TURNS, TOKENS = (1, 2, 4, 5, 8, 16), (100, 1000, 4000, 8000, 32000), 25, 150


def seconds(run: Callable[[], object]) -> float:
    """How long a function takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def bandwidth() -> float:
    """GB/s at which PyTorch reads memory."""
    numbers = torch.zeros(1 << 25, dtype=torch.int64)
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(9)) / 1e9


def passes(target: Target, kv: FullKV, length: int) -> None:
    """Time passes of several nodes over so many keys."""

    def run(nodes: int) -> None:
        tokens = torch.zeros(nodes, dtype=torch.int64)
        kv.length = length
        alone = torch.eye(nodes, dtype=torch.bool)
        target.logits(target.forward(tokens, tokens + length, kv, alone).hidden)

    best = dict.fromkeys(NODES, float("inf"))
    for _ in range(TURNS):
        for nodes in NODES:
            best[nodes] = min(best[nodes], seconds(partial(run, nodes)))
    words = (f"{1e3 * each:.2f} ({each / best[1]:.2f})" for each in best.values())
    print(f"| {length:,} | {' | '.join(words)} |", flush=True)


def decoding(target: Target, length: int) -> None:
    """Time the steps of plain decoding after so many tokens."""
    text = torch.randint(target.vocab_size, (length,)).tolist()
    drafter = make_drafter("ar", target, None, DraftOptions(), None)
    steps = Decoding(target, text, SamplingParams(), 3, drafter, TOKENS).steps(())
    next(steps)
    times = [seconds(partial(next, steps)) for _ in range(TOKENS - 1)]
    figures = (1e3 * min(times), 1e3 * median(times), len(times) / sum(times))
    print(f"| {length:,} | {figures[0]:.2f} | {figures[1]:.2f} | {figures[2]:.0f} |", flush=True)


@torch.inference_mode()
def main(model: str, bits: str = "16") -> None:
    """Measure and print."""
    started = time.perf_counter()
    target = load(model, device="cpu").target
    print(f"loaded in {time.perf_counter() - started:.1f} s; reading: {bandwidth():.1f} GB/s")
    own = {id(each): each for each in target.model.modules() if isinstance(each, PackedCodes)}
    print(f"codes and scales: {sum(each.bytes.nbytes for each in own.values()) / 1e6:.1f} MB")
    lengths = [each for each in LENGTHS if each + TOKENS + NODES[-1] <= target.max_positions]
    kv = FullKV(target.kv_shape, lengths[-1] + 600)
    for buffer in kv.buffers:
        buffer.random_(-99, 99)
    for input_bits in map(int, bits.split(",")):
        for layer in target.model.modules():
            if isinstance(layer, PackedLinear):
                layer.input_bits = input_bits
        target.pack()
        print(f"inputs of {input_bits} bits; passes with logits, ms, and over one node's")
        print(f"| keys | {' | '.join(map(str, NODES))} |")
        for length in lengths:
            passes(target, kv, length)
        kv.length = 0
        run = partial(prefill, target, torch.randint(target.vocab_size, (1024,)).tolist(), kv)
        print(f"a prompt of 1,024 tokens: {1024 / seconds(run):.0f} tokens/s")
        print("| plain decoding after | least, ms | median | tokens/s |")
        for length in lengths:
            decoding(target, length)


if __name__ == "__main__":
    main(*sys.argv[1:])
