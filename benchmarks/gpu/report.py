"""``gpu.md``: targets, then every table of figures, as they were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import tables

Figures = Sequence[Mapping[str, Any]]


def markdown(content: Mapping[str, Any]) -> str:
    """The report of a run, with whatever figures there are."""
    figures: Figures = content["figures"]
    parts = ["# tswift on a GPU" + (" (dry run: tiny shapes on a CPU, which say nothing)" if content["dry"] else "")]
    parts.append(f"```sh\n{content['command']}\n```")
    groups: dict[str, list[dict[str, Any]]] = {
        "Sections": [{"section": name, "state": state} for name, state in content["sections"].items()],
        "Targets": targets(figures),
    }
    for figure in figures:
        section, table = figure["section"], figure["table"]
        row = {name: value for name, value in figure.items() if name not in ("section", "table")}
        if table == "environment":
            groups[table] = [{"what": name, "value": value} for name, value in row.items()]
        elif table not in ("begun", "ended"):
            groups.setdefault(f"{section}: {table}", []).append(row)
    parts += [f"## {title}\n\n{tables.markdown(rows)}" for title, rows in groups.items() if rows]
    return "\n\n".join(parts) + "\n"


def targets(figures: Figures) -> list[dict[str, Any]]:
    """Issue 17's targets beside the worst that was measured of each, on the first shape that was."""
    passes = [figure for figure in figures if (figure["section"], figure["table"]) == ("passes", "passes")]
    verify = {(row["context"], row["nodes"]): row for row in passes if row["kind"] == "verify"}
    plain = {context: row["ms"] for (context, nodes), row in verify.items() if nodes == 1}
    wide = {context: row["ms"] for (context, nodes), row in verify.items() if nodes == 32}
    texts = [row for row in figures if row["table"] == "integrated from steps" and row["method"] == "tokenswift"]
    measured = [
        ("AR step / its floor", 1.2, [row["x"] for (_, nodes), row in verify.items() if nodes == 1]),
        ("verification of 32 nodes / AR step", 1.2, [wide[at] / plain[at] for at in wide if at in plain]),
        ("draft pass / its floor", 1.3, [row["x"] for row in passes if row["kind"] == "draft"]),
        ("idle, ms per step", 0.1, [row["idle ms"] for row in figures if row["table"] == "idle" and "idle ms" in row]),
        ("100,000 tokens at alpha 0.9, integrated, s", 220, [row["seconds"] for row in texts[:1]]),
    ]
    return [
        {
            "target": name,
            "at most": limit,
            "measured, worst": max(values) if values else "not measured",
            "verdict": ("met" if max(values) <= limit else "MISSED") if values else "",
        }
        for name, limit, values in measured
    ]
