"""A suite on a model: its groups prepared, measured one after another, and compared with the paper's order.

The result is one dict, ``suite.json``. A group is what runs side by side: one setting, with its own plain decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from statistics import mean, stdev
from typing import Any

from tswift.benchmarking.config import (
    BASELINE,
    DRAFTLESS,
    REFERENCE,
    BenchConfig,
    BenchOptions,
    Contender,
    Plan,
    Prompt,
)
from tswift.benchmarking.quality import quality
from tswift.benchmarking.roofline import Machine
from tswift.benchmarking.run import INTERRUPTED, RUNNING, Case, Run, Sample, begin_measurement, measure
from tswift.benchmarking.suites import (
    AXIS,
    LENGTH,
    PREFILL,
    Choice,
    Row,
    Suite,
    counterparts,
    place_name,
    published_rows,
)
from tswift.benchmarking.summary import FINISHED, METRICS, Cell, Figure, by_draw, summarise
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import resolve
from tswift.drafting.options import DraftOptions, find_method
from tswift.engine import check, ending, preflight
from tswift.errors import InputError
from tswift.jobs.config import loading
from tswift.jobs.environment import now
from tswift.jobs.prompt import TextStream
from tswift.models.load import LoadedModel, load

SCHEMA = 1
KIND = "suite"
HERE = "here"  # source of measured rows

# two-sided 95% quantiles of Student's t, by degrees of freedom
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

OnProgress = Callable[[str, int, int, Case, Run], None]  # the group's label, then as for ``measure``


@dataclass(frozen=True)
class Prepared:
    """A suite on a loaded model."""

    suite: Suite
    groups: Mapping[str, BenchConfig]  # by place on the suite's axis; "" where contenders differ along it
    missing: Mapping[str, str]  # labels that cannot run here, and why


def prepare(suite: Suite, options: BenchOptions, plan: Plan) -> Prepared:
    """Check the options, and load the model; a method that cannot run on it is left out and listed as missing.

    Args:
        options: of their methods only ``ar-reference`` counts, and the suite's ``own`` options must not be set.

    Raises:
        InputError: an option cannot be met, or none of the suite's methods can run.
    """
    typed = [*options.sampling, *options.drafting, *(["tree"] if options.trees else [])]
    options.refuse_unused(suite.methods)
    reference = REFERENCE in options.methods
    if reference and not (suite.axis == "method" and suite.along == AXIS):
        raise InputError(f"suite {suite.name} compares no methods", "with_reference_ar")
    DraftOptions(**options.drafting)  # what is out of range is refused before a model is loaded
    params = [SamplingParams(**{**options.sampling, **setting.sampling}) for setting in suite.settings]
    model = _load(suite, options)
    contenders, missing, errors = [Contender(BASELINE, BASELINE, DraftOptions())], {}, []
    for choice in suite.choices:
        label = choice.label or choice.method
        try:
            contenders.append(Contender(label, choice.method, _draft_options(choice, model, options, plan)))
        except InputError as error:
            missing[label] = error.message
            errors.append(error)
    if len(contenders) == 1:
        if errors[0].field in typed:
            raise errors[0]
        raise InputError(f"{suite.name} cannot run on this model: {next(iter(missing.values()))}", "suite")
    if reference:
        contenders.append(Contender(REFERENCE, REFERENCE, DraftOptions()))
    groups = {}
    for setting, drawn in zip(suite.settings, params, strict=True):
        label = setting.label or (model.name if suite.axis == "model" else "")
        groups[label] = BenchConfig(model, ending(drawn, model.eos_ids, stop_at_eos=False)[0], contenders)
    return Prepared(suite, groups, missing)


def _load(suite: Suite, options: BenchOptions) -> LoadedModel:
    """The model, with a smaller one where one is asked for, or is there anyway."""
    try:
        how = loading(options, suite.methods)
    except InputError as error:
        if options.draft_model is not None or error.field != "draft_model":
            raise
        # methods that need a draft model are left out
        how = loading(options, [method for method in suite.methods if not find_method(method).draft])
    if options.quantize is None:  # else how much memory it takes is seen when it is loaded
        preflight(options.model, 1, 1, BASELINE, DraftOptions(), option="model", **how)
    return load(options.model, exact=options.exact, quantize=options.quantize, **how)


def _draft_options(choice: Choice, model: LoadedModel, options: BenchOptions, plan: Plan) -> DraftOptions:
    """A choice's resolved options."""
    fields = {**options.drafting, "tree": options.tree(choice.method), **choice.drafting}
    if "tree" in choice.drafting and model.heads is not None:
        fields["nodes"] = tree_nodes(choice.drafting["tree"], model.heads.conditioned)
    resolved = resolve(choice.method, model.target, model.heads, DraftOptions(**fields))
    try:
        check(model.target, max(plan.prefills), max(plan.lens), choice.method, resolved, draft=model.draft)
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
    suite = prepared.suite
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "suite": suite.name,
        "title": suite.title,
        "state": RUNNING,
        "started": now(),
        "ended": now(),
        "command": list(command),
        "missing": [{"label": label, "why": why} for label, why in prepared.missing.items()],
        "groups": groups,
        "texts": [],
    }
    _summarise(suite, record)
    return record


