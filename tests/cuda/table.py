"""What a step of every method asks of the host and of a CUDA device, by simulation, as JSON.

Medians of single steps. Kernels inside CUDA graphs are not counted: a replay of a graph is one
launch.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.cuda.devsim import Simulator, moved  # isort: skip  # before the package
import torch

import tests.helpers as helpers
from benchmarks.architectures import ARCHITECTURES
from tests.cuda.capture import LOG, CodesAttention, StaticAttention, StaticStates
from tests.drafters import LAYOUTS, RECURRENT, VOCAB, drafter_folder, load_own_head, qwen3, qwen35
from tests.helpers import METHODS
from tswift.decoding.loop import Decoding
from tswift.drafting.methods import BUILDERS, make_drafter
from tswift.drafting.options import RecordedOptions
from tswift.forward import eager
from tswift.forward.cuda import runner
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.drafter_files import find_drafter

PROMPT, WARM = 70, 4
COUNTS = ("waits", "sent", "fetched", "kernels", "launches")
_WITH_HEADS = ("medusa", "tokenswift", "cascade", "auto")
# layouts of published drafters
_NETWORKS = {"block": ("dspark", "dflash"), "eagle": ("eagle-safeai",)}
CASES = [
    (name, kind)
    for name in METHODS
    for kind in ("chained", "conditioned", "trimmed")[: 3 if name in _WITH_HEADS else 1]
]
COUNTED = "chained, counted"  # heads, where it matters how often tokens were generated
CASES += [("medusa", COUNTED)]
CODES = "chained, int8 cache"
CASES += [(name, CODES) for name in ("ar", "tokenswift", "magicdec")]
CASES += [(name, layout) for name, layouts in _NETWORKS.items() for layout in layouts]
_STATES = "states"  # of a model with recurrent layers, whose heads are chained
if ARCHITECTURES[RECURRENT].there:
    _SERVED = ("ar", "medusa", "recall", "reuse", "standalone", "auto", "mtp")
    CASES += [(name, _STATES) for name in _SERVED if name in (*METHODS, "mtp")]


def _decoding(method: str, kind: str, steps: int, nodes: int | None, simulated: bool) -> Decoding:
    """A decode of a tiny model, with default options where these do not ask for more text than
    there is.
    """
    put = (lambda module: moved(copy.deepcopy(module))) if simulated else copy.deepcopy
    dtype = torch.float32
    options = RecordedOptions(budget=128, nodes=nodes, costs="nominal")
    params = SamplingParams(window=24, min_p=0.02)
    if kind == COUNTED:
        params = replace(params, presence_penalty=0.7, frequency_penalty=0.4, penalty=1.0)
    if kind in LAYOUTS:
        target = Target(put(qwen3(dtype)), StaticAttention)
        with TemporaryDirectory() as folder:
            find_drafter(drafter_folder(Path(folder), kind)).load(target)
        drafter = make_drafter(method, target, None, options)
        prompt = helpers.random_prompt(PROMPT, vocab=VOCAB)
    else:
        recurrent = kind == _STATES
        model = qwen35(dtype) if recurrent else helpers.tiny_llama("gqa", dtype, layers=2)
        target = Target(put(model), CodesAttention if kind == CODES else StaticAttention)
        if kind == CODES:
            target.set_kv_dtype(torch.int8)
        if method == "mtp":
            load_own_head(target)
            if simulated:
                moved(target.speculator)
        draft = Target(put(helpers.tiny_llama("mqa", dtype)), StaticAttention)
        heads = helpers.tiny_heads(dtype, kind="chained" if recurrent else kind.partition(",")[0])
        drafter = make_drafter(method, target, put(heads), options, draft)
        prompt = helpers.random_prompt(PROMPT)
    return Decoding(target, prompt, params, 3, drafter, 40 * (WARM + steps))


def measure(method: str, kind: str, steps: int, nodes: int | None = None) -> dict[str, Any]:
    """What single steps do, the text they write, and where they wait and copy."""
    rows = []
    tokens = []
    places = {name: set[str]() for name in COUNTS[:3]}
    with Simulator(), torch.no_grad():
        decoding = _decoding(method, kind, steps, nodes, simulated=True)
        running = decoding.steps()
        for index in range(WARM + steps):
            LOG.clear()
            LOG.on = index >= WARM
            step = next(running)
            LOG.on = False
            tokens += step.tokens
            if index >= WARM:
                rows.append(
                    [sum(LOG.waits.values()), sum(LOG.sent.values()), sum(LOG.fetched.values())]
                )
                rows[-1] += [LOG.kernels, LOG.launches]
                for name, found in places.items():
                    found.update(getattr(LOG, name))
        target = decoding._target
        assert target.fallbacks.graph_fault is None, target.fallbacks.graph_fault
    counts = {
        name: median(column) for name, column in zip(COUNTS, zip(*rows, strict=True), strict=True)
    }
    found = {name: sorted(each) for name, each in places.items()}
    same = tokens == _plain(kind)[: len(tokens)]
    return {
        "method": method,
        "kind": kind,
        "counts": counts,
        "places": found,
        "tokens": tokens,
        "same": same,
    }


@functools.cache
def _plain(kind: str) -> list[int]:
    """What plain decoding writes, without a simulated device, by the model of a case."""
    decoding = _decoding("ar", kind, 5, None, simulated=False)
    return [token for step in itertools.islice(decoding.steps(), 200) for token in step.tokens]


def main():
    """Print all figures as JSON, or those of the methods or kinds that are named."""
    # a simulated device has no Triton
    for place in (eager, runner):
        place.device_kernel = lambda device, wide: StaticStates if device.type == "cuda" else None
    chosen = [case for case in CASES if {*case} & {*(sys.argv[1:] or BUILDERS)}]
    json.dump(
        {"found": [measure(method, kind, steps=5, nodes=20) for method, kind in chosen]}, sys.stdout
    )


if __name__ == "__main__":
    main()
