"""transformers' own generate with a static cache, which it compiles, beside our plain decoding at the same context."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks.gpu.loop import GREEDY
from benchmarks.gpu.session import Session
from tswift.models.dummy import random_network
from tswift.models.shapes import PREFIX, shape_config


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
    """Time greedy ``generate``; what was found goes to ``peer``, with the loop's greedy steps beside it."""
    scale = session.scale
    ours = ((session.content["loop"] or {}).get("methods") or {}).get(GREEDY)
    found: dict[str, Any] = {
        "shape": scale.main,
        "context": scale.place,
        "ours": ours["mean"] if ours else None,
        "theirs": None,
        "x": None,
    }
    session.content["peer"] = found
    found["theirs"] = _theirs(session)
    found["x"] = found["theirs"]["per_token"] / found["ours"] if ours else None
    return None


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
