"""Attention alone, over bfloat16, and over codes by layouts that programs could have; a minute.

    python -m benchmarks.gpu.layouts        # --dry: tiny sizes on the CPU, interpreted

A figure is of one layer of LLaMA3.1-8b's shape; layers take turns, so that no cache holds them.
What a layout gives has to be near what the first one of its kind gives.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import tables
from benchmarks.gpu.clocks import replayed
from tswift.attention import triton
from tswift.attention.sdpa import Layout
from tswift.attention.triton import Configuration, TritonAttention
from tswift.caches import FullKV, KVShape

# of passes of up to 64 rows, and of more; None for what configuration() says
LAYOUTS: dict[str, tuple[Configuration, Configuration] | None] = {
    "as it is": None,
    "3 programs": (Configuration(64, 32, 4, 4), Configuration(128, 32, 8, 3, 128)),
    "blocks of 64 rows": (Configuration(64, 32, 4, 3, 128),) * 2,
    "64 keys, blocks of 64 rows": (Configuration(64, 64, 4, 3, 168),) * 2,
    "64 keys, blocks of 64 rows, 3 programs": (Configuration(64, 64, 4, 2, 168),) * 2,
    "64 keys, 128 rows": (Configuration(64, 64, 4, 3, 168), Configuration(128, 64, 8, 3)),
}
_CALLS = 16  # in a graph


def filled(kind: torch.dtype, heads: int, slots: int, layers: int, device: torch.device) -> FullKV:
    """A cache of random keys and values, stored by the kernel."""
    codes = kind == torch.int8
    kv = FullKV(KVShape(layers, heads, 128, kind, device, steps_behind=codes), slots)
    nothing = torch.zeros((), dtype=torch.int32, device=device)
    for keys, values in zip(kv.keys, kv.values, strict=True):
        made = torch.randn(2, heads, slots, 128, device=device).bfloat16()
        TritonAttention.store(keys, values, made[0], made[1], nothing)
    return kv


def attending(kv: FullKV, held: int, nodes: int) -> Callable[[], torch.Tensor]:
    """A pass of nodes behind so many keys, over the next layer at each call."""
    device, heads = kv.shape.device, kv.shape.heads
    source = torch.Generator(device).manual_seed(0)
    rows = torch.randn(nodes, 4 * heads, 128, device=device, generator=source).bfloat16()
    ancestors = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
    length = torch.full((), held, dtype=torch.int32, device=device)
    layout = Layout(heads, 4, torch.bfloat16, device)
    attend = TritonAttention(layout, length, nodes, ancestors)
    turn = count()

    def run() -> torch.Tensor:
        at = next(turn) % len(kv.keys)
        return attend(rows.transpose(0, 1), kv.keys[at], kv.values[at], 128**-0.5)

    return run


@torch.inference_mode()
def main() -> None:
    """Time, and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.layouts")
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    device = torch.device("cpu" if dry else "cuda")
    contexts, widths = ((70,), (1,)) if dry else ((4096, 100_000), (1, 8, 32))
    heads, layers = (1, 1) if dry else (8, 16)
    found: list[dict[str, Any]] = []
    for kind in (torch.bfloat16, torch.int8):
        kv = filled(kind, heads, max(contexts) + max(widths), layers, device)
        for held in contexts:
            for nodes in widths:
                first = None
                for name, pair in [*LAYOUTS.items()][: None if kind == torch.int8 else 1]:
                    chosen = triton.configuration if pair is None else _always(pair)
                    with patch.object(triton, "configuration", chosen):
                        out = attending(kv, held, nodes)()
                        run = attending(kv, held, nodes)
                        seconds = replayed(lambda run=run: [run() for _ in range(_CALLS)], device)
                    first = out if first is None else first
                    about = {"cache": str(kind), "keys": held, "nodes": nodes, "layout": name}
                    read = held * kv.shape.bytes_per_token / layers
                    figures = {"ms": 1e3 * seconds / _CALLS, "GB/s": read * _CALLS / seconds / 1e9}
                    apart = (out - first).float().abs().max().item()
                    found.append({**about, **figures, "apart": apart})
    print(tables.markdown(found))


def _always(pair: tuple[Configuration, Configuration]) -> Callable[..., Configuration]:
    return lambda rows, width, generation, codes=False: pair[rows > 64]


if __name__ == "__main__":
    main()
