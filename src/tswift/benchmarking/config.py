"""What a benchmark runs: options, the grid, and the loaded model with its contenders.

torch is imported where a model is loaded, so that what is cheap to check is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tswift.drafting.options import (
    METHODS,
    OF_CHOICE,
    DraftOptions,
    find_method,
    parse_tree,
    refuse_unused,
    used,
    used_options,
)
from tswift.errors import InputError, Object, renaming
from tswift.jobs.config import TextConfig, refuse_with_chat, to_load
from tswift.models.config import DEMO, KV_DTYPES, SHAPES, ModelConfig, parse_dtype_name
from tswift.options import (
    Values,
    changed,
    check_options,
    given_names,
    given_options,
    option,
    parse_numbers,
    part,
    switch,
)
from tswift.sampling.parameters import SamplingParams, apply_eos_policy

if TYPE_CHECKING:
    from tswift.loading.model import LoadedModel
    from tswift.loading.plan import ModelPlan

BASELINE = "ar"
REFERENCE = "ar-reference"  # plain decoding with the attention of reference implementations
DRAFTLESS = (BASELINE, REFERENCE)
FULL, SAMPLED = "full", "sampled"
KINDS = ("prose", "reasoning", "structured")  # of workloads that are bundled

_GRID = "Grid"
_MOST = 1_000_000_000
Trees = Mapping[str, "tuple[int, ...] | str"]


def parse_methods(words: str) -> tuple[str, ...]:
    """Methods of ``a,b,c``, ``ar`` first."""
    names = [name.strip() for name in words.split(",")]
    with renaming(method="methods"):
        for name in names:
            find_method(name)
    if len(set(names)) < len(names):
        raise InputError(f"names a method twice: {words}", "methods")
    return (BASELINE, *(name for name in names if name != BASELINE))


def parse_trees(words: Sequence[str] | None) -> Trees:
    """Draft trees by method, from words such as ``tokenswift=1,3,3,3``;
    one for all methods goes by ``""``.
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
    chat: bool = switch("The prompt is what a user says: put it into the model's chat template.")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_with_chat(self, self.chat)


@dataclass(frozen=True)
class BenchOptions:
    """A model and several methods, as on the command line; ``compare`` and ``bench`` have them."""

    methods: Sequence[str] = option(
        (BASELINE, "auto"),
        f"Of {', '.join(METHODS)}; ar is always among them.",
        shown="ar,auto",
        parse=parse_methods,
        also=("--method",),
    )
    model: ModelConfig = part(ModelConfig)
    sampling: SamplingParams = part(SamplingParams)
    drafting: DraftOptions = part(DraftOptions)  # for all methods that use them
    # by method; one under "" goes to all methods that use a tree
    trees: Trees = field(default_factory=dict)
    with_reference_ar: bool = switch(
        "Also ar-reference: expanded K/V and dense masks, as published."
    )
    stop_at_eos: bool = switch(
        "End a text at an end-of-text token, so that the length is its most."
    )
    simulate_alpha: float | None = option(
        None,
        "Accept this share of the drafted tokens whatever is drawn: times are real, texts are not.",
        panel=_GRID,
        above=0,
        most=1,
    )
    given: frozenset[str] = given_names()

    def __post_init__(self) -> None:
        check_options(self)
        if self.with_reference_ar and REFERENCE not in self.methods:
            object.__setattr__(self, "methods", (*self.methods, REFERENCE))

    @classmethod
    def of(cls, trees: Trees, values: Values) -> BenchOptions:
        """Options by name, those of its parts among them."""
        return changed(cls(trees=trees), values)

    def tree(self, method: str) -> tuple[int, ...] | str | None:
        """The tree given for a method."""
        return self.trees.get(method, self.trees.get(""))

    def check(self) -> dict[str, DraftOptions]:
        """Each method's drafting options, after all was checked that needs no model."""
        self.refuse_unused(self.methods)
        drafting = {
            method: replace(self.drafting, tree=self.tree(method)) for method in self.methods
        }
        self.to_load()
        if self.simulate_alpha is not None:
            if self.stop_at_eos:
                raise InputError(
                    "cannot be given together with --simulate-alpha, whose texts end nowhere",
                    "stop_at_eos",
                )
            drafting_methods = [method for method in self.methods if method not in DRAFTLESS]
            if not drafting_methods:
                raise InputError(
                    "none of the methods drafts anything that could be accepted", "simulate_alpha"
                )
            for method in drafting_methods:
                if OF_CHOICE & used(find_method(method), drafting[method]):
                    reason = (
                        f"{method} chooses here how deep a tree pays, so the share would not be met"
                    )
                    raise InputError(f"goes with trees of one shape; {reason}", "simulate_alpha")
        return drafting

    def to_load(self, methods: Sequence[str] | None = None) -> ModelConfig:
        """What is loaded for methods, if not for all of these."""
        return to_load(self.model, self.methods if methods is None else methods)

    def refuse_unused(self, methods: Sequence[str]) -> None:
        """Refuse options that none of these methods uses."""
        drafting = given_options(self.drafting, self.given)
        refuse_unused(methods, {**drafting, "tree": self.trees.get("")}, self.trees)
        for method in self.trees:
            if method and (method not in methods or "tree" not in find_method(method).uses):
                raise InputError(
                    f"is given for {method}, which is not among the methods or has no tree", "tree"
                )


