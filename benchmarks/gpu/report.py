"""``gpu.md``: targets, then every table of figures, as they were written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_HIDDEN = ("section", "table")
Figures = Sequence[Mapping[str, Any]]


def markdown(content: Mapping[str, Any]) -> str:
    """The report of a run, whatever there is of it."""
    figures: Figures = content["figures"]
    parts = ["# tswift on a GPU" + (" (dry run: tiny shapes on a CPU, which say nothing)" if content["dry"] else "")]
    parts.append(f"```sh\n{content['command']}\n```")
    parts.append(_table("Sections", [{"section": name, "state": state} for name, state in content["sections"].items()]))
    parts.append(_table("Targets", targets(figures)))
    for key in dict.fromkeys((figure["section"], figure["table"]) for figure in figures):
        rows = [figure for figure in figures if (figure["section"], figure["table"]) == key]
        if key[1] in ("begun", "ended"):
            continue
        if key[1] == "estimate":
            parts.append(rows[-1]["markdown"].strip())
        elif key[1] == "environment":
            parts.append(_table(key[1], [{"what": name, "value": value} for name, value in _shown(rows[-1]).items()]))
        else:
            parts.append(_table(f"{key[0]}: {key[1]}", [_shown(row) for row in rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def targets(figures: Figures) -> list[dict[str, Any]]:
    """Issue 17's targets beside the worst that was measured of each, on the first shape that was."""
    passes = [figure for figure in figures if (figure["section"], figure["table"]) == ("passes", "passes")]
    verify = {(each["context"], each["nodes"]): each for each in passes if each["kind"] == "verify"}
    ones = {context: each["ms"] for (context, nodes), each in verify.items() if nodes == 1}
    texts = [each for each in figures if each["table"] == "integrated from steps" and each["method"] == "tokenswift"]
    idle = [each["idle ms"] for each in figures if each["table"] == "idle" and "idle ms" in each]
    rows = [
        ("AR step / its floor", 1.2, [each["x"] for each in passes if each["kind"] == "verify" and each["nodes"] == 1]),
        (
            "verification of 32 nodes / AR step",
            1.2,
            [
                each["ms"] / ones[context]
                for (context, nodes), each in verify.items()
                if nodes == 32 and context in ones
            ],
        ),
        ("draft pass / its floor", 1.3, [each["x"] for each in passes if each["kind"] == "draft"]),
        ("idle, ms per step", 0.1, idle),
        ("100,000 tokens at alpha 0.9, integrated, s", 220, [each["seconds"] for each in texts[:1]]),
    ]
    return [
        {
            "target": name,
            "at most": limit,
            "measured, worst": max(found) if found else "not measured",
            "verdict": ("met" if max(found) <= limit else "MISSED") if found else "",
        }
        for name, limit, found in rows
    ]


def _shown(figure: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figure.items() if name not in _HIDDEN}


def _table(title: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table whose columns are all names that a row has; nothing for no rows."""
    rows = list(rows)
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_text(row.get(name)) for name in columns] for row in rows)]
    return f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
