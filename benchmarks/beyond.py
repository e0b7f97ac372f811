"""What each addition to the paper's method brings, one after the other and each left out at the end.

For contexts of N tokens taken from a finished run, all lanes decode the same next tokens in interleaved slices. Every
lane's text is held against plain decoding's and audited. A table for each context, and everything in JSON.

    python benchmarks/beyond.py RUN_FOLDER --contexts 4096,20000,98000 --tokens 2000 --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tswift
from tswift.decoding.audit import audit
from tswift.decoding.costs import costs_of
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.stats import DecodeStats
from tswift.decoding.step import Step
from tswift.drafting.chains import CascadeSource
from tswift.drafting.history import HistorySource
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.jobs.environment import environment, now
from tswift.models.heads import Heads
from tswift.models.passes import PassCosts

_PAPER = (1, 3, 3, 3)
_DEFAULTS = DraftOptions()
_FREE = PassCosts(nodes=(1, 2), base=(1e-3, 1e-3), per_key=(0.0, 0.0), level=0.0)  # another node costs nothing


@dataclass(frozen=True)
class Lane:
    """A method with its options.

    Attributes:
        method, options: these.
        heads: which of the bundled heads it has.
        follows: whether long matches are followed where something is recalled.
        sized: whether the size of its trees is chosen by costs; otherwise they are as large as they may be.
    """

    method: str
    options: DraftOptions = _DEFAULTS
    heads: str = "conditioned"
    follows: bool = True
    sized: bool = True


LANES: dict[str, Lane] = {
    "plain decoding": Lane("ar"),
    "as published: chained heads, 4-grams, noise not shared": Lane(
        "tokenswift", DraftOptions(tree=_PAPER, nodes=8, shared_noise=False), "chained"
    ),
    "+ shared noise": Lane("tokenswift", DraftOptions(tree=_PAPER, nodes=8), "chained"),
    "+ conditioned heads": Lane("tokenswift", DraftOptions(tree=(1, 2, 2, 2, 2), nodes=8)),
    "+ reuse model: the 8 likeliest nodes of heads and recall": Lane(
        "tokenswift", DraftOptions(tree="auto", nodes=8), follows=False, sized=False
    ),
    "+ long reuse": Lane("tokenswift", DraftOptions(tree="auto", nodes=8), sized=False),
    "+ trees by cost": Lane("tokenswift", DraftOptions(tree="auto")),
    "+ cascade instead of the drafting pass": Lane("cascade"),
    "+ the fastest of several drafters (auto)": Lane("auto"),
    "auto without recall": Lane("auto", DraftOptions(recall=0)),
    "auto without long reuse": Lane("auto", follows=False),
    "auto without shared noise": Lane("auto", DraftOptions(shared_noise=False)),
    "auto with chained heads": Lane("auto", heads="chained"),
    "medusa, conditioned heads": Lane("medusa", DraftOptions(tree=(2, 2, 2, 2), nodes=8)),
    "medusa, trees by cost and recall": Lane("medusa", DraftOptions(tree="auto")),
    "recall alone": Lane("recall"),
    "cascade without recall": Lane("cascade", DraftOptions(recall=0)),
}


def main() -> None:
    """Parse, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a run folder of `tswift generate`, or a file of text")
    parser.add_argument("--contexts", default="4096", help="numbers of tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, help="decoded after each (default: %(default)s)")
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.1)
    parser.add_argument("--penalty", type=float, default=1.2)
    parser.add_argument("--lanes", help="words that a lane's name has to have one of, separated by commas")
    parser.add_argument("--out", type=Path, required=True, help="folder for beyond.json and beyond.md")
    args = parser.parse_args()
    chosen = {
        name: lane
        for name, lane in LANES.items()
        if name == "plain decoding" or not args.lanes or any(word in name for word in args.lanes.split(","))
    }
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    found, tables = [], []
    for context in (int(word) for word in args.contexts.split(",")):
        rows = bench.measure(context, chosen)
        found.append({"context": context, "lanes": rows})
        tables.append(table(context, args.tokens, rows))
        print(tables[-1])
        about = {"command": sys.argv, "when": now(), "environment": environment(torch.device("cpu"))}
        told = {**about, "settings": {name: str(value) for name, value in vars(args).items()}, "contexts": found}
        (args.out / "beyond.json").write_text(json.dumps(told, indent=1))
        (args.out / "beyond.md").write_text("\n".join(tables))


