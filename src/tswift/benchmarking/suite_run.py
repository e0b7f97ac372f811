"""A suite on a model: its groups prepared, begun in one dict, ``suite.json``, and their texts judged.

A group is what runs side by side: one setting, with its own plain decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tswift.benchmarking.config import BASELINE, REFERENCE, BenchConfig, BenchOptions, Contender, Plan, Prompt
from tswift.benchmarking.quality import quality
from tswift.benchmarking.roofline import Machine
from tswift.benchmarking.run import Case, Groups, Sample, begin_measurement
from tswift.benchmarking.suites import AXIS, Suite
from tswift.decoding.params import SamplingParams
from tswift.decoding.text import TextStream
from tswift.drafting.methods import resolve
from tswift.drafting.options import DraftOptions, find_method
from tswift.engine import check, ending, preflight
from tswift.errors import InputError
from tswift.jobs.config import loading
from tswift.jobs.environment import now
from tswift.jobs.folder import RUNNING
from tswift.models.load import LoadedModel, load

SCHEMA = 1


@dataclass(frozen=True)
class Prepared:
    """A suite on a loaded model."""

    suite: Suite
    groups: Mapping[str, BenchConfig]  # by place on the suite's axis; "" where contenders differ along it
    missing: Mapping[str, str]  # labels that cannot run here, and why

    @property
    def model(self) -> LoadedModel:
        """The model of all groups."""
        return next(iter(self.groups.values())).model


def prepare(suite: Suite, options: BenchOptions, plan: Plan) -> Prepared:
    """Check the options, and load the model; a method that cannot run on it is left out and listed as missing.

    Args:
        options: of their methods only ``ar-reference`` counts, and the suite's ``own`` options must not be set.
    """
    typed = [*options.sampling, *options.drafting, *(["tree"] if options.trees else [])]
    options.refuse_unused(suite.methods)
    reference = REFERENCE in options.methods
    if reference and not (suite.axis == "method" and suite.along == AXIS):
        raise InputError(f"suite {suite.name} compares no methods", "with_reference_ar")
    DraftOptions(**options.drafting)  # what is out of range is refused before a model is loaded
    params = {label: SamplingParams(**{**options.sampling, **own}) for label, own in suite.settings.items()}
    try:
        arguments = loading(options, suite.methods)
    except InputError as error:
        if options.draft_model is not None or error.field != "draft_model":
            raise
        # methods that need a draft model are left out
        arguments = loading(options, [method for method in suite.methods if not find_method(method).draft])
    if options.quantize is None:  # else how much memory it takes is seen when it is loaded
        preflight(options.model, 1, 1, BASELINE, DraftOptions(), option="model", **arguments)
    model = load(options.model, exact=options.exact, quantize=options.quantize, **arguments)
    contenders, missing, errors = [Contender(BASELINE, BASELINE, DraftOptions())], {}, []
    for label, (method, drafting) in suite.contenders.items():
        try:
            resolved = _draft_options(method, drafting, model, options, plan)
            contenders.append(Contender(label or method, method, resolved))
        except InputError as error:
            missing[label or method] = error.message
            errors.append(error)
    if len(contenders) == 1:
        if errors[0].field in typed:
            raise errors[0]
        raise InputError(f"{suite.name} cannot run on this model: {errors[0].message}", "suite")
    if reference:
        contenders.append(Contender(REFERENCE, REFERENCE, DraftOptions()))
    unnamed = model.name if suite.axis == "model" else ""
    groups = {
        label or unnamed: BenchConfig(model, ending(drawn, model.eos_ids, stop_at_eos=False)[0], contenders)
        for label, drawn in params.items()
    }
    return Prepared(suite, groups, missing)


def _draft_options(
    method: str, drafting: Mapping[str, Any], model: LoadedModel, options: BenchOptions, plan: Plan
) -> DraftOptions:
    """A contender's resolved options."""
    fields = {**options.drafting, "tree": options.tree(method), **drafting}
    if "tree" in drafting and model.heads is not None:
        fields["nodes"] = tree_nodes(drafting["tree"], model.heads.conditioned)
    resolved = resolve(method, model.target, model.heads, DraftOptions(**fields))
    try:
        check(model.target, max(plan.prefills), max(plan.lens), method, resolved, draft=model.draft)
    except InputError as error:
        if error.field == "draft_model":  # what the model itself cannot do is refused for all methods
            raise
    return resolved


def tree_nodes(tree: Sequence[int], conditioned: bool) -> int:
    """Nodes of a tree with these candidates per level, root included.

    After conditioned heads, a level's candidates follow the best one of the level before, not every one.
    """
    nodes, last = 1, 1
    for width in tree:
        last = width if conditioned else last * width
        nodes += last
    return nodes


def begin_suite(prepared: Prepared, prompts: Sequence[Prompt], plan: Plan, command: Sequence[str]) -> dict[str, Any]:
    """A suite without samples: what is to be measured. See :func:`tswift.benchmarking.run.begin_measurement`."""
    groups: list[dict[str, Any]] = []
    for label, config in prepared.groups.items():
        machine = Machine(**groups[0]["measurement"]["machine"]) if groups else None  # measured once
        groups.append({"label": label, "measurement": begin_measurement(config, prompts, plan, command, machine)})
    return {
        "schema": SCHEMA,
        "kind": "suite",
        "suite": prepared.suite.name,
        "title": prepared.suite.title,
        "state": RUNNING,
        "started": now(),
        "ended": now(),
        "command": list(command),
        "missing": [{"label": label, "why": why} for label, why in prepared.missing.items()],
        "groups": groups,
        "texts": [],
    }


def groups_of(record: dict[str, Any], prepared: Prepared) -> Groups:
    """What is to be measured, for :func:`tswift.benchmarking.run.measure`; the samples go into the record."""
    groups = zip(prepared.groups.items(), record["groups"], strict=True)
    return {label: (config, group["measurement"]) for (label, config), group in groups}


def judge_texts(
    record: dict[str, Any],
    prepared: Prepared,
    label: str,
    case: Case,
    texts: Mapping[str, Sequence[int]],
    samples: list[Sample],
) -> None:
    """Measure how much every text of a trial repeats itself, up to each length; keep those that are to be shown."""
    tokenizer = prepared.model.tokenizer
    plain = texts.get(BASELINE) or next(iter(texts.values()))  # plain decoding may have been sampled
    known: dict[tuple[int, ...], dict[str, float | None]] = {}
    for sample in samples:
        for point in sample["points"]:
            part = tuple((texts.get(sample["method"]) or plain)[: point["len"]])
            if part not in known:  # nearly always, all runs have the same text
                known[part] = quality(part, tokenizer.decode(list(part), skip_special_tokens=False))
            point["quality"] = known[part]
    if prepared.suite.texts and samples and case.repeat == 0:
        tokens = list(plain)[: samples[0]["points"][-1]["len"]]
        stream = TextStream(tokenizer)
        pieces = [stream.add([token]) for token in tokens]  # the text that each token completes
        pieces[-1] += stream.finish()
        place = {"label": label, "prompt": case.prompt.name, "prefill": case.prefill, "seed": case.seed}
        record["texts"].append({**place, "tokens": tokens, "pieces": pieces})
