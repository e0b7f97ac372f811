"""``tswift compare``: methods side by side on one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tswift.benchmarking.config import BenchOptions, CompareConfig, parse_trees
from tswift.cli import options
from tswift.cli.streams import FAILED, INTERRUPTED, loading
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.models.config import refuse_shape

if TYPE_CHECKING:
    from tswift.benchmarking.run import Comparison, Outcome, Run
    from tswift.benchmarking.table import Table


@options.takes(CompareConfig, BenchOptions, SamplingParams, DraftOptions, without=("tree", "simulate_alpha"))
def compare(
    typed: options.Typed,
    tree: options.Trees = None,
    json: options.Json = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Decode one prompt by several methods side by side: the same text or not, and what each cost.

    Exit code 1 if a text differs from plain decoding's by more than rounding explains.
    """
    wanted, asked = typed.make(CompareConfig), BenchOptions.of(parse_trees(tree), typed.values)
    refuse_shape(asked.model)
    asked.check()
    text = wanted.read(asked.model)
    with loading(asked.model, quiet):
        from tswift.benchmarking.config import configure
        from tswift.benchmarking.run import compare as run_all
        from tswift.benchmarking.run import open_runs
        from tswift.cli import output
        from tswift.cli.bars import Bars
        from tswift.jobs.environment import environment
        from tswift.jobs.prompt import BUNDLED_PREFILL, fingerprint, take

        record = output.writable(json)
        length, prefill, seed = wanted.length, wanted.prefill, wanted.seed
        least = prefill or (BUNDLED_PREFILL if wanted.bundled else 1)
        config = configure(asked, least, length, "prefill" if prefill and prefill > length else "length")
        ids = take(config.model.encode(text), prefill, bundled=wanted.bundled)
        open_runs(
            config, ids, length, seed
        )  # allocated and let go: what does not fit is refused before anything is said
    bars = Bars(quiet, not no_progress)
    target = config.model.target
    about = f"model {asked.model}, {target.device}{config.model.besides()}"
    if config.note is not None:
        bars.say(config.note)
    bars.say(f"{about}, prompt {len(ids):,} tokens, {length:,} to generate, seed {seed}")
    plain: dict[str, float] = {}

    def on_progress(run: Run) -> None:
        stats = run.stats
        if run.label == "ar" and stats.seconds:
            plain["speed"] = stats.tokens_per_second
        x = f" x {stats.tokens_per_second / plain['speed']:.2f}" if plain and stats.seconds else ""
        bars.update(run.label, stats.tokens, length, f"{stats.tokens_per_second:,.1f} tokens/s{x}")

    with bars:
        comparison = run_all(
            config, ids, length, seed, on_progress, lambda name, *done: bars.update(f"audit of {name}", *done)
        )
    if record is None or record.path:
        output.show(_grid(comparison))
    if record:
        record.write(
            {
                "kind": "compare",
                "command": typed.command,
                "environment": environment(target.device),
                "model": config.model.about(),
                "prompt": {"source": wanted.source, "tokens": len(ids), "sha256": fingerprint(ids)},
                "length": length,
                "seed": seed,
                "sampling": config.params,
                "drafting": config.drafting(),
                **comparison.as_dict(),
            }
        )
    if not comparison.ok:
        raise typer.Exit(FAILED)
    if comparison.interrupted:
        bars.say("interrupted; the table is of what was there")
        raise typer.Exit(INTERRUPTED)


def _grid(comparison: Comparison) -> Table:
    from tswift.benchmarking.config import DRAFTLESS
    from tswift.benchmarking.table import NOTHING, Table, method_name

    cut = ", interrupted" if comparison.interrupted else ""
    reference = any(outcome.speedup_over_reference is not None for outcome in comparison.outcomes)
    columns = ["method", "same text as AR", "alpha", "beta", "tokens/step", "passes", "tokens/s", "decode time", "x"]
    rows = []
    for outcome in comparison.outcomes:
        drafts = outcome.method not in DRAFTLESS
        rows.append(
            [
                method_name(outcome.method),
                _same(outcome),
                f"{outcome.alpha:.3f}" if drafts else NOTHING,
                f"{outcome.beta:.3f}" if drafts else NOTHING,
                f"{outcome.tokens_per_step:.2f}",
                f"{outcome.passes:,}",
                f"{outcome.tokens_per_second:,.1f}",
                f"{outcome.seconds:,.2f} s",
                f"{outcome.speedup:.2f}",
            ]
        )
        if reference:
            rows[-1].append(f"{outcome.speedup_over_reference or 0:.2f}")
    return Table(
        f"{min(outcome.tokens for outcome in comparison.outcomes):,} tokens, in interleaved slices{cut}",
        [*columns, *(["x over reference style"] if reference else [])],
        rows,
        left=2,
        notes=["x: AR's time / the method's, prefill apart."],
    )


def _same(outcome: Outcome) -> str:
    if outcome.first_difference is None:
        if outcome.explained is False:  # plain decoding's own text, audited since another one differs
            return "not what the rule draws"
        return "-" if outcome.method == "ar" else "yes"
    margin = "no margin found" if outcome.margin is None else f"margin {outcome.margin:.2g}"
    why = "rounding" if outcome.explained else "NOT rounding"
    return f"to token {outcome.first_difference:,}, then {why} ({margin})"
