"""Which mistakes does the audit see? (development only)

Decodes with the bundled model, once as asked and once with a mistake in it, and audits both as the text that was asked
for. For each mistake and each arithmetic: how many of the texts it changed, and how many of those the audit refused.

    python -m benchmarks.audit_power --seeds 6 --out results/audit-power
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tswift
from tswift.decoding.audit import Audit, audit
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.engine import begin
from tswift.jobs.environment import environment, now
from tswift.kv.full import FullKV
from tswift.models.load import LoadedModel

PARAMS = SamplingParams(window=100)  # shorter than prompt and text, so that its length matters
NOVEL = Path(__file__).parents[1] / "prompts" / "long-novel.txt"
CONFIGURATIONS: dict[str, tuple[int, str, bool]] = {  # tokens, dtype, whether passes have a fixed width
    "float32": (200, "float32", False),
    "bfloat16, exact": (200, "bfloat16", True),
    "bfloat16, not exact": (200, "bfloat16", False),
    "the same, 1,000 tokens": (1000, "bfloat16", False),
}


@dataclass(frozen=True)
class Asked:
    """A text to decode, and the one that was decoded.

    Attributes:
        model, prompt, seed: these.
        params: the sampling parameters, banned ids included.
        tokens: what plain decoding draws.
    """

    model: LoadedModel
    prompt: list[int]
    seed: int
    params: SamplingParams
    tokens: list[int]

    def audit(self, tokens: list[int]) -> Audit:
        """Audit other tokens as if they were these."""
        return audit(self.model.target, self.prompt, tokens, self.params, self.seed)

    def decode(self, written: list[int] | None = None, **other: object) -> list[int]:
        """As many tokens again, after some that are there already and with other arguments."""
        asked = {"params": self.params, "seed": self.seed, "prompt": self.prompt, **other}
        return decode(self.model, len(self.tokens), written or [], **asked)  # type: ignore[arg-type]

    def with_token(self, place: int, token: int) -> list[int]:
        """A text with this token at a place, drawn as asked before and after it."""
        return self.decode([*self.tokens[:place], token])

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits that tokens were drawn from, ``[n, V]`` float64, and after the filters and with the noise."""
        target, text, first = self.model.target, [*self.prompt, *self.tokens], len(self.prompt)
        passes = target.chunks(text[:-1], FullKV(target.kv_shape, len(text) + (target.width or 0)))
        logits = torch.cat([target.logits(forwarded.hidden) for forwarded in passes])[first - 1 :].double()
        sampler, scores = Sampler(self.params, self.seed, target.vocab_size, target.device), []
        for place, row in enumerate(logits, first):
            sampler.extend(text[sampler.length : place])
            seen = sampler.seen(
                torch.tensor(text[place - 1 : place]), torch.tensor([place - 1]), torch.ones(1, 1).bool()
            )
            scores.append(sampler.scores(row[None], seen, [place]))
        return logits, torch.cat(scores)


def decode(
    model: LoadedModel, length: int, written: list[int], prompt: list[int], params: SamplingParams, seed: int
) -> list[int]:
    """What plain decoding draws, after tokens that are there already."""
    run = begin(model, prompt, length, method="ar", params=params, seed=seed, written=written)
    return [*written, *(token for step in run.steps() for token in step.tokens)]


def ask(model: LoadedModel, seed: int, length: int, params: SamplingParams = PARAMS) -> Asked:
    """A text of the bundled prompt's, from another place of it for every seed."""
    prompt = model.encode(NOVEL.read_text())[seed * 256 :][:256]
    run = begin(model, prompt, length, method="ar", params=params, seed=seed)
    return Asked(model, prompt, seed, run.params, [token for step in run.steps() for token in step.tokens])


def runner_up(asked: Asked) -> list[int]:
    """The second best token at the middle of the text."""
    place = len(asked.tokens) // 2
    _, scores = asked.rows()
    return asked.with_token(place, next(other for other in _best(scores[place]) if other != asked.tokens[place]))


def dropped_token(asked: Asked) -> list[int]:
    """At the middle of the text, the likeliest token that the filters drop."""
    place = len(asked.tokens) // 2
    logits, scores = asked.rows()
    dropped = logits[place].masked_fill(scores[place].isfinite(), -torch.inf)
    dropped[list(asked.params.banned)] = -torch.inf
    return asked.with_token(place, int(dropped.argmax()))


def closest_lead(asked: Asked) -> list[int]:
    """The second best token where its score is the closest to the best."""
    best = asked.rows()[1].topk(2)
    place = int((best.values[:, 0] - best.values[:, 1]).argmin())
    return asked.with_token(place, next(t for t in best.indices[place].tolist() if t != asked.tokens[place]))


