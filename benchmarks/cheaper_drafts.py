"""What does a cheaper drafting pass lose in acceptance? (development only)

The drafting pass runs on a copy of the model: with weights rounded to a grid of fewer bits (they stay float32, so
nothing is quicker here), or with layers that add nothing; or over a smaller partial KV cache. The verification is the
exact model's, and so are the keys and values that the partial cache is filled with: the text has to be plain decoding's
whatever drafts, and is compared with it. Prints a Markdown table; exit code 1 if a text is another.

    python -m benchmarks.cheaper_drafts --prefill 4096 --len 1500 --seeds 1,2 --json cheaper.json
    python -m benchmarks.cheaper_drafts --method magicdec --only "int|budget"
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tswift
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.decoding.stats import DecodeStats
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.engine import ending
from tswift.jobs.environment import environment
from tswift.jobs.prompt import read_prompt, take
from tswift.models.load import LoadedModel
from tswift.models.target import Target

Change = Callable[[Any], None]  # makes a copy of a causal language model a cheaper one, in place

_FP8 = torch.float8_e4m3fn


def fp8(weight: Tensor) -> Tensor:
    """``[out, in]`` rounded to e4m3, one scale for each output channel."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(_FP8).max
    return (weight / scale).to(_FP8).to(weight.dtype) * scale


