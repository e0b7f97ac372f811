"""Estimated milliseconds of a step on an H200, and seconds of 100,000 tokens: a cost model, nothing of it measured.

A pass is priced by the bytes that it reads, its operations, and its launches; a step by its two passes, its sampler and
the time in which the device waits for the host. Default nodes and tiles are read from the code; the other counts are of
operators that a dispatch mode saw on a CPU, views apart.

    python -m benchmarks.gpu.estimate --shape llama3.1-8b --alpha 0.9
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

import torch

from benchmarks import tables
from tswift.attention import triton
from tswift.benchmarking.roofline import MACHINES, pass_seconds
from tswift.drafting.methods import usual_nodes
from tswift.models.passes import sizes
from tswift.models.shapes import SHAPES, Shape, shape_config, shape_of, skeleton

# Rates of an H200, bytes or operations per second. All but the published ones are guesses from an H100's.
PUBLISHED = MACHINES["h200"]
ACHIEVED = 4.3e12  # of the memory, by a good kernel
KEYS = 3.9e12  # of the memory, by the attention of one node
L2 = 6.0e12  # least certain of all; for keys that several blocks of rows read
ATTENTION_FLOPS = 560e12
PRODUCT_FLOPS, EXPOSED = 600e12, 0.3  # of products over many rows, and the share that reading weights does not hide
FLOAT64_RATE = 3.8e12  # of the memory, by the sampler's float64 kernels
# Seconds.
GAP = 1.1e-6  # between dependent kernels of a graph
SMALL = 0.7e-6  # a kernel that is neither a product nor attention, beyond its gap
LEAST_ATTENTION = 8e-6  # attention of a layer over few keys
EAGER = 2e-6  # a launch outside graphs, while the host is ahead
# small kernels of a pass outside its layers, embedding to final norm, and those that pack a tree's ancestors
BESIDE, PACKING = 19, 5
HEADS, DEPTH = 3, 4  # drafting heads, and most tokens drafted along a path
# Kernels of a layer, matrix products among them, and the share of the published bandwidth that these reach.
KERNELS, PRODUCTS, PRODUCT_SHARE = 14, 4, 0.86  # joined products, coordinate descent tuning
SAMPLER_BYTES, SAMPLER_LAUNCHES = 20.0, 3  # per logit: two bytes read twice; noise in float64 takes as long as 16 more
DRAFT_TAIL = 24 + 3  # kernels after the draft pass, in its graph: heads and warping, and the ranking of candidates
COMMIT, AR_COMMIT = 101, 27  # kernels that complete the tree, walk it and commit; of a step of plain decoding
IDLE = 0.1e-3  # seconds that are aimed at, from the end of one program to the launch of the next


def pass_time(shape: Shape, context: float, nodes: int, bits: int = 16) -> float:
    """Seconds of a pass over ``nodes`` nodes and ``context`` tokens, its logits included."""
    lm_head = shape.lm_head * shape.itemsize
    weights = shape.weight_bytes - lm_head - (shape.spared_bytes(bits) if bits != 8 * shape.itemsize else 0)
    products = weights / (PRODUCT_SHARE * PUBLISHED.bandwidth) + lm_head / (0.94 * ACHIEVED)
    products += EXPOSED * (nodes - 1) * 2 * shape.read / PRODUCT_FLOPS
    layer = context * shape.kv_bytes / shape.layers
    rows = nodes * shape.query_heads // shape.kv_heads
    tile = triton.configuration(rows, triton.head_width(shape.head_dim), shape.itemsize, 9)  # of a Hopper
    reads = -(-rows // tile.rows)  # blocks of rows, each of which reads all keys
    parts = triton.chunk_count(int(context), triton.chunk_size(shape.kv_heads))
    reading = layer / KEYS if reads == 1 else max(layer / KEYS, reads * layer / L2)
    multiplying = 4 * context * nodes * shape.query_heads * shape.head_dim / ATTENTION_FLOPS
    merging = 2 * parts * rows * shape.kv_heads * shape.head_dim * 4 / L2  # partial results, written and read
    attention = max(LEAST_ATTENTION, reading, multiplying) + merging
    beside = (BESIDE + (PACKING if nodes > 1 else 0)) * (GAP + SMALL)
    return products + beside + shape.layers * (attention + KERNELS * GAP + (KERNELS - PRODUCTS - 1) * SMALL)


def step(shape: Shape, vocabulary: int, nodes: int, context: float, budget: int, bits: int = 16) -> dict[str, float]:
    """Seconds of a step's parts at a context; ``ar`` is a step of plain decoding.

    ``bits`` are of the weights that the draft pass reads, the LM head's apart.
    """

    def sampler(rows: int) -> float:
        return rows * vocabulary * SAMPLER_BYTES / FLOAT64_RATE + SAMPLER_LAUNCHES * EAGER

    heads = HEADS * shape.hidden_size**2 * shape.itemsize / ACHIEVED
    parts = {
        "draft pass": pass_time(shape, min(budget, context), 1, bits),
        "heads, top-k": DRAFT_TAIL * (GAP + SMALL) + 0.02e-3 + heads,
        "verification": pass_time(shape, context, next(size for size in sizes(nodes) if size >= nodes)),
        "sampler": sampler(nodes),
        "walk, commit": COMMIT * (GAP + SMALL),
        "idle": IDLE,
    }
    ar = pass_time(shape, context, 1) + sampler(1) + AR_COMMIT * (GAP + SMALL) + IDLE
    return {**parts, "step": sum(parts.values()), "ar": ar}


def floor(shape: Shape, context: float, budget: int) -> dict[str, float]:
    """As :func:`step`, of bytes at the published bandwidth alone."""
    heads = HEADS * shape.hidden_size**2 * shape.itemsize / PUBLISHED.bandwidth
    draft, verify = (float(pass_seconds(shape, PUBLISHED, held, 1)) for held in (min(budget, context), context))
    parts = {"draft pass": draft, "heads, top-k": heads, "verification": verify}
    parts |= dict.fromkeys(("sampler", "walk, commit", "idle"), 0.0)
    return {**parts, "step": sum(parts.values()), "ar": verify}


def estimate(
    name: str, alpha: float, tokens: int = 100_000, prefill: int = 4096, budget: int = 4096
) -> list[dict[str, Any]]:
    """Rows of a table: a step's mean milliseconds over a text, the text's seconds, and ratios of issue 17's targets."""
    config = shape_config(name)
    shape = shape_of(skeleton(config), 2)
    nodes = usual_nodes(torch.device("cuda"), shape.query_heads // shape.kv_heads)
    contexts = [prefill + tokens * (index + 0.5) / 100 for index in range(100)]
    ends = (prefill, prefill + tokens)
    columns: dict[str, dict[str, float | str]] = {}
    for column, bits in (("floor", None), (f"{nodes} nodes", 16), (f"{nodes} nodes, int8 drafts", 8)):

        def parts(context: float, bits: int | None = bits) -> dict[str, float]:
            if bits is None:
                return floor(shape, context, budget)
            return step(shape, config.vocab_size, nodes, context, budget, bits)

        every = [parts(context) for context in contexts]
        means = {part: mean(values[part] for values in every) for part in every[0]}
        seconds, plain = tokens / (alpha * DEPTH + 1) * means["step"], tokens * means["ar"]
        over = [parts(end)["ar"] / floor(shape, end, budget)["ar"] for end in ends]
        verify = [parts(end)["verification"] / parts(end)["ar"] for end in ends]
        columns[column] = {
            **{f"{'AR step' if part == 'ar' else part}, ms": 1e3 * value for part, value in means.items()},
            f"{tokens:,} tokens, s": seconds,
            f"{tokens:,} tokens of AR, s": plain,
            "speedup": plain / seconds,
            "AR step / its floor, first and last": f"{over[0]:.2f}, {over[1]:.2f}",
            "verification / AR step, first and last": f"{verify[0]:.2f}, {verify[1]:.2f}",
            "draft pass / its floor": parts(prefill)["draft pass"] / floor(shape, prefill, budget)["draft pass"],
        }
    return [{"estimate": row, **{name: column[row] for name, column in columns.items()}} for row in columns["floor"]]


def main() -> None:
    """Parse, estimate, print."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.estimate", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--alpha", type=float, default=0.9)
    args = parser.parse_args()
    print(f"{args.shape} on an H200, bfloat16, alpha {args.alpha:g}; means over 100,000 tokens after 4,096. Nothing of")
    print(f"it is measured. The floor is bytes at the published {PUBLISHED.bandwidth / 1e12:g} TB/s.\n")
    print(tables.markdown(estimate(args.shape, args.alpha)))


if __name__ == "__main__":
    main()
