"""Compile the sampler's kernels for GPUs that are not here, from the launches it makes; a JSON line per kernel.

In a process of its own, without TRITON_INTERPRET: ``python -m tests.decoding.compiled 80,bfloat16,41``, which is
compute capability, dtype of the logits and nodes. Registers and spilled bytes are of one thread, shared memory of one
program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tswift.decoding import fused
from tswift.decoding.params import SamplingParams

VOCAB = 128_256
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    int: "i32",
}


class Compiler:
    """Stands in a kernel's place: to launch it is to compile it."""

    def __init__(self, kernel, capability: int, label: str) -> None:
        self.kernel, self.capability, self.label = kernel, capability, label

    def __getitem__(self, grid):
        self.grid = grid
        return self.launch

    def launch(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in ("num_warps", "enable_fp_fusion") if name in kwargs}
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        fixed, signature, aligned = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, given[parameter.name]
            if parameter.is_constexpr or value is None:
                fixed[name], signature[name] = value, "constexpr"
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype if tensor else type(value)]
            if not parameter.do_not_specialize and (value.data_ptr() if tensor else value) % 16 == 0:
                aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        ptx = compiled.asm["ptx"]
        found = {
            "kernel": self.kernel.__name__,
            "label": self.label,
            "grid": self.grid,
            "warps": compiled.metadata.num_warps,
            "shared": compiled.metadata.shared,
            **{name: ptx.count(name) for name in ("div.rn.f64", "div.full", "div.approx", "fma.rn.f64", ".ftz.f32")},
            **assembled(ptx),
        }
        print(json.dumps(found), flush=True)


def assembled(ptx: str) -> dict[str, int]:
    """Registers and spilled bytes of a thread, as the assembler tells them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        (target,) = re.findall(r"\.target (\w+)", ptx)
        assembler = os.path.join(os.path.dirname(nvidia.__file__), "bin", "ptxas")
        command = [assembler, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.findall(r"Used (\d+) registers", said)
    return {
        "registers": max(map(int, registers)),
        "stack": max(int(stack) for stack, _, _ in numbers),
        "spilled": max(int(stores) + int(loads) for _, stores, loads in numbers),
    }


def main(capability: str, dtype: str, nodes: str) -> None:
    count, device = int(nodes), torch.device("cpu")
    logits = torch.zeros(count, VOCAB, dtype=getattr(torch, dtype))
    tokens = torch.zeros(count, dtype=torch.int64)
    ancestors, newest = torch.zeros(count, count, dtype=torch.bool), torch.zeros(VOCAB, dtype=torch.int64)
    for label, params in PARAMS.items():
        for name in ("top_logits", "rank_parts", "rank_rows"):
            setattr(fused.kernels, name, Compiler(KERNELS[name], int(capability), f"{dtype}, {nodes} nodes, {label}"))
        rule = fused.FusedRule(params, 1, VOCAB, device)
        rule.draw(logits, tokens, tokens, ancestors, newest)
        if count <= 4:
            rule.candidates(logits, newest[None] > 0, tokens, 3)


PARAMS = {
    "greedy": SamplingParams(temperature=0, penalty=1),
    "paper": SamplingParams(),
    "all": SamplingParams(temperature=0.7, banned=(1,)),
    "no min-p": SamplingParams(temperature=0.7, min_p=0.0),
}
KERNELS = {name: getattr(fused.kernels, name) for name in ("top_logits", "rank_parts", "rank_rows")}

if __name__ == "__main__":
    for case in sys.argv[1:]:
        main(*case.split(","))
