"""Estimated time of passes, steps and texts on an H200: a cost model, nothing of it measured.

A pass is priced by the bytes that it reads, its operations and its launches; a step by its passes,
its sampler and the time in which the device waits for the host. Default nodes and tiles are read
from the code. What is guessed stands in the constants and in :data:`DESIGNS`.

    python -m benchmarks.gpu.estimate --shape llama3.1-8b --alpha 0.9
    python -m benchmarks.gpu.estimate --shape qwen3.5-9b

A model with recurrent layers has a table of its own: plain decoding and its MTP head.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from benchmarks import tables
from tswift.attention import triton
from tswift.attention.sdpa import MAX_WIDTH
from tswift.benchmarking.roofline import MACHINES, pass_seconds
from tswift.drafting.methods import usual_nodes
from tswift.drafting.options import METHODS
from tswift.forward.passes import sizes
from tswift.models.architecture import skeleton
from tswift.models.checkpoint import SHAPES, shape_config
from tswift.models.shapes import Shape, shape_of
from tswift.speculators.formats import native_head
from tswift.training.config import HeadsConfig

# Rates of an H200, bytes or operations per second. All but the published ones are guesses from an
# H100's.
PUBLISHED = MACHINES["h200"]
ACHIEVED = 4.3e12  # of the memory, by a good kernel
KEYS = 3.9e12  # of the memory, by the attention of one node
# least certain of all; of partial results, and of keys that several blocks of rows read
L2 = 6.0e12
ATTENTION_FLOPS = 560e12
PRODUCT_FLOPS = 600e12  # of products over many rows
OWN_FLOPS = 450e12  # of products over many rows by our own kernel
EXPOSED = 0.3  # share of a product's operations that reading weights does not hide
FLOAT64_RATE = 3.8e12  # of the memory, by the sampler's float64 kernels
# Seconds.
GAP = 1.1e-6  # between dependent kernels of a graph
SMALL = 0.7e-6  # a kernel that is neither a product nor attention, beyond its gap
LEAST_ATTENTION = 8e-6  # attention of a layer over few keys
LM_HEAD_SHARE = 0.94  # of ACHIEVED
IDLE = 0.1e-3  # from the end of one program to the launch of the next: aimed at
AHEAD = 0.01e-3  # the same where the next one was launched before: a guess
# Kernels, counted by a dispatch mode on a CPU, views apart.
PACKING = 5  # of a tree's ancestors
HEADS = 3
DEPTH = 4  # most tokens drafted along a path
SAMPLER_BYTES = 20.0  # per logit: two bytes read twice; noise in float64 takes as long as 16 more
SAMPLER_KERNELS = 3
# after the draft pass, in its graph: chained heads, warping, and the ranking of candidates; the
# same by conditioned heads, one after the other, and how many times the weights those have
DRAFT_TAIL = 24 + 3
CONDITIONED_TAIL = 42 + 3 * (1 + HEADS)
CONDITIONED_SIZE = 6
# seconds by which two kernels that lay a tree out and walk it exceed small ones: loads that wait
WALKING = 6e-6
BUDGET = 4096  # keys that a draft pass reads
DRAFT_VOCABULARY = HeadsConfig.draft_vocabulary  # tokens that heads draft as we train them
# Of a published block drafter: its layers, and kernels of a draft, as they were counted and if its
# layers were joined as the model's are. What the host takes for a tree is a guess.
BLOCK_LAYERS = 5
BLOCK_KERNELS = 480
FEWER_BLOCK_KERNELS = 100
BLOCK_HOST = 0.3e-3
PROMPT_ROWS = 512
# that the host takes for a kernel: 9.2 ms were measured with 17 in each of 32 layers
LAUNCH = 9.2e-3 / 17 / 32
PROMPT_KERNELS = 11  # of a layer
# Of a model with recurrent layers (Qwen3.5's), whose layers run operator by operator: kernels of a
# gated delta net and of gated attention beside products, attention and recurrence; of a commit
# beside one for each recurrence; of a level of the MTP head with its ranking.
DELTA_KERNELS = 88
GATED_KERNELS = 63
COMMIT_KERNELS = 10
LEVEL_KERNELS = 147
FUSED_KERNELS = 6  # of either layer, if kernels of ours did what is around products
CUBLAS = 0.85  # of ACHIEVED, by products of layers that PyTorch multiplies
MTP_LEVELS = 4
MTP_BUDGET = METHODS["mtp"].budget or 0  # tokens of its window


@dataclass(frozen=True)
class Design:
    """How a pass is made of kernels.

    Attributes:
        shares: of ACHIEVED that products of attention and MLP reach; None where ``ramp`` says what
            they take.
        ramp: seconds of a product in which memory is not read yet, or no longer.
        parts: sums in float32 that a product of queries, keys and values, of attention's output,
            and of MLP's leaves for the kernel behind it.
        small: kernels of a layer that are neither products nor attention.
        gap: seconds between kernels of a layer that depend on each other; outside of layers it is
            :data:`GAP`.
        wide_text: whether what was generated is taken up in wide passes.
        commit: kernels that complete a tree, walk it and commit.
        plain_commit: the same in plain decoding.
        walks: whether one kernel lays out the tree and one walks it.
        idle: seconds between a verification and the draft that follows it.
        plain_idle: seconds between two plain steps.
        beside: kernels of a pass outside its layers.
        pads: more of them in a plain step, whose tokens and positions are padded to a width.
        merging: whether a kernel of its own merges what an attention's programs found.
    """

    name: str
    shares: tuple[float, float] | None = None
    ramp: float = 0.0
    parts: tuple[int, int, int] = (0, 0, 0)
    small: int = 4
    gap: float = GAP
    wide_text: bool = False
    commit: int = 90
    plain_commit: int = 26
    walks: bool = False
    idle: float = IDLE
    plain_idle: float = IDLE
    merging: bool = True
    beside: int = 19
    pads: int = 0

    def committing(self, kernels: int) -> float:
        """Seconds of so many kernels that walk and commit."""
        return kernels * (GAP + SMALL) + (WALKING if self.walks else 0.0)

    @property
    def gaps(self) -> float:
        """Seconds of a layer's: one for each kernel;
        within a single one all programs wait for each other as often.
        """
        return (5 + self.merging + max(self.small, 3)) * self.gap


_KERNELS: dict[str, Any] = {
    "parts": (4, 4, 4),
    "wide_text": True,
    "commit": 13,
    "plain_commit": 3,
    "walks": True,
    "idle": AHEAD,
    "plain_idle": AHEAD,
    "beside": 4,
    "pads": 4,
}
NOW = Design("today: launched early", ramp=0.8e-6, small=3, gap=0.5e-6, **_KERNELS)
DESIGNS = (
    Design("17 kernels, cuBLAS at 77%", (0.72, 0.90), small=11),
    Design("10 kernels, cuBLAS at 80%", (0.80, 0.92)),
    Design("own products", ramp=2.5e-6, parts=(4, 4, 4), small=3),
    NOW,
    Design("attention in one kernel", ramp=0.8e-6, small=3, gap=0.5e-6, merging=False, **_KERNELS),
    Design("one kernel a layer", ramp=0.8e-6, small=0, gap=1.3e-6, **_KERNELS),
)


def products(shape: Shape, design: Design, rows: int, bits: int) -> float:
    """Seconds of the four products of a layer."""
    whole = (shape.read - shape.lm_head) / shape.layers
    queries = shape.query_heads * shape.head_dim
    joined = queries + 2 * shape.kv_heads * shape.head_dim
    narrow = (joined + queries) * shape.hidden_size
    wide = whole - narrow  # of the MLP
    if design.shares is not None:
        return bits / 8 / ACHIEVED * (narrow / design.shares[0] + wide / design.shares[1])
    outputs = zip(design.parts, (joined, shape.hidden_size, shape.hidden_size), strict=True)
    # written and read, in float32
    sums = sum(2 * 4 * max(16, rows) * parts * count for parts, count in outputs)
    return bits / 8 * whole / ACHIEVED + 4 * design.ramp + sums / L2


def pass_parts(
    shape: Shape, design: Design, context: float, nodes: int, bits: int = 16
) -> dict[str, float]:
    """Seconds of the parts of a pass over ``nodes`` nodes and ``context`` tokens,
    its logits included.

    ``bits`` are of the layers' weights.
    """
    floor = (shape.weight_bytes - shape.spared_bytes(bits)) / PUBLISHED.bandwidth
    lm_head = shape.lm_head * shape.itemsize / (LM_HEAD_SHARE * ACHIEVED)
    weights = shape.layers * products(shape, design, nodes, bits) + lm_head
    rows = nodes * shape.query_heads // shape.kv_heads
    # of a Hopper
    tile = triton.configuration(rows, triton.head_width(shape.head_dim), shape.itemsize, 9)
    reads = -(-rows // tile.rows)  # blocks of rows, each of which reads all keys
    keys = context * shape.kv_bytes / shape.layers
    reading = keys / KEYS if reads == 1 else max(keys / KEYS, reads * keys / L2)
    multiplying = 4 * context * nodes * shape.query_heads * shape.head_dim / ATTENTION_FLOPS
    _, chunks = triton.chunking(shape.kv_heads, nodes, int(context))
    # partial results, written and read
    merging = 2 * chunks * rows * shape.kv_heads * shape.head_dim * 4 / L2
    attention = max(LEAST_ATTENTION, reading, multiplying) + merging
    beside = design.beside + (PACKING if nodes > 1 else 0)
    return {
        "bytes of weights": floor,
        "weights beyond": weights - floor,
        "operations not hidden": EXPOSED * (nodes - 1) * 2 * shape.read / PRODUCT_FLOPS,
        "bytes of keys and values": shape.layers * keys / PUBLISHED.bandwidth,
        "attention beyond": shape.layers * (attention - keys / PUBLISHED.bandwidth),
        "gaps in layers": shape.layers * design.gaps,
        "small kernels in layers": shape.layers * (design.small + design.merging) * SMALL,
        "kernels outside layers": beside * (GAP + SMALL),
    }


def sampler(vocabulary: int, rows: int) -> float:
    """Seconds of drawing a token for each row."""
    return rows * vocabulary * SAMPLER_BYTES / FLOAT64_RATE + SAMPLER_KERNELS * (GAP + SMALL)


def plain_parts(shape: Shape, vocabulary: int, design: Design, context: float) -> dict[str, float]:
    """Seconds of the parts of a step of plain decoding."""
    beside = sampler(vocabulary, 1) + design.committing(design.plain_commit)
    parts = pass_parts(shape, design, context, 1)
    parts["kernels outside layers"] += design.pads * (GAP + SMALL)
    return parts | {"sampler, commit": beside, "idle": design.plain_idle}


def verification(
    shape: Shape, vocabulary: int, design: Design, context: float, nodes: int
) -> float:
    """Seconds of a program that verifies a tree."""
    size = next(size for size in sizes(nodes) if size >= nodes)
    beside = sampler(vocabulary, nodes) + design.committing(design.commit)
    return sum(pass_parts(shape, design, context, size).values()) + beside


def drafting(
    shape: Shape,
    design: Design,
    context: float,
    bits: int = 16,
    share: float = 1.0,
    conditioned: bool = False,
) -> float:
    """Seconds of a draft by heads: a pass over the partial cache, and what follows.

    They draft a ``share`` of all tokens, whose rows of the LM head alone are read: once by chained
    heads, once for every level by conditioned ones.
    """
    heads = HEADS * shape.hidden_size**2 * shape.itemsize / ACHIEVED
    kernels = DRAFT_TAIL
    readings = 1
    if conditioned:
        heads *= CONDITIONED_SIZE
        kernels = CONDITIONED_TAIL
        readings += HEADS
    if share < 1:  # logits are spread out among those of all tokens
        kernels += 2 * readings
    # the pass has the whole LM head once
    lm_head = (readings * share - 1) * shape.lm_head * shape.itemsize / (LM_HEAD_SHARE * ACHIEVED)
    tail = kernels * (GAP + SMALL) + 0.02e-3 + heads + lm_head
    return sum(pass_parts(shape, design, min(BUDGET, context), 1, bits).values()) + tail


def block_step(
    shape: Shape,
    vocabulary: int,
    design: Design,
    context: float,
    nodes: int,
    kernels: int,
    host: float,
) -> float:
    """Seconds of a step of ``block`` with a drafter of DSpark's, so many of them for the host's
    tree, over what its bytes take at the published rate.
    """
    layer = (shape.read - shape.lm_head) / shape.layers
    drafter = (BLOCK_LAYERS * layer + shape.lm_head) * shape.itemsize
    draft = drafter / (0.85 * ACHIEVED) + kernels * (GAP + SMALL) + IDLE
    floor = drafter / PUBLISHED.bandwidth + float(pass_seconds(shape, PUBLISHED, context, 1))
    return (draft + verification(shape, vocabulary, design, context, nodes) + host) / floor


def forwarded(shape: Shape, design: Design, start: int, stop: int, rows: int) -> float:
    """Seconds of forwarding a text from ``start`` to ``stop`` in passes of so many rows,
    launched in one go each.
    """
    middle = (start + stop) / 2
    if rows > MAX_WIDTH:  # a prompt's, bound by operations
        multiplying = 2 * (shape.read - shape.lm_head) * rows / PRODUCT_FLOPS
        attention = (
            4 * middle * rows * shape.query_heads * shape.head_dim * shape.layers / ATTENTION_FLOPS
        )
        return (
            (stop - start)
            / rows
            * max(multiplying + attention, PROMPT_KERNELS * shape.layers * LAUNCH)
        )
    return (stop - start) / rows * sum(pass_parts(shape, design, middle, rows).values())


def taken_up(shape: Shape, design: Design, start: int, stop: int, nodes: int) -> float:
    """Seconds of forwarding what was generated, with the bits that it was generated with."""
    if not design.wide_text:
        return forwarded(shape, design, start, stop, nodes)
    rows = PROMPT_ROWS
    middle = (start + stop) / 2
    heads = shape.query_heads * shape.head_dim
    groups = shape.query_heads // shape.kv_heads
    tile = triton.configuration(
        MAX_WIDTH * groups, triton.head_width(shape.head_dim), shape.itemsize, 9
    )
    # a node's newest keys, for which it has a program whose rows are mostly empty
    tails = (MAX_WIDTH + 1.5 * tile.keys) * tile.rows / groups
    multiplying = 4 * (middle + tails) * rows * heads * shape.layers / ATTENTION_FLOPS
    blocks = rows / MAX_WIDTH
    reading = blocks * middle * shape.kv_bytes / KEYS
    _, chunks = triton.chunking(shape.kv_heads, MAX_WIDTH, int(middle))
    # partial results, written and read
    merging = 2 * chunks * rows * heads * 4 * shape.layers / ACHIEVED
    one = 2 * (shape.read - shape.lm_head) * rows / OWN_FLOPS + max(multiplying, reading) + merging
    launching = (PROMPT_KERNELS - 2 + 2 * blocks) * shape.layers * LAUNCH
    return (stop - start) / rows * max(one, launching)


def table_of_parts(shape: Shape, vocabulary: int, context: int) -> list[dict[str, Any]]:
    """Milliseconds of a plain step by part, for every design."""
    floor = 1e3 * float(pass_seconds(shape, PUBLISHED, context, 1))
    columns = {each.name: plain_parts(shape, vocabulary, each, context) for each in DESIGNS}
    rows: list[dict[str, Any]] = [
        {"part": part} | {name: f"{1e3 * parts[part]:.2f}" for name, parts in columns.items()}
        for part in columns[NOW.name]
    ]
    whole = {name: 1e3 * sum(parts.values()) for name, parts in columns.items()}
    rows.append({"part": "together"} | {name: f"{each:.2f}" for name, each in whole.items()})
    return [
        *rows,
        {"part": "of the floor"} | {name: f"{each / floor:.2f}" for name, each in whole.items()},
    ]


def table_of_texts(
    shape: Shape, vocabulary: int, alpha: float, tokens: int, prefill: int
) -> list[dict[str, Any]]:
    """What a text takes, and what targets ask of it, for every design."""
    nodes = usual_nodes(torch.device("cuda"), shape.query_heads // shape.kv_heads)
    contexts = [prefill + tokens * (index + 0.5) / 100 for index in range(100)]
    steps = tokens / (alpha * DEPTH + 1)
    columns: dict[str, dict[str, float]] = {}
    for design in DESIGNS:
        verify = mean(verification(shape, vocabulary, design, each, nodes) for each in contexts)
        plain = mean(
            sum(plain_parts(shape, vocabulary, design, each).values()) for each in contexts
        )
        draft, cheap, trimmed, both = (
            mean(drafting(shape, design, each, bits, share) for each in contexts)
            for share in (1.0, DRAFT_VOCABULARY / vocabulary)
            for bits in (16, 8)
        )
        conditioned, cheapest = (
            mean(
                drafting(shape, design, each, bits, DRAFT_VOCABULARY / vocabulary, conditioned=True)
                for each in contexts
            )
            for bits in (16, 8)
        )
        block, joined, unseen = (
            block_step(shape, vocabulary, design, mean(contexts), nodes, kernels, host)
            for kernels, host in (
                (BLOCK_KERNELS, IDLE + BLOCK_HOST),
                (FEWER_BLOCK_KERNELS, IDLE + BLOCK_HOST),
                (FEWER_BLOCK_KERNELS, 0.0),
            )
        )
        columns[design.name] = {
            "draft, ms": 1e3 * draft,
            "draft of FP8, ms": 1e3 * cheap,
            "verification, ms": 1e3 * verify,
            "plain step, ms": 1e3 * plain,
            f"ar, {tokens:,} tokens, s": tokens * plain,
            f"tokenswift, {tokens:,} tokens, s": steps * (draft + verify + design.idle),
            "the same, FP8 drafts, s": steps * (cheap + verify + design.idle),
            f"{DRAFT_VOCABULARY:,} tokens drafted, s": steps * (trimmed + verify + design.idle),
            "both, s": steps * (both + verify + design.idle),
            "the same by conditioned heads, s": steps * (conditioned + verify + design.idle),
            "and FP8 drafts, s": steps * (cheapest + verify + design.idle),
            "block, of its bytes": block,
            "the same, its layers joined": joined,
            "and its tree made on the device": unseen,
            f"prompt of {prefill:,}, s": forwarded(shape, design, 0, prefill, PROMPT_ROWS),
            f"resume at {tokens:,}, s": forwarded(shape, design, 0, prefill, PROMPT_ROWS)
            + taken_up(shape, design, prefill, tokens, nodes),
        }
    return [
        {"estimate": row} | {name: f"{column[row]:.3g}" for name, column in columns.items()}
        for row in columns[NOW.name]
    ]


def recurrent_parts(
    shape: Shape, vocabulary: int, context: float, nodes: int, kernels: tuple[int, int]
) -> dict[str, float]:
    """Seconds of the parts of a step over a model with recurrent layers, drafting apart.

    ``kernels`` are those of a gated delta net and of gated attention, products, attention and
    recurrence apart.
    """
    states = shape.states
    assert states is not None
    known = pass_parts(shape, NOW, context, nodes)
    layers = (shape.read - shape.lm_head) * shape.itemsize / (CUBLAS * ACHIEVED)
    lm_head = shape.lm_head * shape.itemsize / (LM_HEAD_SHARE * ACHIEVED)
    # read in the pass; read once more and written when what is accepted is committed
    moved = 3 * states.nbytes / ACHIEVED
    delta, gated = (7 + each for each in kernels)  # with products, recurrence or attention
    return {
        "bytes of weights": known["bytes of weights"],
        "weights beyond": layers + lm_head - known["bytes of weights"],
        "operations not hidden": known["operations not hidden"],
        "bytes of keys and values": known["bytes of keys and values"],
        "attention beyond": known["attention beyond"],
        "states, with their commit": moved,
        "kernels of layers": states.layers * (delta * GAP + kernels[0] * SMALL)
        + shape.layers * (gated * GAP + kernels[1] * SMALL),
        "kernels of the commit": (states.layers + COMMIT_KERNELS) * (GAP + SMALL),
        "sampler, walk": sampler(vocabulary, nodes) + NOW.committing(NOW.commit),
        "idle": IDLE,  # no step is launched ahead of the host
    }


def table_of_states(name: str, context: int, tokens_a_step: float) -> list[dict[str, Any]]:
    """Milliseconds of a plain step and of one with the MTP head, as layers run and if fused."""
    config = shape_config(name)
    shape = shape_of(skeleton(config), 2)
    found = native_head(f"shape:{name}", config)
    assert found is not None
    read = found.spec.read_bytes(shape.itemsize, MTP_BUDGET, MTP_LEVELS, shape.lm_head)
    draft = read / (CUBLAS * ACHIEVED)
    floor = float(pass_seconds(shape, PUBLISHED, context, 1))
    columns = {}
    designs = {
        "today": ((DELTA_KERNELS, GATED_KERNELS), LEVEL_KERNELS),
        "layers fused": ((FUSED_KERNELS, FUSED_KERNELS), LEVEL_KERNELS),
    }
    for design, (kernels, level) in designs.items():
        plain = recurrent_parts(shape, config.vocab_size, context, 1, kernels)
        verify = recurrent_parts(shape, config.vocab_size, context, 2 * MTP_LEVELS, kernels)
        drafting = draft + MTP_LEVELS * level * (GAP + SMALL) + IDLE
        together = sum(plain.values())
        share = (sum(verify.values()) + drafting) / tokens_a_step / together
        cells = {part: f"{1e3 * seconds:.2f}" for part, seconds in plain.items()}
        columns[design] = cells | {
            "together": f"{1e3 * together:.2f}",
            "of the floor": f"{together / floor:.2f}",
            "verification of 8 nodes": f"{1e3 * sum(verify.values()):.2f}",
            f"drafting {MTP_LEVELS} levels": f"{1e3 * drafting:.2f}",
            f"mtp at {tokens_a_step:g} tokens a step, of ar": f"{share:.2f}",
        }
    return [
        {"part": part} | {design: columns[design][part] for design in columns}
        for part in columns["today"]
    ]


def main() -> None:
    """Parse, estimate, print."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.estimate", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--alpha", type=float, default=0.9)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--prefill", type=int, default=4096)
    parser.add_argument("--tokens-a-step", type=float, default=2.8, help="of an MTP head")
    args = parser.parse_args()
    config = shape_config(args.shape)
    shape = shape_of(skeleton(config), 2)
    ends = (args.prefill, args.prefill + args.tokens)
    if shape.states is not None:
        print(f"{args.shape} on an H200, bfloat16. Nothing of it is measured.")
        for context in (*ends, sum(ends) // 2):
            print(f"\nA step over {context:,} tokens, ms\n")
            print(tables.markdown(table_of_states(args.shape, context, args.tokens_a_step)))
        return
    print(f"{args.shape} on an H200, bfloat16, alpha {args.alpha:g}. Nothing of it is measured.")
    for context in ends:
        print(f"\nA plain step over {context:,} tokens, ms\n")
        print(tables.markdown(table_of_parts(shape, config.vocab_size, context)))
    print("\nTexts; means over their length\n")
    print(
        tables.markdown(
            table_of_texts(shape, config.vocab_size, args.alpha, args.tokens, args.prefill)
        )
    )


if __name__ == "__main__":
    main()
