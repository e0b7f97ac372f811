"""The measurement behind ``tswift bench``: a grid of prompts, prefills and seeds, every method in each of its cells.

The result is one dict, written to ``bench.json`` as it is; ``bench.schema.json`` says what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, product
from typing import Any

from tswift.benchmarking.floor import floor_of
from tswift.benchmarking.lanes import Lane
from tswift.benchmarking.lineup import Lineup
from tswift.benchmarking.machine import measured
from tswift.benchmarking.measurement import BASELINE, DRAFTLESS, FINISHED, KIND, SCHEMA, workload_hash
from tswift.benchmarking.prompts import Prompt
from tswift.benchmarking.roofline import Machine
from tswift.benchmarking.round import Place, Round, Sample
from tswift.errors import InputError, renamed
from tswift.jobs.environment import environment, now
from tswift.jobs.prompt import fingerprint
from tswift.models.fingerprint import fingerprint_of

FULL, SAMPLED = "full", "sampled"
RUNNING, INTERRUPTED = "running", "interrupted"
_LONG_USED = ("tokenswift", "kv", "dynamic")  # there was no choice once, and files of then do not say so
_WARM_PROMPT = 64  # tokens of the prompt that methods are warmed up on


@dataclass(frozen=True)
class Plan:
    """A grid.

    Attributes:
        prefills: prompt tokens to begin with.
        lens: generated lengths to read off; one run goes to the longest.
        seeds: a run for each.
        ar: ``full`` decodes plainly beside the methods; ``sampled`` times plain steps now and then and integrates.
        repeats: how often the whole grid is run.
        warmup: tokens each method generates before anything is measured.

    Raises:
        InputError: a value outside its range.
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


Keep = Callable[[], None]
Tick = Callable[[int, int, Place, Lane], None]  # number of the round, rounds in all, the round, the lane that advanced
Observe = Callable[[Place, Mapping[str, Sequence[int]], list[Sample]], None]


def header(
    lineup: Lineup, prompts: Sequence[Prompt], plan: Plan, command: Sequence[str], machine: Machine | None = None
) -> dict[str, Any]:
    """A measurement without samples: what is to be measured, and where. The machine's own speed is measured here.

    Args:
        lineup: the model and its methods.
        prompts: each of at least the longest prefill.
        plan: the grid.
        command: the words of the command line.
        machine: its speed, where that was measured already.

    Raises:
        InputError: more positions or memory than there are, or nothing to sample plain decoding beside.
    """
    if plan.ar == SAMPLED and not any(variant.method not in DRAFTLESS for variant in lineup.variants):
        raise InputError("sampled takes its samples while another method runs; name one", "--ar")
    # the largest cell, allocated and let go: what does not fit is refused before an hour has passed
    try:
        lineup.lanes(prompts[0].tokens[: max(plan.prefills)], max(plan.lens), 0, _methods(lineup, plan))
    except InputError as error:
        raise renamed(error, {"--len": "--lens"}) from None
    try:
        _warm_lanes(lineup, prompts[0], plan.warmup)
    except InputError as error:
        raise renamed(error, {"--len": "--warmup"}) from None
    workload, target = _workload(lineup, prompts, plan), lineup.model.target
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "simulated": lineup.simulated is not None,
        "state": RUNNING,
        "started": now(),
        "ended": now(),
        "command": list(command),
        "environment": environment(target.device),
        "machine": asdict(machine or measured(target.device, target.dtype)),
        "layers": lineup.model.layers,
        "workload": {"hash": workload_hash(workload), **workload},
        "samples": [],
    }


