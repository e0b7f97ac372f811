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


_SHOWN = {  # by figure: heading and format
    "alpha": ("alpha", ".3f"),
    "beta": ("beta", ".3f"),
    "tokens_per_step": ("tokens/step", ".2f"),
    "passes": ("passes", ","),
    "tokens_per_second": ("tokens/s", ",.1f"),
    "seconds": ("decode time, s", ",.2f"),
    "speedup": ("x", ".2f"),
    "speedup_over_reference": ("x over reference style", ".2f"),
}


def _table(comparison: Mapping[str, Any]) -> Table:
    from tswift.benchmarking.table import NOTHING, Table, method_name

    outcomes, cut = comparison["outcomes"], ", interrupted" if comparison["interrupted"] else ""
    shown = {name: each for name, each in _SHOWN.items() if outcomes[0][name] is not None}

    def text(outcome: Mapping[str, Any], name: str) -> str:
        undrafted = outcome["method"] in DRAFTLESS and name in ("alpha", "beta")
        return NOTHING if undrafted else format(outcome[name], shown[name][1])

    return Table(
        f"{min(outcome['tokens'] for outcome in outcomes):,} tokens, in interleaved slices{cut}",
        ["method", "same text as AR", *(heading for heading, _ in shown.values())],
        [[method_name(each["method"]), _same(each), *(text(each, name) for name in shown)] for each in outcomes],
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
