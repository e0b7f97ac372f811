"""The tables of README.md, from figures-simulated.jsonl and products.jsonl:
python results/h200/tables.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONTEXTS = (4096, 100_000)


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a file beside this one."""
    return [json.loads(line) for line in Path(__file__).with_name(name).read_text().splitlines()]


ROWS = read("figures-simulated.jsonl")


def of(call: int, table: str, **wanted: Any) -> list[Mapping[str, Any]]:
    """The figures of a table of a call with these values."""
    return [
        row
        for row in ROWS
        if (row["call"], row["table"]) == (call, table)
        if all(row.get(name) == value for name, value in wanted.items())
    ]


def markdown(head: str, rows: Iterable[list[str]]) -> str:
    """A table whose first column is of words."""
    columns = head.count("|") + 1
    lines = [head, " | ".join(["---", *["---:"] * (columns - 1)])]
    return "\n".join(f"| {line} |" for line in (*lines, *(" | ".join(row) for row in rows)))


FLOATS = {"draft_weights": "none"}
# words, call, method, and how the weights are held
TEXTS = (
    ("plain decoding", 4, "ar", FLOATS),
    ("`auto`", 4, "auto", FLOATS),
    ("`medusa`", 4, "medusa", FLOATS),
    ("`tokenswift`", 3, "tokenswift", FLOATS),
    ("`tokenswift`, drafts in int8", 3, "tokenswift", {"draft_weights": "int8"}),
    ("`tokenswift`, drafts in int4", 3, "tokenswift", {"draft_weights": "int4"}),
    ("int8: plain decoding", 4, "ar", {"weights": "int8"}),
    ("int8: `auto`", 4, "auto", {"weights": "int8"}),
    ("int4: plain decoding", 4, "ar", {"weights": "int4"}),
    ("int4: `auto`", 4, "auto", {"weights": "int4"}),
    ("int4: `tokenswift`", 4, "tokenswift", {"weights": "int4"}),
)


def texts() -> str:
    """What a step takes by method and weights, and 100,000 tokens."""
    plain = of(4, "integrated", method="ar", **FLOATS)[0]["seconds"]
    rows = []
    for words, call, method, held in TEXTS:
        made = {row["context"]: row for row in of(call, "steps", method=method, **held)}
        (whole,) = of(call, "integrated", method=method, **held)
        cells = [f"{made[at]['ms']:.2f}, {made[at]['tokens']:.1f}" for at in CONTEXTS]
        x = plain / whole["seconds"]
        rows.append([words, *cells, f"{whole['seconds']:.0f} s", f"{x:.2f}"])
    return markdown("ms a step, tokens | 4,096 | 100,000 | 100,000 tokens | x", rows)


def tokens() -> str:
    """What a token takes, for the README."""
    plain = of(4, "integrated", method="ar", **FLOATS)[0]["seconds"]
    rows = []
    for words, call, method, held in (*TEXTS[:4], TEXTS[8]):
        made = {row["context"]: row for row in of(call, "steps", method=method, **held)}
        (whole,) = of(call, "integrated", method=method, **held)
        cells = [f"{made[at]['ms'] / made[at]['tokens']:.2f}" for at in CONTEXTS]
        x = "" if method == "ar" else f"{plain / whole['seconds']:.1f}"
        held_as = "plain decoding in int4, another model" if "weights" in held else words
        rows.append([held_as, *cells, f"{whole['seconds']:.0f} s", x])
    ours, theirs = of(1, "generate")
    words = f"transformers' `generate`, after 8,192 (plain decoding: {ours['ms']:.1f})"
    rows.append([words, f"{theirs['ms']:.1f}", "", "", f"{ours['ms'] / theirs['ms']:.2f}"])
    return markdown("ms a token | after 4,096 | after 100,000 | 100,000 tokens | x", rows)


def passes() -> str:
    """Passes by weights and nodes, and the floor at the rate that was measured."""
    rows = []
    held = (("bfloat16", FLOATS), ("int8", {"weights": "int8"}), ("int4", {"weights": "int4"}))
    for context in CONTEXTS:
        for words, how in held:
            made = of(4, "passes", kind="verify", context=context, **how)
            cells = [f"{row['ms']:.2f}" for row in made]
            rows.append([f"{words}, {context:,}", *cells, f"{made[0]['floor']:.2f}"])
    return markdown("ms, after | 1 node | 8 | 16 | 32 | floor", rows)


def products() -> str:
    """Designs of a product of codes: gate and up of 8B's MLP together, one row."""
    rows = read("products.jsonl")
    floats = next(row for row in rows if row.get("what") == "bfloat16" and row["shape"] == "silu")
    cells = [["bfloat16", f"{floats['us']:.1f}", f"{floats['tbs']:.2f}"]]
    for words, design, index in (
        ("4 bits, scales loaded where they are used", 1, 0),
        ("the same, with minima", 1, 16),
        ("scales fetched ahead, two warps", 2, 0),
        ("the same, codes converted by the compiler", 2, 25),
        ("four warps, warpgroup products", 2, 10),
        ("in units of 64 by 64", 2, 20),
        ("with minima", 2, 2),
        ("with minima, in units of 64 by 64", 2, 21),
        ("32 rows, with minima", 2, 31),
    ):
        (row,) = (
            each
            for each in rows
            if (each["design"], each.get("index"), each.get("shape")) == (design, index, "silu")
        )
        name = "1" if row.get("ROWS", 16) == 16 else str(row["ROWS"])
        cells.append([words, f"{row[f'us {name}']:.1f}", f"{row[f'tbs {name}']:.2f}"])
    return markdown("design | us | TB/s", cells)


TABLES = (texts, passes, products)

if __name__ == "__main__":
    print("\n\n".join(table() for table in (*TABLES, tokens)))
