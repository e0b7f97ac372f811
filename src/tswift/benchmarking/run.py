"""Runs of several methods side by side, in interleaved slices, over a grid.

The samples of a grid go into a record, which becomes ``bench.json`` or ``suite.json``.
"""

from __future__ import annotations

import math
import platform
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from tswift.benchmarking import summary
from tswift.benchmarking.config import (
    BASELINE,
    DRAFTLESS,
    FULL,
    REFERENCE,
    SAMPLED,
    BenchConfig,
    Plan,
)
from tswift.benchmarking.record import (
    Cell,
    DraftModel,
    Environment,
    Machine,
    Measurement,
    Point,
    PromptEntry,
    Record,
    Sample,
    Session,
    Simulation,
    State,
    Workload,
    to_json,
    workload_hash,
)
from tswift.benchmarking.roofline import machine_for, plain_floor
from tswift.benchmarking.workloads import Prompt
from tswift.decoding.audit import Audit, audit
from tswift.decoding.drafter import DraftTree, Step
from tswift.decoding.stats import DecodeStats
from tswift.engine import Generation, Request, begin
from tswift.errors import InputError, renaming
from tswift.jobs.config import fingerprint
from tswift.jobs.folder import FINISHED, INTERRUPTED, RUNNING
from tswift.machine import available_bytes, environment, gigabytes, now
from tswift.models.hashes import fingerprint_of
from tswift.sampling.parameters import SamplingParams

_IMPLIED = ("tokenswift", "kv", "dynamic")  # left out of workloads, whose hashes it would change
_WARM_PROMPT = 64  # tokens of the prompt that methods are warmed up on
_SLICES = 50  # of a text
_PROBE_STEPS = 8  # timed ones
_SLACK = 1e-9  # of a product that should be whole and is a last bit less


class SimulatedWalk:
    """Accepts a set share of the drafted tokens, whatever was drawn; a walk for ``Decoding``.

    After any step the accepted tokens are the share ``alpha`` of all that could have been accepted,
    ``depth`` a step, rounded down. Where a tree is too shallow for that, later steps make up for it
    as far as theirs go.
    """

    def __init__(self, alpha: float, depth: int) -> None:
        self._per_step = alpha * depth
        self._steps = 0
        self._accepted = 0

    def __call__(self, tree: DraftTree, drawn: Sequence[int]) -> list[int]:
        """The nodes accepted, root first: the path to the first node deep enough.

        ``drawn`` is not looked at.
        """
        self._steps += 1
        owed = math.floor(self._per_step * self._steps + _SLACK) - self._accepted
        depth = min(owed, max(tree.depths))
        self._accepted += depth
        path = [tree.depths.index(depth)]
        while path[-1]:
            path.append(tree.parents[path[-1]])
        return path[::-1]


@dataclass(frozen=True)
class Probe:
    """Plain steps from a method's state, timed."""

    position: int  # generated tokens before the first timed step
    tokens: tuple[int, ...]  # what plain decoding drew, from ``position - 1`` on
    seconds: tuple[float, ...]  # wall time of each timed step


@dataclass
class BenchRun:
    """One decode among several."""

    label: str  # its name in tables: its method's, unless several contenders have one method
    method: str
    generation: Generation | None  # the decode; None once the run was closed
    # whether its text should be plain decoding's; not where its acceptance is set
    comparable: bool = True
    ended: bool = False  # by an end-of-text token
    tokens: list[int] = field(default_factory=list)  # generated so far
    stats: DecodeStats = field(init=False)
    # (tokens, seconds) at the end of every slice
    slices: list[tuple[int, float]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    # stats when it had reached each length of the plan
    marks: list[DecodeStats] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)  # plain steps taken between its own

    def __post_init__(self) -> None:
        self.stats = DecodeStats(self.generation.depth if self.generation else 0)
        self._steps: Iterator[Step] | None = None

    @property
    def _open(self) -> Generation:
        assert self.generation is not None
        return self.generation

    def prefill(self) -> None:
        """Forward the prompt."""
        self.prefill_seconds = self._open.decoding.prefill()

    def advance(self, goal: int) -> None:
        """Decode at least ``goal`` tokens in all, if the text does not end before;
        the last step may add a few more.
        """
        if self.ended:
            return
        self._steps = self._steps or self._open.steps()
        while self.stats.tokens < goal and not self.ended:
            step = next(self._steps)
            self.tokens += step.tokens
            self.stats.add(step)
            self.ended = step.tokens[-1] in self._open.rules.ends
        # work that the last step left on the device belongs to this run, not to the next one's
        # first step
        self.stats.seconds += self._open.decoding.settle()
        self.slices.append((self.stats.tokens, self.stats.seconds))

    def probe(self) -> None:
        """Time a few plain steps from here on, unless the cache has no room for two.

        The first step is not timed: the processor's caches hold the method's data. The others find
        noise that drafting has computed already, so plain decoding comes out a little too fast
        rather than too slow.
        """
        steps = self._open.decoding.plain(1 + _PROBE_STEPS)
        if len(steps) > 1:
            drawn = [step.tokens[0] for step in steps]
            seconds = [step.seconds for step in steps[1:]]
            self.probes.append(Probe(self.stats.tokens + 1, tuple(drawn), tuple(seconds)))

    def close(self) -> None:
        """Free the decode and its caches; tokens and stats stay."""
        self.generation = self._steps = None


