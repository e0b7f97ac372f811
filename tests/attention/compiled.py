"""Compile the Triton kernels for GPUs that are not here, from the launches the backend makes; a JSON line per kernel.

In a process of its own, without TRITON_INTERPRET: ``python -m tests.attention.compiled 80,bfloat16,8,4,128,41,tree``,
which is compute capability, dtype, KV heads, query heads per KV head, head size, nodes, and ``tree`` or ``chain``.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.attention.oracle import case
from tswift.attention import triton as backend
from tswift.attention.layout import Layout

KERNELS = {name: getattr(backend, name) for name in ("attend_part", "combine_parts", "store_new")}
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    int: "i32",
    float: "fp32",
}


class Compiler:
    """Stands in a kernel's place: to launch it is to compile it."""

    def __init__(self, name: str, capability: int) -> None:
        self.name, self.kernel, self.capability = name, KERNELS[name], capability

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
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
        found = {name: compiled.asm["ptx"].count(name) for name in ("mma", "cp.async.cg")}
        print(json.dumps({"kernel": self.name, "shared": compiled.metadata.shared, **found}), flush=True)


def main(capability: str, dtype: str, kv_heads: str, groups: str, size: str, nodes: str, kind: str) -> None:
    for name in KERNELS:
        setattr(backend, name, Compiler(name, int(capability)))
    backend._processors = lambda device: 132
    query, keys, values, ancestors, scale = case(
        int(kv_heads), int(groups), int(size), 100, int(nodes), getattr(torch, dtype)
    )
    layout = Layout(int(kv_heads), int(groups), query.dtype, query.device)
    ancestors = ancestors if kind == "tree" else None
    backend.TritonAttention(layout, 100, int(nodes), ancestors)(query, keys, values, scale)
    backend.TritonAttention.store(keys, values, keys[:, 100:], values[:, 100:], torch.tensor(100))


if __name__ == "__main__":
    for shape in sys.argv[1:]:
        main(*shape.split(","))
