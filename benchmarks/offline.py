"""Compile a launch of a Triton kernel for a GPU that is not here, and have it assembled for what it takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    int: "i32",
    float: "fp32",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


def compiled_launch(kernel: Any, args: tuple[Any, ...], given: Mapping[str, Any], capability: int) -> Any:
    """The kernel as Triton would compile it for these arguments of a launch, for a compute capability such as 90."""
    options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    values = dict(zip(kernel.arg_names, args, strict=False)) | dict(given)
    fixed, signature, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            fixed[name], signature[name] = value, "constexpr"
            continue
        tensor = isinstance(value, Tensor)
        signature[name] = _TYPES[value.dtype if tensor else type(value)]
        whole = tensor or isinstance(value, int)
        if whole and not parameter.do_not_specialize and (value.data_ptr() if tensor else value) % 16 == 0:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assembled(ptx: str) -> dict[str, int]:
    """Registers, and bytes of stack and spills, of a thread, as the assembler tells them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        (target,) = re.findall(r"\.target (\w+)", ptx)
        assembler = Path(nvidia.__file__).parent / "bin" / "ptxas"
        command = [assembler, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
        "stack": max(int(stack) for stack, _, _ in numbers),
        "spills": max(int(stores) + int(loads) for _, stores, loads in numbers),
    }
