"""What ``tswift bench`` is asked for, and its beginning:
all that can be checked without a model is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tswift.benchmarking import resume
from tswift.benchmarking.config import (
    KINDS,
    BenchOptions,
    Plan,
    configure,
    fit_grid,
    fit_note,
    parse_trees,
)
from tswift.benchmarking.gate import JUDGED, Judging
from tswift.benchmarking.record import Options, Record, State
from tswift.benchmarking.suites import Suite, find_suite
from tswift.benchmarking.workloads import encode, read_texts, read_workloads
from tswift.errors import InputError, find_path
from tswift.jobs.config import Text
from tswift.jobs.folder import FINISHED
from tswift.models.config import SHAPE_PREFIX, refuse_missing_heads, refuse_shape
from tswift.options import fields_of

if TYPE_CHECKING:
    from tswift.benchmarking.run import OnProgress
    from tswift.loading.plan import ModelPlan

# what bench does and a suite does not
_OF_BENCH = ("methods", "simulate_alpha", "stop_at_eos", "workload", "chat", *JUDGED)


@dataclass(frozen=True)
class BenchRequest:
    """What one ``tswift bench`` is to do."""

    given: Options  # options by name, as typed, or as in the record of what was measured before
    earlier: Record | None
    suite: Suite | None
    plan: Plan
    judging: Judging
    options: BenchOptions
    made: ModelPlan | None = None  # of the model, once it has been asked for its positions
    note: str = ""  # that the grid's defaults gave way

    @classmethod
    def of(cls, given: Options, earlier: Record | None = None) -> BenchRequest:
        """From options by name; what does not go together is refused."""
        suite = find_suite(given["suite"]) if "suite" in given else None
        for name in given if suite else ():  # no option is silently ignored
            if suite and name in suite.own:
                raise InputError(f"suite {suite.name} sets it itself", name)
            if name in _OF_BENCH:
                raise InputError("cannot be given together with --suite", name)
        judging = Judging(**fields_of(Judging, given))
        plan = resume.plan_of(given)
        named = {name: value for name, value in given.items() if name != "tree"}
        options = BenchOptions.of(parse_trees(given.get("tree")), named)
        if plan.workload and judging.paper:
            raise InputError(
                "cannot be given together with --workload: the paper has none", "paper"
            )
        if suite:
            refuse_shape(options.model.model)
        else:
            options.check()
        return cls(given, earlier, suite, plan, judging, options)

    def fitted(self) -> BenchRequest:
        """The same, its grid's defaults as far as the model has positions for them;
        a suite's grid is its own.
        """
        if self.suite or self.measured:
            return self
        from tswift.loading.plan import plan_model

        plan = self.plan
        model = self.options.model.model
        made = plan_model(self.options.to_load())
        positions = made.max_positions
        given = "prefills" in self.given, "lens" in self.given
        prefill, lens, gave_way = fit_grid(max(plan.prefills), plan.lens, given, positions)
        if not gave_way:
            return replace(self, made=made)
        prefills = plan.prefills if given[0] else (prefill,)
        note = fit_note(model, positions, prefill, lens)
        fitted = replace(plan, prefills=prefills, lens=lens)
        return replace(self, plan=fitted, note=note, made=made)

    @property
    def measured(self) -> bool:
        """Whether nothing is left to be measured."""
        return self.earlier is not None and self.earlier.state == FINISHED

    @property
    def simulated(self) -> bool:
        """Whether times mean something and texts do not."""
        return self.options.simulate_alpha is not None or self.options.model.model.startswith(
            SHAPE_PREFIX
        )

    @property
    def name(self) -> str:
        """What the folder is called after."""
        if self.suite:
            return f"bench-{self.suite.name}"
        return "bench-simulated" if self.simulated else "bench"

    def read_texts(self) -> list[Text]:
        """The prompts' texts; none if nothing is left to be measured."""
        if self.measured:
            return []
        refuse_missing_heads(self.options.model.heads)
        return (
            read_workloads(self.plan.workload)
            if self.plan.workload
            else read_texts(self.plan.prompts)
        )

    def begin(self, texts: Sequence[Text], command: Sequence[str], folder: Path) -> Begun:
        """Load the model, and begin the record; cells that were finished before are in it."""
        if self.earlier and self.measured:
            begun = Begun(self.earlier)
        else:
            begin = self._begin_suite if self.suite else self._begin_bench
            begun = begin(texts, command)
        begun.record.options = absolute_paths(self.given)
        if self.earlier and begun.measure:
            resume.continue_from(begun.record, self.earlier, folder)
        return begun

    def _begin_bench(self, texts: Sequence[Text], command: Sequence[str]) -> Begun:
        from tswift.benchmarking.run import begin_measurement, measure

        longest = max(self.plan.prefills)
        length = max(self.plan.lens)
        least = 1 if self.plan.workload else longest
        option = "prefills" if least > length else "lens"
        config = configure(self.options, least, length, option, made=self.made)
        prompts = encode(texts, config.model, longest, self.plan.chat)
        record = begin_measurement(config, prompts, self.plan, command)
        notes = [note for note in (self.note, config.note) if note]
        return Begun(record, notes, partial(measure, {"": config}, record, prompts, self.plan))

    def _begin_suite(self, texts: Sequence[Text], command: Sequence[str]) -> Begun:
        from tswift.benchmarking.run import measure
        from tswift.benchmarking.suite_run import begin_suite, judge_texts, prepare

        assert self.suite is not None
        groups, left_out = prepare(self.suite, self.options, self.plan)
        model = next(iter(groups.values())).model
        prompts = encode(texts, model, max(self.plan.prefills))
        record = begin_suite(self.suite, groups, left_out, prompts, self.plan, command)
        on_trial = partial(judge_texts, record, model.tokenizer)
        notes = [f"{label} is left out: {why}" for label, why in left_out.items()]
        return Begun(
            record, notes, partial(measure, groups, record, prompts, self.plan, on_trial=on_trial)
        )


@dataclass(frozen=True)
class Begun:
    """A benchmark's record, and how it is measured."""

    record: Record
    notes: Sequence[str] = ()
    # None where nothing is left
    measure: Callable[[OnProgress, Callable[[], None]], State] | None = None


def absolute_paths(given: Options) -> Options:
    """Options as a record keeps them: files are named so that they are found from another working
    directory.
    """
    options = dict(given)
    for name in {"prompts", "workload"} & given.keys():
        options[name] = [_absolute(word, name) for word in given[name]]
    if "against" in given:
        options["against"] = str(Path(given["against"]).absolute())
    return options


def _absolute(word: str, option: str) -> str:
    kind = word.partition(":")[0]
    return word if kind in ("pg19", *KINDS) else str(find_path(word, option).absolute())
