"""What a model of codes costs here: passes by nodes and keys, prompts, and plain decoding.

The best or median of turns.

python measure.py MODEL: a GGUF file, or another model; run it on an idle machine.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from tswift.decoding.params import SamplingParams
from tswift.kv import FullKV
from tswift.models.integers import IntegerLinear, PackedCodes
from tswift.models.load import load
from tswift.models.program import PassProgram
from tswift.models.target import Target

from tswift.decoding.loop import Decoding
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions

NODES, LENGTHS, TURNS, TOKENS = (1, 2, 4, 5, 8, 16), (100, 1000, 4000, 8000), 25, 150


def seconds(run: Callable[[], object]) -> float:
    """How long a function takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@torch.inference_mode()
def main(model: str) -> None:
    """Measure and print."""
    started = time.perf_counter()
    target = load(model, device="cpu").target
    print(f"loaded in {time.perf_counter() - started:.1f} s")
    packed = {id(each): each for each in target.model.modules() if isinstance(each, PackedCodes)}
    print(f"codes and scales: {sum(each.bytes.nbytes for each in packed.values()) / 1e6:.1f} MB")
    print(f"reading: {bandwidth():.1f} GB/s")
    kv = FullKV(target.kv_shape, min(target.max_positions, LENGTHS[-1] + 600))
    kv.keys.zero_()
    kv.values.zero_()
    for bits in (16, 8):
        for layer in target.model.modules():
            if isinstance(layer, IntegerLinear):
                layer.input_bits = bits
        target.program = PassProgram(target.model, target.kv_shape.dtype)
        print(f"inputs of {bits} bits")
        for length in LENGTHS:
            if length + TOKENS + NODES[-1] > kv.capacity:
                break
            passes(target, kv, length)
        kv.length = 0
        run = partial(target.prefill, torch.randint(target.vocab_size, (1024,)).tolist(), kv)
        print(f"  a prompt of 1,024 tokens: {1024 / seconds(run):.0f} tokens/s")
        for length in LENGTHS:
            if length + TOKENS < target.max_positions:
                decoding(target, length)


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

    best = {nodes: float("inf") for nodes in NODES}
    for _ in range(TURNS):
        for nodes in NODES:
            best[nodes] = min(best[nodes], seconds(partial(run, nodes)))
    words = (
        f"{nodes}: {best[nodes] * 1e3:.2f} ms ({best[nodes] / best[1]:.2f})" for nodes in NODES
    )
    print(f"  pass and logits, {length:,} keys, nodes", ", ".join(words))


def decoding(target: Target, length: int) -> None:
    """Time the steps of plain decoding after so many tokens."""
    text = torch.randint(target.vocab_size, (length,)).tolist()
    drafter = make_drafter("ar", target, None, DraftOptions(), None)
    times = []
    before = None
    for _ in Decoding(target, text, SamplingParams(), 3, drafter, TOKENS).steps(()):
        now = time.perf_counter()
        if before is not None:
            times.append(now - before)
        before = now
    mean = sum(times) / len(times)
    print(
        f"  ar after {length:,} tokens: least {min(times) * 1e3:.2f} ms, median "
        f"{median(times) * 1e3:.2f}, mean {mean * 1e3:.2f}, {1 / mean:.0f} tokens/s",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
