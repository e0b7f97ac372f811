"""Compile the sampler's kernels for GPUs that are not here, from the launches it makes;
a JSON line per kernel.

In a process of its own, without TRITON_INTERPRET: ``python -m tests.sampling.compiled
80,bfloat16,41``, which is compute capability, dtype of the logits and nodes. Registers and spilled
bytes are of one thread, shared memory of one program.
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.offline import assembled, compiled_launch
from tests.helpers import CPU
from tswift.sampling import sampler_triton as fused
from tswift.sampling.parameters import SamplingParams

VOCAB = 128_256


class Compiler:
    """Stands in a kernel's place: to launch it is to compile it."""

    def __init__(self, kernel, capability: int, label: str):
        self.kernel, self.capability, self.label = kernel, capability, label

    def __getitem__(self, grid):
        self.grid = grid
        return self.launch

    def launch(self, *args, **kwargs):
        compiled = compiled_launch(self.kernel, args, kwargs, self.capability)
        ptx = compiled.asm["ptx"]
        found = {
            "kernel": self.kernel.__name__,
            "label": self.label,
            "grid": self.grid,
            "warps": compiled.metadata.num_warps,
            "shared": compiled.metadata.shared,
            **{
                name: ptx.count(name)
                for name in ("div.rn.f64", "div.full", "div.approx", "fma.rn.f64", ".ftz.f32")
            },
            **assembled(ptx),
        }
        print(json.dumps(found), flush=True)


def main(capability: str, dtype: str, nodes: str):
    count = int(nodes)
    device = CPU
    logits = torch.zeros(count, VOCAB, dtype=getattr(torch, dtype))
    tokens = torch.zeros(count, dtype=torch.int64)
    ancestors, newest = (
        torch.zeros(count, count, dtype=torch.bool),
        torch.zeros(VOCAB, dtype=torch.int64),
    )
    for label, params in PARAMS.items():
        for name in KERNELS:
            setattr(
                fused,
                name,
                Compiler(KERNELS[name], int(capability), f"{dtype}, {nodes} nodes, {label}"),
            )
        rule = fused.TritonSampler(params, 1, VOCAB, device)
        rule.draw(logits, tokens, tokens, ancestors, newest)
        if count <= 4:
            rule.candidates(logits, newest[None] > 0, tokens, 3)


PARAMS = {
    "greedy": SamplingParams(temperature=0, penalty=1),
    "paper": SamplingParams(),
    "all": SamplingParams(temperature=0.7, banned=(1,)),
    "no min-p": SamplingParams(temperature=0.7, min_p=0.0),
}
KERNELS = {name: getattr(fused, name) for name in ("rank_parts", "rank_rows")}

if __name__ == "__main__":
    for case in sys.argv[1:]:
        main(*case.split(","))
