"""How fast is transformers' own `generate` on the same model, prompt and length? (development only, CPU)

Every lane is a decode in a thread of its own. A baton goes from lane to lane, once around for every slice of the
length: one runs at a time, all of them see the same weather, and a clock runs only while its lane does.

    python -m benchmarks.peers --len 20000 --prompt-tokens 1024 --seed 1 --slices 20 --out peers.md --json peers.json
    python -m benchmarks.peers --len 200 --lanes ar-greedy,lookup-greedy

Lanes: ar, tokenswift (ours); generate, lookup, assisted (transformers); each with -sampled or -greedy behind it.
Prints a Markdown table; --out writes it to a file as well, --json the raw samples.

Every thread has OpenMP workers of its own. Together they are more than the processors, so GNU's OpenMP lets them sleep
almost at once where they wait for work; those of a program with one thread spin. On an idle machine spinning may be
faster (OMP_WAIT_POLICY=active gives it to all lanes), on a busy one it is ruinous: 10 times slower was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

import tswift
from benchmarks import tables
from tswift.decoding.params import SamplingParams
from tswift.decoding.stats import distinct
from tswift.engine import begin
from tswift.jobs.environment import environment
from tswift.jobs.prompt import fingerprint, read_prompt

OURS = ("ar", "tokenswift")
PEERS = ("generate", "lookup", "assisted")
LANES = [f"{kind}-{mode}" for mode in ("sampled", "greedy") for kind in (*OURS, *PEERS)]
LOOKUP = 10  # prompt_lookup_num_tokens
ASSISTANT = 1  # of the model's layers make the assistant

Step = Callable[[int], None]  # told after every target pass how many tokens there are
Body = Callable[[Step], list[int]]


class Lane:
    """A decode that moves only while the caller waits for it.

    `generate` is no generator: it is held inside a callback of its own, and so needs a thread. Ours are held the same
    way, since a thread has its own OpenMP workers and malloc arena: no lane may be alone in having them.
    """

    def __init__(self, name: str, shown: str, length: int, seed: int, body: Body) -> None:
        self.name, self.shown, self.length = name, shown, length
        self.tokens: list[int] = []
        self.samples: list[tuple[int, float, int]] = []  # tokens, seconds, target passes, each since the prompt
        self._seed, self._body = seed, body
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._mark, self._seconds, self._passes, self._started = 0, 0.0, 0, 0.0
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def greedy(self) -> bool:
        """Whether the lane takes the most likely token."""
        return self.name.endswith("-greedy")

    def advance(self, mark: int) -> None:
        """Run until there are ``mark`` tokens, or a few more where a pass yields several."""
        if self.samples and self.samples[-1][0] >= mark:
            return
        self._mark = mark
        self._go.release()
        self._back.acquire()
        if self._error:
            raise RuntimeError(f"lane {self.name} failed") from self._error

    def _run(self) -> None:
        self._go.acquire()
        try:
            torch.manual_seed(self._seed)
            self._started = time.perf_counter()
            self.tokens = self._body(self._step)
            if len(self.tokens) != self.length:
                raise RuntimeError(f"made {len(self.tokens)} tokens, wanted {self.length}")
        except Exception as error:  # raised again in the thread that waits
            self._error = error
        self._back.release()

    def _step(self, tokens: int) -> None:
        now = time.perf_counter()
        self._seconds += now - self._started
        self._passes += 1
        if tokens >= self._mark:
            self.samples.append((tokens, self._seconds, self._passes))
            if tokens < self.length:
                # the generator is the process's: without this, the other lanes' draws would change this lane's text
                state = torch.get_rng_state()
                self._back.release()
                self._go.acquire()
                torch.set_rng_state(state)
        self._started = time.perf_counter()

    @property
    def decoded(self) -> tuple[int, float, int]:
        """Tokens, seconds and passes after the first pass, which is the one that has the prompt to read."""
        (tokens, seconds, passes), (all_tokens, all_seconds, all_passes) = self.samples[0], self.samples[-1]
        return all_tokens - tokens, all_seconds - seconds, all_passes - passes


class _Watch(BaseStreamer):
    """Told by `generate` of the prompt, and then of the new tokens of every target pass.

    A stopping criterion would not do: 5.17 also calls those on the assistant's candidates.
    """

    def __init__(self, step: Step) -> None:
        self._step, self._tokens = step, -1

    def put(self, value: torch.Tensor) -> None:
        if self._tokens < 0:
            self._tokens = 0
            return
        self._tokens += value.numel()
        self._step(self._tokens)

    def end(self) -> None:
        pass


def ours(step: Step, *given: Any, **named: Any) -> list[int]:
    """Tokens that tswift decodes."""
    tokens: list[int] = []
    for part in begin(*given, **named).steps():
        tokens += part.tokens
        step(len(tokens))
    return tokens


def theirs(step: Step, network: Any, prompt: list[int], length: int, settings: dict[str, Any]) -> list[int]:
    """Tokens that transformers decodes."""
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length, "streamer": _Watch(step), **settings}
    return network.generate(ids, **given)[0, len(prompt) :].tolist()


def sampling(params: SamplingParams) -> dict[str, Any]:
    """What `generate` calls the same sampling; its penalty looks at the whole text, having no window."""
    greedy = params.temperature == 0
    drawn = {"temperature": params.temperature, "min_p": params.min_p, "top_p": params.top_p, "top_k": params.top_k}
    return {
        "do_sample": not greedy,
        "repetition_penalty": params.penalty,
        "suppress_tokens": list(params.banned) or None,
        **({} if greedy else drawn),
    }


def loop(tokens: list[int]) -> tuple[int, int] | None:
    """Where the text begins to repeat itself to its end, and its period; None if it does not."""
    ids = np.asarray(tokens)
    for period in range(1, len(ids) // 3 + 1):
        differ = np.flatnonzero(ids[period:] != ids[:-period])
        first = int(differ[-1]) + 1 if len(differ) else 0
        if len(ids) - period - first >= max(2 * period, 16):
            return first, period
    return None


def relation(lane: Lane, reference: Lane | None) -> str:
    """How a lane's text relates to plain decoding's; transformers' sampled lanes draw with noise of their own."""
    if not lane.greedy and lane.name.split("-")[0] in PEERS:
        return "its own draws"
    if reference is None or lane is reference:
        return ""
    differ = np.flatnonzero(np.asarray(lane.tokens) != np.asarray(reference.tokens))
    return f"differs from token {differ[0]:,}" if len(differ) else "the same"


