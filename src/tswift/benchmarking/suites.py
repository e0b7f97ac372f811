"""Suites: the paper's tables and figures as data. What each runs, shows, and is compared with.

Where the paper gives no figures, what is varied is our choice.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import log
from typing import Any

from tswift.benchmarking.summary import Figure
from tswift.benchmarking.table import method_name
from tswift.errors import InputError

PAPER_LENS = (20_000, 40_000, 60_000, 80_000, 100_000)
PAPER_MACHINE = "NVIDIA A100 80G"
CAUTION = (
    "Published x is relative to the paper's own plain decoding, which took about 176 ms per token on LLaMA3.1-8b; "
    "ar-reference decodes in that style. Its Medusa* is Medusa with heads that the authors trained."
)

AXIS, LENGTH, PREFILL = "axis", "length", "prefill"  # what a suite puts in order


@dataclass(frozen=True)
class Setting:
    """Fields of ``SamplingParams``, and its place on the axis. Each setting has a plain decode of its own."""

    label: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A method, fields of its ``DraftOptions``, and its place on the axis. All choices write the same text."""

    label: str
    method: str
    drafting: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """Where the published rows are (Wu et al., "From Hours to Minutes", arXiv 2502.18890; facts, transcribed)."""

    file: str  # a CSV in ``paper/``
    axis: tuple[str, ...]  # its columns that, joined by spaces, are a row's place on the axis
    figures: Mapping[str, str]  # its column by metric. Columns called minutes are converted to seconds
    names: Mapping[str, str] = field(default_factory=dict)  # our label for a place on the axis, where it is another one


@dataclass(frozen=True)
class Suite:
    """One of the paper's tables or figures."""

    name: str
    title: str
    axis: str  # what is varied, as a column heading
    choices: tuple[Choice, ...]  # what runs side by side, plain decoding apart
    columns: tuple[str, ...] = ("alpha", "speedup")  # metrics shown
    ordered: tuple[str, ...] = ("alpha", "speedup")  # those of them whose order is compared with the paper's
    along: str = AXIS  # what is put in order: the axis, generated lengths or prefills
    contrasts: tuple[tuple[str, str], ...] = ()  # pairs on the axis that are compared; all if empty
    settings: tuple[Setting, ...] = (Setting(),)
    paper: Paper | None = None  # None where no figures were transcribed
    wide: bool = False  # the axis runs across the table, as in the paper, and not down
    plot: str = "lines"  # ``lines`` over length, ``axis`` over the axis, ``bars`` or ``time``
    plotted: tuple[str, ...] = ("alpha", "speedup")
    prefills: tuple[int, ...] = (4096,)
    lens: tuple[int, ...] = PAPER_LENS
    fixes: tuple[str, ...] = ()  # options that are set here without being varied
    plain: bool = False  # plain decoding is on the axis, too
    texts: bool = False  # keep the texts, and show them
    note: str = ""  # shown below the table

    @property
    def own(self) -> frozenset[str]:
        """Parameter names of the options that it varies or fixes, which nobody else can set."""
        sampling = {name for setting in self.settings for name in setting.sampling}
        drafting = {name for choice in self.choices for name in choice.drafting}
        prefill = {"prefills"} if self.along == PREFILL else set()
        return frozenset({"methods", *sampling, *drafting, *self.fixes} | prefill)

    @property
    def labels(self) -> tuple[str, ...]:
        """Places on its axis; none where the model or the prefill is varied."""
        labels = [choice.label for choice in self.choices] + [setting.label for setting in self.settings]
        return tuple(label for label in labels if label)

    @property
    def methods(self) -> tuple[str, ...]:
        """Its methods, each once."""
        return tuple(dict.fromkeys(choice.method for choice in self.choices))


def _methods(*names: str) -> tuple[Choice, ...]:
    return tuple(Choice(name, name) for name in names)


def _varied(name: str, *values: Any) -> tuple[Setting, ...]:
    """A setting for each value of one field of ``SamplingParams``."""
    return tuple(Setting(str(value), {name: value}) for value in values)


def _reused(*counts: int) -> tuple[Choice, ...]:
    return tuple(Choice(str(count), "tokenswift", {"ngrams": count}) for count in counts)


