"""Options that several subcommands take: declared once, so that they are named, typed and explained alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tswift.errors import InputError

if TYPE_CHECKING:
    from tswift.benchmarking.config import BenchOptions

_SAMPLING, _DRAFTING, _MODEL, _OUTPUT = "Sampling", "Drafting", "Model", "Output"


def option(panel: str, text: str, *names: str) -> Any:
    """An option whose help says its default."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


Prompt = Annotated[
    str | None,
    typer.Option(
        help="File to continue, - for stdin. (default: the first 1,024 tokens of the bundled novel)",
        show_default=False,
    ),
]
Prefill = Annotated[
    int | None, typer.Option(help="Use the prompt's first N tokens only.", metavar="N", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Any integer; with the prompt and the sampling it fixes the text.")]

Temperature = Annotated[float | None, option(_SAMPLING, "0 takes the most likely token. (default: 1)", "--temperature")]
TopK = Annotated[int | None, option(_SAMPLING, "Keep the K most likely. (default: 0, all)", "--top-k")]
TopP = Annotated[float | None, option(_SAMPLING, "Keep the likeliest up to this probability. (default: 1)", "--top-p")]
MinP = Annotated[
    float | None, option(_SAMPLING, "Drop what is below this share of the likeliest. (default: 0.1)", "--min-p")
]
Eta = Annotated[float | None, option(_SAMPLING, "Epsilon of eta sampling. (default: 0, off)", "--eta")]
Penalty = Annotated[float | None, option(_SAMPLING, "Contextual penalty; 1 is none. (default: 1.2)", "--penalty")]
Window = Annotated[int | None, option(_SAMPLING, "Tokens it looks back on. (default: 1024)", "--window")]

Methods = Annotated[
    str,
    typer.Option(
        help="Of ar, medusa, tokenswift, cascade, recall, reuse, magicdec, standalone, triforce, auto, ar-reference; "
        "ar is always among them."
    ),
]
ReferenceAr = Annotated[
    bool, typer.Option("--with-reference-ar", help="Also ar-reference: expanded K/V and dense masks, as published.")
]
Trees = Annotated[
    list[str] | None,
    option(_DRAFTING, "auto or 1,2,2,2 for all methods, or METHOD=1,2,2,2; repeatable. (default: by device)", "--tree"),
]
Costs = Annotated[
    str | None,
    option(
        _DRAFTING,
        "measured or nominal: by which costs of passes trees are chosen; never changes the text. (default: measured)",
        "--costs",
    ),
]
Recall = Annotated[
    int | None,
    option(
        _DRAFTING,
        "Likeliest tokens kept of each distribution, to be recalled where the text stands like that again, with --tree "
        "auto; 0 reuses n-grams. (default: 64)",
        "--recall",
    ),
]
Nodes = Annotated[int | None, option(_DRAFTING, "Most nodes of a draft tree. (default: by device)", "--nodes")]
Ngrams = Annotated[int | None, option(_DRAFTING, "4-grams reused per token. (default: 20)", "--ngrams")]
ReuseRecent = Annotated[
    bool | None,
    option(_DRAFTING, "Reuse text in the penalty window too. (default: no)", "--reuse-recent/--no-reuse-recent"),
]
Gamma = Annotated[
    int | None,
    option(
        _DRAFTING, "Tokens of a drafted chain, or heads to use of the default tree. (default: by method)", "--gamma"
    ),
]
InnerGamma = Annotated[
    int | None, option(_DRAFTING, "Tokens the small model drafts for triforce's draft. (default: 2)", "--inner-gamma")
]
Kv = Annotated[
    str | None,
    option(_DRAFTING, "What drafting reads: full, partial, dynamic, streaming, snapkv. (default: by method)", "--kv"),
]
Budget = Annotated[int | None, option(_DRAFTING, "Tokens of the partial KV cache. (default: by method)", "--budget")]
Sinks = Annotated[int | None, option(_DRAFTING, "First tokens it always holds. (default: 16)", "--sinks")]
SharedNoise = Annotated[
    bool | None,
    option(_DRAFTING, "Draft with the noise of the draw. (default: yes)", "--shared-noise/--no-shared-noise"),
]
HeadsFile = Annotated[
    str | None,
    option(_DRAFTING, "chained, conditioned or a file. (default: heads.safetensors by the model)", "--heads"),
]

DraftModel = Annotated[
    str | None,
    option(
        _DRAFTING,
        "Smaller model with the same vocabulary, for methods that draft with one. (default: demo-draft for demo)",
        "--draft-model",
    ),
]

DraftWeights = Annotated[
    str | None,
    option(
        _DRAFTING,
        "int8, fp8 or int4: drafting passes of the model run on a copy that torchao quantises; never changes the text. "
        "(default: none)",
        "--draft-weights",
    ),
]

Model = Annotated[str, typer.Option(help="demo (the bundled model), a folder or a hub id.", rich_help_panel=_MODEL)]
ModelOrShape = Annotated[
    str,
    typer.Option(
        help="demo, a folder, a hub id, or shape:NAME: random weights in a published model's shape (llama3.1-8b, "
        "yarn-llama2-7b-128k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-14b).",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...", rich_help_panel=_MODEL)]
Dtype = Annotated[str, typer.Option(help="auto, float32, float64, bfloat16 or float16.", rich_help_panel=_MODEL)]
Quantize = Annotated[
    str | None,
    option(_MODEL, "int8, fp8 or int4: torchao quantises the weights. (default: as they are)", "--quantize"),
]
Exact = Annotated[
    bool | None,
    option(
        _MODEL,
        "Passes of one width, so that all methods give the same tokens in every dtype; drafts are cut to it. (default: "
        "in bfloat16 and float16, and on CUDA)",
        "--exact/--no-exact",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="auto (triton on CUDA, native on the CPU, sdpa where these cannot be had), native, triton, flash or sdpa.",
        rich_help_panel=_MODEL,
    ),
]

Json = Annotated[Path | None, option(_OUTPUT, "Write everything to a JSON file; - is stdout.", "--json")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Nothing on stderr but errors.", rich_help_panel=_OUTPUT)]
NoProgress = Annotated[
    bool, typer.Option("--no-progress", help="No progress bar and no progress lines.", rich_help_panel=_OUTPUT)
]


_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "eta", "penalty", "window")
_OF_DRAFTING = (
    "nodes",
    "ngrams",
    "reuse_recent",
    "gamma",
    "inner_gamma",
    "kv",
    "budget",
    "sinks",
    "shared_noise",
    "costs",
    "recall",
)
_OF_MODEL = ("heads", "model", "draft_model", "draft_weights", "device", "dtype", "attention", "exact")


def given(context: typer.Context, names: Sequence[str]) -> dict[str, Any]:
    """Of these options, by parameter name, those that were typed or have a default."""
    return {name: context.params[name] for name in names if context.params[name] is not None}


def typed(context: typer.Context) -> dict[str, Any]:
    """The options that stood on the command line, by parameter name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def sampling(context: typer.Context) -> dict[str, Any]:
    """The sampling options that were typed."""
    return given(context, _OF_SAMPLING)


def drafting(context: typer.Context) -> dict[str, Any]:
    """The drafting options that were typed, trees apart."""
    return given(context, _OF_DRAFTING)


def model(context: typer.Context) -> dict[str, Any]:
    """How the model is to be loaded."""
    return given(context, _OF_MODEL)


def entry(context: typer.Context) -> BenchOptions:
    """What is asked of several methods.

    Raises:
        InputError: no such methods or trees.
    """
    from tswift.benchmarking.config import REFERENCE, BenchOptions, parse_methods

    methods = parse_methods(context.params["methods"])
    if context.params["with_reference_ar"] and REFERENCE not in methods:
        methods = (*methods, REFERENCE)
    return BenchOptions(
        methods=methods,
        sampling=sampling(context),
        drafting=drafting(context),
        trees=trees(context.params["tree"]),
        simulate_alpha=context.params.get("simulate_alpha"),
        **model(context),
    )


def numbers(words: str, option: str) -> tuple[int, ...]:
    """The numbers of ``1000,20_000``.

    Raises:
        InputError: it is no such thing.
    """
    try:
        return tuple(int(word.replace("_", "")) for word in words.split(","))
    except ValueError:
        raise InputError(f"wants numbers and commas, got {words!r}", option) from None


def widths(tree: str) -> tuple[int, ...] | str:
    """The levels of a tree such as ``1,3,3,3``; ``auto`` is one, too.

    Raises:
        InputError: it is no such thing.
    """
    if tree == "auto":
        return tree
    try:
        return tuple(int(width) for width in tree.split(","))
    except ValueError:
        raise InputError(f"wants auto, or numbers and commas, such as 1,3,3,3, got {tree!r}", "--tree") from None


def trees(words: list[str] | None) -> Mapping[str, tuple[int, ...] | str]:
    """Trees by method from ``--tree tokenswift=1,3,3,3`` given several times; one without a method goes by ``""``.

    Raises:
        InputError: no tree, or two for the same method.
    """
    found: dict[str, tuple[int, ...] | str] = {}
    for word in words or ():
        method, equals, tree = word.rpartition("=")
        if equals and not method:
            raise InputError(f"names no method before the =, got {word!r}", "--tree")
        if method in found:
            raise InputError(f"is given twice for {method or 'all methods'}", "--tree")
        found[method] = widths(tree)
    return found
