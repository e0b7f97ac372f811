"""``tswift compare``: methods side by side on one prompt, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tswift.benchmarking.config import (
    BASELINE,
    DRAFTLESS,
    REFERENCE,
    BenchConfig,
    BenchOptions,
    CompareConfig,
    configure,
)
from tswift.benchmarking.record import Options, Sample
from tswift.benchmarking.run import BenchRun, Case, Trial, open_runs
from tswift.benchmarking.summary import STATS, from_source, method_name
from tswift.decoding.audit import Audit
from tswift.jobs.config import Text, fingerprint
from tswift.machine import environment
from tswift.memory import fit_length
from tswift.tables import NOTHING, Table

_SHOWN = {  # by figure: heading and format
    "tokens_per_step": ("tokens/step", ".2f"),
    "alpha": ("alpha", ".3f"),
    "beta": ("beta", ".3f"),
    "passes": ("passes", ","),
    "tokens_per_second": ("tokens/s", ",.1f"),
    "seconds": ("decode time, s", ",.2f"),
    "speedup": ("x", ".2f"),
    "speedup_over_reference": ("x over reference style", ".2f"),
}


@dataclass
class Comparison:
    """Methods side by side on one text, as far as they got: a loaded model, what all of them are to
    write, and what came of it.
    """

    config: BenchConfig
    source: str  # of the prompt
    ids: Sequence[int]  # its tokens
    length: int
    seed: int
    notes: Sequence[str] = ()  # lines for people
    samples: Sequence[Sample] = ()  # plain decoding's first
    audits: Mapping[str, Audit] = field(default_factory=dict)  # by method, if there are any
    interrupted: bool = False

    @classmethod
    def of(
        cls, options: BenchOptions, asked: CompareConfig, text: str, flexible: bool
    ) -> Comparison:
        """Load the model, and refuse what does not fit; a ``flexible`` length gives way."""
        length = asked.length
        config = configure(options, asked.least, length, asked.larger, flexible)
        model = config.model
        ids = asked.first(Text(asked.source, text).encode(model, asked.chat))
        positions = model.target.max_positions
        notes = []
        if flexible and (length := fit_length(length, len(ids), positions)) < asked.length:
            notes.append(f"--len is {length:,}: the model has {positions:,} positions")
        open_runs(config, ids, length, asked.seed)  # allocated and freed
        notes += [config.note] if config.note is not None else []
        notes.append(
            f"model {model.name}, {model.target.device}{model.remarks()}, prompt {len(ids):,} "
            f"tokens, {length:,} to generate, seed {asked.seed}"
        )
        return cls(config, asked.source, ids, length, asked.seed, notes)

    def run(
        self, on_progress: Callable[[BenchRun], None], on_audit: Callable[[str, int, int], None]
    ) -> None:
        """Run all methods in interleaved slices and compare their texts,
        as far as they got if Ctrl-C is pressed.

        Where a text differs from plain decoding's, it is audited as a whole, and so is plain
        decoding's: after a near-tie the two are different draws, and comparing them further would
        say nothing.

        Args:
            on_progress: called when a run has been prefilled or has advanced by a slice.
            on_audit: called with a method's name and the tokens audited so far and in all.
        """
        prompt = self.ids
        case = Case(repeat=0, prompt="", prefill=len(prompt), seed=self.seed, tokens=prompt)
        runs = open_runs(self.config, prompt, self.length, self.seed)
        trial = Trial(self.config, case, runs, [self.length])
        # a second Ctrl-C ends the audit too
        self.interrupted = trial.run(on_progress, lambda samples: None)
        if self.interrupted and not all(run.tokens for run in runs):
            raise KeyboardInterrupt
        for run in runs:
            run.marks = [run.stats]
        self.samples = trial.samples()
        self.audits = trial.explain(self.samples, on_audit)

    @property
    def ok(self) -> bool:
        """Whether no text differs beyond rounding."""
        return all(audit.ok for audit in self.audits.values())

    def margin(self, sample: Sample) -> float | None:
        """How much the first differing token's logits, in either text, would have to change."""
        return max(
            (
                finding.margin
                for name in (sample.method, BASELINE)
                if name in self.audits
                for finding in self.audits[name].findings
                if finding.index == sample.first_difference
                and finding.margin not in (None, math.inf)
            ),
            default=None,
        )

    @property
    def outcomes(self) -> list[Options]:
        """What each method came to, ready for JSON."""
        speedups = {sample.method: sample.points[0].speedup for sample in self.samples}
        reference = speedups.get(REFERENCE)
        outcomes = []
        for sample in self.samples:
            point = sample.points[0]
            about = ("method", "first_difference", "explained", "prefill_seconds", "slices")
            outcomes.append(
                {
                    **{name: getattr(sample, name) for name in about},
                    **{
                        name: point.figure(name)
                        for name in ("tokens", "speedup", *from_source(STATS))
                    },
                    "margin": self.margin(sample),
                    "speedup_over_reference": reference
                    and point.speedup
                    and point.speedup / reference,
                }
            )
        return outcomes

    def as_dict(self) -> Options:
        """Everything, ready for JSON."""
        model = self.config.model
        return {
            "environment": environment(model.target.device),
            "model": model.about(),
            "prompt": {
                "source": self.source,
                "tokens": len(self.ids),
                "sha256": fingerprint([*self.ids]),
            },
            "length": self.length,
            "seed": self.seed,
            "sampling": self.config.params,
            "drafting": self.config.drafting(),
            "ok": self.ok,
            "interrupted": self.interrupted,
            "outcomes": self.outcomes,
            "audits": {label: audit.as_dict() for label, audit in self.audits.items()},
        }

    def table(self) -> Table:
        """A row for each method."""
        outcomes = self.outcomes
        shown = {name: each for name, each in _SHOWN.items() if outcomes[0][name] is not None}
        rows = []
        for outcome in outcomes:
            method = outcome["method"]
            figures = [
                NOTHING
                if method in DRAFTLESS and name in ("alpha", "beta")
                else format(outcome[name], form)
                for name, (_, form) in shown.items()
            ]
            rows.append([method_name(method), _same(outcome), *figures])
        cut = ", interrupted" if self.interrupted else ""
        end = " to the text's end" if all(sample.ended for sample in self.samples) else ""
        return Table(
            f"{min(one['tokens'] for one in outcomes):,} tokens{end}, in interleaved slices{cut}",
            ["method", "same text as AR", *(heading for heading, _ in shown.values())],
            rows,
            left=2,
            notes=["x: AR's time / the method's, prefill apart."],
        )


def _same(outcome: Options) -> str:
    first = outcome["first_difference"]
    if first is None:
        if outcome["explained"] is False:
            # plain decoding's own text, audited since another one differs
            return "not what the rule draws"
        return "-" if outcome["method"] == BASELINE else "yes"
    margin = outcome["margin"]
    said = "no margin found" if margin is None else f"margin {margin:.2g}"
    why = "rounding" if outcome["explained"] else "NOT rounding"
    return f"to token {first:,}, then {why} ({said})"