def _best(scores: torch.Tensor) -> list[int]:
    return scores.topk(2).indices.tolist()


@contextmanager
def shifted_noise() -> Iterator[None]:
    """Every token is drawn with the noise of the next position."""
    right = Sampler.noise
    Sampler.noise = lambda self, positions: right(self, [place + 1 for place in positions])  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sampler.noise = right  # type: ignore[method-assign]


def noise_of_the_next_position(asked: Asked) -> list[int]:
    """Every token drawn with the noise of the next position."""
    with shifted_noise():
        return asked.decode()


def other_params(**changes: float) -> Callable[[Asked], list[int]]:
    """Decoding with other sampling parameters."""
    return lambda asked: asked.decode(params=replace(asked.params, **changes))


def another_seed(asked: Asked) -> list[int]:
    """Another seed from the middle of the text."""
    return asked.decode(asked.tokens[: len(asked.tokens) // 2], seed=asked.seed + 1000)


def other_prompt_token(asked: Asked) -> list[int]:
    """Another token in the middle of the prompt."""
    prompt = list(asked.prompt)
    prompt[len(prompt) // 2] = prompt[len(prompt) // 2] % 1000 + 1
    return asked.decode(prompt=prompt)


FAULTS: dict[str, Callable[[Asked], list[int]]] = {
    "none": lambda asked: asked.tokens,
    "runner-up at the middle token": runner_up,
    "a token from the filter's edge": dropped_token,
    "the closest lead swapped": closest_lead,
    "window one longer": other_params(window=PARAMS.window + 1),
    "noise of the next position": noise_of_the_next_position,
    "temperature 1.02": other_params(temperature=1.02),
    "min-p 0.11": other_params(min_p=0.11),
    "min-p 0.09": other_params(min_p=0.09),
    "penalty 1.19": other_params(penalty=1.19),
    "another seed from the middle": another_seed,
    "one other prompt token": other_prompt_token,
}


def main() -> None:
    """Parse, decode, audit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--only", choices=list(CONFIGURATIONS), help="one of the columns")
    parser.add_argument("--out", type=Path, default=Path("results/audit-power"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    raw = args.out / "raw.csv"
    rows: list[dict[str, Any]] = list(csv.DictReader(raw.open())) if raw.exists() else []  # those not made anew stay
    seeds = range(args.first, args.first + args.seeds)
    for name in [args.only] if args.only else CONFIGURATIONS:
        length, dtype, exact = CONFIGURATIONS[name]
        model = tswift.load("demo", dtype=dtype, exact=exact)
        for seed in seeds:
            asked = ask(model, seed, length)
            rows = [row for row in rows if (row["configuration"], int(row["seed"])) != (name, seed)]
            for fault, make in FAULTS.items():
                tokens = make(asked)
                found = asked.audit(tokens)
                counts = {"drawn exactly": found.exact, "within rounding": len(found.within)}
                about = {"configuration": name, "fault": fault, "seed": seed, "tokens": len(tokens)}
                changed, caught = int(tokens != asked.tokens), int(not found.ok)
                excess = " ".join(f"{level.observed}>{level.margin:.3g}" for level in found.excess)
                rows.append(
                    {**about, "changed": changed, "caught": caught, **counts, "violations": len(found.violations)}
                    | {"more than rounding explains": excess}
                )
            with raw.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    table = [*_table(rows), "", _about()]
    print("\n".join(table))
    (args.out / "table.md").write_text("\n".join(table) + "\n")


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    names = [name for name in CONFIGURATIONS if any(row["configuration"] == name for row in rows)]
    yield "| mistake | " + " | ".join(names) + " |"
    yield "| --- |" + " --- |" * len(names)
    for fault in FAULTS:
        cells = []
        for name in names:
            mine = [row for row in rows if (row["configuration"], row["fault"]) == (name, fault)]
            changed = [row for row in mine if int(row["changed"])]
            refused = sum(int(row["caught"]) for row in changed or mine)
            what = (
                f"changed {len(changed)} of {len(mine)}, caught {refused}" if changed else f"changed 0 of {len(mine)}"
            )
            cells.append(what if changed or not refused else f"{what}; {refused} refused wrongly")
        yield f"| {fault} | " + " | ".join(cells) + " |"


def _about() -> str:
    machine = environment(torch.device("cpu"))
    return (
        f"Texts of 200 tokens if nothing is said, after 256 of {NOVEL.name}, one per seed, window {PARAMS.window}; "
        f"{machine['cpu']}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), {now()[:10]}; "
        "`python -m benchmarks.audit_power`, a column at a time (`--only`)."
    )


if __name__ == "__main__":
    main()