_TOKENSWIFT = (Choice("", "tokenswift"),)
_FASTER = {"alpha": "alpha", "speedup": "speedup"}
_TIMES = {"ar_seconds": "ar_minutes", "seconds": "tokenswift_minutes", "delta": "delta_minutes"}
_DISTINCT = ("distinct_1", "distinct_2", "distinct_3", "distinct_4", "distinct")
_REPETITION = (*_DISTINCT, "seq_rep_4", "self_bleu", "compression")
_OF_TEXTS: dict[str, Any] = {
    "columns": _REPETITION, "ordered": ("distinct",), "plot": "bars", "plotted": _DISTINCT,
}  # fmt: skip
_COUNTED = {**{name: name for name in _DISTINCT}, "distinct": "average"}
_REUSE = ("alpha", "beta", "speedup")
_WITH_BETA: dict[str, Any] = {
    "columns": _REUSE, "ordered": _REUSE, "plotted": _REUSE,
    "note": "Where few nodes pay, as the 8 on a CPU, the heads' tree leaves 4-grams no room: "
    "--nodes 64 gives them some.",
}  # fmt: skip
_WINDOWS = _varied("window", 64, 128, 256, 512, 1024, 2048)
_SAMPLERS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"top_p": 0.9, "min_p": 0.0, "eta": 0.0},
    "min-p 0.1": {"top_p": 1.0, "min_p": 0.1, "eta": 0.0},
    "eta 2e-4": {"top_p": 1.0, "min_p": 0.0, "eta": 2e-4},
}
_PENALTIES = ((" + penalty", 1.2, "yes"), ("", 1.0, "no"))  # suffix of the label, penalty, and what the paper says

# fmt: off
_ALL = (
    Suite(
        "table1", "Earlier methods over short texts", "method", _methods("triforce", "magicdec", "standalone"),
        paper=Paper("table1_prior_methods.csv", ("method", "draft_form"), {"speedup": "speedup"}, {
            "TriForce standalone draft": "triforce",
            "MagicDec self-speculation": "magicdec",
            "MagicDec standalone draft": "standalone",
        }),
        ordered=("speedup",), plotted=("speedup",), lens=(64, 256),
        note="The paper's figures are of different lengths, each method's own default.",
    ),
    Suite(
        "table3", "Acceptance and speedup of all methods", "method",
        _methods("medusa", "triforce", "magicdec", "standalone", "tokenswift"),
        paper=Paper("table3_main.csv", ("method",), _FASTER, {
            "Medusa*": "medusa", "TriForce*": "triforce", "TokenSwift": "tokenswift",
        }),
        wide=True, prefills=(2048, 4096, 8192),
    ),
    Suite(
        "table4", "Decoding time of whole texts", "model", _TOKENSWIFT,
        columns=("alpha", "speedup", "ar_seconds", "seconds", "delta"), along=LENGTH,
        paper=Paper("table4_qwen.csv", ("model",), {**_FASTER, **_TIMES}),
    ),
    Suite(
        "table5", "The KV cache that drafting reads, without reuse", "KV",
        tuple(
            Choice(label, "tokenswift", {"kv": kv, "ngrams": 0})
            for label, kv in (("full", "full"), ("partial", "partial"), ("dynamic partial", "dynamic"))
        ),
        paper=Paper("table5_kv.csv", ("kv",), _FASTER), wide=True,
    ),
    Suite(
        "table6", "Repetition with and without the contextual penalty", "sampler", _TOKENSWIFT,
        columns=(*_REPETITION, "alpha", "speedup"), ordered=("distinct", "speedup"),
        plot="bars", plotted=_DISTINCT,
        contrasts=tuple((f"{name} + penalty", name) for name in _SAMPLERS),
        settings=tuple(
            Setting(f"{name}{suffix}", {**sampling, "penalty": penalty})
            for name, sampling in _SAMPLERS.items() for suffix, penalty, _ in _PENALTIES
        ),
        paper=Paper(
            "table6_penalty.csv", ("sampler", "contextual_penalty"), {**_COUNTED, "speedup": "speedup"},
            {f"{name.split()[0]} {word}": f"{name}{suffix}" for name in _SAMPLERS for suffix, _, word in _PENALTIES},
        ),
    ),
    Suite(
        "table7", "The shape of the draft tree, without reuse", "tree",
        tuple(
            Choice(f"[{' '.join(map(str, tree))}]", "tokenswift", {"tree": tree, "ngrams": 0})
            for tree in ((3, 3, 3, 3), (1, 9, 9, 9), (1, 3, 3, 3))
        ),
        paper=Paper("table7_tree.csv", ("tree",), _FASTER, {"[1 3 3 3] (adopted)": "[1 3 3 3]"}),
        wide=True, fixes=("nodes", "gamma"),
        note="Each tree has as many nodes as it takes: after conditioned heads, a level's candidates follow "
        "the best one of the level before only.",
    ),
    Suite(
        "table8", "Repetition by the penalty's strength", "theta", _TOKENSWIFT,
        settings=_varied("penalty", 1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
        paper=Paper("table8_theta.csv", ("theta",), _COUNTED),
        **{**_OF_TEXTS, "columns": (*_REPETITION, "alpha", "speedup")},
    ),
    Suite(
        "table12", "Acceptance and speedup by sampler", "sampler", _TOKENSWIFT,
        settings=tuple(Setting(name, sampling) for name, sampling in _SAMPLERS.items()),
        paper=Paper("table12_samplers.csv", ("sampler",), _FASTER), wide=True,
    ),
    Suite(
        "table13", "Acceptance and speedup by temperature, top-p 0.9", "temperature", _TOKENSWIFT,
        settings=tuple(
            Setting(f"{value:g}", {**_SAMPLERS["top-p 0.9"], "temperature": value})
            for value in (0.4, 0.6, 0.8, 1.0, 1.2)
        ),
        plot="axis",
    ),
    Suite(
        "table14", "Acceptance and speedup by the prompt's length, without reuse", "method",
        (Choice("", "tokenswift", {"ngrams": 0}),),
        along=PREFILL, plot="axis", prefills=tuple(range(2048, 8193, 1024)),
    ),
    Suite(
        "table15", "Acceptance and speedup by the penalty's window", "window", _TOKENSWIFT,
        settings=_WINDOWS, plot="axis",
    ),
    Suite("table16", "Repetition by the penalty's window", "window", _TOKENSWIFT, settings=_WINDOWS, **_OF_TEXTS),
    Suite(
        "figure1", "Decoding time of plain decoding and of tokenswift", "method", _methods("tokenswift"),
        columns=("seconds", "speedup"), ordered=("seconds",), plot="time", plain=True,
        paper=Paper("figure1.csv", ("method",), {"seconds": "minutes"}, {"AR": "ar", "TokenSwift": "tokenswift"}),
    ),
    Suite(
        "figure3", "Acceptance and speedup over length, without reuse and with 20 4-grams", "k", _reused(0, 20),
        wide=True, **_WITH_BETA,
    ),
    Suite(
        "figure4", "Acceptance and speedup by how many 4-grams are reused", "k", _reused(0, 5, 10, 20, 50),
        plot="axis", **_WITH_BETA,
    ),
    Suite(
        "case-study", "The same beginning, with and without the contextual penalty", "penalty", _TOKENSWIFT,
        settings=(Setting("with penalty", {"penalty": 1.2}), Setting("without", {"penalty": 1.0})),
        lens=(4000,), texts=True, **_OF_TEXTS,
    ),
)
# fmt: on

SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}


