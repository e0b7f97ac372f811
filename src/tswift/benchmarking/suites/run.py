"""A suite's run: every group measured by bench's own loop, one after another; ``suite.json`` is what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tswift.benchmarking.lanes import Lane
from tswift.benchmarking.measure import INTERRUPTED, RUNNING, Plan, header, measure
from tswift.benchmarking.measurement import BASELINE, FINISHED
from tswift.benchmarking.prompts import Prompt
from tswift.benchmarking.quality import quality
from tswift.benchmarking.roofline import Machine
from tswift.benchmarking.round import Place, Sample
from tswift.benchmarking.suites.conclusion import conclude
from tswift.benchmarking.suites.lineups import Group, Prepared
from tswift.benchmarking.suites.rows import measured_rows, published_rows
from tswift.jobs.environment import now
from tswift.jobs.prompt import TextStream
from tswift.models.loaded import LoadedModel

SCHEMA = 1
KIND = "suite"

Tick = Callable[[str, int, int, Place, Lane], None]  # the group's label, then as for measure


def begin_record(prepared: Prepared, prompts: Sequence[Prompt], plan: Plan, command: Sequence[str]) -> dict[str, Any]:
    """A suite without samples: what is to be measured. See ``header`` of measure.

    Raises:
        InputError: more positions or memory than there are.
    """
    groups: list[dict[str, Any]] = []
    for group in prepared.groups:
        # the machine is the same for all
        machine = Machine(**groups[0]["measurement"]["machine"]) if groups else None
        groups.append({"label": group.label, "measurement": header(group.lineup, prompts, plan, command, machine)})
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
        "missing": [{"label": label, "why": why} for label, why in prepared.missing],
        "groups": groups,
        "texts": [],
    }
    settle(prepared, record)
    return record


def run(
    record: dict[str, Any],
    prepared: Prepared,
    prompts: Sequence[Prompt],
    plan: Plan,
    tick: Tick,
    keep: Callable[[], None],
) -> None:
    """Measure all groups, or as much as is done when Ctrl-C is pressed.

    Args:
        record: from :func:`begin_record`; the samples go there. Its ``state`` says at the end whether it is whole.
        prepared: the suite.
        prompts: each of at least the longest prefill.
        plan: the grid of every group.
        tick: called whenever a lane has advanced by a slice.
        keep: called whenever there is something to be kept.
    """

    def kept() -> None:
        settle(prepared, record)
        keep()

    for group, held in zip(prepared.groups, record["groups"], strict=True):
        observe = partial(_observe, record, prepared, group)
        measure(held["measurement"], group.lineup, prompts, plan, partial(tick, group.label), kept, observe)
        if held["measurement"]["state"] == INTERRUPTED:
            record["state"] = INTERRUPTED
            break
    else:
        record["state"] = FINISHED
    kept()


def settle(prepared: Prepared, record: dict[str, Any]) -> None:
    """Bring up to date what follows from the samples: the rows and the conclusion."""
    suite = prepared.suite
    measured, published = measured_rows(suite, record["groups"]), published_rows(suite)
    record.update(
        ended=now(),
        rows=[row.as_dict() for row in measured],
        published=[row.as_dict() for row in published],
        conclusion=conclude(suite, measured, published).as_dict(),
    )


def _observe(
    record: dict[str, Any],
    prepared: Prepared,
    group: Group,
    place: Place,
    texts: Mapping[str, Sequence[int]],
    samples: list[Sample],
) -> None:
    """Say of every text how much it repeats itself, up to each length; keep those that are to be shown."""
    known: dict[tuple[int, ...], dict[str, float | None]] = {}
    model = group.lineup.model
    for sample in samples:
        tokens = texts.get(sample["method"]) or next(iter(texts.values()))  # plain decoding may have been sampled
        for point in sample["points"]:
            part = tuple(tokens[: point["len"]])
            if part not in known:  # nearly always, all lanes have the same text
                known[part] = quality(part, decoded(model, part))
            point["quality"] = known[part]
    if prepared.suite.texts and samples and place.repeat == 0:
        length = samples[0]["points"][-1]["len"]
        tokens = list(texts.get(BASELINE) or next(iter(texts.values())))[:length]
        record["texts"].append(
            {
                "label": group.label,
                "prompt": place.prompt.name,
                "prefill": place.prefill,
                "seed": place.seed,
                "tokens": tokens,
                "pieces": pieces(model, tokens),
            }
        )


def decoded(model: LoadedModel, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    text: str = model.tokenizer.decode(list(tokens), skip_special_tokens=False)
    return text


def pieces(model: LoadedModel, tokens: Sequence[int]) -> list[str]:
    """The text that each token completes; together they are the whole text."""
    stream = TextStream(model.tokenizer)
    found = [stream.add([token]) for token in tokens]
    found[-1] += stream.finish()
    return found
