"""Tables of the development scripts, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table whose columns are all names that a row has, as GitHub shows it;
    nothing for no rows.
    """
    rows = list(rows)
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *([_text(row.get(name)) for name in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
