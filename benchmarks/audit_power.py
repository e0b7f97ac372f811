"""Which mistakes does the audit see? (development only)

Decodes with the bundled model, once right and once with a mistake in it, and audits both as the right text.
For each mistake and each arithmetic: how many of the texts it changed, and how many of those the audit refused.

    python -m benchmarks.audit_power --seeds 6 --out results/audit-power
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import tswift
from benchmarks import tables
from tswift.decoding.audit import Audit, audit
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.engine import begin
from tswift.kv import FullKV
from tswift.models.devices import environment, now
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
class Reference:
    """A text that plain decoding drew, and all that decides it."""

    model: LoadedModel
    prompt: list[int]
    seed: int
    params: SamplingParams
    tokens: list[int]

    def audit(self, tokens: list[int]) -> Audit:
        """Audit other tokens as if they were these."""
        return audit(self.model.target, self.prompt, tokens, self.params, self.seed)

    def decode(self, written: Sequence[int] = (), prompt: list[int] | None = None, **other: Any) -> list[int]:
        """As many tokens again by plain decoding, after some that are there already and with other arguments."""
        given = {"params": self.params, "seed": self.seed, "written": written, **other}
        run = begin(self.model, prompt or self.prompt, len(self.tokens), method="ar", **given)
        return [*written, *(token for step in run.steps() for token in step.tokens)]

    def with_token(self, index: int, token: int) -> list[int]:
        """A text with this token at an index, and what plain decoding draws after it."""
        return self.decode([*self.tokens[:index], token])

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits that tokens were drawn from, ``[n, V]`` float64, and after the filters and with the noise."""
        target, text, first = self.model.target, [*self.prompt, *self.tokens], len(self.prompt)
        passes = target.chunks(text[:-1], FullKV(target.kv_shape, len(text) + (target.width or 0)))
        logits = torch.cat([target.logits(forwarded.hidden) for forwarded in passes])[first - 1 :].double()
        sampler, scores = Sampler(self.params, self.seed, target.vocab_size, target.device), []
        for index, row in enumerate(logits, first):
            sampler.extend(text[sampler.length : index])
            seen = sampler.seen(
                torch.tensor(text[index - 1 : index]), torch.tensor([index - 1]), torch.ones(1, 1).bool()
            )
            scores.append(sampler.scores(row[None], seen, [index]))
        return logits, torch.cat(scores)


def decode_reference(model: LoadedModel, seed: int, length: int, params: SamplingParams = PARAMS) -> Reference:
    """A text of the bundled prompt's, from another index of it for every seed."""
    prompt = model.encode(NOVEL.read_text())[seed * 256 :][:256]
    run = begin(model, prompt, length, method="ar", params=params, seed=seed)
    return Reference(model, prompt, seed, run.params, [token for step in run.steps() for token in step.tokens])


def dropped_token(reference: Reference) -> list[int]:
    """At the middle of the text, the likeliest token that the filters drop."""
    index = len(reference.tokens) // 2
    logits, scores = reference.rows()
    dropped = logits[index].masked_fill(scores[index].isfinite(), -torch.inf)
    dropped[list(reference.params.banned)] = -torch.inf
    return reference.with_token(index, int(dropped.argmax()))


def second_best(reference: Reference, closest: bool) -> list[int]:
    """The second best token: where its score is the closest to the best, or at the middle of the text."""
    best = reference.rows()[1].topk(2)
    index = int((best.values[:, 0] - best.values[:, 1]).argmin()) if closest else len(reference.tokens) // 2
    return reference.with_token(index, next(t for t in best.indices[index].tolist() if t != reference.tokens[index]))


def noise_of_the_next_position(reference: Reference) -> list[int]:
    """Every token drawn with the noise of the next position."""
    right = Sampler.noise

    def shifted(self: Sampler, positions: Sequence[int] | torch.Tensor) -> torch.Tensor:
        return right(self, [index + 1 for index in positions])

    # the C program has noise of its own, and is not to draw here
    with patch.object(Sampler, "noise", shifted), patch.object(Sampler, "program", lambda self, dtype: None):
        return reference.decode()