def find_suite(name: str) -> Suite:
    """The suite of a name, or an ``InputError``."""
    if name not in SUITES:
        raise InputError(f"no suite {name!r:.40}; there are {', '.join(SUITES)}", "suite")
    return SUITES[name]


@dataclass(frozen=True)
class Row:
    """Figures at one place of a suite."""

    axis: str  # its place on the suite's axis
    source: str  # ``here``, or the paper's model
    prefill: int | None  # tokens; None where the paper does not say
    length: int | None
    figures: Mapping[str, Figure]
    # means by prompt and seed, of a measured row
    draws: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)


def place_name(suite: Suite, axis: str) -> str:
    """A place on the axis where the axis' name is not in sight: ``k 20``, ``AR``."""
    return f"{suite.axis} {axis}" if axis.replace(".", "").isdecimal() else method_name(axis)


def published_rows(suite: Suite) -> list[Row]:
    """The paper's rows; none where no figures were transcribed."""
    paper = suite.paper
    if paper is None:
        return []

    def number(line: Mapping[str, str], column: str) -> float | None:
        factor = 60.0 if column.endswith("minutes") else 1.0
        return float(line[column]) * factor if line.get(column) else None

    rows = []
    text = (files("tswift.benchmarking") / "paper" / paper.file).read_text(encoding="utf-8")
    for line in csv.DictReader(text.splitlines()):
        axis = " ".join(line[column] for column in paper.axis)
        model = "" if "model" in paper.axis else line.get("model", "")
        prefill, length = (int(line[name]) if line.get(name) else None for name in ("prefill", "generated_length"))
        figures = {
            name: Figure(1, number(line, column), number(line, f"{column}_std"))
            for name, column in paper.figures.items()
        }
        source = f"paper: {model}" if model else "paper"
        rows.append(Row(paper.names.get(axis, axis), source, prefill, length, figures))
    return rows


def counterparts(suite: Suite, axis: str, prefill: int, length: int, published: Sequence[Row]) -> list[Row]:
    """Of each of the paper's sources, the row at a place, or at the nearest one: prefill first, then length.

    Where lengths are put in order, and not what is on the axis, every one of the paper's rows there counts.
    """

    def distance(row: Row) -> tuple[float, float]:
        prefills = abs(log(row.prefill / prefill)) if row.prefill else 0.0
        return prefills, abs(log(row.length / length)) if row.length else 0.0

    nearest: dict[tuple[str, str], Row] = {}
    for row in published:
        key = row.source, row.axis
        if row.axis == axis or suite.along == LENGTH:
            nearest[key] = min(nearest.get(key, row), row, key=distance)
    return list(nearest.values())
