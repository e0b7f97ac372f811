"""transformers' own generate with a static cache, which it compiles, beside our plain decoding at the same context."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks.gpu.loop import at_context, timed
from benchmarks.gpu.session import Session, tidy
from tswift.decoding.sampling import SamplingParams
from tswift.models.dummy import random_network
from tswift.models.loading import load
from tswift.models.shapes import PREFIX, shape_config

_GREEDY = SamplingParams(temperature=0.0, min_p=0.0, penalty=1.0)


class _Watch(BaseStreamer):
    """Notes when each token of ``generate`` arrives; the prompt, which comes first, is none."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure(session: Session) -> str | None:
    """Greedy decoding by both, one after the other; what was found goes to ``peer``."""
    scale = session.scale
    found: dict[str, Any] = {"shape": scale.main, "context": scale.place, "ours": None, "theirs": None}
    session.content["peer"] = found
    found["ours"] = _ours(session)
    session.keep()
    tidy(session.device)  # or the cache of ours would take the memory that theirs needs
    found["theirs"] = _theirs(session)
    found["x"] = found["theirs"]["per_token"] / found["ours"]["per_token"]
    session.keep()
    return None


def _ours(session: Session) -> dict[str, Any]:
    scale = session.scale
    model = load(PREFIX + scale.main, device=str(session.device))
    run = at_context(model, "ar", scale.place, 2 * scale.steps, params=_GREEDY)
    steps = run.steps()
    timed(steps, scale.steps // 2)
    _, seconds = timed(steps, scale.steps)
    return {"seconds": seconds, "median": median(seconds), "per_token": mean(seconds)}


def _theirs(session: Session) -> dict[str, Any]:
    """Seconds between the tokens of the second half; the first half holds the prompt's pass and the compiling."""
    scale, device = session.scale, session.device
    name = PREFIX + scale.main
    config = shape_config(name)
    # unmodified: transformers' own attention, which load would have replaced
    network = random_network(config, torch.bfloat16, device, name).eval()
    network.generation_config.eos_token_id = None  # random weights must not end the text early
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (1, scale.place), generator=generator).to(device)
    watch = _Watch()
    started = time.perf_counter()
    out = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=scale.peer_tokens,
        do_sample=False,
        cache_implementation="static",
        streamer=watch,
    )
    made = out.shape[1] - ids.shape[1]
    if made != scale.peer_tokens or len(watch.times) != made:
        raise RuntimeError(f"generate made {made} tokens and told of {len(watch.times)}, wanted {scale.peer_tokens}")
    times = watch.times[made // 2 - 1 :]
    seconds = [after - before for before, after in pairwise(times)]
    return {
        "attention": network.config._attn_implementation,
        "compiled": getattr(network, "_compiled_call", None) is not None,
        "first_token_seconds": watch.times[0] - started,
        "second_token_seconds": watch.times[1] - watch.times[0],
        "seconds": seconds,
        "median": median(seconds),
        "per_token": mean(seconds),
    }
