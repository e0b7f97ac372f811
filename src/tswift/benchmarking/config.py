"""What a benchmark runs: options checked once, the grid, its prompts, and the loaded model with its contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tswift.decoding.audit import Audit, audit
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import OF_CHOICE, cut_note, find_method, resolve, used
from tswift.drafting.options import DraftOptions
from tswift.engine import ending, preflight
from tswift.errors import InputError, renamed
from tswift.jobs.prompt import read_prompt
from tswift.jobs.settings import draft_for, refuse_unused, sampling_params, used_options, weights_for
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load
from tswift.models.source import DEMO, hub

BASELINE = "ar"
REFERENCE = "ar-reference"  # plain decoding with the attention of reference implementations
DRAFTLESS = (BASELINE, REFERENCE)
FULL, SAMPLED = "full", "sampled"
PG19 = "emozilla/pg19"  # on the hub, as parquet; the test split holds 100 books

_LOADING = ("device", "dtype", "attention", "heads")  # options that go to ``load`` as they are


@dataclass(frozen=True)
class BenchOptions:
    """Options of several methods, as on the command line.

    Attributes:
        methods: names, ``ar`` first.
        sampling: fields of ``SamplingParams`` that were given.
        drafting: fields of ``DraftOptions`` but ``tree`` that were given; each goes to the methods that use it.
        trees: draft trees by method; one under ``""`` goes to all methods that use a tree.
        draft_model: None for the bundled one, where a method needs one and the model is the bundled one.
        draft_weights: ``int8``, ``fp8`` or ``int4``, for the methods that draft with the model itself.
        exact: as for :func:`tswift.load`.
        simulate_alpha: share of the drafted tokens that is accepted, whatever is drawn; None to measure it.
    """

    methods: Sequence[str] = (BASELINE, "medusa", "tokenswift")
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, tuple[int, ...] | str] = field(default_factory=dict)
    heads: str | None = None
    model: str = DEMO
    draft_model: str | None = None
    draft_weights: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    exact: bool | None = None
    simulate_alpha: float | None = None

    def tree(self, method: str) -> tuple[int, ...] | str | None:
        """The tree given for a method."""
        return self.trees.get(method, self.trees.get(""))

    def loading(self, methods: Sequence[str]) -> dict[str, Any]:
        """Arguments of ``load`` for some methods, the model's name, the draft model and ``exact`` apart."""
        return {name: getattr(self, name) for name in _LOADING} | {
            "draft_weights": weights_for(methods, self.draft_weights)
        }

    def refuse_unused(self, methods: Sequence[str]) -> None:
        """Refuse options that none of these methods uses.

        Raises:
            InputError: there is one.
        """
        refuse_unused(methods, {**self.drafting, "heads": self.heads, "tree": self.trees.get("")}, self.trees)
        for method in self.trees:
            if method and (method not in methods or "tree" not in find_method(method).uses):
                raise InputError(f"is given for {method}, which is not among the methods or has no tree", "--tree")


@dataclass(frozen=True)
class Contender:
    """A method with resolved draft options, under a label of its own."""

    label: str
    method: str
    options: DraftOptions