def run_suite(
    record: dict[str, Any],
    prepared: Prepared,
    prompts: Sequence[Prompt],
    plan: Plan,
    on_progress: OnProgress,
    on_checkpoint: Callable[[], None],
) -> None:
    """Measure all groups, or as much as is done when Ctrl-C is pressed.

    Args:
        record: from :func:`begin_suite`; filled with samples. Its ``state`` says whether it is whole.
        on_progress: called whenever a run has advanced by a slice.
        on_checkpoint: called whenever the record is worth writing.
    """
    suite = prepared.suite

    def keep() -> None:
        _summarise(suite, record)
        on_checkpoint()

    for (label, config), held in zip(prepared.groups.items(), record["groups"], strict=True):
        on_trial = partial(_judge_texts, record, suite, label, config.model)
        measure(held["measurement"], config, prompts, plan, partial(on_progress, label), keep, on_trial)
        if held["measurement"]["state"] == INTERRUPTED:
            record["state"] = INTERRUPTED
            break
    else:
        record["state"] = FINISHED
    keep()


def _summarise(suite: Suite, record: dict[str, Any]) -> None:
    """Bring up to date what follows from the samples: rows and pairs."""
    measured, published = measured_rows(suite, record["groups"]), published_rows(suite)
    for name, rows in (("rows", measured), ("published", published)):
        record[name] = [{key: value for key, value in asdict(row).items() if key != "draws"} for row in rows]
    record.update(ended=now(), pairs=[asdict(pair) for pair in compared(suite, measured, published)])


def _judge_texts(
    record: dict[str, Any],
    suite: Suite,
    label: str,
    model: LoadedModel,
    case: Case,
    texts: Mapping[str, Sequence[int]],
    samples: list[Sample],
) -> None:
    """Measure how much every text repeats itself, up to each length; keep those that are to be shown."""
    known: dict[tuple[int, ...], dict[str, float | None]] = {}
    for sample in samples:
        tokens = texts.get(sample["method"]) or next(iter(texts.values()))  # plain decoding may have been sampled
        for point in sample["points"]:
            part = tuple(tokens[: point["len"]])
            if part not in known:  # nearly always, all runs have the same text
                known[part] = quality(part, model.tokenizer.decode(list(part), skip_special_tokens=False))
            point["quality"] = known[part]
    if suite.texts and samples and case.repeat == 0:
        length = samples[0]["points"][-1]["len"]
        tokens = list(texts.get(BASELINE) or next(iter(texts.values())))[:length]
        stream = TextStream(model.tokenizer)
        pieces = [stream.add([token]) for token in tokens]  # the text that each token completes
        pieces[-1] += stream.finish()
        start = {"label": label, "prompt": case.prompt.name, "prefill": case.prefill, "seed": case.seed}
        record["texts"].append({**start, "tokens": tokens, "pieces": pieces})


