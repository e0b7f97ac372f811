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

from tswift.benchmarking.grid import NOTHING, duration, method_name, with_spread
from tswift.benchmarking.summary import Figure
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
    """Where the published rows are (Wu et al., "From Hours to Minutes", arXiv 2502.18890; facts, transcribed).

    Attributes:
        file: a CSV in ``paper/``.
        axis: its columns that, joined by spaces, say where on the axis a row is.
        figures: its column by our figure's name. Columns called minutes are told in seconds.
        names: our label for a place on the axis, where it is another one.
    """

    file: str
    axis: tuple[str, ...]
    figures: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """One of the paper's tables or figures.

    Attributes:
        axis: what is varied, as the head of a column.
        choices: what runs side by side, plain decoding apart.
        columns: figures shown, by name.
        ordered: those of them whose order is compared with the paper's.
        along: what is put in order: the axis, generated lengths or prefills.
        contrasts: pairs on the axis that are compared; all if there are none.
        settings: how texts are drawn.
        paper: the published rows; None where no figures were transcribed.
        wide: the axis runs across the table, as in the paper, and not down.
        plot: ``lines`` over length, ``axis`` over the axis, ``bars`` or ``time``.
        plotted: figures drawn.
        prefills, lens: defaults; the paper's.
        fixes: options that are set here without being varied.
        plain: plain decoding has a place on the axis, too.
        texts: keep the texts, and show them.
        note: what has to be known to read it.
    """

    name: str
    title: str
    axis: str
    choices: tuple[Choice, ...]
    columns: tuple[str, ...] = ("alpha", "speedup")
    ordered: tuple[str, ...] = ("alpha", "speedup")
    along: str = AXIS
    contrasts: tuple[tuple[str, str], ...] = ()
    settings: tuple[Setting, ...] = (Setting(),)
    paper: Paper | None = None
    wide: bool = False
    plot: str = "lines"
    plotted: tuple[str, ...] = ("alpha", "speedup")
    prefills: tuple[int, ...] = (4096,)
    lens: tuple[int, ...] = PAPER_LENS
    fixes: tuple[str, ...] = ()
    plain: bool = False
    texts: bool = False
    note: str = ""

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


_DISTINCT = ("distinct_1", "distinct_2", "distinct_3", "distinct_4", "distinct")
_REPETITION = (*_DISTINCT, "seq_rep_4", "self_bleu", "compression")
_FASTER = {"alpha": "alpha", "speedup": "speedup"}
_COUNTED = {**{f"distinct_{n}": f"distinct_{n}" for n in range(1, 5)}, "distinct": "average"}
_REUSE = ("alpha", "beta", "speedup")

_TOKENSWIFT = (Choice("", "tokenswift"),)
_SAMPLERS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"top_p": 0.9, "min_p": 0.0, "eta": 0.0},
    "min-p 0.1": {"top_p": 1.0, "min_p": 0.1, "eta": 0.0},
    "eta 2e-4": {"top_p": 1.0, "min_p": 0.0, "eta": 2e-4},
}
_PENALISED = " + penalty"
_ROOM = "Where few nodes pay, as the 8 on a CPU, the heads' tree leaves 4-grams no room: --nodes 64 gives them some."
_WINDOWS = tuple(Setting(str(window), {"window": window}) for window in (64, 128, 256, 512, 1024, 2048))


