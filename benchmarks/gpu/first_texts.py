"""First contact of a model with a GPU: it is loaded, with its own checks,
and every method writes a text.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time
import traceback
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import SPOILED, figures
from benchmarks.gpu.run import add_tiny_shapes, spoiled
from tswift.engine import Request, begin
from tswift.loading import LoadedModel, load
from tswift.models.config import SHAPE_PREFIX

if TYPE_CHECKING:
    from benchmarks.gpu.first_contact import Asked

_METHODS = ("ar", "tokenswift", "medusa", "block", "auto", "cascade", "recall")
# a model has one; texts are compared within
_DRAFTERS = {"dspark": _METHODS, "eagle3": ("ar", "eagle")}


def load_shape(asked: Asked, shape: str, **how: Any) -> LoadedModel:
    """A shape with random weights."""
    if asked.dry:
        add_tiny_shapes()
    started = time.perf_counter()
    model = load(
        SHAPE_PREFIX + ("tiny-llama" if asked.dry else shape), device=str(asked.device), **how
    )
    if asked.dry:  # decode as on a GPU, by programs, without the slow interpreter
        from tests.forward.test_passes import LengthOnDevice

        model.target.backend = LengthOnDevice
    about = {key: model.about()[key] for key in ("name", "dtype", "attention", "layers", "exact")}
    why_not = {
        "inexact": model.target.fallbacks.get("exact"),
        "graphs": model.target.fallbacks.graph_fault,
    }
    asked.note("loaded", **about, **why_not, seconds=time.perf_counter() - started)
    return model


def meet(asked: Asked) -> None:
    """The 8B shape with published drafters' shapes: its own checks,
    and 120 tokens by every kind of draft.

    What an earlier process has noted is not done again; where a capture fails, another process has
    to go on.
    """
    tokens, prompt = (12, 60) if asked.dry else (120, 4096)
    rows = [row for row in figures(asked.folder) if row["table"] == "methods"]
    known = {(row["drafter"], row["method"]): row.get("text") for row in rows}
    for drafter, methods in _DRAFTERS.items():
        left = [method for method in methods if (drafter, method) not in known]
        if not left:
            continue
        loaded = load_shape(asked, "llama3.1-8b", drafter=drafter)
        # then by the checks of the model itself, as in every other process
        checked = spoiled(loaded)
        ids = [index * 7919 % (loaded.target.vocab_size - 256) for index in range(prompt + 1)]
        for method in left:
            row: dict[str, Any] = {"drafter": drafter, "method": method}
            try:
                row |= _decoded(loaded, Request(ids, tokens, method=method, seed=1))
                known[drafter, method] = row["text"]
                row["same_as_ar"] = row["text"] == known.get((drafter, "ar"))
            except Exception as error:
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            asked.note("methods", **row)
            if spoiled(loaded) and not checked:
                sys.exit(SPOILED)
        del loaded
        if not asked.dry:
            gc.collect()
            torch.cuda.empty_cache()


def _decoded(loaded: LoadedModel, request: Request) -> dict[str, Any]:
    """Figures of a text, and its digest."""
    decode = begin(loaded, request)
    prefill = decode.decoding.prefill()
    text: list[int] = []
    seconds = []
    for step in decode.steps():
        text += step.tokens
        seconds.append(step.seconds)
    return {
        "prefill_and_capture_s": prefill,
        "ms_per_step": 1e3 * median(seconds),
        "tokens_per_s": len(text) / sum(seconds),
        "text": hashlib.sha256(repr(text[: request.length]).encode()).hexdigest()[:16],
        "graphs": loaded.target.fallbacks.graph_fault,
    }