def table(lanes: list[Lane]) -> str:
    """The lanes in Markdown."""
    references = {lane.greedy: lane for lane in lanes if lane.name.startswith("ar-")}
    rows = []
    for lane in lanes:
        tokens, seconds, passes = lane.decoded
        row = {
            "lane": lane.shown,
            "sampling": "greedy" if lane.greedy else "sampled",
            "tokens": f"{lane.samples[-1][0]:,}",
            "prefill and first pass, s": f"{lane.samples[0][1]:.2f}",
            "then, s": f"{seconds:.2f}",
            "tokens/s": f"{tokens / seconds:.1f}",
            "x": "",
            "tokens per target pass": f"{tokens / passes:.2f}",
            "distinct-4": f"{distinct(lane.tokens, 4):.3f}",
            "text against ours": relation(lane, reference := references.get(lane.greedy)),
        }
        if reference:
            plain_tokens, plain_seconds, _ = reference.decoded
            row["x"] = f"{tokens / seconds / (plain_tokens / plain_seconds):.2f}"
        rows.append(row)
    return tables.markdown(rows)


def notes(lanes: list[Lane], sampled: SamplingParams, greedy: SamplingParams, prompt: int) -> str:
    """What one must know to read the table."""
    lines = [
        f"Prompt of {prompt:,} tokens, batch 1, float32, CPU, {torch.get_num_threads()} threads; end-of-text tokens "
        "are never drawn. tokens/s, x and tokens per target pass leave out the first pass. x: over tswift ar with the "
        "same sampling. Target passes: the assistant's own are not among them.",
        f"Sampled: temperature {sampled.temperature:g}, min-p {sampled.min_p:g}, penalty {sampled.penalty:g}. tswift "
        f"penalises the last {sampled.window:,} tokens, transformers the whole text: its work per token (for lookup "
        "and assisted: per drafted token, more than once) grows with the text, and a text longer than the window is "
        "drawn from another distribution. transformers draws with torch's random numbers, tswift with a hash.",
        f"Greedy: penalty {greedy.penalty:g}"
        + (", over the whole text in every lane." if greedy.penalises else ", that is none.")
        + " A float32 near-tie may part two texts.",
        "transformers: stock model, sdpa attention, dynamic cache (lookup and assisted take no other, and batch 1), "
        "its defaults but for what is said here.",
    ]
    texts = {tuple(lane.tokens): lane for lane in reversed(lanes) if lane.greedy}  # of equal ones, the first lane's
    for lane in reversed(texts.values()):
        if repeated := loop(lane.tokens):
            start, period = repeated
            lines.append(f"{lane.shown}, greedy: from token {start:,} on the text repeats the same {period:,} tokens.")
    return "\n".join(f"- {line}" for line in lines)