@dataclass(frozen=True)
class Plan:
    """The grid of a benchmark."""

    prefills: tuple[int, ...] = option(
        (4096,),
        "Prompt tokens; repeatable.",
        panel=_GRID,
        shown="4096",
        flag="--prefill",
        repeat=True,
        least=2,
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
    warmup: int = option(
        32, "Tokens generated before measuring.", panel=_GRID, least=0, most=1 << 31
    )
    prompts: tuple[str, ...] = option(
        (),
        "File, folder of .txt, or pg19:N (needs the hub); repeatable.",
        panel=_GRID,
        shown="bundled novel",
        repeat=True,
        also=("--prompt",),
    )
    workload: tuple[str, ...] = option(
        (),
        f"{', '.join(KINDS)}, FILE.jsonl or FILE.parquet, in lines by kind; :N behind it takes N "
        "prompts; repeatable.",
        panel=_GRID,
        shown="none",
        repeat=True,
    )
    chat: bool = switch("Put a workload's prompts into the model's chat template.", panel=_GRID)

    def __post_init__(self) -> None:
        check_options(self)
        if self.workload and self.prompts:
            raise InputError("cannot be given together with --prompts", "workload")
        if self.chat and not self.workload:
            raise InputError("goes with --workload", "chat")
        for name in ("prefills", "lens", "seeds"):
            values = getattr(self, name)
            if not values:
                raise InputError("names nothing", name)
            if len(set(values)) < len(values):
                raise InputError(
                    f"names {next(v for v in values if list(values).count(v) > 1)} twice", name
                )


def fit_grid(
    prefill: int, lens: Sequence[int], given: tuple[bool, bool], positions: int
) -> tuple[int, tuple[int, ...], bool]:
    """Prompt tokens and generated lengths for a model:
    what nobody asked for gives way to its positions.

    Args:
        prefill, lens: as asked for, or the defaults.
        given: whether each was asked for.
        positions: that the model has.

    Returns:
        Those, and whether one gave way. What still does not fit is to be refused.
    """
    least = prefill
    fitting = tuple(lens)
    typed, chosen = given
    if not typed and prefill + max(lens) > positions:
        least = min(prefill, positions - max(lens) if chosen else positions // 2)
        least = least if least > 1 else prefill
    if not chosen:
        room = positions - least
        fitting = tuple(length for length in lens if length <= room) or (
            (room,) if room > 0 else fitting
        )
    return least, fitting, (least, fitting) != (prefill, tuple(lens))


def fit_note(model: str, positions: int, prefill: int, lens: Sequence[int]) -> str:
    """A line for people about defaults that gave way."""
    longest = ", ".join(f"{length:,}" for length in lens)
    return (
        f"{model} has {positions:,} positions: {prefill:,} prompt tokens, and {longest} generated "
        "ones"
    )


_machine = partial(option, panel="Machine")
_job = partial(option, panel="Job")


@dataclass(frozen=True, kw_only=True)
class RooflineQuery:
    """Options of ``tswift roofline``. The model bounds what has no upper bound here."""

    model: str = option(
        DEMO,
        "demo, a folder, a hub id, or shape:NAME: a published model's shape "
        f"({', '.join(SHAPES)}).",
        panel="Model",
    )
    dtype: str = option(
        "auto",
        "auto (as bench takes it: float32 on this CPU, else the model's own), float32, float64, "
        "bfloat16 or float16.",
        panel="Model",
    )
    weights: str | None = option(
        None,
        "int4 or int8: weights as `bench --weights` rounds them.",
        panel="Model",
        shown="as they are",
        choices=("int8", "int4"),
    )
    kv_dtype: str = option(
        "auto",
        "auto (as bench takes it), int8 or another dtype of the KV cache.",
        panel="Model",
        parse=partial(parse_dtype_name, kinds=KV_DTYPES, field="kv_dtype"),
    )
    device: str | None = _machine(
        None,
        "a100-80g, h100-sxm, h200; h100, as measured; or here, cpu, cuda, cuda:1 ...: measured.",
        shown="here",
    )
    bandwidth: float | None = _machine(
        None, "Instead of --device: memory bandwidth in GB/s.", least=1e-9, most=1e9
    )
    flops: float | None = _machine(
        None, "Instead of --device: matrix products in TFLOP/s.", least=1e-9, most=1e9
    )
    contexts: tuple[int, ...] | None = option(
        None,
        "Tokens in the KV cache.",
        shown="4096 to 131072, as far as the model goes",
        flag="--context",
        parse=parse_numbers,
        least=1,
    )
    nodes: tuple[int, ...] = option(  # a plain pass, and the paper's draft tree with its root
        (1, 41),
        "Nodes of a pass; the most of them are the draft tree's.",
        shown="1,41",
        parse=parse_numbers,
        least=1,
        most=_MOST,
    )
    prefill: int = _job(4096, "Prompt tokens.", least=1)
    length: int = _job(100_000, "Generated tokens.", flag="--len", least=1)
    given: frozenset[str] = given_names()

    def __post_init__(self) -> None:
        check_options(self)
        given = [name for name in ("bandwidth", "flops") if getattr(self, name) is not None]
        if given and self.device is not None:
            raise InputError("is given instead of --device, not with it", given[0])
        if len(given) == 1:
            raise InputError("wants both", "--bandwidth and --flops")

    @property
    def here(self) -> bool:
        """Whether the machine is one to be measured."""
        return self.bandwidth is None and (self.device or "here").split(":")[0] in (
            "here",
            "cpu",
            "cuda",
        )


@dataclass(frozen=True)
class Contender:
    """A method with resolved draft options, under a label of its own."""

    label: str
    method: str
    options: DraftOptions


@dataclass(frozen=True)
class BenchConfig:
    """A loaded model and the contenders that run on it; all write the same text."""

    model: LoadedModel
    params: SamplingParams  # without ``stop_at_eos`` end-of-text tokens are banned
    contenders: Sequence[Contender]  # labels are unique; ``ar`` is among them
    simulate_alpha: float | None = None
    stop_at_eos: bool = False  # texts end by themselves; else all lengths are exact
    note: str | None = None  # what of the options had to be changed

    @property
    def simulated(self) -> Object | None:
        """For records: whether weights are random, and the acceptance that is set;
        None if neither.
        """
        if self.simulate_alpha is None and not self.model.simulated:
            return None
        return {"weights": self.model.simulated, "alpha": self.simulate_alpha}

    def drafting(self) -> dict[str, Object]:
        """For records: by label, the options that its method uses."""
        return {
            one.label: used_options(find_method(one.method), one.options) for one in self.contenders
        }


def configure(
    options: BenchOptions,
    prompt: int = 1,
    length: int = 1,
    option: str = "model",
    flexible: bool = False,
    made: ModelPlan | None = None,
) -> BenchConfig:
    """Check the options, and load the model.

    Args:
        prompt: least prompt tokens: what does not fit is refused before anything is loaded.
        length: least generated tokens.
        option: what the user gave that length with, for the error.
        flexible: whether nobody gave it, so that it gives way to the model's positions.
        made: the model's plan, where there is one already.
    """
    from tswift.drafting.methods import cut_note, resolve
    from tswift.loading.model import load_model
    from tswift.loading.plan import plan_model
    from tswift.memory import Demand, preflight

    drafting = options.check()
    with renaming(method="methods"):
        plan = made or plan_model(options.to_load())
        for method, asked in drafting.items():
            preflight(plan, Demand(prompt, length, method, asked, flexible), option=option)
        model = load_model(plan)
        draft = model.draft is not None
        contenders = [
            Contender(method, method, resolve(method, model.target, model.heads, asked, draft))
            for method, asked in drafting.items()
        ]
    if options.stop_at_eos and not model.eos_ids:
        raise InputError(f"{model.name} names no end-of-text token", "stop_at_eos")
    if options.sampling.stop_token_ids and not options.stop_at_eos:
        raise InputError("go with --stop-at-eos: else lengths are exact", "stop_token_ids")
    params, _ = apply_eos_policy(options.sampling, model.eos_ids, options.stop_at_eos)
    cuts = [cut_note(asked, model.target.fixed_rows) for asked in drafting.values()]
    note = next((cut for cut in cuts if cut is not None), None)
    return BenchConfig(model, params, contenders, options.simulate_alpha, options.stop_at_eos, note)
