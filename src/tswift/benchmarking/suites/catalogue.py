"""The suites by name. Where the paper gives no figures, what is varied is our choice."""

from __future__ import annotations

from typing import Any

from tswift.benchmarking.suites.suite import LENGTH, PREFILL, Choice, Paper, Setting, Suite
from tswift.errors import InputError

_REPEATS = ("seq_rep_4", "self_bleu", "compression")
_DISTINCT = ("distinct_1", "distinct_2", "distinct_3", "distinct_4", "distinct")
_FASTER = {"alpha": "alpha", "speedup": "speedup"}
_COUNTED = {**{f"distinct_{n}": f"distinct_{n}" for n in range(1, 5)}, "distinct": "average"}

_TOKENSWIFT = (Choice("", "tokenswift"),)
_SAMPLERS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"top_p": 0.9, "min_p": 0.0, "eta": 0.0},
    "min-p 0.1": {"top_p": 1.0, "min_p": 0.1, "eta": 0.0},
    "eta 2e-4": {"top_p": 1.0, "min_p": 0.0, "eta": 2e-4},
}
_PENALISED = " + penalty"
_ROOM = "Where few nodes pay, as the 8 on a CPU, the heads' tree leaves 4-grams no room: --nodes 64 gives them some."
_TREES = ((3, 3, 3, 3), (1, 9, 9, 9), (1, 3, 3, 3))
_WINDOWS = tuple(Setting(str(window), {"window": window}) for window in (64, 128, 256, 512, 1024, 2048))


def _k(*counts: int) -> tuple[Choice, ...]:
    return tuple(Choice(str(count), "tokenswift", {"ngrams": count}) for count in counts)


_ALL = (
    Suite(
        "table1",
        "Earlier methods over short texts",
        "method",
        (
            Choice("triforce", "triforce"),
            Choice("magicdec", "magicdec"),
            Choice("standalone", "standalone"),
        ),
        columns=("alpha", "speedup"),
        judged=("speedup",),
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
        columns=("alpha", "speedup"),
        judged=("alpha", "speedup"),
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
        judged=("alpha", "speedup"),
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
        (
            Choice("full", "tokenswift", {"kv": "full", "ngrams": 0}),
            Choice("partial", "tokenswift", {"kv": "partial", "ngrams": 0}),
            Choice("dynamic partial", "tokenswift", {"kv": "dynamic", "ngrams": 0}),
        ),
        columns=("alpha", "speedup"),
        judged=("alpha", "speedup"),
        paper=Paper("table5_kv.csv", ("kv",), _FASTER),
        wide=True,
    ),
    Suite(
        "table6",
        "Repetition with and without the contextual penalty",
        "sampler",
        _TOKENSWIFT,
        columns=(*_DISTINCT, *_REPEATS, "alpha", "speedup"),
        judged=("distinct", "speedup"),
        contrasts=tuple((f"{name}{_PENALISED}", name) for name in _SAMPLERS),
        settings=tuple(
            Setting(f"{name}{told}", {**sampling, "penalty": penalty})
            for name, sampling in _SAMPLERS.items()
            for told, penalty in ((_PENALISED, 1.2), ("", 1.0))
        ),
        paper=Paper(
            "table6_penalty.csv",
            ("sampler", "contextual_penalty"),
            {**_COUNTED, "speedup": "speedup"},
            {
                f"{name.split()[0]} {yes}": f"{name}{told}"
                for name in _SAMPLERS
                for yes, told in (("yes", _PENALISED), ("no", ""))
            },
        ),
        plot="bars",
        plotted=_DISTINCT,
    ),
    Suite(
        "table7",
        "The shape of the draft tree, without reuse",
        "tree",
        tuple(Choice(f"[{' '.join(map(str, tree))}]", "tokenswift", {"tree": tree, "ngrams": 0}) for tree in _TREES),
        columns=("alpha", "speedup"),
        judged=("alpha", "speedup"),
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
        columns=(*_DISTINCT, *_REPEATS, "alpha", "speedup"),
        judged=("distinct",),
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
        columns=("alpha", "speedup"),
        judged=("alpha", "speedup"),
        settings=tuple(Setting(name, sampling) for name, sampling in _SAMPLERS.items()),
        paper=Paper("table12_samplers.csv", ("sampler",), _FASTER),
        wide=True,
    ),
    Suite(
        "table13",
        "Acceptance and speedup by temperature, top-p 0.9",
        "temperature",
        _TOKENSWIFT,
        columns=("alpha", "speedup"),
        judged=("alpha", "speedup"),
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
        columns=("alpha", "speedup"),
        judged=("alpha", "speedup"),
        along=PREFILL,
        plot="axis",
        prefills=tuple(range(2048, 8193, 1024)),
    ),
    Suite(
        "table15",
        "Acceptance and speedup by the penalty's window",
        "window",
        _TOKENSWIFT,
        columns=("alpha", "speedup"),
        judged=("alpha", "speedup"),
        settings=_WINDOWS,
        plot="axis",
    ),
    Suite(
        "table16",
        "Repetition by the penalty's window",
        "window",
        _TOKENSWIFT,
        columns=(*_DISTINCT, *_REPEATS),
        judged=("distinct",),
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
        judged=("seconds",),
        paper=Paper("figure1.csv", ("method",), {"seconds": "minutes"}, {"AR": "ar", "TokenSwift": "tokenswift"}),
        plot="time",
        plain=True,
    ),
    Suite(
        "figure3",
        "Acceptance and speedup over length, without reuse and with 20 4-grams",
        "k",
        _k(0, 20),
        columns=("alpha", "beta", "speedup"),
        judged=("alpha", "beta", "speedup"),
        wide=True,
        plotted=("alpha", "beta", "speedup"),
        note=_ROOM,
    ),
    Suite(
        "figure4",
        "Acceptance and speedup by how many 4-grams are reused",
        "k",
        _k(0, 5, 10, 20, 50),
        columns=("alpha", "beta", "speedup"),
        judged=("alpha", "beta", "speedup"),
        plot="axis",
        plotted=("alpha", "beta", "speedup"),
        note=_ROOM,
    ),
    Suite(
        "case-study",
        "The same beginning, with and without the contextual penalty",
        "penalty",
        _TOKENSWIFT,
        columns=(*_DISTINCT, *_REPEATS),
        judged=("distinct",),
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