def other_params(**changes: float) -> Callable[[Reference], list[int]]:
    """Decoding with other sampling parameters."""
    return lambda reference: reference.decode(params=replace(reference.params, **changes))


def other_prompt_token(reference: Reference) -> list[int]:
    """Another token in the middle of the prompt."""
    prompt = list(reference.prompt)
    prompt[len(prompt) // 2] = prompt[len(prompt) // 2] % 1000 + 1
    return reference.decode(prompt=prompt)


FAULTS: dict[str, Callable[[Reference], list[int]]] = {
    "none": lambda reference: reference.tokens,
    "runner-up at the middle token": lambda reference: second_best(reference, closest=False),
    "a token from the filter's edge": dropped_token,
    "the closest lead swapped": lambda reference: second_best(reference, closest=True),
    "window one longer": other_params(window=PARAMS.window + 1),
    "noise of the next position": noise_of_the_next_position,
    "temperature 1.02": other_params(temperature=1.02),
    "min-p 0.11": other_params(min_p=0.11),
    "min-p 0.09": other_params(min_p=0.09),
    "penalty 1.19": other_params(penalty=1.19),
    "another seed from the middle": lambda reference: reference.decode(
        reference.tokens[: len(reference.tokens) // 2], seed=reference.seed + 1000
    ),
    "one other prompt token": other_prompt_token,
}


def main() -> None:
    """Parse, decode, audit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="how many (default: %(default)s)")
    parser.add_argument("--only", choices=list(CONFIGURATIONS), help="one of the columns")
    parser.add_argument("--out", type=Path, default=Path("results/audit-power"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    raw = args.out / "raw.csv"
    rows: list[dict[str, Any]] = list(csv.DictReader(raw.open())) if raw.exists() else []  # those not made anew stay
    for name in [args.only] if args.only else CONFIGURATIONS:
        length, dtype, exact = CONFIGURATIONS[name]
        model = tswift.load("demo", dtype=dtype, exact=exact)
        rows = [row for row in rows if row["configuration"] != name]
        for seed in range(args.seeds):
            reference = decode_reference(model, seed, length)
            for fault, make in FAULTS.items():
                tokens = make(reference)
                result = reference.audit(tokens)
                excess = (f"{level.observed}>{level.margin:.3g}" for level in result.excess)
                about = {"configuration": name, "fault": fault, "seed": seed, "tokens": len(tokens)}
                about |= {"changed": int(tokens != reference.tokens), "caught": int(not result.ok)}
                about |= {"drawn exactly": result.exact, "within rounding": len(result.within)}
                about |= {"violations": len(result.violations), "more than rounding explains": " ".join(excess)}
                rows.append(about)
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    with raw.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    machine = environment(torch.device("cpu"))
    text = (
        f"{tables.markdown(_cells(rows))}\n\n"
        f"Texts of 200 tokens if nothing is said, after 256 of {NOVEL.name}, one per seed, window {PARAMS.window}; "
        f"{machine['cpu']}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), {now()[:10]}; "
        "`python -m benchmarks.audit_power`, a column at a time (`--only`)."
    )
    print(text)
    (args.out / "table.md").write_text(text + "\n")


def _cells(rows: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """A row of the table for each mistake: how many texts it changed and how many of those were refused."""
    for fault in FAULTS:
        cells = {"mistake": fault}
        for name in CONFIGURATIONS:
            tried = [row for row in rows if (row["configuration"], row["fault"]) == (name, fault)]
            changed = [row for row in tried if int(row["changed"])]
            refused = sum(int(row["caught"]) for row in changed or tried)
            ending = f", caught {refused}" if changed else f"; {refused} refused wrongly" if refused else ""
            if tried:
                cells[name] = f"changed {len(changed)} of {len(tried)}{ending}"
        yield cells


if __name__ == "__main__":
    main()
