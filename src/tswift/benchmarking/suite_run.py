"""A suite on a model: its groups prepared, its record begun, and their texts judged.

A group is what runs side by side: one setting, with its own plain decode.

How much texts repeat themselves is judged by distinct n-grams and the repetition rate; both depend
on a text's length: compare texts of the same length only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from tswift.benchmarking.config import (
    BASELINE,
    REFERENCE,
    BenchConfig,
    BenchOptions,
    Contender,
    Plan,
)
from tswift.benchmarking.record import Group, LeftOut, Sample, SuiteRecord, SuiteText
from tswift.benchmarking.run import Case, begin_measurement
from tswift.benchmarking.suites import Suite, find_suite
from tswift.benchmarking.workloads import Prompt
from tswift.decoding.stats import distinct
from tswift.decoding.text import TextStream
from tswift.drafting.methods import resolve
from tswift.drafting.options import DraftOptions, find_method
from tswift.errors import InputError
from tswift.jobs.folder import RUNNING
from tswift.loading.model import LoadedModel, load_model
from tswift.loading.plan import plan_model
from tswift.machine import now
from tswift.memory import Demand, check, preflight
from tswift.options import Values, changed
from tswift.sampling.parameters import apply_eos_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 4  # tokens of an n-gram
REPEAT = 8  # tokens in a row that occurred before are marked as a repetition


def quality(tokens: Sequence[int]) -> dict[str, float | None]:
    """Metrics of a text's tokens; None where it is too short.

    ``distinct_1`` to ``distinct_4`` are unique n-grams of tokens / n-grams (the paper's
    Distinct-n), ``distinct`` their mean, ``seq_rep_4`` the share of 4-grams that occurred before
    (Welleck et al., 2020).
    """
    shares = [distinct(tokens, n) for n in range(1, LONGEST + 1)]
    known = len(tokens) >= LONGEST
    return {
        **{
            f"distinct_{n}": share if len(tokens) >= n else None
            for n, share in enumerate(shares, 1)
        },
        "distinct": sum(shares) / LONGEST if known else None,
        "seq_rep_4": 1 - shares[-1] if known else None,
    }


def repeated(tokens: Sequence[int], length: int = REPEAT) -> list[bool]:
    """Of each token, whether it is part of ``length`` tokens in a row that occurred before."""
    marks = [False] * len(tokens)
    seen = set()
    for start in range(len(tokens) - length + 1):
        gram = tuple(tokens[start : start + length])
        if gram in seen:
            marks[start : start + length] = [True] * length
        seen.add(gram)
    return marks


def spans(text: SuiteText) -> list[tuple[str, bool]]:
    """A text of ``suite.json`` as runs of characters, each with whether it is repeated."""
    parts: list[tuple[str, bool]] = []
    for piece, mark in zip(text.pieces, repeated(text.tokens), strict=True):
        if parts and (parts[-1][1] == mark or not piece):
            parts[-1] = parts[-1][0] + piece, parts[-1][1]
        else:
            parts.append((piece, mark))
    return parts


def texts_html(record: SuiteRecord, about: str) -> str:
    """All texts of a ``suite.json`` as a self-contained page; ``about`` is a line on the model."""
    sections: dict[str, str] = defaultdict(str)
    for text in record.texts:
        where = f"{text.cell}, {len(text.tokens):,} tokens"
        heading = f"{text.label}: {sum(repeated(text.tokens)) / len(text.tokens):.0%} repeated"
        parts = (
            f"<mark>{escape(part)}</mark>" if mark else escape(part) for part, mark in spans(text)
        )
        section = f"<section><h2>{escape(heading)}</h2><p>{''.join(parts)}</p></section>"
        sections[f"<h3>{escape(where)}</h3>\n"] += section
    title = escape(f"{record.suite}: {record.title}")
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        f"<style>{_STYLE}</style>\n"
        f"<h1>{title}</h1>\n<p class=about>{escape(about)}</p>\n"
        f"<p class=about><mark>Marked</mark>: {REPEAT} or more tokens that the text has had "
        "before, in order.</p>\n"
        f"{''.join(f'{where}<div>{texts}</div>' for where, texts in sections.items())}</html>\n"
    )


_STYLE = """
body { font: 16px/1.5 Georgia, serif; color: #111; background: #fff }
body { margin: 2em auto; max-width: 76em; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em }
h3 { font-size: 1em; font-weight: normal; color: #444 }
.about { font: 14px/1.5 system-ui, sans-serif; color: #333; margin: .3em 0 }
div { display: grid; grid-template-columns: repeat(auto-fit, minmax(20em, 1fr)); gap: 2em }
section p { white-space: pre-wrap; overflow-wrap: anywhere }
mark { background: #ffd54d; color: inherit }
"""


def prepare(
    suite: Suite, options: BenchOptions, plan: Plan
) -> tuple[dict[str, BenchConfig], dict[str, str]]:
    """Check the options, and load the model.

    Args:
        options: of their methods only ``ar-reference`` counts, and the suite's ``own`` options must
            not be set.

    Returns:
        What runs side by side, by place on the suite's axis, ``""`` where contenders differ along
        it; and by label why a method cannot run on this model: it is left out.
    """
    options.refuse_unused(suite.methods)
    reference = REFERENCE in options.methods
    if reference and (suite.axis != "method" or suite.of_prefills):
        raise InputError(f"suite {suite.name} compares no methods", "with_reference_ar")
    params = {label: changed(options.sampling, own) for label, own in suite.settings.items()}
    try:
        wanted = options.to_load(suite.methods)
    except InputError as error:
        if options.model.draft_model is not None or error.field != "draft_model":
            raise
        # methods that need a draft model are left out
        wanted = options.to_load(
            [method for method in suite.methods if "draft_model" not in find_method(method).needs]
        )
    made = plan_model(wanted)
    preflight(made, Demand(1, 1, BASELINE, DraftOptions()), option="model")
    model = load_model(made)
    contenders = [Contender(BASELINE, BASELINE, DraftOptions())]
    missing = {}
    errors = []
    for label, (method, drafting) in suite.contenders.items():
        try:
            resolved = _draft_options(method, drafting, model, options, plan)
            contenders.append(Contender(label or method, method, resolved))
        except InputError as error:
            missing[label or method] = error.message
            errors.append(error)
    if len(contenders) == 1:
        if errors[0].field in options.given or (errors[0].field == "tree" and options.trees):
            raise errors[0]
        raise InputError(f"{suite.name} cannot run on this model: {errors[0].message}", "suite")
    if reference:
        contenders.append(Contender(REFERENCE, REFERENCE, DraftOptions()))
    unnamed = model.name if suite.axis == "model" else ""
    groups = {
        label or unnamed: BenchConfig(
            model, apply_eos_policy(drawn, model.eos_ids, stop_at_eos=False)[0], contenders
        )
        for label, drawn in params.items()
    }
    return groups, missing


def _draft_options(
    method: str, drafting: Values, model: LoadedModel, options: BenchOptions, plan: Plan
) -> DraftOptions:
    """A contender's resolved options."""
    asked = replace(options.drafting, **{"tree": options.tree(method), **drafting})
    if "tree" in drafting and model.heads is not None:
        asked = replace(asked, nodes=tree_nodes(drafting["tree"], model.heads.conditioned))
    resolved = resolve(method, model.target, model.heads, asked, model.draft is not None)
    try:
        check(
            model.target,
            Demand(max(plan.prefills), max(plan.lens), method, resolved),
            draft=model.draft,
        )
    except InputError as error:
        if error.field == "draft_model":
            # what the model itself cannot do is refused for all methods
            raise
    return resolved


def tree_nodes(tree: Sequence[int], conditioned: bool) -> int:
    """Nodes of a tree with these candidates per level, root included.

    After conditioned heads, a level's candidates follow the best one of the level before, not every
    one.
    """
    nodes = 1
    last = 1
    for width in tree:
        last = width if conditioned else last * width
        nodes += last
    return nodes


def begin_suite(
    suite: Suite,
    groups: Mapping[str, BenchConfig],
    missing: Mapping[str, str],
    prompts: Sequence[Prompt],
    plan: Plan,
    command: Sequence[str],
) -> SuiteRecord:
    """A suite without samples: what is to be measured.

    See :func:`tswift.benchmarking.run.begin_measurement`.
    """
    begun: list[Group] = []
    for label, config in groups.items():
        machine = begun[0].measurement.machine if begun else None  # measured once
        begun.append(Group(label, begin_measurement(config, prompts, plan, command, machine)))
    started = now()
    return SuiteRecord(
        suite=suite.name,
        title=suite.title,
        state=RUNNING,
        started=started,
        ended=started,
        command=list(command),
        missing=[LeftOut(label, why) for label, why in missing.items()],
        groups=begun,
        texts=[],
    )


def judge_texts(
    record: SuiteRecord,
    tokenizer: PreTrainedTokenizerBase,
    label: str,
    case: Case,
    texts: Mapping[str, Sequence[int]],
    samples: list[Sample],
) -> None:
    """Measure how much every text of a trial repeats itself, up to each length;
    keep those that are to be shown.
    """
    # plain decoding may have been sampled
    plain = texts.get(BASELINE) or next(iter(texts.values()))
    for sample in samples:
        for point in sample.points:
            point.quality = quality((texts.get(sample.method) or plain)[: point.len])
    if find_suite(record.suite).texts and samples and case.repeat == 0:
        tokens = list(plain)[: samples[0].points[-1].len]
        stream = TextStream(tokenizer)
        pieces = [stream.add([token]) for token in tokens]  # the text that each token completes
        pieces[-1] += stream.finish()
        record.texts.append(
            SuiteText(
                label=label,
                prompt=case.prompt,
                prefill=case.prefill,
                seed=case.seed,
                tokens=tokens,
                pieces=pieces,
            )
        )