def measure(
    measurement: dict[str, Any],
    lineup: Lineup,
    prompts: Sequence[Prompt],
    plan: Plan,
    tick: Tick,
    keep: Keep,
    observe: Observe | None = None,
) -> None:
    """Run the grid, or as much of it as is done when Ctrl-C is pressed.

    Args:
        measurement: from :func:`header`; the samples go there. Its ``state`` says at the end whether it is whole.
        lineup: the model and its methods.
        prompts: each of at least the longest prefill.
        plan: the grid.
        tick: called whenever a lane has advanced by a slice.
        keep: called whenever all methods have reached another length, so that an error later on loses little.
        observe: called when a round has ended, with its texts by label; it may add to its samples.
    """
    lens = sorted(plan.lens)
    rounds = plan.repeats * len(prompts) * len(plan.prefills) * len(plan.seeds)
    done: list[Sample] = []
    floor = floor_of(lineup, Machine(**measurement["machine"]))

    def note(samples: list[Sample]) -> None:
        if measurement["simulated"]:
            for sample in samples:
                sample["simulated"] = True
        measurement.update(samples=[*done, *samples], ended=now(), layers=lineup.model.layers)
        keep()

    try:
        _warm_up(lineup, prompts[0], plan.warmup)
        for number, place in enumerate(_places(plan, prompts)):
            prompt = place.prompt.tokens[: place.prefill]
            lanes = lineup.lanes(prompt, lens[-1], place.seed, _methods(lineup, plan))
            each = Round(place, lanes, lens, floor)
            del lanes  # or their caches would stay while the next ones are allocated
            interrupted = each.run(partial(tick, number, rounds, place), note)
            samples = each.samples()
            note(samples)
            each.explain(samples, partial(_audited, lineup, prompt, place.seed))
            if observe:
                observe(place, each.texts, samples)
            done += samples
            if interrupted:
                raise KeyboardInterrupt
            note([])
    except KeyboardInterrupt:
        measurement["state"] = INTERRUPTED
    else:
        measurement["state"] = FINISHED
    keep()


def _places(plan: Plan, prompts: Sequence[Prompt]) -> Iterator[Place]:
    """The rounds one by one: a million repeats are nothing that has to be there at once."""
    for repeat in count():
        if repeat == plan.repeats:
            return
        yield from (Place(repeat, *each) for each in product(prompts, sorted(plan.prefills), plan.seeds))


def _audited(lineup: Lineup, prompt: Sequence[int], seed: int, lane: Lane) -> bool:
    return lineup.audit(prompt, lane.tokens, seed).ok


def _methods(lineup: Lineup, plan: Plan) -> list[str]:
    """The lanes: without plain decoding where that is sampled."""
    return [name for name in lineup.names if plan.ar == FULL or name != BASELINE]


def _workload(lineup: Lineup, prompts: Sequence[Prompt], plan: Plan) -> dict[str, Any]:
    about = lineup.model.about()
    # only where there is something to say, so that other workloads keep the hashes they have had
    simulated = {"simulated": lineup.simulated} if lineup.simulated else {}
    draft = lineup.model.draft
    drafts: dict[str, Any] = (
        {"draft_model": {**about["draft"], "weights": fingerprint_of(draft.model)}} if draft else {}
    )
    if lineup.model.drafting is not None:
        drafts["draft_weights"] = lineup.model.draft_weights
    renamed = {"variants": lineup.renamed} if lineup.renamed else {}
    return {
        "model": about["name"],
        "weights": fingerprint_of(lineup.model.target.model),
        "dtype": about["dtype"],
        "attention": about["attention"],
        "heads": about["heads"],
        "heads_weights": None if lineup.model.heads is None else fingerprint_of(lineup.model.heads),
        "sampling": asdict(lineup.params) | {"banned": list(lineup.params.banned)},
        "drafting": {
            label: {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in options.items()
                if (label, name, value) != _LONG_USED
            }
            for label, options in lineup.drafting().items()
        },
        "prompts": [
            {"name": prompt.name, "sha256": fingerprint(prompt.tokens[: max(plan.prefills)])} for prompt in prompts
        ],
        "prefills": sorted(plan.prefills),
        "lens": sorted(plan.lens),
        "seeds": list(plan.seeds),
        "methods": lineup.names,
        "ar": plan.ar,
        **drafts,
        **renamed,
        **simulated,
    }


def _warm_lanes(lineup: Lineup, prompt: Prompt, tokens: int) -> list[Lane]:
    return lineup.lanes(prompt.tokens[:_WARM_PROMPT], tokens, 0) if tokens else []


def _warm_up(lineup: Lineup, prompt: Prompt, tokens: int) -> None:
    for lane in _warm_lanes(lineup, prompt, tokens):
        lane.prefill()
        lane.advance(tokens)
