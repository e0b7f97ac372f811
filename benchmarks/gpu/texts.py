"""A process that loads a model with its checks, and lets every method write one text:

    python -m benchmarks.gpu.texts --folder runs/gpu [--dry] [--drafter dspark | --bits] MODEL

It fails if a method's text is not plain decoding's. With ``--bits`` it only notes the hash of what
exact passes compute.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import traceback
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import EQUALITY
from benchmarks.gpu.run import DRY, Run, Scale
from tswift.drafting.options import METHODS
from tswift.engine import Request, begin, possible
from tswift.jobs.config import read_prompt
from tswift.loading.model import LoadedModel
from tswift.models.config import SHAPE_PREFIX

_SEED = 1


def compare(run: Run, model: LoadedModel, drafter: str | None) -> bool:
    """Let all methods that the model takes write a text, each noted at once;
    whether all are plain decoding's.
    """
    if model.simulated:
        length, prompt = run.scale.texts
        ids = [index * 7919 % (model.target.vocab_size - 256) for index in range(prompt + 1)]
    else:
        length, prompt = run.scale.own_texts
        ids = model.encode(read_prompt(None))[:prompt]
    if drafter == "eagle3":  # all others are compared with the other drafter
        names = ["ar", "eagle"]
    else:
        takes = possible(model.target, model.heads, draft=model.draft is not None)
        names = [name for name in takes if name != "ar-reference"]
        names = [name for name in names if "draft_model" not in METHODS[name].needs]
        names = ["ar", *(name for name in names if name != "ar")]
    plain = None
    same = True
    for name in names:
        row: dict[str, Any] = {"model": model.name, "drafter": drafter, "method": name}
        row["weights"] = model.quantization
        try:
            row |= _written(model, Request(prompt=ids, length=length, method=name, seed=_SEED))
            plain = plain or row["text"]
            row["same_as_ar"] = row["text"] == plain
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        run.note("methods", **row)
        same = same and row.get("same_as_ar", False)
    return same


def _written(model: LoadedModel, request: Request) -> dict[str, Any]:
    """Figures of a text, and its digest."""
    decode = begin(model, request)
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
        "kv_dtype": model.about().get("kv_dtype"),
        "layers": model.layers,
    }


def main() -> int:
    """Load, and write; 1 if a text is not plain decoding's."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.texts")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--dry", action="store_true")
    for name in ("weights", "kv_dtype"):
        parser.add_argument(f"--{name}", help="as of tswift.load")
    parser.add_argument("model")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry else "cuda")
    run = Run(args.folder, DRY if args.dry else Scale(), device, EQUALITY)
    asked = {name: getattr(args, name) for name in ("drafter", "weights", "kv_dtype")}
    how = {name: value for name, value in asked.items() if value is not None}
    name = args.model
    if args.bits or how:
        name = SHAPE_PREFIX + (run.scale.main if args.dry else name)
    model = run.load(name, **how)
    if args.bits:
        run.note("bits", bits=model.exact)
        return 0
    return 0 if compare(run, model, args.drafter) else 1


if __name__ == "__main__":
    sys.exit(main())
