"""The tables of README.md, from figures-simulated.jsonl: python results/h100/tables.py"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("figures-simulated.jsonl").read_text().splitlines()
]


def of(table: str, **wanted: Any) -> list[Mapping[str, Any]]:
    """The figures of a table with these values."""
    return [
        row
        for row in ROWS
        if row["table"] == table and all(row[name] == value for name, value in wanted.items())
    ]


def markdown(head: str, rows: Iterable[list[str]]) -> str:
    """A table whose first column is of words."""
    columns = head.count("|") + 1
    lines = [head, " | ".join(["---", *["---:"] * (columns - 1)])]
    return "\n".join(f"| {line} |" for line in (*lines, *(" | ".join(row) for row in rows)))


def texts() -> str:
    """What a token takes by method, and 100,000 of them."""
    rows = []
    plain = of("integrated", method="ar")[0]["seconds"]
    for method, name in {
        "ar": "plain decoding",
        "auto": "`auto`",
        "medusa": "`medusa`",
        "tokenswift": "`tokenswift`",
    }.items():
        made = {
            row["context"]: row["ms_per_token"]
            for row in of("steps", method=method, nodes=None, exact=True)
        }
        seconds = of("integrated", method=method, nodes=None)[0]["seconds"]
        cells = [f"{made[4096]:.2f}", f"{made[100_000]:.2f}", f"{seconds:.0f} s"]
        rows.append([name, *cells, "" if method == "ar" else f"{plain / seconds:.1f}"])
    ours, theirs = of("generate")
    rows.append(
        [
            f"transformers' `generate`, after 8,192 (plain decoding: {ours['ms']:.1f})",
            f"{theirs['ms']:.1f}",
            *["", "", f"{ours['ms'] / theirs['ms']:.2f}"],
        ]
    )
    return markdown("ms a token | after 4,096 | after 100,000 | 100,000 tokens | x", rows)


def steps() -> str:
    """Steps by method: what they take, and how many tokens they make."""
    rows = []
    for each in of("integrated"):
        own = {"method": each["method"], "nodes": each["nodes"]}
        nodes = "" if each["nodes"] is None else f", {each['nodes']} nodes"
        made = {row["context"]: row for row in of("steps", **own, exact=True)}
        rows.append(
            [
                f"`{each['method']}`{nodes}",
                *(
                    f"{made[context]['ms']:.2f}, {made[context]['tokens']:.1f}"
                    if context in made
                    else ""
                    for context in (4096, 50_000, 100_000)
                ),
                f"{each['seconds']:.0f} s",
            ]
        )
    return markdown("ms a step, tokens | 4,096 | 50,000 | 100,000 | 100,000 tokens", rows)


def passes() -> str:
    """Passes by nodes, and their floor at the rate that was measured."""
    rows = []
    for context in (4096, 100_000):
        made = of("passes", kind="verify", context=context)
        cells = [f"{row['ms']:.2f}" for row in made]
        rows.append([f"{context:,}", *cells, f"{made[0]['floor']:.2f}"])
    return markdown("after | 1 node | 8 | 16 | 32 | floor", rows)


def sampler() -> str:
    """Microseconds of drawing a token for each row."""
    rows = []
    for words, what in (
        ("kernels", "rows, fused"),
        ("PyTorch", "rows, eager"),
        ("with its wait", "draw, wall"),
    ):
        rows.append([words, *(f"{row['us']:.0f}" for row in of("sampler", what=what))])
    return markdown("us | 1 row | 4 | 8 | 16 | 32 | 64", rows)


def early_launch() -> str:
    """Passes with and without early launch."""
    rows = []
    for words, variant in (("with", ""), ("without", "nopdl")):
        rows.append([words, *(f"{row['ms']:.2f}" for row in of("early launch", TV=variant))])
    head = "early launch | 4,096: 1 node | 32 | 100,000: 1 node | 32"
    return markdown(head, rows)


TABLES = (texts, steps, passes, sampler, early_launch)

if __name__ == "__main__":
    print("\n\n".join(table() for table in TABLES))