@dataclass(frozen=True)
class BenchConfig:
    """A loaded model and the contenders that run on it; all write the same text.

    Attributes:
        params: sampling parameters; end-of-text tokens are banned, so lengths are exact.
        contenders: labels are unique; ``ar`` is among them.
        simulate_alpha: as in :class:`BenchOptions`.
        note: what of the options had to be changed; None for nothing.
    """

    model: LoadedModel
    params: SamplingParams
    contenders: Sequence[Contender]
    simulate_alpha: float | None = None
    note: str | None = None

    @property
    def simulated(self) -> dict[str, Any] | None:
        """For records: whether weights are random, and the acceptance that is set; None if neither."""
        if self.simulate_alpha is None and not self.model.simulated:
            return None
        return {"weights": self.model.simulated, "alpha": self.simulate_alpha}

    @property
    def labels(self) -> list[str]:
        """Labels of all contenders."""
        return [contender.label for contender in self.contenders]

    def drafting(self) -> dict[str, dict[str, Any]]:
        """For records: by label, the options that its method uses."""
        return {each.label: used_options(each.method, each.options) for each in self.contenders}

    def audit(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        seed: int,
        method: str,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Audit:
        """Whether a text by a method is what the sampling rule draws; see :func:`tswift.decoding.audit.audit`."""
        target = self.model.target
        if find_method(method).reference:  # whose passes are not exact
            target = target.reference()
        return audit(target, prompt, tokens, self.params, seed, on_progress)


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

    prefills: Sequence[int] = (4096,)
    lens: Sequence[int] = (20_000, 40_000, 60_000, 80_000, 100_000)
    seeds: Sequence[int] = (0,)
    ar: str = FULL
    repeats: int = 1
    warmup: int = 32

    def __post_init__(self) -> None:
        for option, values, least in (
            ("--prefill", self.prefills, 2),
            ("--lens", self.lens, 1),
            ("--seeds", self.seeds, None),
            ("--repeats", [self.repeats], 1),
            ("--warmup", [self.warmup], 0),
        ):
            if not values:
                raise InputError("names nothing", option)
            if len(set(values)) < len(values):
                raise InputError(f"names {next(v for v in values if list(values).count(v) > 1)} twice", option)
            if least is not None and min(values) < least:
                raise InputError(f"must be at least {least}, got {min(values)}", option)
        if self.ar not in (FULL, SAMPLED):
            raise InputError(f"is full or sampled, got {self.ar}", "--ar")


@dataclass(frozen=True)
class Prompt:
    """A prompt by name: a file's, ``pg19:0`` and so on, or ``bundled``."""

    name: str
    tokens: list[int]


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
            raise renamed(error, {"--method": "--methods"}) from None
    if len(set(names)) < len(names):
        raise InputError(f"names a method twice: {words}", "--methods")
    return (BASELINE, *(name for name in names if name != BASELINE))


def configure(options: BenchOptions, prompt: int = 1, length: int = 1, option: str = "--model") -> BenchConfig:
    """Check the options, and load the model.

    Args:
        prompt: least prompt tokens: what does not fit is refused before anything is loaded.
        length: least generated tokens.
        option: what the user gave that length with, for the error.

    Raises:
        InputError: something asked cannot be done.
    """
    params = sampling_params(options.sampling)
    options.refuse_unused(options.methods)
    drafting = {method: DraftOptions(**options.drafting, tree=options.tree(method)) for method in options.methods}
    _refuse_alpha(options.simulate_alpha, drafting)
    how = options.loading(options.methods)
    how["draft"] = draft_for(options.methods, options.model, options.draft_model)
    try:
        for method, asked in drafting.items():
            preflight(options.model, prompt, length, method, asked, **how, option=option)
        model = load(options.model, exact=options.exact, **how)
        contenders = [
            Contender(method, method, resolve(method, model.target, model.heads, asked))
            for method, asked in drafting.items()
        ]
    except InputError as error:
        raise renamed(error, {"--method": "--methods"}) from None
    params, _ = ending(params, model.eos_ids, stop_at_eos=False)
    cuts = [note for asked in drafting.values() if (note := cut_note(asked, model.target.width)) is not None]
    return BenchConfig(model, params, contenders, options.simulate_alpha, next(iter(cuts), None))


def _refuse_alpha(alpha: float | None, drafting: Mapping[str, DraftOptions]) -> None:
    """Refuse a simulated acceptance out of range, for no method, or for trees too shallow to reach it."""
    if alpha is None:
        return
    methods = [method for method in drafting if method not in DRAFTLESS]
    if not 0 < alpha <= 1:
        raise InputError(f"must be above 0 and at most 1, got {alpha}", "--simulate-alpha")
    if not methods:
        raise InputError("none of the methods drafts anything that could be accepted", "--simulate-alpha")
    dynamic = [method for method in methods if OF_CHOICE & used(method, drafting[method])]
    if dynamic:
        reason = f"{dynamic[0]} chooses here how deep a tree pays"
        raise InputError(f"goes with trees of one shape; {reason}, so the share would not be met", "--simulate-alpha")


def read_texts(words: Sequence[str]) -> dict[str, str]:
    """Texts that ``--prompts`` names, by name; the bundled novel if nothing is named.

    Args:
        words: files, folders (their ``*.txt``), or ``pg19:N`` for the first N books of PG-19's test split.

    Raises:
        InputError: nothing is there, or no text.
    """
    if not words:
        return {"bundled": read_prompt(None)}
    texts: dict[str, str] = {}
    for word in words:
        if word.startswith("pg19:"):
            texts |= _books(word)
            continue
        path = Path(word).expanduser()
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise InputError(f"there is no .txt file in {word}", "--prompts")
        for file in files:
            if file.name in texts:
                raise InputError(f"two prompts are called {file.name}", "--prompts")
            try:
                texts[file.name] = read_prompt(str(file))
            except InputError as error:
                raise renamed(error, {"--prompt": "--prompts"}) from None
    return texts


def encode(texts: Mapping[str, str], model: LoadedModel, longest: int) -> list[Prompt]:
    """Token ids of the texts.

    Raises:
        InputError: one has fewer than ``longest`` tokens.
    """
    prompts = [Prompt(name, model.encode(text)) for name, text in texts.items()]
    for prompt in prompts:
        if len(prompt.tokens) < longest:
            raise InputError(f"asks for {longest:,} tokens, {prompt.name} has {len(prompt.tokens):,}", "--prefill")
    return prompts


def _books(word: str) -> dict[str, str]:
    count = word.removeprefix("pg19:")
    if not count.isdecimal() or int(count) < 1:
        raise InputError(f"wants pg19:N with N books, got {word}", "--prompts")
    try:
        import datasets
    except ImportError:
        raise InputError("pg19 needs the package datasets (pip install datasets)", "--prompts") from None
    try:
        with hub():
            books = datasets.load_dataset(PG19, split="test", streaming=True)
            texts = [book["text"] for book in islice(books, int(count))]
    except Exception as error:  # no network, no such data set, a broken cache: datasets raises all kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{PG19} cannot be loaded from the hub ({reason[:120]})", "--prompts") from None
    if len(texts) < int(count):
        raise InputError(f"asks for {count} books, the test split of {PG19} has {len(texts)}", "--prompts")
    return {f"pg19:{index}": text for index, text in enumerate(texts)}
