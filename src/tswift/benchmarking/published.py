"""The paper's published rows, to be put beside measured ones.

Wu et al., "From Hours to Minutes", arXiv 2502.18890, tables 3 and 4: facts, transcribed to ``paper/*.csv``.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files

MACHINE = "NVIDIA A100 80G"
CAUTION = (
    "Published x is relative to the paper's own plain decoding, which took about 176 ms per token on LLaMA3.1-8b; "
    "ar-reference decodes in that style. Its Medusa* is Medusa with heads that the authors trained."
)

_METHODS = {"Medusa*": "medusa", "TriForce*": "triforce", "TokenSwift": "tokenswift"}


@dataclass(frozen=True)
class PublishedRow:
    """A row of the paper.

    Attributes:
        table: number of the paper's table.
        method: our name for it.
        published_method: its name in the paper; a star marks the authors' own version.
        model: its name in the paper.
        prefill: tokens.
        length: generated tokens.
        alpha: acceptance rate.
        alpha_std: its standard deviation; None where none is given.
        speedup: over the paper's plain decoding.
        speedup_std: its standard deviation; None where none is given.
        ar_seconds: decoding time of plain decoding; None in table 3.
        seconds: decoding time of the method; None in table 3.
    """

    table: int
    method: str
    published_method: str
    model: str
    prefill: int
    length: int
    alpha: float
    alpha_std: float | None
    speedup: float
    speedup_std: float | None
    ar_seconds: float | None
    seconds: float | None

    @property
    def source(self) -> str:
        """Model and machine, as a label."""
        return f"paper: {self.model}, {MACHINE}"


def published_rows() -> list[PublishedRow]:
    """Tables 3 and 4 of the paper, in its order."""
    return [_row(3, line) for line in read_lines("table3_main.csv")] + [
        _row(4, line) for line in read_lines("table4_qwen.csv")
    ]


def read_lines(name: str) -> list[dict[str, str]]:
    """The lines of one of the paper's tables, by column."""
    text = (files("tswift.benchmarking") / "paper" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _row(table: int, line: dict[str, str]) -> PublishedRow:
    def number(name: str, factor: float = 1.0) -> float | None:
        return float(line[name]) * factor if line.get(name) else None

    method = line.get("method", "TokenSwift")  # table 4 has no other
    return PublishedRow(
        table=table,
        method=_METHODS[method],
        published_method=method,
        model=line["model"],
        prefill=int(line["prefill"]),
        length=int(line["generated_length"]),
        alpha=float(line["alpha"]),
        alpha_std=number("alpha_std"),
        speedup=float(line["speedup"]),
        speedup_std=number("speedup_std"),
        ar_seconds=number("ar_minutes", 60),
        seconds=number("tokenswift_minutes", 60),
    )