def integers(bits: int) -> Callable[[Tensor], Tensor]:
    """Rounds ``[out, in]`` to whole multiples of one scale for each output channel, symmetric about 0."""

    def rounded(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
        return (weight / scale).round() * scale

    return rounded


def grouped(bits: int, group: int) -> Callable[[Tensor], Tensor]:
    """Rounds ``[out, in]`` to steps between the least and the largest weight of each ``group`` inputs, or of all."""

    def rounded(weight: Tensor) -> Tensor:
        parts = weight.unflatten(1, (-1, min(group, weight.shape[1])))
        least, most = parts.amin(2, keepdim=True), parts.amax(2, keepdim=True)
        step = (most - least).clamp(min=1e-12) / (2**bits - 1)
        return (((parts - least) / step).round() * step + least).flatten(1)

    return rounded


def weights(how: Callable[[Tensor], Tensor], lm_head: bool = False) -> Change:
    """Round the weights of the decoder's linear layers, as torchao would; the LM head's too if asked."""

    def change(network: Any) -> None:
        layers = [module for module in network.get_decoder().modules() if isinstance(module, nn.Linear)]
        for layer in [*layers, network.get_output_embeddings()] if lm_head else layers:
            layer.weight = nn.Parameter(how(layer.weight), requires_grad=False)  # new: the embeddings may be tied

    return change


def without(*indices: int) -> Change:
    """Have these layers add nothing to the hidden states, which is to skip them."""

    def change(network: Any) -> None:
        for index in indices:
            layer = network.get_decoder().layers[index]
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight = nn.Parameter(torch.zeros_like(last.weight), requires_grad=False)

    return change


@dataclass(frozen=True)
class Variant:
    """A drafting pass: its name, what is done to the copy of the model that it runs on, and its budget of tokens."""

    name: str
    change: Change | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a decode came to; ``same`` says whether the text is plain decoding's."""

    variant: str
    seed: int
    depth: int
    passes: int
    tokens: int
    alpha: float
    tokens_per_step: float
    same: bool


EXACT = Variant("exact, budget 4,096")
VARIANTS = [
    Variant("fp8", weights(fp8)),
    Variant("int8", weights(integers(8))),
    Variant("int8, LM head too", weights(integers(8), lm_head=True)),
    *(Variant(f"int4 in groups of {group}", weights(grouped(4, group))) for group in (32, 64, 128)),
    Variant("int4 in groups of 128, LM head too", weights(grouped(4, 128), lm_head=True)),
    Variant("int3 in groups of 128", weights(grouped(3, 128))),
    Variant("int2 in groups of 128", weights(grouped(2, 128))),
    *(Variant(f"budget {budget:,}", budget=budget) for budget in (2048, 1024, 512, 256, 128, 64)),
]


def skips(layers: int) -> list[Variant]:
    """Each layer left out alone, and the last two together."""
    alone = [Variant(f"without layer {index + 1} of {layers}", without(index)) for index in range(layers)]
    return [*alone, Variant("without the last two layers", without(layers - 2, layers - 1))]


class Bench:
    """One model, one prompt.

    Args:
        model: in float32.
        method: one that drafts with the model itself.
        prompt: token ids.
        length: tokens to generate.
    """

    def __init__(self, model: LoadedModel, method: str, prompt: Sequence[int], length: int) -> None:
        self._model, self._method, self._prompt, self._length = model, method, prompt, length
        self._params, _ = ending(SamplingParams(), model.eos_ids, stop_at_eos=False)
        self._plain: dict[int, list[int]] = {}

    def run(self, variant: Variant, seeds: Sequence[int]) -> list[Outcome]:
        """Decode with such drafts, and compare with plain decoding."""
        draft, found = self._draft(variant), []
        for seed in seeds:
            if seed not in self._plain:
                self._plain[seed] = self._decode(Drafter(), seed)[0]
            drafter = make_drafter(self._method, draft, self._model.heads, DraftOptions(budget=variant.budget))
            text, stats = self._decode(drafter, seed)
            counts = (stats.depth, stats.passes, stats.tokens, stats.alpha, stats.tokens_per_step)
            found.append(Outcome(variant.name, seed, *counts, same=text == self._plain[seed]))
        return found

    def _draft(self, variant: Variant) -> Target:
        """What the drafting pass runs on."""
        if variant.change is None:
            return self._model.target
        network = deepcopy(self._model.target.model)
        variant.change(network)
        return Target(network)

    def _decode(self, drafter: Drafter, seed: int) -> tuple[list[int], DecodeStats]:
        decoding = Decoding(self._model.target, self._prompt, self._params, seed, drafter, self._length)
        text, stats = [], DecodeStats(drafter.depth)
        for step in decoding.steps():
            stats.add(step)
            text += step.tokens
        return text, stats


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: alpha and tokens per step of every variant, and the share of the first one's that is kept.

    All seeds together; and each seed's alpha.
    """
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(each.seed for each in outcomes))
    lines = [
        f"| drafting pass | alpha | kept | tokens per step | kept | alpha, seeds {seeds} | text |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    exact: tuple[float, float] | None = None
    for variant in dict.fromkeys(each.variant for each in outcomes):
        own = [each for each in outcomes if each.variant == variant]
        passes = sum(each.passes for each in own)
        alpha = sum(each.alpha * each.passes for each in own) / passes
        per_step = sum(each.tokens for each in own) / passes
        exact = exact or (alpha, per_step)
        cells = [
            *(variant, f"{alpha:.3f}", f"{alpha / exact[0]:.0%}", f"{per_step:.2f}", f"{per_step / exact[1]:.0%}"),
            ", ".join(f"{each.alpha:.3f}" for each in own),
            "the same" if all(each.same for each in own) else "ANOTHER",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Parse, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as for tswift generate (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", help="as for tswift generate")
    parser.add_argument("--method", default="tokenswift", help="tokenswift or magicdec (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=4096)
    parser.add_argument("--len", dest="length", type=int, default=1500)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--only", default="", help="a regular expression of names of drafting passes")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    args = parser.parse_args()
    model = tswift.load(args.model, device=args.device, dtype="float32")
    bench = Bench(model, args.method, take(model.encode(read_prompt(args.prompt)), args.prefill, False), args.length)
    variants = [*VARIANTS, *skips(len(model.target.model.get_decoder().layers))]
    command = f"python -m benchmarks.cheaper_drafts {shlex.join(sys.argv[1:])}"
    about = {"command": command, "environment": environment(model.target.device), "model": model.about()}
    about |= {"method": args.method, "prefill": args.prefill, "len": args.length}
    outcomes: list[Outcome] = []
    for variant in [EXACT, *(each for each in variants if re.search(args.only, each.name))]:
        outcomes += bench.run(variant, [int(seed) for seed in args.seeds.split(",")])
        print(f"{variant.name}: {outcomes[-1].alpha:.3f}", file=sys.stderr)
        if args.json:  # as far as it got
            record = {**about, "outcomes": [asdict(each) for each in outcomes]}
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(outcomes))
    return 0 if all(each.same for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