def open_runs(
    config: BenchConfig, prompt: Sequence[int], length: int, seed: int, ar: str = FULL
) -> list[BenchRun]:
    """A run for each contender, but for plain decoding where that is sampled."""
    device = config.model.target.device
    free = available_bytes(device)
    runs = []
    need = 0
    for contender in config.contenders:
        if contender.label == BASELINE and ar == SAMPLED:
            continue
        alpha = None if contender.method in DRAFTLESS else config.simulate_alpha
        generation = begin(
            config.model,
            Request(
                prompt=prompt,
                length=length,
                method=contender.method,
                params=config.params,
                seed=seed,
                options=contender.options,
                stop_at_eos=config.stop_at_eos,
            ),
            simulate=None if alpha is None else partial(SimulatedWalk, alpha),
        )
        need += generation.need.held_bytes(device)
        runs.append(
            BenchRun(contender.label, contender.method, generation, comparable=alpha is None)
        )
    if free is not None and need > free:
        message = (
            f"{len(runs)} methods side by side need {gigabytes(need)} of caches, "
            f"{gigabytes(free)} are free"
        )
        raise InputError(message, "methods")
    return runs


def slice_goals(length: int, stops: Sequence[int]) -> list[int]:
    """Where slices end: about 50 equal parts of ``length``, and at every one of ``stops``."""
    even = {length * part // _SLICES for part in range(1, _SLICES + 1)}
    return sorted({goal for goal in (*even, *stops) if 0 < goal <= length})


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, as far as both go; None if in none."""
    pairs = zip(tokens, others, strict=False)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def probes_differ(tokens: Sequence[int], probes: Sequence[Probe]) -> int | None:
    """Index of the first generated token that is not what plain decoding drew in a probe;
    None if there is none.
    """
    for probe in sorted(probes, key=lambda probe: probe.position):
        first = probe.position - 1
        different = first_difference(tokens[first:], probe.tokens)
        if different is not None:
            return first + different
    return None


def integrate(probes: Sequence[Probe], length: int) -> float:
    """Seconds of plain decoding for ``length`` tokens: step times, interpolated between probes,
    summed.

    A plain step's time depends on the length of the text and on little else, so hours of plain
    decoding can be replaced by steps timed at many lengths.
    """
    by_position: dict[float, list[float]] = {}
    for probe in probes:
        by_position.setdefault(probe.position + (len(probe.seconds) - 1) / 2, []).extend(
            probe.seconds
        )
    positions = sorted(by_position)
    means = [float(np.mean(by_position[position])) for position in positions]
    return float(np.interp(np.arange(length), positions, means).sum())


@dataclass(kw_only=True)
class Case(Cell):
    """A cell of the grid that is measured."""

    tokens: Sequence[int]  # of the prompt, those that are prefilled


class Trial:
    """All methods on one case, up to the longest of ``lens`` or their texts' ends;
    without a plain run, plain steps are timed in between.
    """

    def __init__(
        self,
        config: BenchConfig,
        case: Case,
        runs: Sequence[BenchRun],
        lens: Sequence[int],
        floor: Callable[[int, int], float] | None = None,
    ) -> None:
        self._config = config
        self._case = case
        self._lens = lens
        self._floor = floor
        self.runs = {run.label: run for run in runs}
        self._plain = self.runs.get(BASELINE)

    def run(
        self, on_progress: Callable[[BenchRun], None], on_checkpoint: Callable[[list[Sample]], None]
    ) -> bool:
        """Run to the end, or to Ctrl-C; True if that was pressed.

        Args:
            on_progress: called when a run has advanced by a slice.
            on_checkpoint: called with the samples whenever all runs have reached another length.
        """
        kept = 0

        def advanced(run: BenchRun) -> None:
            nonlocal kept
            for length in self._lens[len(run.marks) :]:
                if run.stats.tokens >= length or run.ended:
                    run.marks.append(run.stats.copy())
            if self._plain is None and run.method != REFERENCE:
                run.probe()
            on_progress(run)
            if self._reached > kept:
                kept = self._reached
                on_checkpoint(self.samples())

        try:
            for run in self.runs.values():
                run.prefill()
                advanced(run)
            runs = deque(self.runs.values())
            for goal in slice_goals(self._lens[-1], self._lens):  # all see the same machine
                for run in runs:
                    run.advance(goal)
                    advanced(run)
                runs.rotate(-1)  # each slice starts with another run
        except KeyboardInterrupt:
            return True
        return False

    @property
    def _reached(self) -> int:
        return min(len(run.marks) for run in self.runs.values())

    @property
    def _probes(self) -> list[Probe]:
        return [probe for run in self.runs.values() for probe in run.probes]

    def samples(self) -> list[Sample]:
        """Samples with the lengths that all runs have reached; none if there is no such length."""
        lens = self._lens[: self._reached]
        if not lens:
            return []
        runs = list(self.runs.values())
        if self._plain is None:  # plain decoding was not run but sampled
            plain = BenchRun(BASELINE, BASELINE, None, comparable=False)
            seconds = partial(integrate, self._probes)
            plain.marks = [
                DecodeStats(
                    0, passes=n, tokens=n, nodes=n, seconds=seconds(n), accepted=Counter({0: n})
                )
                for n in lens
            ]
            plain.slices = [(goal, seconds(goal)) for goal in slice_goals(lens[-1], lens)]
            runs.insert(0, plain)
        return [self._sample(run, lens) for run in runs]

    def _sample(self, run: BenchRun, lens: Sequence[int]) -> Sample:
        estimated = run.label not in self.runs
        (different, compared) = self._compare(run)
        return Sample(
            **vars(self._case.cell),
            method=run.label,
            estimated=estimated,
            prefill_seconds=None if estimated else run.prefill_seconds,
            same_as_ar=different is None if run.comparable and run is not self._plain else None,
            explained=None,
            first_difference=different,
            compared_tokens=compared,
            ended=run.ended or None,
            slices=list(run.slices),
            probes=[(probe.position, list(probe.seconds)) for probe in run.probes] or None,
            points=[
                self._point(index, stats, run.label == BASELINE)
                for index, stats in enumerate(run.marks[: len(lens)])
            ],
        )

    def _compare(self, run: BenchRun) -> tuple[int | None, int]:
        """First token that is not plain decoding's, if there is one,
        and how many tokens could be compared.
        """
        if not run.comparable or run is self._plain:
            return None, 0
        if self._plain:
            return first_difference(run.tokens, self._plain.tokens), min(
                len(run.tokens), len(self._plain.tokens)
            )
        # a run that takes none is held against those of the others
        probes = run.probes or self._probes
        compared = sum(
            len(run.tokens[probe.position - 1 :][: len(probe.tokens)]) for probe in probes
        )
        return probes_differ(run.tokens, probes), compared

    def _point(self, index: int, stats: DecodeStats, plain: bool) -> Point:
        """Figures at one length: counters, and all metrics that are not of the text."""
        if self._plain is None:
            ar_seconds = integrate(self._probes, stats.tokens)
        else:  # its time for so many tokens
            mark = self._plain.marks[index]
            ar_seconds = mark.seconds * (stats.tokens / mark.tokens)
        metrics = {name: getattr(stats, name) for name in summary.from_source(summary.STATS)}
        if plain and self._floor is not None:
            floor = self._floor(len(self._case.tokens), stats.tokens)
            metrics |= {"floor_seconds": floor, "of_floor": stats.seconds / floor}
        return Point(
            len=self._lens[index],
            tokens=stats.tokens,  # fewer where the text ended before
            nodes=stats.nodes,
            depth=stats.depth,
            accepted=[
                stats.accepted[number] for number in range(max(stats.accepted, default=0) + 1)
            ],
            reused=stats.reused,
            ar_seconds=ar_seconds,
            speedup=ar_seconds / stats.seconds,
            **Point.gather(metrics),
        )

    def explain(
        self, samples: Sequence[Sample], on_audit: Callable[[str, int, int], None] | None = None
    ) -> dict[str, Audit]:
        """Audit the texts that need it, and set ``explained``:
        whether every token is drawn exactly or within rounding.

        A text needs it if it differs from plain decoding's; plain decoding's own then too; and all
        if plain decoding was sampled, since its few steps start from the runs' own state. Simulated
        texts are never audited. All runs are closed, since an audit needs a cache of its
        own.
        """
        for run in self.runs.values():
            run.close()
        own = [one for one in samples if not one.estimated]
        differ = any(sample.same_as_ar is False for sample in own)
        audits = {}
        for sample in own:
            run = self.runs[sample.method]
            target = self._config.model.target
            needed = (
                self._plain is None or sample.same_as_ar is False or (differ and run is self._plain)
            )
            if needed and run.comparable:
                # whose passes are not exact
                target = target.reference() if run.method == REFERENCE else target
                case = self._case
                tell = on_audit and partial(on_audit, run.label)
                found = audit(target, case.tokens, run.tokens, self._config.params, case.seed, tell)
                audits[run.label] = found
                sample.explained = found.ok
        return audits


# group's label, cell's number among all, how many they are, its case, the run that
# advanced
OnProgress = Callable[[str, int, int, Case, BenchRun], None]
OnTrial = Callable[[str, Case, Mapping[str, Sequence[int]], list[Sample]], None]


def begin_measurement(
    config: BenchConfig,
    prompts: Sequence[Prompt],
    plan: Plan,
    command: Sequence[str],
    machine: Machine | None = None,
) -> Measurement:
    """A measurement without samples: what is to be measured, and where.

    Args:
        prompts: each of at least the longest prefill.
        machine: its rates; None to measure them.
    """
    if plan.ar == SAMPLED and config.stop_at_eos:
        raise InputError("sampled needs texts of a set length; leave out --stop-at-eos", "ar")
    if plan.ar == SAMPLED and all(contender.method in DRAFTLESS for contender in config.contenders):
        raise InputError("sampled takes its samples while another method runs; name one", "ar")
    # the largest case is allocated and freed: what does not fit is refused now, not after an hour
    prompt = max((prompt.tokens for prompt in prompts), key=len)
    with renaming(length="lens"):
        open_runs(config, prompt[: max(plan.prefills)], max(plan.lens), 0, plan.ar)
    with renaming(length="warmup"):
        if plan.warmup:
            open_runs(config, prompts[0].tokens[:_WARM_PROMPT], plan.warmup, 0)
    workload = _workload(config, prompts, plan)
    target = config.model.target
    begun = now()
    where = Environment(**environment(target.device))
    session = Session(
        host=platform.node(),
        started=begun,
        ended=begun,
        command=list(command),
        environment=where,
        machine=machine or machine_for(config.model),
        cells=[],
    )
    return Measurement(
        simulated=config.simulated is not None,
        state=RUNNING,
        started=begun,
        ended=begun,
        command=list(command),
        environment=where,
        machine=session.machine,
        layers=config.model.layers,
        workload=workload,
        sessions=[session],
        samples=[],
    )


def measure(
    groups: Mapping[str, BenchConfig],
    record: Record,
    prompts: Sequence[Prompt],
    plan: Plan,
    on_progress: OnProgress,
    on_checkpoint: Callable[[], None],
    on_trial: OnTrial | None = None,
) -> State:
    """Run the plan's grid, but for cells that are done, or as much of it as Ctrl-C leaves time for.

    Args:
        groups: by label, what runs side by side in one setting: a bench has one, a suite one for
            each setting.
        record: of the bench or the suite, just begun or begun before; the samples go there.
        on_progress: called whenever a run has advanced by a slice.
        on_checkpoint: called whenever all methods have reached another length, and when a cell is
            done.
        on_trial: called with a group's label when a trial has ended, with its texts by label; may
            add to its samples.

    Returns:
        How it ended, which is the ``state`` of the measurements too.
    """
    texts = {prompt.name: prompt.tokens for prompt in prompts}
    cells = next(iter(record.parts.values())).workload.grid(plan.repeats)
    for order, (label, config) in enumerate(groups.items()):
        measurement = record.parts[label]
        warm = False
        try:
            for number, cell in enumerate(cells, order * len(cells)):
                if cell in measurement.done:
                    continue
                case = Case(**vars(cell), tokens=texts[cell.prompt][: cell.prefill])
                if plan.warmup and not warm:
                    for run in open_runs(config, prompts[0].tokens[:_WARM_PROMPT], plan.warmup, 0):
                        run.prefill()
                        run.advance(plan.warmup)
                        run.close()
                warm = True
                progress = partial(on_progress, label, number, len(cells) * len(groups), case)
                ended = on_trial and partial(on_trial, label, case)
                _measure_cell(config, measurement, case, plan, progress, on_checkpoint, ended)
        except KeyboardInterrupt:
            measurement.state = INTERRUPTED
            break
        measurement.state = FINISHED
    on_checkpoint()
    return measurement.state


def _measure_cell(
    config: BenchConfig,
    measurement: Measurement,
    case: Case,
    plan: Plan,
    on_progress: Callable[[BenchRun], None],
    on_checkpoint: Callable[[], None],
    on_trial: Callable[[Mapping[str, Sequence[int]], list[Sample]], None] | None,
) -> None:
    """Measure all methods on a case; raises KeyboardInterrupt, with the samples so far kept,
    if Ctrl-C was pressed.
    """
    before = measurement.samples
    session = measurement.sessions[-1]
    lens = sorted(plan.lens)
    order = summary.grid_order(measurement.workload)

    def keep(samples: list[Sample]) -> None:
        for sample in samples if measurement.simulated else ():
            sample.simulated = True
        session.ended = now()
        measurement.samples = sorted([*before, *samples], key=lambda sample: order(sample.cell))
        measurement.ended = session.ended
        measurement.layers = config.model.layers
        on_checkpoint()

    runs = open_runs(config, case.tokens, lens[-1], case.seed, plan.ar)
    trial = Trial(config, case, runs, lens, plain_floor(config.model, session.machine))
    interrupted = trial.run(on_progress, keep)
    samples = trial.samples()
    keep(samples)
    trial.explain(samples)
    if on_trial:
        on_trial({label: run.tokens for label, run in trial.runs.items()}, samples)
    if interrupted:
        raise KeyboardInterrupt
    session.cells.append(case.cell)
    keep(samples)


# of sampling, what the hashes of all workloads are taken of
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "eta", "penalty", "window", "banned")


def _workload(config: BenchConfig, prompts: Sequence[Prompt], plan: Plan) -> Workload:
    """What is measured.

    What does not apply is left out, so that the hashes of other workloads stay as they are.
    """
    model = config.model
    about = config.model.about()
    draft = model.draft
    simulated = config.simulated
    usual = asdict(SamplingParams())
    sampling = {
        name: value
        for name, value in asdict(config.params).items()
        if name in _SAMPLED or value != usual[name]
    }
    drafting = {
        label: {name: value for name, value in options.items() if (label, name, value) != _IMPLIED}
        for label, options in config.drafting().items()
    }
    used = [prompt.tokens[: max(plan.prefills)] for prompt in prompts]
    workload = Workload(
        hash="",
        model=about["name"],
        weights=fingerprint_of(model.target.model),
        dtype=about["dtype"],
        attention=about["attention"],
        heads=about["heads"],
        heads_weights=None if model.heads is None else fingerprint_of(model.heads),
        sampling=to_json(sampling),
        drafting=to_json(drafting),
        prompts=[
            PromptEntry(
                name=prompt.name,
                sha256=fingerprint(tokens),
                kind=prompt.kind,
                tokens=None if prompt.kind is None else len(tokens),
            )
            for prompt, tokens in zip(prompts, used, strict=True)
        ],
        prefills=sorted(plan.prefills),
        lens=sorted(plan.lens),
        seeds=list(plan.seeds),
        methods=[contender.label for contender in config.contenders],
        ar=plan.ar,
        draft_model=None
        if draft is None
        else DraftModel(about["draft"]["name"], fingerprint_of(draft.model)),
        kv_dtype=about.get("kv_dtype"),
        exact=about["exact"] and about["exact"]["width"],
        variants={one.label: one.method for one in config.contenders if one.label != one.method}
        or None,
        simulated=None if simulated is None else Simulation(**simulated),
        stop_at_eos=config.stop_at_eos or None,
    )
    workload.hash = workload_hash(to_json(workload))
    return workload
