"""What decoding computes under the settings of this process, as hashes:
``python -m tests.lossless.bits``, in JSON.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

import tswift
from tests.attention.oracle import by, case
from tests.forward.test_program import KINDS_OF_KV, target_of
from tests.helpers import tokens_of
from tswift.attention.native import NativeAttention
from tswift.forward.exact_passes import fingerprint

PROMPT = Path(__file__).parents[2] / "prompts" / "long-novel.txt"
TOKENS = 100  # of a text


def bits(*parts: torch.Tensor) -> str:
    whole = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    return hashlib.sha256(whole).hexdigest()[:16]


def of_the_program() -> dict[str, str]:
    """Of passes and of attention; none where there is no C program."""
    found = {}
    kinds = [*(("qwen3", dtype) for dtype in KINDS_OF_KV), ("qwen3.5", torch.int16)]
    for kind, dtype in kinds:
        target = target_of(kind, kv_dtype=dtype)
        if target.runner.program is None:
            return {}
        target.fixed_rows = target.runner.program.most_nodes
        found[f"a small {kind} with a cache in {dtype}"] = fingerprint(target)
    for nodes, dtype in ((1, torch.float32), (7, torch.bfloat16), (64, torch.float16)):
        # with the small model's size of heads, as each takes the compiler two seconds
        given = case(2, 3, 16, 1500, nodes, dtype)
        out = by(NativeAttention)(*given)
        found[f"attention of {nodes} nodes in {dtype}"] = bits(out)
    demo = tswift.load("demo", dtype="float32", device="cpu")
    found["the bundled model"] = fingerprint(demo.target)
    return found


def text(dtype: str) -> str:
    """The bundled model's."""
    model = tswift.load("demo", dtype=dtype, device="cpu")
    prompt = model.encode(PROMPT.read_text()[:600])[:90]
    steps = tswift.generate(model, prompt, TOKENS, method="medusa", seed=1)
    return bits(torch.tensor(tokens_of(steps)))


def main():
    """Print the hashes."""
    program = {}
    for threads in (2, 1):
        torch.set_num_threads(threads)
        program[threads] = of_the_program()
    half = tswift.load("demo", dtype="bfloat16", device="cpu", exact=True)
    found = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "program": program,
        "texts": {dtype: text(dtype) for dtype in ("float32", "float64")},
        "bfloat16": fingerprint(half.target),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