_ALL = (
    Suite(
        "table1",
        "Earlier methods over short texts",
        "method",
        tuple(Choice(name, name) for name in ("triforce", "magicdec", "standalone")),
        ordered=("speedup",),
        paper=Paper(
            "table1_prior_methods.csv",
            ("method", "draft_form"),
            {"speedup": "speedup"},
            {
                "TriForce standalone draft": "triforce",
                "MagicDec self-speculation": "magicdec",
                "MagicDec standalone draft": "standalone",
            },
        ),
        plotted=("speedup",),
        lens=(64, 256),
        note="The paper's figures are of different lengths, each method's own default.",
    ),
    Suite(
        "table3",
        "Acceptance and speedup of all methods",
        "method",
        tuple(Choice(name, name) for name in ("medusa", "triforce", "magicdec", "standalone", "tokenswift")),
        paper=Paper(
            "table3_main.csv",
            ("method",),
            _FASTER,
            {"Medusa*": "medusa", "TriForce*": "triforce", "TokenSwift": "tokenswift"},
        ),
        wide=True,
        prefills=(2048, 4096, 8192),
    ),
    Suite(
        "table4",
        "Decoding time of whole texts",
        "model",
        _TOKENSWIFT,
        columns=("alpha", "speedup", "ar_seconds", "seconds", "delta"),
        along=LENGTH,
        paper=Paper(
            "table4_qwen.csv",
            ("model",),
            {**_FASTER, "ar_seconds": "ar_minutes", "seconds": "tokenswift_minutes", "delta": "delta_minutes"},
        ),
    ),
    Suite(
        "table5",
        "The KV cache that drafting reads, without reuse",
        "KV",
        tuple(
            Choice(label, "tokenswift", {"kv": kv, "ngrams": 0})
            for label, kv in (("full", "full"), ("partial", "partial"), ("dynamic partial", "dynamic"))
        ),
        paper=Paper("table5_kv.csv", ("kv",), _FASTER),
        wide=True,
    ),
    Suite(
        "table6",
        "Repetition with and without the contextual penalty",
        "sampler",
        _TOKENSWIFT,
        columns=(*_REPETITION, "alpha", "speedup"),
        ordered=("distinct", "speedup"),
        contrasts=tuple((f"{name}{_PENALISED}", name) for name in _SAMPLERS),
        settings=tuple(
            Setting(f"{name}{mark}", {**sampling, "penalty": penalty})
            for name, sampling in _SAMPLERS.items()
            for mark, penalty in ((_PENALISED, 1.2), ("", 1.0))
        ),
        paper=Paper(
            "table6_penalty.csv",
            ("sampler", "contextual_penalty"),
            {**_COUNTED, "speedup": "speedup"},
            {
                f"{name.split()[0]} {yes}": f"{name}{mark}"
                for name in _SAMPLERS
                for yes, mark in (("yes", _PENALISED), ("no", ""))
            },
        ),
        plot="bars",
        plotted=_DISTINCT,
    ),
    Suite(
        "table7",
        "The shape of the draft tree, without reuse",
        "tree",
        tuple(
            Choice(f"[{' '.join(map(str, tree))}]", "tokenswift", {"tree": tree, "ngrams": 0})
            for tree in ((3, 3, 3, 3), (1, 9, 9, 9), (1, 3, 3, 3))
        ),
        paper=Paper("table7_tree.csv", ("tree",), _FASTER, {"[1 3 3 3] (adopted)": "[1 3 3 3]"}),
        wide=True,
        fixes=("nodes", "gamma"),
        note="Each tree has as many nodes as it takes: after conditioned heads, a level's candidates follow "
        "the best one of the level before only.",
    ),
    Suite(
        "table8",
        "Repetition by the penalty's strength",
        "theta",
        _TOKENSWIFT,
        columns=(*_REPETITION, "alpha", "speedup"),
        ordered=("distinct",),
        settings=tuple(Setting(f"{theta:.1f}", {"penalty": theta}) for theta in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)),
        paper=Paper("table8_theta.csv", ("theta",), _COUNTED),
        plot="bars",
        plotted=_DISTINCT,
    ),
    Suite(
        "table12",
        "Acceptance and speedup by sampler",
        "sampler",
        _TOKENSWIFT,
        settings=tuple(Setting(name, sampling) for name, sampling in _SAMPLERS.items()),
        paper=Paper("table12_samplers.csv", ("sampler",), _FASTER),
        wide=True,
    ),
    Suite(
        "table13",
        "Acceptance and speedup by temperature, top-p 0.9",
        "temperature",
        _TOKENSWIFT,
        settings=tuple(
            Setting(f"{value:g}", {**_SAMPLERS["top-p 0.9"], "temperature": value})
            for value in (0.4, 0.6, 0.8, 1.0, 1.2)
        ),
        plot="axis",
    ),
    Suite(
        "table14",
        "Acceptance and speedup by the prompt's length, without reuse",
        "method",
        (Choice("", "tokenswift", {"ngrams": 0}),),
        along=PREFILL,
        plot="axis",
        prefills=tuple(range(2048, 8193, 1024)),
    ),
    Suite(
        "table15",
        "Acceptance and speedup by the penalty's window",
        "window",
        _TOKENSWIFT,
        settings=_WINDOWS,
        plot="axis",
    ),
    Suite(
        "table16",
        "Repetition by the penalty's window",
        "window",
        _TOKENSWIFT,
        columns=_REPETITION,
        ordered=("distinct",),
        settings=_WINDOWS,
        plot="bars",
        plotted=_DISTINCT,
    ),
    Suite(
        "figure1",
        "Decoding time of plain decoding and of tokenswift",
        "method",
        (Choice("tokenswift", "tokenswift"),),
        columns=("seconds", "speedup"),
        ordered=("seconds",),
        paper=Paper("figure1.csv", ("method",), {"seconds": "minutes"}, {"AR": "ar", "TokenSwift": "tokenswift"}),
        plot="time",
        plain=True,
    ),
    Suite(
        "figure3",
        "Acceptance and speedup over length, without reuse and with 20 4-grams",
        "k",
        tuple(Choice(str(count), "tokenswift", {"ngrams": count}) for count in (0, 20)),
        columns=_REUSE,
        ordered=_REUSE,
        wide=True,
        plotted=_REUSE,
        note=_ROOM,
    ),
    Suite(
        "figure4",
        "Acceptance and speedup by how many 4-grams are reused",
        "k",
        tuple(Choice(str(count), "tokenswift", {"ngrams": count}) for count in (0, 5, 10, 20, 50)),
        columns=_REUSE,
        ordered=_REUSE,
        plot="axis",
        plotted=_REUSE,
        note=_ROOM,
    ),
    Suite(
        "case-study",
        "The same beginning, with and without the contextual penalty",
        "penalty",
        _TOKENSWIFT,
        columns=_REPETITION,
        ordered=("distinct",),
        settings=(Setting("with penalty", {"penalty": 1.2}), Setting("without", {"penalty": 1.0})),
        plot="bars",
        plotted=_DISTINCT,
        lens=(4000,),
        texts=True,
    ),
)

SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}


def find_suite(name: str) -> Suite:
    """The suite of a name.

    Raises:
        InputError: there is none.
    """
    if name not in SUITES:
        raise InputError(f"no suite {name!r:.40}; there are {', '.join(SUITES)}", "--suite")
    return SUITES[name]


@dataclass(frozen=True)
class Shown:
    """A figure as tables and plots of suites have it.

    Attributes:
        head: of its column.
        meaning: for a note below, and the axis of a plot.
        digits: decimals; None for a time.
        close: a difference that says nothing, whatever the spread: in the figure's own unit, or a share of the larger.
        relative: see close.
        rounding: the paper's last digit, in our unit.
        name: in a legend of bars.
    """

    head: str
    meaning: str
    digits: int | None = 3
    close: float = 0.01
    relative: bool = False
    rounding: float = 0.01
    name: str = ""

    def text(self, figure: Figure | None) -> str:
        """The figure with its spread; times without."""
        if figure is None or figure.mean is None:
            return NOTHING
        return duration(figure.mean) if self.digits is None else with_spread(figure.mean, figure.std, self.digits)

    def number(self, value: float) -> str:
        """A value alone."""
        return duration(value) if self.digits is None else f"{value:.{self.digits}f}"

    def tolerance(self, first: float, second: float) -> float:
        """The largest difference of two values that says nothing."""
        return self.close * max(abs(first), abs(second)) if self.relative else self.close


