"""``tswift compare``: methods side by side on one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from tswift.benchmarking.config import DRAFTLESS, BenchOptions, CompareConfig, parse_trees
from tswift.cli import options
from tswift.cli.streams import FAILED, INTERRUPTED, loading
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.models.config import refuse_shape

if TYPE_CHECKING:
    from tswift.benchmarking.run import Run
    from tswift.benchmarking.table import Table


@options.takes(CompareConfig, BenchOptions, SamplingParams, DraftOptions, without=("tree", "simulate_alpha", "peers"))
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
    text_config, bench_options = typed.make(CompareConfig), BenchOptions.of(parse_trees(tree), typed.values)
    refuse_shape(bench_options.model)
    bench_options.check()
    text = text_config.read(bench_options.model)
    with loading(bench_options.model, quiet):
        from tswift.benchmarking.config import configure
        from tswift.benchmarking.run import compare as run_all
        from tswift.benchmarking.run import open_runs
        from tswift.cli import output
        from tswift.cli.progress import Bars
        from tswift.jobs.environment import environment
        from tswift.jobs.prompt import BUNDLED_PREFILL, fingerprint, take

        found = output.writable(json)
        length, prefill, seed = text_config.length, text_config.prefill, text_config.seed
        least = prefill or (BUNDLED_PREFILL if text_config.bundled else 1)
        config = configure(bench_options, least, length, "prefill" if prefill and prefill > length else "length")
        ids = take(config.model.encode(text), prefill, bundled=text_config.bundled)
        # allocated and freed: what does not fit is refused before anything is said
        open_runs(config, ids, length, seed)
    bars, device = Bars(quiet, not no_progress), config.model.target.device
    if config.note is not None:
        bars.say(config.note)
    name = f"model {bench_options.model}, {device}{config.model.besides()}"
    bars.say(f"{name}, prompt {len(ids):,} tokens, {length:,} to generate, seed {seed}")
    plain_speed = 0.0

    def on_progress(run: Run) -> None:
        nonlocal plain_speed
        speed = run.stats.tokens_per_second
        plain_speed = speed if run.label == "ar" else plain_speed
        x = f" x {speed / plain_speed:.2f}" if plain_speed and run.stats.seconds else ""
        bars.update(run.label, run.stats.tokens, length, f"{speed:,.1f} tokens/s{x}")

    with bars:
        comparison = run_all(
            config, ids, length, seed, on_progress, lambda name, *done: bars.update(f"audit of {name}", *done)
        )
    found.show(_table(comparison))
    about = {
        "environment": environment(device),
        "model": config.model.about(),
        "prompt": {"source": text_config.source, "tokens": len(ids), "sha256": fingerprint(ids)},
        "length": length,
        "seed": seed,
        "sampling": config.params,
        "drafting": config.drafting(),
    }
    found.write("compare", typed.command, {**about, **comparison})
    if not comparison["ok"]:
        raise typer.Exit(FAILED)
    if comparison["interrupted"]:
        bars.say("interrupted; the table is of what was there")
        raise typer.Exit(INTERRUPTED)


def _table(comparison: Mapping[str, Any]) -> Table:
    from tswift.benchmarking.table import NOTHING, Table, method_name

    outcomes, cut = comparison["outcomes"], ", interrupted" if comparison["interrupted"] else ""
    columns = ["method", "same text as AR", "alpha", "beta", "tokens/step", "passes", "tokens/s", "decode time", "x"]
    rows = []
    for outcome in outcomes:
        rates = [
            f"{outcome[name]:.3f}" if outcome["method"] not in DRAFTLESS else NOTHING for name in ("alpha", "beta")
        ]
        rows.append(
            [
                method_name(outcome["method"]),
                _same(outcome),
                *rates,
                f"{outcome['tokens_per_step']:.2f}",
                f"{outcome['passes']:,}",
                f"{outcome['tokens_per_second']:,.1f}",
                f"{outcome['seconds']:,.2f} s",
                f"{outcome['speedup']:.2f}",
            ]
        )
        if outcome["speedup_over_reference"] is not None:
            rows[-1].append(f"{outcome['speedup_over_reference']:.2f}")
    return Table(
        f"{min(outcome['tokens'] for outcome in outcomes):,} tokens, in interleaved slices{cut}",
        [*columns, "x over reference style"][: len(rows[0])],
        rows,
        left=2,
        notes=["x: AR's time / the method's, prefill apart."],
    )


def _same(outcome: Mapping[str, Any]) -> str:
    if outcome["first_difference"] is None:
        if outcome["explained"] is False:  # plain decoding's own text, audited since another one differs
            return "not what the rule draws"
        return "-" if outcome["method"] == "ar" else "yes"
    margin = "no margin found" if outcome["margin"] is None else f"margin {outcome['margin']:.2g}"
    why = "rounding" if outcome["explained"] else "NOT rounding"
    return f"to token {outcome['first_difference']:,}, then {why} ({margin})"
