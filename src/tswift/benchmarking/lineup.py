"""Several methods on one model: what is asked of them, checked once, and the lanes they run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from tswift.benchmarking.lanes import Lane
from tswift.benchmarking.measurement import BASELINE, REFERENCE
from tswift.benchmarking.simulated import SimulatedWalk, refuse_share
from tswift.decoding.audit import Audit, audit
from tswift.decoding.generation import begin, ending
from tswift.decoding.limits import check_ahead
from tswift.decoding.sampling import SamplingParams
from tswift.drafting.methods import DraftOptions, find_method, resolve
from tswift.errors import InputError, renamed
from tswift.jobs.settings import refuse_unused, sampling_params
from tswift.models.loading import LoadedModel, load
from tswift.models.memory import available_bytes, gigabytes

DEFAULT_METHODS = ("ar", "medusa", "tokenswift")


@dataclass(frozen=True)
class Entry:
    """What is asked of several methods.

    Attributes:
        methods: names; ``ar`` comes first whether named or not, since all are measured against it.
        sampling: fields of ``SamplingParams`` that were given.
        drafting: fields of ``DraftOptions`` but ``tree`` that were given; each goes to the methods that use it.
        trees: draft trees by method; one under ``""`` goes to all methods that use a tree.
        with_reference: also run plain decoding with the attention of reference implementations.
        simulate_alpha: the share of drafted tokens that is accepted, whatever is drawn; None for what is drawn.
    """

    methods: Sequence[str] = DEFAULT_METHODS
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    heads: str | None = None
    model: str = "demo"
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    with_reference: bool = False
    simulate_alpha: float | None = None


@dataclass(frozen=True)
class Lineup:
    """A loaded model and the methods to run on it.

    Attributes:
        model: the model.
        params: sampling parameters; end-of-text tokens are banned, so lengths are exact.
        options: resolved drafting options by method.
        with_reference: whether the slow plain decoding runs too.
        simulate_alpha: the share of drafted tokens that is accepted, whatever is drawn; None for what is drawn.
    """

    model: LoadedModel
    params: SamplingParams
    options: Mapping[str, DraftOptions]
    with_reference: bool
    simulate_alpha: float | None = None

    @property
    def simulated(self) -> dict[str, Any] | None:
        """For records: whether the weights are random, and the acceptance that is given; None if neither."""
        given = self.simulate_alpha
        if given is None and not self.model.simulated:
            return None
        return {"weights": self.model.simulated, "alpha": given}

    @property
    def names(self) -> list[str]:
        """The lanes' names."""
        return [*self.options, *([REFERENCE] if self.with_reference else [])]

    def drafting(self) -> dict[str, dict[str, Any]]:
        """For records: by method, the options that it uses."""
        return {
            method: {name: value for name, value in asdict(options).items() if name in find_method(method).uses}
            for method, options in self.options.items()
        }

    def lanes(self, prompt: Sequence[int], length: int, seed: int, methods: Sequence[str] | None = None) -> list[Lane]:
        """A lane for each method, or for some of them.

        Raises:
            InputError: more positions or memory than there are.
        """
        free = available_bytes(self.model.target.device)
        lanes, need = [], 0
        for name in self.names if methods is None else methods:
            model = replace(self.model, target=self.model.target.reference()) if name == REFERENCE else self.model
            method = BASELINE if name == REFERENCE else name
            walk = None
            if self.simulate_alpha is not None and method != BASELINE:
                walk = partial(SimulatedWalk, self.simulate_alpha)
            generation = begin(
                model,
                prompt,
                length,
                method=method,
                params=self.params,
                seed=seed,
                options=self.options[method],
                walk=walk,
            )
            need += generation.need.kv_bytes
            lanes.append(Lane(name, generation, simulated=walk is not None))
        if free is not None and need > free:
            raise InputError(
                f"{len(lanes)} methods side by side need {gigabytes(need)} of KV cache, {gigabytes(free)} are free",
                "--methods",
            )
        return lanes

    def audit(
        self, prompt: Sequence[int], tokens: Sequence[int], seed: int, show: Callable[[int, int], None] | None = None
    ) -> Audit:
        """Whether a text is what the sampling rule draws; see :func:`tswift.decoding.audit.audit`."""
        return audit(self.model.target, prompt, tokens, self.params, seed, show)


def parse_methods(words: str) -> tuple[str, ...]:
    """The methods of ``a,b,c``, ``ar`` first.

    Raises:
        InputError: one that there is not, or one named twice.
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


def line_up(entry: Entry, prompt: int = 1, length: int = 1, option: str = "--model") -> Lineup:
    """Check what is asked, and load the model.

    Args:
        entry: what is asked.
        prompt: tokens that a prompt will have, at least: what does not fit is refused before anything is loaded.
        length: tokens that a text will have, at least.
        option: what the user gave that length with, for the error.

    Raises:
        InputError: something asked cannot be done.
    """
    params = sampling_params(entry.sampling)
    refuse_share(entry.simulate_alpha, [method for method in entry.methods if method != BASELINE])
    typed = [*entry.drafting, *(["heads"] if entry.heads is not None else []), *(["tree"] if "" in entry.trees else [])]
    refuse_unused(entry.methods, typed)
    for method in entry.trees:
        if method and (method not in entry.methods or "tree" not in find_method(method).uses):
            raise InputError(f"is given for {method}, which is not among the methods or has no tree", "--tree")
    asked = {
        method: DraftOptions(**entry.drafting, tree=entry.trees.get(method, entry.trees.get("")))
        for method in entry.methods
    }
    how: dict[str, Any] = {name: getattr(entry, name) for name in ("device", "dtype", "attention", "heads")}
    try:
        for method, each in asked.items():
            check_ahead(entry.model, prompt, length, method, each, **how, option=option)
        model = load(entry.model, **how)
        options = {method: resolve(method, model.target, model.heads, each) for method, each in asked.items()}
    except InputError as error:
        raise renamed(error, {"--method": "--methods"}) from None
    params, _ = ending(params, model.eos_ids, stop_at_eos=False)
    return Lineup(model, params, options, entry.with_reference, entry.simulate_alpha)
