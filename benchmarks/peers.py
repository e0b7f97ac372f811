"""transformers' own ``generate`` beside tswift, in turns: plain, with prompt lookup,
and assisted by a smaller model.

Each turn writes the whole text once by every one of them, on the same device in the same dtype, so
that all see the same machine. The network of the peers is transformers' own copy, with its own
attention. Prefill is not counted, nor is a peer's first token, which it draws in the same pass. A
sampled peer draws with torch's random numbers: its text is another one. At temperature 0, without
a penalty or with one over less than its window, it has to be plain decoding's, up to near-ties.

    python -m benchmarks.peers --model demo --prefill 1024 --tokens 1000 --repeats 3
    --peers transformers,prompt-lookup,assisted --methods auto --temperature 0 --penalty 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from tswift.decoding.stats import DecodeStats
from tswift.engine import Request, begin
from tswift.loading.model import LoadedModel, load
from tswift.models.checkpoint import find_source, silence
from tswift.models.config import DEMO, DEMO_DRAFT
from tswift.sampling.parameters import SamplingParams, apply_eos_policy
from tswift.tables import Table

TRANSFORMERS, LOOKUP, ASSISTED = "transformers", "prompt-lookup", "assisted"
PEERS = (TRANSFORMERS, LOOKUP, ASSISTED)
_LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, transformers' example


@dataclass(frozen=True)
class Written:
    """A text, and what it cost."""

    tokens: list[int]
    passes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, prefill apart."""
        return (len(self.tokens) - 1) / self.seconds


@dataclass
class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes the new tokens of every pass of ``generate``, and when they came.

    A stopping criterion would not do: transformers 5.17 also calls those on the assistant's
    candidates.
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of the prompt, and then of each pass

    def put(self, value: torch.Tensor) -> None:
        """Take what ``generate`` gives out; the prompt comes first."""
        if self.times:
            self.tokens += value.flatten().tolist()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """The text is whole."""

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self.times[-1] - self.times[1]


def settings(name: str, params: SamplingParams, assistant: object) -> dict[str, Any]:
    """What a peer's ``generate`` is given."""
    drawn = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
        "eta_cutoff": params.eta,
    }
    greedy = params.temperature == 0
    return {
        "do_sample": not greedy,
        "repetition_penalty": params.penalty,
        "suppress_tokens": list(params.banned) or None,
        **({} if greedy else drawn),
        **({"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if name == LOOKUP else {}),
        **({"assistant_model": assistant} if name == ASSISTED else {}),
    }


def written_by_peer(
    network: PreTrainedModel, prompt: Sequence[int], length: int, given: Mapping[str, Any]
) -> Written:
    """A text by transformers' ``generate``."""
    ids = torch.tensor([list(prompt)], device=network.device)
    clock = Clock()
    network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=length,
        max_new_tokens=length,
        streamer=clock,
        **given,
    )
    return Written(clock.tokens, len(clock.times) - 1, clock.seconds)


def written_by_us(model: LoadedModel, request: Request) -> Written:
    """A text by a method of ours, in no more than the tokens asked for."""
    generation = begin(model, request)
    generation.decoding.prefill()
    stats = DecodeStats(generation.depth)
    tokens: list[int] = []
    for step in generation.steps():
        stats.add(step)
        tokens += step.tokens
    return Written(tokens, stats.passes, stats.seconds)


def network_of(name: str, model: LoadedModel) -> PreTrainedModel:
    """A network of transformers' own, as it loads it, beside a model of ours."""
    with silence():
        network = AutoModelForCausalLM.from_pretrained(
            find_source(name)[0],
            dtype=model.target.dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
        )
    return network.eval().to(model.target.device)


def compared(texts: Mapping[str, Sequence[Written]]) -> Table:
    """A row for each: medians over its turns, and whether its text is plain decoding's."""
    plain = texts["ar"]
    rows = []
    for name, turns in texts.items():
        same = [one.tokens == plain[0].tokens for one in turns]
        rows.append(
            [
                name,
                f"{len(turns[0].tokens) / turns[0].passes:.2f}",
                f"{median(one.rate for one in turns):,.1f}",
                f"{median(one.rate / ar.rate for one, ar in zip(turns, plain, strict=True)):.2f}",
                f"{sum(same)} of {len(same)}",
            ]
        )
    columns = ["", "tokens per pass", "tokens/s", "x", "same text as ar"]
    return Table(f"{len(plain[0].tokens):,} tokens, in turns", columns, rows, left=1)


def measured(asked: argparse.Namespace) -> Table:
    """Load everything, and let all of them write in turns."""
    model = load(asked.model, dtype=asked.dtype)
    own = SamplingParams(temperature=asked.temperature, penalty=asked.penalty, min_p=asked.min_p)
    params, _ = apply_eos_policy(own, model.eos_ids, stop_at_eos=False)
    prompt = model.encode(asked.prompt.read_text())[: asked.prefill]
    network = network_of(asked.model, model)
    assistant = network_of(asked.draft_model, model) if ASSISTED in asked.peers else None
    ways: dict[str, Callable[[], Written]] = {}
    for method in dict.fromkeys(["ar", *asked.methods]):
        request = Request(
            prompt=prompt, length=asked.tokens, method=method, params=params, seed=asked.seed
        )
        ways[method] = lambda request=request: written_by_us(model, request)
    for name in asked.peers:
        given = settings(name, params, assistant)
        ways[name] = lambda given=given: written_by_peer(network, prompt, asked.tokens, given)
    texts: dict[str, list[Written]] = {name: [] for name in ways}
    for turn in range(asked.repeats + 1):  # the first one warms up
        torch.manual_seed(asked.seed)
        for name, write in ways.items():
            found = write()
            if turn:
                texts[name].append(found)
    return compared(texts)


def main(words: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--draft-model", default=DEMO_DRAFT, help="what assists")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=Path, default=Path("prompts/long-novel.txt"))
    parser.add_argument("--prefill", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--methods", type=listed, default=["auto"])
    parser.add_argument("--peers", type=listed, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--penalty", type=float, default=SamplingParams.penalty)
    parser.add_argument("--min-p", type=float, default=SamplingParams.min_p)
    print(measured(parser.parse_args(words)).markdown())


if __name__ == "__main__":
    main()
