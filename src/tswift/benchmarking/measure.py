"""The measurement behind ``tswift bench``: a grid of prompts, prefills and seeds, every method in each of its cells.

The result is one dict, written to ``bench.json`` as it is; ``bench.schema.json`` says what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import product
from typing import Any

from tswift.benchmarking.comparison import first_difference
from tswift.benchmarking.lanes import Lane, interleave, slice_goals
from tswift.benchmarking.lineup import BASELINE, Lineup
from tswift.benchmarking.measurement import KIND, SCHEMA, workload_hash
from tswift.benchmarking.prompts import Prompt
from tswift.benchmarking.sampled import Probe, integrate, probe, probes_differ
from tswift.decoding.stats import DecodeStats
from tswift.errors import InputError
from tswift.jobs.environment import environment
from tswift.jobs.prompt import fingerprint

FULL, SAMPLED = "full", "sampled"


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


@dataclass(frozen=True)
class Cell:
    """One cell of the grid, in one repeat."""

    repeat: int
    prompt: Prompt
    prefill: int
    seed: int

    def __str__(self) -> str:
        return f"{self.prompt.name}, prefill {self.prefill:,}, seed {self.seed}"


Tick = Callable[[int, int, Cell, Lane], None]  # number of the cell, cells in all, the cell, the lane that advanced


def measure(
    lineup: Lineup, prompts: Sequence[Prompt], plan: Plan, command: Sequence[str], tick: Tick
) -> dict[str, Any]:
    """Run the grid.

    Args:
        lineup: the model and its methods.
        prompts: each of at least the longest prefill.
        plan: the grid.
        command: the words of the command line, for the record.
        tick: called whenever a lane has advanced by a slice.

    Raises:
        InputError: more positions or memory than there are; nothing has been measured then.
    """
    if plan.ar == SAMPLED and len(lineup.options) < 2:
        raise InputError("sampled takes its samples while another method runs; name one", "--ar")
    cells = [Cell(*each) for each in product(range(plan.repeats), prompts, sorted(plan.prefills), plan.seeds)]
    methods = [name for name in lineup.names if plan.ar == FULL or name != BASELINE]
    # the largest cell first, allocated and let go: what does not fit is refused before an hour has passed
    lineup.lanes(prompts[0].tokens[: max(plan.prefills)], max(plan.lens), 0, methods)
    started = _now()
    _warm_up(lineup, prompts[0], plan.warmup)
    samples: list[dict[str, Any]] = []
    for number, cell in enumerate(cells):
        lanes = lineup.lanes(cell.prompt.tokens[: cell.prefill], max(plan.lens), cell.seed, methods)
        samples += _run(cell, lanes, plan, lambda lane, n=number, c=cell: tick(n, len(cells), c, lane))  # type: ignore[misc]
    workload = _workload(lineup, prompts, plan)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "simulated": False,
        "started": started,
        "ended": _now(),
        "command": list(command),
        "environment": environment(lineup.model.target.device),
        "workload": {"hash": workload_hash(workload), **workload},
        "samples": samples,
    }


def _workload(lineup: Lineup, prompts: Sequence[Prompt], plan: Plan) -> dict[str, Any]:
    about = lineup.model.about()
    return {
        "model": about["name"],
        "weights": lineup.model.target.fingerprint(),
        "dtype": about["dtype"],
        "attention": about["attention"],
        "heads": about["heads"],
        "sampling": asdict(lineup.params) | {"banned": list(lineup.params.banned)},
        "drafting": {
            method: {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
            for method, options in lineup.drafting().items()
        },
        "prompts": [
            {"name": prompt.name, "sha256": fingerprint(prompt.tokens[: max(plan.prefills)])} for prompt in prompts
        ],
        "prefills": sorted(plan.prefills),
        "lens": sorted(plan.lens),
        "seeds": list(plan.seeds),
        "methods": lineup.names,
        "ar": plan.ar,
    }


def _warm_up(lineup: Lineup, prompt: Prompt, tokens: int) -> None:
    if tokens:
        for lane in lineup.lanes(prompt.tokens[:64], tokens, 0):
            lane.prefill()
            lane.advance(tokens)


def _run(cell: Cell, lanes: Sequence[Lane], plan: Plan, tick: Callable[[Lane], None]) -> Iterator[dict[str, Any]]:
    lens = sorted(plan.lens)
    marks: dict[str, list[DecodeStats]] = {lane.name: [] for lane in lanes}
    probes: dict[str, list[Probe]] = {lane.name: [] for lane in lanes}

    def after(lane: Lane) -> None:
        reached = marks[lane.name]
        if len(reached) < len(lens) and lane.stats.tokens >= lens[len(reached)]:
            reached.append(lane.stats.copy())
        if plan.ar == SAMPLED and (taken := probe(lane)):
            probes[lane.name].append(taken)
        tick(lane)

    for lane in lanes:
        lane.prefill()
        if plan.ar == SAMPLED and (taken := probe(lane)):
            probes[lane.name].append(taken)
    interleave(lanes, slice_goals(lens[-1], lens), after)
    pooled = [taken for each in probes.values() for taken in each]
    plain = next((lane for lane in lanes if lane.name == BASELINE), None)

    def ar_seconds(index: int, tokens: int) -> float:
        if plain is None:
            return integrate(pooled, tokens)
        mark = marks[BASELINE][index]
        return mark.seconds * tokens / mark.tokens

    if plain is None:
        yield _estimated(cell, pooled, lens)
    for lane in lanes:
        different = (
            probes_differ(lane.tokens, probes[lane.name])
            if plain is None
            else first_difference(lane.tokens, plain.tokens)
        )
        yield {
            **_of(cell, lane.name),
            "estimated": False,
            "prefill_seconds": lane.prefill_seconds,
            "same_as_ar": None if lane is plain else different is None,
            "first_difference": different,
            "slices": [list(each) for each in lane.slices],
            "probes": [[each.position, list(each.seconds)] for each in probes[lane.name]] or None,
            "points": [
                _point(length, mark, ar_seconds(index, mark.tokens))
                for index, (length, mark) in enumerate(zip(lens, marks[lane.name], strict=True))
            ],
        }


def _of(cell: Cell, method: str) -> dict[str, Any]:
    return {
        "prompt": cell.prompt.name,
        "prefill": cell.prefill,
        "seed": cell.seed,
        "repeat": cell.repeat,
        "method": method,
    }


def _estimated(cell: Cell, probes: Sequence[Probe], lens: Sequence[int]) -> dict[str, Any]:
    """Plain decoding's row where it was not run but sampled."""
    points = []
    for length in lens:
        stats = DecodeStats(0, passes=length, tokens=length, nodes=length, seconds=integrate(probes, length))
        stats.accepted[0] = length
        points.append(_point(length, stats, stats.seconds))
    return {
        **_of(cell, BASELINE),
        "estimated": True,
        "prefill_seconds": None,
        "same_as_ar": None,
        "first_difference": None,
        "slices": [[goal, integrate(probes, goal)] for goal in slice_goals(lens[-1], lens)],
        "probes": None,
        "points": points,
    }


def _point(length: int, stats: DecodeStats, ar_seconds: float) -> dict[str, Any]:
    most = max(stats.accepted, default=0)
    return {
        "len": length,
        "tokens": stats.tokens,
        "seconds": stats.seconds,
        "passes": stats.passes,
        "nodes": stats.nodes,
        "depth": stats.depth,
        "accepted": [stats.accepted[count] for count in range(most + 1)],
        "reused": stats.reused,
        "alpha": stats.alpha,
        "beta": stats.beta,
        "tokens_per_step": stats.tokens_per_step,
        "tokens_per_second": stats.tokens_per_second,
        "ar_seconds": ar_seconds,
        "speedup": ar_seconds / stats.seconds,
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
