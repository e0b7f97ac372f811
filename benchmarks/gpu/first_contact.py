"""First contact with a GPU: what no emulation shows, asked of it before anything else is measured.

    python -m benchmarks.gpu.first_contact --folder runs/gpu [--dry] model

Every probe is a process of its own, as a failed capture may spoil one. It prints what it finds,
tracebacks in full, and notes it as figures. In a dry run the model is tiny and on the CPU, and what
needs CUDA graphs says so.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu import FIRST, PROBES, note
from benchmarks.gpu.clocks import kernels, replayed

_PRODUCTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
_ROWS = (1, 16, 32, 64)
_BEYOND_CACHE = 400_000_000  # bytes of weights that no L2 holds
_SLOTS, _MOVED = 104_000, 5  # of a cache of more than 2^31 bytes, and tokens that a step commits


class Asked:
    """What a probe is given: where figures go, and what it runs on."""

    def __init__(self, folder: Path, dry: bool) -> None:
        self.folder, self.dry = folder, dry
        self.device = torch.device("cpu" if dry else "cuda")

    def note(self, table: str, **values: Any) -> None:
        """Write a row of figures, and print it."""
        note(self.folder, FIRST, table, **values)
        print(table, values, flush=True)


def _on_cuda(probe: Callable[[Asked], None]) -> Callable[[Asked], None]:
    """A probe of what only CUDA has."""

    def probed(asked: Asked) -> None:
        if asked.dry:
            print("left out: there is no CUDA")
        else:
            probe(asked)

    return probed


def _outcome(run: Callable[[], Any]) -> str:
    try:
        found = run()
    except Exception as error:
        traceback.print_exc()
        root: BaseException = error
        while root.__context__ is not None:
            root = root.__context__
        return f"fails: {str(error).splitlines()[0]} | {str(root).splitlines()[0]}"
    return "works" if found is None else f"works: {found}"


def _capture(run: Callable[[], Any], **how: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return out


@_on_cuda
def setitem(asked: Asked) -> None:
    """Is ``x[int] = number`` legal in a capture? (What the drafters' window does instead is.)"""
    places = torch.zeros(9, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    for what, run in (
        ("x[int] = number", _set_element(places)),
        ("x[a:b].fill_", places[3:4].zero_),
    ):
        asked.note(
            "setitem",
            what=f"{what}, asked not to wait",
            outcome=_outcome(lambda run=run: run() and None),
        )
    torch.cuda.set_sync_debug_mode("default")
    for what, run in (
        ("x[a:b].fill_", places[3:4].zero_),
        ("x[int] = number", _set_element(places)),
    ):
        asked.note(
            "setitem",
            what=f"{what} in a capture",
            outcome=_outcome(lambda run=run: _capture(run) and None),
        )


def _set_element(places: Tensor) -> Callable[[], None]:
    def run() -> None:
        places[3] = False

    return run


@_on_cuda
def poison(asked: Asked) -> None:
    """What is broken in a process after one failed capture?"""
    stream = torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle()
    current = torch.cuda.current_stream()
    ones = torch.ones(8, device="cuda")
    how = {"pool": pool, "stream": stream}
    for what, run in (
        ("it", lambda: _capture(lambda: ones.sum().item(), **how)),
        ("its stream", lambda: torch.cuda.set_stream(current)),
        ("empty_cache", torch.cuda.empty_cache),
        ("randn", lambda: torch.randn(3, device="cuda") is None),
        ("a product", lambda: (ones * 2).sum().item()),
        ("another capture", lambda: float(_capture(lambda: ones * 3, **how)[0])),
    ):
        asked.note("after a failed capture", what=what, outcome=_outcome(run))


@_on_cuda
def inference(asked: Asked) -> None:
    """Do captures within and outside of inference mode get along?"""
    ones = torch.ones(8, device="cuda")
    with torch.inference_mode():
        first = _outcome(lambda: float(_capture(lambda: ones * 2)[0]))
    asked.note("inference", what="in inference mode", outcome=first)
    asked.note(
        "inference",
        what="outside, after it",
        outcome=_outcome(lambda: float(_capture(lambda: ones * 2)[0])),
    )


@_on_cuda
def commit(asked: Asked) -> None:
    """What moving a step's tokens takes in a cache of more than 2^31 bytes: PyTorch's kernels,
    and ours.
    """
    from tswift.attention.sdpa import Attention
    from tswift.attention.triton import TritonAttention

    cache = torch.zeros(32, 8, _SLOTS, 128, dtype=torch.bfloat16, device="cuda")
    slots = _SLOTS - 100 + torch.arange(_MOVED, device="cuda")
    accepted = slots + torch.arange(_MOVED, device="cuda"), slots
    for move in (Attention.append, TritonAttention.append):
        pair = cache, cache
        run = partial(move, pair, pair, *accepted, torch.tensor([_MOVED], device="cuda"))
        run()
        for name, start, end in kernels(run, asked.device):
            asked.note("commit", kernel=name[:60], us=end - start)


def products(asked: Asked) -> None:
    """What skinny products reach by rows, cuBLAS's and ours,
    and whether split sums are reduced in bfloat16.
    """
    made = {"dtype": torch.bfloat16, "device": asked.device}
    for name, (out, width) in _PRODUCTS.items():
        if asked.dry:
            out, width = 128, 64
        count = max(1, (0 if asked.dry else _BEYOND_CACHE) // (2 * out * width))
        weights = torch.randn(count, out, width, **made)
        rates = {}
        for rows in _ROWS:
            given = torch.randn(rows, width, **made)
            for whose, multiply in (("", _multiply), (", ours", _multiply_ours)):
                seconds = replayed(partial(multiply, given, weights), asked.device)
                rates[f"{rows} rows{whose}, TB/s"] = 2 * out * width * count / seconds / 1e12
        given = torch.randn(32, width, **made)
        outs = []
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
            outs.append(linear(given, weights[0]))
        asked.note("products", product=name, **rates, reduced_in_bfloat16=not torch.equal(*outs))


def _multiply(rows: Tensor, weights: Tensor) -> None:
    for weight in weights:
        linear(rows, weight)


def _multiply_ours(rows: Tensor, weights: Tensor) -> None:
    from tswift.forward.layer_kernels import multiply

    for weight in weights:
        multiply(rows, weight, early=True)


def model(asked: Asked) -> None:
    """A model with drafters, and the texts that all methods make of it."""
    from benchmarks.gpu import first_texts  # a probe without a model begins seconds earlier

    first_texts.meet(asked)


def bits(asked: Asked) -> None:
    """The bits of exact passes, in a process with empty caches of compiled kernels:
    they are to be the same in all.
    """
    from benchmarks.gpu import first_texts

    first_texts.load_shape(asked, "qwen3-4b")


_PROBES: dict[str, Callable[[Asked], None]] = {
    "model": model,
    "setitem": setitem,
    "poison": poison,
    "inference": inference,
    "commit": commit,
    "products": products,
    "bits": bits,
}


def main() -> None:
    """Run one probe."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.first_contact")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("probe", choices=list(PROBES))
    args = parser.parse_args()
    _PROBES[args.probe](Asked(args.folder, args.dry))


if __name__ == "__main__":
    main()
