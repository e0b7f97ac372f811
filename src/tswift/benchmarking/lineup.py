"""Several methods on one model: what is asked of them, checked once, and the lanes they run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tswift.benchmarking.lanes import Lane
from tswift.benchmarking.measurement import BASELINE, DRAFTLESS
from tswift.benchmarking.simulated import SimulatedWalk, refuse_share
from tswift.decoding.audit import Audit, audit
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import OF_CHOICE, find_method, resolve, used
from tswift.drafting.options import DraftOptions
from tswift.engine import begin, check_ahead, ending
from tswift.errors import InputError, renamed
from tswift.jobs.settings import draft_for, refuse_unused, sampling_params, used_options, weights_for
from tswift.models.devices import available_bytes, gigabytes
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load
from tswift.models.source import DEMO

DEFAULT_METHODS = ("ar", "medusa", "tokenswift")


@dataclass(frozen=True)
class Entry:
    """What is asked of several methods.

    Attributes:
        methods: names; ``ar`` comes first whether named or not, since all are measured against it.
        sampling: fields of ``SamplingParams`` that were given.
        drafting: fields of ``DraftOptions`` but ``tree`` that were given; each goes to the methods that use it.
        trees: draft trees by method; one under ``""`` goes to all methods that use a tree.
        draft_model: None for the bundled one, where a method needs one and the model is the bundled one.
        draft_weights: ``int8``, ``fp8`` or ``int4``, for the methods that draft with the model itself; ``none`` is
            what None is.
        simulate_alpha: the share of drafted tokens that is accepted, whatever is drawn; None for what is drawn.
    """

    methods: Sequence[str] = DEFAULT_METHODS
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


@dataclass(frozen=True)
class Variant:
    """A method with the options it drafts with, under a name of its own.

    Attributes:
        label: what it is called in tables; the method's name, unless several variants of one run side by side.
        method: one of ``METHODS``.
        options: resolved ones.
    """

    label: str
    method: str
    options: DraftOptions


@dataclass(frozen=True)
class Lineup:
    """A loaded model and what is to run on it. The text is the same for all, so all share one plain decode.

    Attributes:
        model: the model.
        params: sampling parameters; end-of-text tokens are banned, so lengths are exact.
        variants: no two of a label; ``ar`` among them.
        simulate_alpha: the share of drafted tokens that is accepted, whatever is drawn; None for what is drawn.
    """

    model: LoadedModel
    params: SamplingParams
    variants: Sequence[Variant]
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
        return [variant.label for variant in self.variants]

    @property
    def renamed(self) -> dict[str, str]:
        """For records: the method of every lane that is not called by it."""
        return {each.label: each.method for each in self.variants if each.label != each.method}

    def drafting(self) -> dict[str, dict[str, Any]]:
        """For records: by label, the options that its method uses."""
        return {each.label: used_options(each.method, each.options) for each in self.variants}

    def lanes(self, prompt: Sequence[int], length: int, seed: int, labels: Sequence[str] | None = None) -> list[Lane]:
        """A lane for each variant, or for those of some labels.

        Raises:
            InputError: more positions or memory than there are.
        """
        free = available_bytes(self.model.target.device)
        lanes, need = [], 0
        for variant in self.variants:
            if labels is not None and variant.label not in labels:
                continue
            walk = None
            if self.simulate_alpha is not None and variant.method not in DRAFTLESS:
                walk = partial(SimulatedWalk, self.simulate_alpha)
            generation = begin(
                self.model,
                prompt,
                length,
                method=variant.method,
                params=self.params,
                seed=seed,
                options=variant.options,
                walk=walk,
            )
            need += generation.need.held_bytes(self.model.target.device)
            lanes.append(Lane(variant.label, generation, simulated=walk is not None, method=variant.method))
        if free is not None and need > free:
            raise InputError(
                f"{len(lanes)} methods side by side need {gigabytes(need)} of caches, {gigabytes(free)} are free",
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
    heads = {} if entry.heads is None else {"heads": entry.heads}
    refuse_unused(entry.methods, {**entry.drafting, **heads, "tree": entry.trees.get("")}, entry.trees)
    for method in entry.trees:
        if method and (method not in entry.methods or "tree" not in find_method(method).uses):
            raise InputError(f"is given for {method}, which is not among the methods or has no tree", "--tree")
    asked = {
        method: DraftOptions(**entry.drafting, tree=entry.trees.get(method, entry.trees.get("")))
        for method in entry.methods
    }
    drafting = [method for method in entry.methods if method not in DRAFTLESS]
    choosing = [method for method in drafting if OF_CHOICE & used(method, asked[method])]
    refuse_share(entry.simulate_alpha, drafting, choosing)
    how: dict[str, Any] = {name: getattr(entry, name) for name in ("device", "dtype", "attention", "heads")}
    how["draft"] = draft_for(entry.methods, entry.model, entry.draft_model)
    how["draft_weights"] = weights_for(entry.methods, entry.draft_weights)
    try:
        for method, each in asked.items():
            check_ahead(entry.model, prompt, length, method, each, **how, option=option)
        model = load(entry.model, exact=entry.exact, **how)
        variants = [
            Variant(method, method, resolve(method, model.target, model.heads, each)) for method, each in asked.items()
        ]
    except InputError as error:
        raise renamed(error, {"--method": "--methods"}) from None
    params, _ = ending(params, model.eos_ids, stop_at_eos=False)
    return Lineup(model, params, variants, entry.simulate_alpha)