def make_lanes(args: argparse.Namespace) -> tuple[list[Lane], dict[str, Any], list[int], dict[bool, SamplingParams]]:
    """The lanes asked for, the settings of each, the prompt and the sampling by greediness."""
    model = tswift.load(args.model, device="cpu", dtype="float32")
    prompt = model.encode(read_prompt(args.prompt))[: args.prompt_tokens]
    if len(prompt) < args.prompt_tokens:
        raise SystemExit(f"the prompt has {len(prompt):,} tokens, --prompt-tokens wants more")
    sampled = SamplingParams(banned=model.eos_ids)
    # what transformers penalises: everything
    window = len(prompt) + args.len
    greedy = replace(sampled, temperature=0.0, min_p=0.0, penalty=args.greedy_penalty, window=window)
    params = {False: sampled, True: greedy}
    source = Path(tswift.__file__).parent / "models" / "demo" if args.model == "demo" else args.model
    # transformers gets its own copy, with its own attention: the one above has had its attention replaced
    stock = {"dtype": torch.float32, "attn_implementation": "sdpa", "use_safetensors": True}
    network = AutoModelForCausalLM.from_pretrained(source, **stock).eval()
    drafts: dict[str, tuple[str, dict[str, Any]]] = {
        "generate": ("transformers generate", {}),
        "lookup": (f"transformers prompt lookup ({LOOKUP} tokens)", {"prompt_lookup_num_tokens": LOOKUP}),
    }
    if any(name.startswith("assisted-") for name in args.lanes):
        assistant = AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=ASSISTANT, **stock)
        layers = f"{ASSISTANT} of {len(network.model.layers)} layers"
        shown = f"transformers assisted (by the model's first {layers}, not trained)"
        drafts["assisted"] = (shown, {"assistant_model": assistant.eval()})
    lanes, settings = [], {}
    for name in args.lanes:
        kind, mode = name.split("-")
        chosen = params[mode == "greedy"]
        if kind in OURS:
            shown, settings[name] = f"tswift {kind}", asdict(chosen)
            named = {"method": kind, "params": chosen, "seed": args.seed}
            body = partial(ours, model=model, prompt=prompt, length=args.len, **named)
        else:
            shown, draft = drafts[kind]
            given = {**sampling(chosen), **draft}
            body = partial(theirs, network=network, prompt=prompt, length=args.len, settings=given)
            settings[name] = given | ({"assistant_model": shown} if kind == "assisted" else {})
        lanes.append(Lane(name, shown, args.len, args.seed, body))
    return lanes, settings, prompt, params


def main(argv: list[str] | None = None) -> None:
    """Parse, decode in slices, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a folder or a hub id")
    parser.add_argument("--prompt", help="a text file (default: the bundled novel)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="use so many of the prompt's tokens")
    parser.add_argument("--len", type=int, default=2000, help="tokens that every lane makes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--lanes", type=lambda text: text.split(","), default=LANES, help="default: all, in this order")
    parser.add_argument("--greedy-penalty", type=float, default=1.0, help="repetition penalty of the greedy lanes")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    parser.add_argument("--json", type=Path, help="write the raw samples to this file")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.lanes) - set(LANES)):
        parser.error(f"no lane {', '.join(unknown)}; there are {', '.join(LANES)}")
    if args.len < 2 or args.slices < 1:
        parser.error("--len must be at least 2, --slices at least 1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lanes, settings, prompt, params = make_lanes(args)
    for part in range(args.slices + 1):
        # the first turn ends with the first pass, so that slices hold no prefill
        mark = 1 + (args.len - 1) * part // args.slices
        for lane in lanes:
            lane.advance(mark)
        total = sum(lane.samples[-1][1] for lane in lanes)
        print(f"slice {part} of {args.slices}: {mark:,} tokens, {total:,.0f} s in all lanes", file=sys.stderr)
    text = f"{table(lanes)}\n\n{notes(lanes, params[False], params[True], len(prompt))}"
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    if args.json:
        record = {
            "schema_version": 1,
            "command": shlex.join([Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)]),
            "started": started,
            "environment": environment(torch.device("cpu")),
            "openmp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))},
            "model": args.model,
            "prompt_tokens": len(prompt),
            "prompt_sha256": fingerprint(prompt),
            "length": args.len,
            "seed": args.seed,
            "samples": "per slice: tokens, seconds, target passes, cumulative; the first is the first pass",
            "lanes": [
                {name: getattr(lane, name) for name in ("name", "shown", "samples", "tokens")}
                | {"settings": settings[lane.name], "sha256": fingerprint(lane.tokens)}
                for lane in lanes
            ],
        }
        args.json.write_text(json.dumps(record, separators=(",", ":"), default=str) + "\n")


if __name__ == "__main__":
    main()
