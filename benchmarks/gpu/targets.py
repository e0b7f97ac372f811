"""The targets of issue 4, each beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.passes import LOADED

STEP, TREE, DRAFT, HOST, PEER = 1.15, 1.2, 1.15, 1e-4, 1.5
_TREE_NODES = 41


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured.

    Attributes:
        target: in words.
        where: the shape, and how its layers ran; or the method.
        limit: what it may be at most; or at least, if ``least``.
        measured: the worst of all contexts; None where nothing was measured.
        at: where that was.
        least: see limit.
        unit: ``x``, or ``ms`` for values in seconds.
    """

    target: str
    where: str
    limit: float
    measured: float | None
    at: str = ""
    least: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """None where nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.least else self.measured <= self.limit

    @property
    def cells(self) -> list[str]:
        """For a table: target, where, limit, measured, verdict."""
        sign = ">=" if self.least else "<="
        limit = f"{sign} {self._shown(self.limit)}"
        if self.measured is None:
            return [self.target, self.where, limit, "-", "not measured"]
        off = abs(self.measured - self.limit)
        share = f"{self._shown(off)}, {100 * off / self.limit:.0f} %"
        at = f" ({self.at})" if self.at else ""
        return [
            self.target,
            self.where,
            limit,
            f"{self._shown(self.measured)}{at}",
            "met" if self.met else f"MISSED by {share}",
        ]

    def _shown(self, value: float) -> str:
        return f"{1e3 * value:.3f} ms" if self.unit == "ms" else f"{value:.2f} x"


def verdicts(content: Mapping[str, Any]) -> list[Verdict]:
    """All targets, in the issue's order; those of which nothing was measured too."""
    judged = content["scale"]["judged"]
    return [
        *(each for name in judged for each in _of_steps(content, name)),
        *(each for name in judged for each in _of_trees(content, name)),
        *(each for name in judged for each in _of_drafts(content, name)),
        *_of_host(content),
        _of_peer(content),
    ]


def _modes(content: Mapping[str, Any], name: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The cells of a shape by how its layers ran; one without cells if it was not measured."""
    cells = content["passes"].get(name, {"cells": []})["cells"]
    modes = list(dict.fromkeys(cell["mode"] for cell in cells)) or [LOADED]
    return [
        (name if mode == LOADED else f"{name}, {mode}", [cell for cell in cells if cell["mode"] == mode])
        for mode in modes
    ]


def _worst(ratios: Sequence[tuple[float, int]]) -> tuple[float | None, str]:
    if not ratios:
        return None, ""
    worst, context = max(ratios)
    return worst, f"worst, at {context:,} tokens"


def _of_steps(content: Mapping[str, Any], name: str) -> list[Verdict]:
    found = []
    for where, cells in _modes(content, name):
        steps = [cell for cell in cells if cell["pass"] == "verify" and cell["nodes"] == 1]
        ratios = [(cell["median"] / cell["floors"]["measured"], cell["context"]) for cell in steps]
        found.append(Verdict("AR step over its floor", where, STEP, *_worst(ratios)))
    return found


def _of_trees(content: Mapping[str, Any], name: str) -> list[Verdict]:
    nodes = _TREE_NODES if _TREE_NODES in content["scale"]["nodes"] else max(content["scale"]["nodes"])
    found = []
    for where, cells in _modes(content, name):
        passes = {(cell["nodes"], cell["context"]): cell["median"] for cell in cells if cell["pass"] == "verify"}
        ratios = [
            (seconds / passes[1, context], context)
            for (count, context), seconds in passes.items()
            if count == nodes and (1, context) in passes
        ]
        found.append(Verdict(f"{nodes} nodes over an AR step", where, TREE, *_worst(ratios)))
    return found


def _of_drafts(content: Mapping[str, Any], name: str) -> list[Verdict]:
    found = []
    for where, cells in _modes(content, name):
        drafts = [cell for cell in cells if cell["pass"] == "draft"]
        ratios = [(cell["median"] / cell["floors"]["measured"], cell["context"]) for cell in drafts]
        found.append(Verdict("draft pass over its floor", where, DRAFT, _worst(ratios)[0]))
    return found


def _of_host(content: Mapping[str, Any]) -> list[Verdict]:
    methods = (content["loop"] or {}).get("methods", {})
    return [
        Verdict("host's share of a step", method, HOST, (methods.get(method) or {}).get("beyond_device"), unit="ms")
        for method in ("ar", "tokenswift")
    ]


def _of_peer(content: Mapping[str, Any]) -> Verdict:
    peer = content["peer"] or {}
    where = f"{content['scale']['main']} at {content['scale']['place']:,} tokens"
    return Verdict("AR faster than transformers' generate", where, PEER, peer.get("x"), least=True)
