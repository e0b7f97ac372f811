"""Texts side by side, what they repeat marked: as HTML, and a piece of them for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

REPEAT = 8  # tokens that were there before, in this order, are a repetition
EXCERPT = 240  # tokens that a terminal shows: the last ones, where repetition has set in


@dataclass(frozen=True)
class Span:
    """A run of text.

    Attributes:
        text: its characters.
        repeated: whether all of it was there before.
    """

    text: str
    repeated: bool


def repeated(tokens: Sequence[int], length: int = REPEAT) -> list[bool]:
    """Of each token, whether it is part of ``length`` tokens that the text has had before in this order."""
    marks, seen = [False] * len(tokens), set()
    for start in range(len(tokens) - length + 1):
        gram = tuple(tokens[start : start + length])
        if gram in seen:
            marks[start : start + length] = [True] * length
        seen.add(gram)
    return marks


def spans(text: Mapping[str, Any], last: int | None = None) -> list[Span]:
    """A kept text as runs that are repeated and runs that are not.

    Args:
        text: an entry of ``texts`` in ``suite.json``.
        last: only so many tokens from its end; None for all.
    """
    marks = repeated(text["tokens"])
    pairs = list(zip(text["pieces"], marks, strict=True))
    found: list[Span] = []
    for piece, mark in pairs if last is None else pairs[-last:]:
        if found and (found[-1].repeated == mark or not piece):
            found[-1] = Span(found[-1].text + piece, found[-1].repeated)
        else:
            found.append(Span(piece, mark))
    return found


def share(text: Mapping[str, Any]) -> float:
    """The share of a text's tokens that are repeated."""
    return sum(repeated(text["tokens"])) / len(text["tokens"])


def pairs_of(texts: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Texts that began alike, side by side: of the same prompt, prefill and seed."""
    places: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for text in texts:
        places.setdefault((text["prompt"], text["prefill"], text["seed"]), []).append(text)
    return list(places.values())


def heading(text: Mapping[str, Any]) -> str:
    """What a text is, and how much of it is repeated."""
    return f"{text['label']}: {share(text):.0%} repeated"


def caption(texts: Sequence[Mapping[str, Any]]) -> str:
    """What texts side by side have in common."""
    first = texts[0]
    return f"{first['prompt']}, prefill {first['prefill']:,}, seed {first['seed']}, {len(first['tokens']):,} tokens"


def page(record: Mapping[str, Any], about: str) -> str:
    """All texts as a page that needs nothing else.

    Args:
        record: as in ``suite.json``.
        about: a line on what they were made with.
    """
    sections = []
    for texts in pairs_of(record["texts"]):
        columns = "".join(
            f"<section><h2>{escape(heading(text))}</h2><p>{_marked(spans(text))}</p></section>" for text in texts
        )
        sections.append(f"<h3>{escape(caption(texts))}</h3>\n<div>{columns}</div>\n")
    lines = "".join(f"<p class=about>{escape(line)}</p>\n" for line in (about, *record["conclusion"]["lines"]))
    title = escape(f"{record['suite']}: {record['title']}")
    legend = f"<mark>Marked</mark>: {REPEAT} or more tokens that the text has had before, in this order."
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{title}</h1>\n{lines}<p class=about>{legend}</p>\n{''.join(sections)}</html>\n"
    )


def side_by_side(texts: Sequence[Mapping[str, Any]]) -> Table:
    """The ends of texts for a terminal: repetitions in reverse, which needs no colours."""
    table = Table(title=Text(_excerpt(texts)), title_justify="left", expand=True)
    for text in texts:
        table.add_column(Text(heading(text)), ratio=1, overflow="fold")
    table.add_row(*(_styled(spans(text, EXCERPT)) for text in texts))
    return table


def plain(texts: Sequence[Mapping[str, Any]]) -> str:
    """The ends of texts for a pipe, one after another: repetitions in angle quotes."""
    parts = [f"{_excerpt(texts)}; repetitions are in «»."]
    for text in texts:
        told = "".join(f"«{span.text}»" if span.repeated else span.text for span in spans(text, EXCERPT))
        parts.append(f"{heading(text)}\n{told.strip()}")
    return "\n\n".join(parts) + "\n"


def _excerpt(texts: Sequence[Mapping[str, Any]]) -> str:
    longer = any(len(text["tokens"]) > EXCERPT for text in texts)
    return f"The last {EXCERPT} of {caption(texts)}" if longer else caption(texts)


def _marked(found: Sequence[Span]) -> str:
    return "".join(f"<mark>{escape(span.text)}</mark>" if span.repeated else escape(span.text) for span in found)


def _styled(found: Sequence[Span]) -> Text:
    styled = Text()
    for span in found:
        styled.append(span.text, "reverse" if span.repeated else "")
    return styled


_STYLE = """
body { font: 16px/1.5 Georgia, serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #111; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em } h3 { font-size: 1em; font-weight: normal; color: #444 }
.about { font: 14px/1.5 system-ui, sans-serif; color: #333; margin: .3em 0 }
div { display: grid; grid-template-columns: repeat(auto-fit, minmax(20em, 1fr)); gap: 2em }
section p { white-space: pre-wrap; overflow-wrap: anywhere }
mark { background: #ffd54d; color: inherit }
"""