def measured_rows(suite: Suite, groups: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Measured rows in the order of the suite's axis; ``groups`` as in ``suite.json``."""
    rows = []
    for group in groups:
        draws = by_draw(group["measurement"])
        for cell in summarise(group["measurement"]):
            if cell.method != BASELINE or suite.plain:
                means = {
                    draw: {name: x.mean for name, x in _figures(suite, one).items() if x.mean is not None}
                    for draw, one in draws[cell.key].items()
                }
                axis = group["label"] or cell.method
                rows.append(Row(axis, HERE, cell.prefill, cell.length, _figures(suite, cell), means))
    return rows


def _figures(suite: Suite, cell: Cell) -> dict[str, Figure]:
    drafts, unknown = cell.method not in DRAFTLESS, Figure(0, None, None)
    names = dict.fromkeys((*suite.columns, *suite.plotted))
    return {name: cell.figures[name] if drafts or not METRICS[name].drafted else unknown for name in names}


@dataclass(frozen=True)
class Pair:
    """Two measured rows, their order, and the paper's."""

    figure: str  # the metric
    place: str  # prefill, length or axis label where both were measured
    first: str
    second: str
    values: tuple[float, float]  # the figure of both
    ours: float  # the first's value minus the second's, as the mean over draws that both have
    within: float  # the largest difference that would say nothing
    n: int  # draws that both have
    paper: int | None  # its sign of the same difference; None where it has none, or its models disagree
    verdict: str  # same, differs, too close, not in the paper, or not compared (none of the suite's contrasts)


def compared(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> list[Pair]:
    """All pairs of measured rows that a suite puts in order, figure by figure and place by place.

    A pair is too close if its difference is within the figure's tolerance, or within the 95% interval of the paired
    difference where there are several draws. The paper has no order if its difference is within its last digit.
    """
    pairs = []
    for figure in suite.ordered:
        for place, rows in _places(suite, measured).items():
            for (name, first), (other, second) in combinations(rows.items(), 2):
                one, two = first.figures[figure].mean, second.figures[figure].mean
                if one is None or two is None:
                    continue
                differences = [
                    values[figure] - second.draws[draw][figure]
                    for draw, values in first.draws.items()
                    if figure in values and figure in second.draws.get(draw, {})
                ]
                ours = mean(differences) if differences else one - two
                within = max(METRICS[figure].tolerance(one, two), _interval(differences))
                paper = _published_sign(suite, figure, first, second, published)
                if suite.contrasts and (first.axis, second.axis) not in suite.contrasts:
                    verdict = "not compared"
                elif not paper:
                    verdict = "not in the paper"
                else:
                    verdict = "too close" if abs(ours) <= within else "same" if ours * paper > 0 else "differs"
                count = len(differences)
                pairs.append(Pair(figure, place, name, other, (one, two), ours, within, count, paper, verdict))
    return pairs


def _places(suite: Suite, measured: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows that are put in order, by name, grouped by where they were measured."""
    varied = {name for name in (AXIS, PREFILL, LENGTH) if len({getattr(row, name) for row in measured}) > 1}
    places: dict[str, dict[str, Row]] = {}
    for row in measured:
        names = {
            LENGTH: f"{row.length:,} tokens",
            AXIS: place_name(suite, row.axis),
            PREFILL: f"prefill {row.prefill:,}",
        }
        own = names.pop(suite.along)
        where = [name for along, name in names.items() if along in varied] or list(names.values())[:1]
        places.setdefault(", ".join(where), {})[own] = row
    return places


def _interval(differences: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of paired differences; 0 from a single draw, which has no spread."""
    if len(differences) < 2:
        return 0.0
    return _T[min(len(differences) - 1, len(_T)) - 1] * stdev(differences) / math.sqrt(len(differences))


def _published_sign(suite: Suite, figure: str, first: Row, second: Row, published: Sequence[Row]) -> int | None:
    """The sign of the paper's difference; None if it has none, or has both."""
    values: list[dict[tuple[str, str], float | None]] = []
    for row in (first, second):
        beside = counterparts(suite, row.axis, row.prefill or 1, row.length or 1, published)
        # where the axis is put in order, the two sides are at different places on it
        values.append(
            {
                (one.source, one.axis if suite.along == LENGTH else ""): one.figures[figure].mean
                for one in beside
                if figure in one.figures
            }
        )
    signs = set()
    for key in values[0].keys() & values[1].keys():
        one, two = values[0][key], values[1][key]
        if one is not None and two is not None and abs(one - two) > METRICS[figure].rounding * 1.01:
            signs.add(1 if one > two else -1)
    return signs.pop() if len(signs) == 1 else None
