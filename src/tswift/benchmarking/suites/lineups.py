"""From a suite and what is asked of it to lineups that are ready to run: one for each of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tswift.benchmarking.lineup import Lineup, Variant
from tswift.benchmarking.measure import Plan
from tswift.benchmarking.measurement import BASELINE, REFERENCE
from tswift.benchmarking.suites.suite import AXIS, Choice, Suite
from tswift.drafting.methods import find_method, resolve
from tswift.drafting.options import DraftOptions
from tswift.engine import check, check_ahead, ending
from tswift.errors import InputError
from tswift.jobs.settings import draft_for, refuse_unused, sampling_params, weights_for
from tswift.models.draft import DRAFT_OPTION
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load


@dataclass(frozen=True)
class Asked:
    """What is asked of a suite besides what it varies.

    Attributes:
        model: how it is loaded: arguments of ``load``, ``model`` among them, with ``draft_model`` for ``draft``.
        sampling: fields of ``SamplingParams`` that were given.
        drafting: fields of ``DraftOptions`` but ``tree`` that were given.
        trees: draft trees by method; one under ``""`` goes to all methods that use a tree.
        reference: run ``ar-reference``, too.
    """

    model: Mapping[str, Any]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, tuple[int, ...] | str] = field(default_factory=dict)
    reference: bool = False


@dataclass(frozen=True)
class Group:
    """What runs side by side: a setting's texts have one plain decode.

    Attributes:
        label: its place on the suite's axis; empty where that is its lanes' matter.
        lineup: the lanes.
    """

    label: str
    lineup: Lineup


@dataclass(frozen=True)
class Prepared:
    """A suite on a loaded model.

    Attributes:
        groups: at least one.
        missing: labels that cannot run here, and why.
    """

    suite: Suite
    groups: tuple[Group, ...]
    missing: tuple[tuple[str, str], ...]


def prepare(suite: Suite, asked: Asked, plan: Plan) -> Prepared:
    """Check what is asked, and load the model.

    A method that cannot run here, as one that needs heads on a model that has none, is left out and said to be missing.

    Args:
        suite: what is to run.
        asked: what was asked for besides.
        plan: the grid, for its longest text.

    Raises:
        InputError: something asked cannot be done, or none of the suite's methods can run.
    """
    _refuse(suite, asked)
    params = [sampling_params({**asked.sampling, **setting.sampling}) for setting in suite.settings]
    model = _load(suite, asked)
    plain = [Variant(BASELINE, BASELINE, DraftOptions())]
    variants, missing, errors = [], [], []
    for choice in suite.choices:
        label = choice.label or choice.method
        try:
            variants.append(Variant(label, choice.method, _options(choice, model, asked, plan)))
        except InputError as error:
            missing.append((label, str(error).removeprefix(f"{error.option}: ")))
            errors.append(error)
    if not variants:
        typed = {f"--{name.replace('_', '-')}" for name in (*asked.drafting, *(["tree"] if asked.trees else []))}
        if errors[0].option in typed:
            raise errors[0]
        raise InputError(f"{suite.name} cannot run on this model: {missing[0][1]}", "--suite")
    if asked.reference:
        plain.append(Variant(REFERENCE, REFERENCE, DraftOptions()))
    groups = []
    for setting, each in zip(suite.settings, params, strict=True):
        ended, _ = ending(each, model.eos_ids, stop_at_eos=False)
        label = setting.label or (model.name if suite.axis == "model" else "")
        groups.append(Group(label, Lineup(model, ended, (*plain[:1], *variants, *plain[1:]))))
    return Prepared(suite, tuple(groups), tuple(missing))


def _refuse(suite: Suite, asked: Asked) -> None:
    """No option is silently ignored."""
    given = [*asked.sampling, *asked.drafting, *(["tree"] if asked.trees else [])]
    for name in given:
        if name in suite.own:
            raise InputError(f"suite {suite.name} sets it itself", f"--{name.replace('_', '-')}")
    heads = {"heads": asked.model["heads"]} if asked.model.get("heads") is not None else {}
    refuse_unused(suite.methods, {**asked.drafting, **heads, "tree": asked.trees.get("")}, asked.trees)
    for method in asked.trees:
        if method and (method not in suite.methods or "tree" not in find_method(method).uses):
            raise InputError(f"is given for {method}, which suite {suite.name} does not run or has no tree", "--tree")
    if asked.reference and not (suite.axis == "method" and suite.along == AXIS):
        raise InputError(f"suite {suite.name} compares no methods", "--with-reference-ar")
    DraftOptions(**asked.drafting)  # what is out of range is told before a model is loaded


def _load(suite: Suite, asked: Asked) -> LoadedModel:
    """The model, with a smaller one where one is asked for, or is there anyway."""
    how = dict(asked.model)
    name, typed = how.pop("model"), how.pop("draft_model", None)
    how["draft_weights"] = weights_for(suite.methods, how.get("draft_weights"))
    check_ahead(name, 1, 1, BASELINE, DraftOptions(), option="--model", **how)
    try:
        return load(name, **how, draft=draft_for(suite.methods, name, typed))
    except InputError as error:
        if typed is not None or error.option != DRAFT_OPTION:
            raise
        return load(name, **how)  # what needs one is left out


def _options(choice: Choice, model: LoadedModel, asked: Asked, plan: Plan) -> DraftOptions:
    """A choice's resolved options."""
    tree = asked.trees.get(choice.method, asked.trees.get(""))
    given = {**asked.drafting, **({} if tree is None else {"tree": tree}), **choice.drafting}
    if "tree" in choice.drafting and model.heads is not None:
        given["nodes"] = nodes_of(choice.drafting["tree"], model.heads.conditioned)
    options = resolve(choice.method, model.target, model.heads, DraftOptions(**given))
    try:
        check(model.target, max(plan.prefills), max(plan.lens), choice.method, options, draft=model.draft)
    except InputError as error:
        if error.option == DRAFT_OPTION:  # what the model itself cannot do is told for all methods
            raise
    return options


def nodes_of(tree: tuple[int, ...], conditioned: bool) -> int:
    """How many nodes a tree has, root included.

    Args:
        tree: candidates per level.
        conditioned: a level's candidates follow the best one of the level before, not every one.
    """
    nodes, last = 1, 1
    for width in tree:
        last = width if conditioned else last * width
        nodes += last
    return nodes