_TIME: dict[str, Any] = {"digits": None, "close": 0.05, "relative": True, "rounding": 0.6}

SHOWN: dict[str, Shown] = {
    "alpha": Shown("alpha", "accepted draft tokens / most that could be"),
    "beta": Shown("beta", "the part of alpha whose longest path came from a reused 4-gram"),
    "speedup": Shown("x", "AR's time / the method's, prefill apart", digits=2, close=0.05, relative=True),
    "ar_seconds": Shown("T_AR", "AR's decoding time", **_TIME),
    "seconds": Shown("time", "decoding time, prefill apart", **_TIME),
    "delta": Shown("delta", "the method's time - AR's", **_TIME),
    **{f"distinct_{n}": Shown(f"D-{n}", f"unique {n}-grams / {n}-grams", name=f"Distinct-{n}") for n in range(1, 5)},
    "distinct": Shown("D", "mean of Distinct-1 to Distinct-4", name="mean"),
    "seq_rep_4": Shown("seq-rep-4", "4-grams that were there before / 4-grams"),
    "self_bleu": Shown("self-BLEU", "mean BLEU-4 of pieces of 64 tokens against the others"),
    "compression": Shown("LZMA", "compression ratio, bytes / bytes after LZMA", digits=2, close=0.03, relative=True),
}


@dataclass(frozen=True)
class Row:
    """Figures at one place of a suite.

    Attributes:
        axis: its place on the suite's axis.
        source: ``here``, or where the paper has it from.
        prefill, length: tokens; None where the paper does not say.
        figures: by name.
        draws: of a measured row, means by prompt and seed.
    """

    axis: str
    source: str
    prefill: int | None
    length: int | None
    figures: Mapping[str, Figure]
    draws: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)


def place_name(suite: Suite, axis: str) -> str:
    """A place on the axis where the axis' name is not in sight: ``k 20``, ``AR``."""
    return f"{suite.axis} {axis}" if axis.replace(".", "").isdecimal() else method_name(axis)


def published_rows(suite: Suite) -> list[Row]:
    """The paper's rows; none where no figures were transcribed."""
    if suite.paper is None:
        return []
    text = (files("tswift.benchmarking") / "paper" / suite.paper.file).read_text(encoding="utf-8")
    return [_published(suite.paper, line) for line in csv.DictReader(text.splitlines())]


def counterparts(suite: Suite, axis: str, prefill: int, length: int, published: Sequence[Row]) -> list[Row]:
    """Of each of the paper's sources, the row at a place, or at the nearest one: prefill first, then length.

    Where lengths are put in order, and not what is on the axis, every one of the paper's rows there counts.
    """

    def distance(row: Row) -> tuple[float, float]:
        prefills = abs(log(row.prefill / prefill)) if row.prefill else 0.0
        return prefills, abs(log(row.length / length)) if row.length else 0.0

    found: dict[tuple[str, str], Row] = {}
    for row in published:
        key = row.source, row.axis
        if (row.axis == axis or suite.along == LENGTH) and (key not in found or distance(row) < distance(found[key])):
            found[key] = row
    return list(found.values())


def _published(paper: Paper, line: Mapping[str, str]) -> Row:
    def number(column: str) -> float | None:
        factor = 60.0 if column.endswith("minutes") else 1.0
        return float(line[column]) * factor if line.get(column) else None

    def whole(column: str) -> int | None:
        return int(line[column]) if line.get(column) else None

    axis = " ".join(line[column] for column in paper.axis)
    model = "" if "model" in paper.axis else line.get("model", "")
    figures = {name: Figure(1, number(column), number(f"{column}_std")) for name, column in paper.figures.items()}
    source = f"paper: {model}" if model else "paper"
    return Row(paper.names.get(axis, axis), source, whole("prefill"), whole("generated_length"), figures)
