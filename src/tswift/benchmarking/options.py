"""What a benchmark is asked for. Nothing here imports torch: what is cheap to check is refused at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tswift.decoding.params import SamplingParams
from tswift.drafting.options import METHODS, OF_CHOICE, DraftOptions, find_method, parse_tree, refuse_unused, used
from tswift.errors import InputError, renamed
from tswift.jobs.config import TextConfig, fields_of, loading
from tswift.models.config import ModelConfig
from tswift.options import check_options, option, parse_numbers

BASELINE = "ar"
REFERENCE = "ar-reference"  # plain decoding with the attention of reference implementations
DRAFTLESS = (BASELINE, REFERENCE)
FULL, SAMPLED = "full", "sampled"

_GRID = "Grid"
Trees = Mapping[str, "tuple[int, ...] | str"]


def parse_methods(words: str) -> tuple[str, ...]:
    """Methods of ``a,b,c``, ``ar`` first.

    Raises:
        InputError: there is no such method, or one is named twice.
    """
    names = [name.strip() for name in words.split(",")]
    for name in names:
        try:
            find_method(name)
        except InputError as error:
            raise renamed(error, {"method": "methods"}) from None
    if len(set(names)) < len(names):
        raise InputError(f"names a method twice: {words}", "methods")
    return (BASELINE, *(name for name in names if name != BASELINE))


def parse_trees(words: Sequence[str] | None) -> Trees:
    """Trees by method from ``--tree tokenswift=1,3,3,3`` given several times; one without a method goes by ``""``.

    Raises:
        InputError: no tree, or two for the same method.
    """
    trees: dict[str, tuple[int, ...] | str] = {}
    for word in words or ():
        method, equals, tree = word.rpartition("=")
        if equals and not method:
            raise InputError(f"names no method before the =, got {word!r}", "tree")
        if method in trees:
            raise InputError(f"is given twice for {method or 'all methods'}", "tree")
        trees[method] = parse_tree(tree)
    return trees


@dataclass(frozen=True, kw_only=True)
class CompareConfig(TextConfig):
    """Which text ``tswift compare`` has all methods write."""

    length: int = option(4000, "Tokens to generate, exactly.", flag="--len", least=1, most=1 << 40)


@dataclass(frozen=True)
class BenchOptions(ModelConfig):
    """Options of several methods, as on the command line; ``compare`` and ``bench`` have them.

    Attributes:
        methods: names, ``ar`` first.
        sampling: fields of ``SamplingParams`` that were given.
        drafting: fields of ``DraftOptions`` but ``tree`` that were given; each goes to the methods that use it.
        trees: draft trees by method; one under ``""`` goes to all methods that use a tree.
        simulate_alpha: share of the drafted tokens that is accepted, whatever is drawn; None to measure it.
    """

    methods: Sequence[str] = option(
        (BASELINE, "medusa", "tokenswift"),
        f"Of {', '.join(METHODS)}; ar is always among them.",
        shown="ar,medusa,tokenswift",
        parse=parse_methods,
        also=("--method",),
    )
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)
    trees: Trees = field(default_factory=dict)
    with_reference_ar: bool = option(
        False,
        "Also ar-reference: expanded K/V and dense masks, as published.",
        flag="--with-reference-ar",
        shown="",
    )
    simulate_alpha: float | None = option(
        None,
        "Accept this share of the drafted tokens whatever is drawn: times are real, texts are not.",
        panel=_GRID,
        above=0,
        most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.with_reference_ar and REFERENCE not in self.methods:
            object.__setattr__(self, "methods", (*self.methods, REFERENCE))

    @classmethod
    def of(cls, trees: Trees, values: Mapping[str, Any]) -> BenchOptions:
        """Options by name: those of this class, SamplingParams and DraftOptions.

        Raises:
            InputError: a value is outside its range.
        """
        own, sampling, drafting = (fields_of(kind, values) for kind in (cls, SamplingParams, DraftOptions))
        return cls(**own, sampling=sampling, drafting=drafting, trees=trees)

    def tree(self, method: str) -> tuple[int, ...] | str | None:
        """The tree given for a method."""
        return self.trees.get(method, self.trees.get(""))

    def check(self) -> dict[str, DraftOptions]:
        """Each method's drafting options, after all was checked that needs no model.

        Raises:
            InputError: a value is outside its range, or no method uses it.
        """
        SamplingParams(**self.sampling)
        self.refuse_unused(self.methods)
        drafting = {method: DraftOptions(**self.drafting, tree=self.tree(method)) for method in self.methods}
        _refuse_alpha(self.simulate_alpha, drafting)
        loading(self, self.methods)
        return drafting

    def refuse_unused(self, methods: Sequence[str]) -> None:
        """Refuse options that none of these methods uses.

        Raises:
            InputError: there is one.
        """
        refuse_unused(methods, {**self.drafting, "heads": self.heads, "tree": self.trees.get("")}, self.trees)
        for method in self.trees:
            if method and (method not in methods or "tree" not in find_method(method).uses):
                raise InputError(f"is given for {method}, which is not among the methods or has no tree", "tree")


def _refuse_alpha(alpha: float | None, drafting: Mapping[str, DraftOptions]) -> None:
    """Refuse a simulated acceptance for no method, or for trees too shallow to reach it."""
    if alpha is None:
        return
    methods = [method for method in drafting if method not in DRAFTLESS]
    if not methods:
        raise InputError("none of the methods drafts anything that could be accepted", "simulate_alpha")
    dynamic = [method for method in methods if OF_CHOICE & used(method, drafting[method])]
    if dynamic:
        reason = f"{dynamic[0]} chooses here how deep a tree pays"
        raise InputError(f"goes with trees of one shape; {reason}, so the share would not be met", "simulate_alpha")


@dataclass(frozen=True)
class Plan:
    """The grid of a benchmark.

    Attributes:
        prefills: prompt tokens to begin with.
        lens: generated lengths to read off; one run goes to the longest.
        seeds: a run for each.
        ar: ``full`` decodes plainly beside the methods; ``sampled`` times plain steps now and then and integrates.
        repeats: runs of the whole grid.
        warmup: tokens each method generates before anything is measured.

    Raises:
        InputError: a value is outside its range.
    """

    prefills: tuple[int, ...] = option(
        (4096,), "Prompt tokens; repeatable.", panel=_GRID, shown="4096", flag="--prefill", repeat=True, least=2
    )
    lens: tuple[int, ...] = option(
        (20_000, 40_000, 60_000, 80_000, 100_000),
        "Generated lengths; one run goes to the longest.",
        panel=_GRID,
        shown="20000,40000,60000,80000,100000",
        parse=parse_numbers,
        also=("--len",),
        least=1,
    )
    seeds: tuple[int, ...] = option(
        (0,), "A run for each.", panel=_GRID, shown="0", parse=parse_numbers, also=("--seed",)
    )
    repeats: int = option(1, "Runs of the whole grid.", panel=_GRID, least=1, most=1 << 31)
    ar: str = option(
        FULL,
        "full runs plain decoding; sampled times some of its steps.",
        panel=_GRID,
        choices=(FULL, SAMPLED),
    )
    warmup: int = option(32, "Tokens generated before measuring.", panel=_GRID, least=0, most=1 << 31)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("prefills", "lens", "seeds"):
            values = getattr(self, name)
            if not values:
                raise InputError("names nothing", name)
            if len(set(values)) < len(values):
                raise InputError(f"names {next(v for v in values if list(values).count(v) > 1)} twice", name)
