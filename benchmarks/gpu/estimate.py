"""Estimated milliseconds of a step on an H200, and seconds of 100,000 tokens: a cost model, nothing of it measured.

A pass is priced by the bytes that it reads, its operations, and its launches; a step by its two passes, its sampler and
the time in which the device waits for the host. ``BEFORE`` is commit b5cc13d as REVIEW.md of issue 17 counted it,
``AFTER`` is today's code. The default nodes are read from the code; the other counts are the fields of ``Counts``.

    python -m benchmarks.gpu.estimate --shape llama3.1-8b --alpha 0.9
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean

import torch

from tswift.attention import triton
from tswift.benchmarking.roofline import MACHINES, pass_seconds
from tswift.benchmarking.table import Table
from tswift.drafting.options import usual_nodes
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
PROCESSORS = 132

Tiling = Callable[
    [Shape, int, float], tuple[int, int]
]  # shape, rows of a KV head, tokens: key reads and partial results


def tiling_before(shape: Shape, rows: int, context: float) -> tuple[int, int]:
    """Blocks of 64 rows or, of more than 256, of 128, each reading all keys; two programs per processor."""
    reads = -(-rows // (64 if rows <= 256 else 128))
    return reads, max(1, 2 * PROCESSORS // (shape.kv_heads * reads))


def tiling_after(shape: Shape, rows: int, context: float) -> tuple[int, int]:
    """As today's kernel has it on a Hopper."""
    run = triton.configuration(rows, triton.head_width(shape.head_dim), shape.itemsize, 9)
    return -(-rows // run.rows), triton.chunk_count(int(context), triton.chunk_size(shape.kv_heads))


@dataclass(frozen=True)
class Counts:
    """What the code does.

    Attributes:
        name: of the column.
        nodes: of the draft tree, n-grams and root included.
        padded: nodes of the prepared pass that verifies it.
        kernels: kernels of a layer.
        products: matrix products among them.
        product_share: of the published bandwidth, reached by products of one row.
        tiling: of the attention kernel.
        sampler_bytes: bytes moved per logit of a step.
        sampler_launches: launches of the sampler.
        tail: seconds of heads, warping and top-k after the draft pass, beyond reading the heads.
        commit, ar_commit: small kernels that complete the tree, walk it and commit, in the verification's graph; a step
            of plain decoding has the second.
        idle: seconds per step in which the device waits.
        idle_per_node: the same, for each node.
        ar_idle: seconds per step of plain decoding.
        draft_bits: of the weights that the draft pass reads, the LM head's apart.
    """

    name: str
    nodes: int
    padded: int
    kernels: int = 17
    products: int = 7
    product_share: float = 0.80
    tiling: Tiling = tiling_before
    sampler_bytes: float = 240.0
    sampler_launches: int = 35
    tail: float = 0.38e-3
    idle: float = 0.73e-3
    idle_per_node: float = 6.6e-6
    ar_idle: float = 0.21e-3
    commit: int = 0  # they are launched one by one: part of idle
    ar_commit: int = 0
    draft_bits: int = 16


def before() -> list[Counts]:
    """Commit b5cc13d: a random model's trees, and a real text's, whose n-grams fill them."""
    return [Counts("before, 41 nodes", 41, 48), Counts("before, 101 nodes", 101, 128)]


def after(shape: Shape) -> list[Counts]:
    """Today's code: operators of its programs, views apart, counted by a dispatch mode on a CPU; idle is aimed at."""
    nodes = usual_nodes(torch.device("cuda"), shape.query_heads // shape.kv_heads)
    code = Counts(
        name=f"after, {nodes} nodes",
        nodes=nodes,
        padded=next(size for size in sizes(nodes) if size >= nodes),
        kernels=14,
        products=4,
        product_share=0.86,  # joined products, coordinate descent tuning
        tiling=tiling_after,
        sampler_bytes=20.0,  # logits of two bytes are read twice; noise in float64 takes as long as 16 more
        sampler_launches=3,
        tail=(24 + 3) * (GAP + SMALL) + 0.02e-3,  # in the draft pass's graph: 24 operators, and candidates by 3 kernels
        idle=0.1e-3,  # from the end of one program to the launch of the next
        idle_per_node=0.0,
        ar_idle=0.1e-3,
        commit=101,
        ar_commit=27,
    )
    return [code, replace(code, name=f"{code.name}, int8 drafts", draft_bits=8)]


def pass_time(shape: Shape, counts: Counts, context: float, nodes: int, bits: int = 16) -> float:
    """Seconds of a pass over ``nodes`` nodes and ``context`` tokens, its logits included."""
    lm_head = shape.lm_head * shape.itemsize
    weights = shape.weight_bytes - lm_head - (shape.spared_bytes(bits) if bits != 8 * shape.itemsize else 0)
    products = weights / (counts.product_share * PUBLISHED.bandwidth) + lm_head / (0.94 * ACHIEVED)
    products += EXPOSED * (nodes - 1) * 2 * shape.read / PRODUCT_FLOPS
    layer = context * shape.kv_bytes / shape.layers
    rows = nodes * shape.query_heads // shape.kv_heads
    reads, parts = counts.tiling(shape, rows, context)
    reading = layer / KEYS if reads == 1 else max(layer / KEYS, reads * layer / L2)
    multiplying = 4 * context * nodes * shape.query_heads * shape.head_dim / ATTENTION_FLOPS
    merging = 2 * parts * rows * shape.kv_heads * shape.head_dim * 4 / L2  # partial results, written and read
    attention = max(LEAST_ATTENTION, reading, multiplying) + merging
    small = counts.kernels - counts.products - 1
    beside = (BESIDE + (PACKING if nodes > 1 else 0)) * (GAP + SMALL)
    return products + beside + shape.layers * (attention + counts.kernels * GAP + small * SMALL)


def step(shape: Shape, vocabulary: int, counts: Counts, context: float, budget: int) -> dict[str, float]:
    """Seconds of a step's parts at a context; ``ar`` is a step of plain decoding."""

    def sampler(nodes: int) -> float:
        return nodes * vocabulary * counts.sampler_bytes / FLOAT64_RATE + counts.sampler_launches * EAGER

    parts = {
        "draft pass": pass_time(shape, counts, min(budget, context), 1, counts.draft_bits),
        "heads, top-k": counts.tail + HEADS * shape.hidden_size**2 * shape.itemsize / ACHIEVED,
        "verification": pass_time(shape, counts, context, counts.padded),
        "sampler": sampler(counts.nodes),
        "walk, commit": counts.commit * (GAP + SMALL),
        "idle": counts.idle + counts.idle_per_node * counts.nodes,
    }
    beside = counts.ar_commit * (GAP + SMALL) + counts.ar_idle
    ar = pass_time(shape, counts, context, 1) + sampler(1) + beside
    return {**parts, "step": sum(parts.values()), "ar": ar}


def floor(shape: Shape, context: float, budget: int) -> dict[str, float]:
    """As :func:`step`, of bytes at the published bandwidth alone."""
    heads = HEADS * shape.hidden_size**2 * shape.itemsize / PUBLISHED.bandwidth
    draft, verify = (float(pass_seconds(shape, PUBLISHED, each, 1)) for each in (min(budget, context), context))
    parts = {"draft pass": draft, "heads, top-k": heads, "verification": verify}
    parts |= dict.fromkeys(("sampler", "walk, commit", "idle"), 0.0)
    return {**parts, "step": sum(parts.values()), "ar": verify}


def estimate(name: str, alpha: float, tokens: int = 100_000, prefill: int = 4096, budget: int = 4096) -> Table:
    """The table: a step's mean milliseconds over a text, the text's seconds, and ratios of issue 17's targets."""
    config = shape_config(name)
    shape = shape_of(skeleton(config), 2)
    per_step = alpha * DEPTH + 1
    contexts = [prefill + tokens * (index + 0.5) / 100 for index in range(100)]
    ends = (prefill, prefill + tokens)
    columns: dict[str, dict[str, str]] = {}
    for counts in (None, *before(), *after(shape)):

        def parts(context: float, counts: Counts | None = counts) -> dict[str, float]:
            if counts is None:
                return floor(shape, context, budget)
            return step(shape, config.vocab_size, counts, context, budget)

        every = [parts(context) for context in contexts]
        mean_of = {part: mean(each[part] for each in every) for part in every[0]}
        seconds, plain = tokens / per_step * mean_of["step"], tokens * mean_of["ar"]
        over = [parts(end)["ar"] / floor(shape, end, budget)["ar"] for end in ends]
        verify = [parts(end)["verification"] / parts(end)["ar"] for end in ends]
        draft = parts(prefill)["draft pass"] / floor(shape, prefill, budget)["draft pass"]
        columns[counts.name if counts else "floor"] = {
            **{f"{'AR step' if part == 'ar' else part}, ms": f"{1e3 * each:.2f}" for part, each in mean_of.items()},
            f"{tokens:,} tokens, s": f"{seconds:.0f}",
            f"{tokens:,} tokens of AR, s": f"{plain:.0f}",
            "speedup": f"{plain / seconds:.2f}",
            "AR step / its floor, first and last": f"{over[0]:.2f}, {over[1]:.2f}",
            "verification / AR step, first and last": f"{verify[0]:.2f}, {verify[1]:.2f}",
            "draft pass / its floor": f"{draft:.2f}",
        }
    rows = [[row, *(column[row] for column in columns.values())] for row in columns["floor"]]
    notes = [
        f"Estimated, nothing of it measured: one H200, bfloat16, alpha {alpha:g} ({per_step:g} tokens a step), from "
        f"{prefill:,} to {prefill + tokens:,} tokens; means over the text. Floor: bytes at the published "
        f"{PUBLISHED.bandwidth / 1e12:g} TB/s; at the {ACHIEVED / 1e12:g} that a good kernel may reach, ratios to it "
        f"are {ACHIEVED / PUBLISHED.bandwidth:.2f} times these. Before: commit b5cc13d.",
    ]
    return Table(f"Estimate: {name}, {tokens:,} tokens on an H200", ["", *columns], rows, left=1, notes=notes)


def main() -> None:
    """Parse, estimate, print."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.estimate", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--alpha", type=float, default=0.9)
    args = parser.parse_args()
    print(estimate(args.shape, args.alpha).markdown(), end="")


if __name__ == "__main__":
    main()