class Bench:
    """A model with both kinds of heads, and a text."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.model = args, tswift.load()
        chained = tswift.load(heads="chained").heads
        self.heads: dict[str, Heads | None] = {"conditioned": self.model.heads, "chained": chained}
        self.params = tswift.SamplingParams(
            args.temperature, min_p=args.min_p, penalty=args.penalty, banned=tuple(self.model.eos_ids)
        )
        if args.text.is_dir():
            kept = [np.fromfile(args.text / f"{part}.u32", dtype="<u4").tolist() for part in ("prompt", "tokens")]
            self.text = kept[0] + kept[1]
        else:
            self.text = self.model.encode(args.text.read_text())
        self.costs = costs_of(self.model.target, self.model.heads)

    def measure(self, context: int, lanes: dict[str, Lane]) -> list[dict[str, Any]]:
        """Decode all lanes in slices; a row of figures for each, the first of which is plain decoding."""
        if len(self.text) < context:
            raise SystemExit(f"the text has {len(self.text)} tokens, {context} are wanted")
        prompt, tokens = self.text[:context], self.args.tokens
        running: dict[str, tuple[Iterator[Step], DecodeStats, list[int]]] = {}
        decodings: list[Decoding] = []
        for name, lane in lanes.items():
            costs = self.costs if lane.sized else _FREE
            drafter = make_drafter(lane.method, self.model.target, self.heads[lane.heads], lane.options, costs=costs)
            for source in recalling(drafter):
                source.follows = lane.follows
            decoding = Decoding(self.model.target, prompt, self.params, self.args.seed, drafter, tokens)
            decodings.append(decoding)
            running[name] = decoding.steps(), DecodeStats(drafter.depth), []
        decodings[0].prefill(along=decodings[1:])
        for part in range(1, self.args.slices + 1):
            for steps, stats, text in running.values():
                while stats.tokens < tokens * part // self.args.slices:
                    step = next(steps)
                    stats.add(step)
                    text.extend(step.tokens)
        plain, wanted = next((stats, text) for _, stats, text in running.values())
        audited: dict[tuple[int, ...], str] = {}
        for _, _, text in running.values():  # as a rule they are all the same
            if tuple(text) not in audited:
                audited[tuple(text)] = self._audit(prompt, text)
        return [
            {
                "lane": name,
                "same": text == wanted,
                "audit": audited[tuple(text)],
                "alpha": stats.alpha,
                "tokens_per_step": stats.tokens_per_step,
                "nodes": stats.nodes / stats.passes,
                "ms_per_step": 1e3 * stats.seconds / stats.passes,
                "tokens_per_second": stats.tokens_per_second,
                "x": stats.tokens_per_second / plain.tokens_per_second,
                "depth": stats.depth,
                "passes": stats.passes,
                **({"choices": dict(stats.choices)} if stats.choices else {}),
            }
            for name, (_, stats, text) in running.items()
        ]

    def _audit(self, prompt: list[int], text: list[int]) -> str:
        """How many tokens were drawn exactly, within rounding, and not at all."""
        found = audit(self.model.target, prompt, text, self.params, self.args.seed)
        return f"{found.exact:,} drawn exactly, {len(found.within)} within rounding, {len(found.violations)} violations"


def recalling(drafter: Drafter) -> Iterator[HistorySource]:
    """The sources that recall, of a drafter and of those that it is made of."""
    for rival in getattr(drafter, "rivals", ()):
        yield from recalling(rival.drafter)
    for source in getattr(drafter, "offering", ()):
        if isinstance(source, HistorySource):
            yield source
        elif isinstance(source, CascadeSource):
            yield from recalling(source.drafter)


def table(context: int, tokens: int, rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [f"## {context:,} tokens before, {tokens:,} decoded", ""]
    lines += ["| lane | alpha | tokens per step | nodes | ms per step | tokens/s | x | same text |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        cells = [row["lane"], f"{row['alpha']:.3f}", f"{row['tokens_per_step']:.2f}", f"{row['nodes']:.1f}"]
        cells += [f"{row['ms_per_step']:.2f}", f"{row['tokens_per_second']:.0f}", f"{row['x']:.2f}"]
        lines.append(f"| {' | '.join([*cells, 'yes' if row['same'] else 'NO'])} |")
    audits = sorted({row["audit"] for row in rows})
    return "\n".join([*lines, "", f"Audit of the text: {'; of one that differs: '.join(audits)}.", ""])


if __name__ == "__main__":
    main()
