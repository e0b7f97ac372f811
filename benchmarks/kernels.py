"""What does the compiler make of the Triton kernels, for GPUs that are not here? (development only)

Every launch that the attention backend would make is compiled instead, and assembled once more for the assembler's
account of registers and spills. Prints a Markdown table, or a JSON line per kernel. TRITON_INTERPRET must not be set.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --json --case 90,bfloat16,8,4,128,32,tree --case 80,float16,2,2,256,1,chain

A case is compute capability, dtype, KV heads, query heads per KV head, head size, nodes, ``tree`` or ``chain``, and
optionally ``window`` and ``softcap``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.offline import assembled, compiled_launch
from tswift.attention import triton as backend
from tswift.attention.layout import Layout
from tswift.attention.special import AttentionSpec

NAMES = ("attend_chunk", "combine_chunks", "store_new")
# KB of shared memory of a multiprocessor and of a program at most, programs and threads at most
LIMITS = {80: (164, 163, 32, 2048), 90: (228, 227, 32, 2048)}
SHAPES = [  # llama3.1-8b, qwen2.5-7b, yarn-llama2-7b; the bundled models' head size, padded ones, gemma's
    *(
        ("bfloat16", 8, 4, 128, nodes, kind)
        for nodes, kind in ((1, "chain"), (8, "tree"), (32, "tree"), (512, "chain"))
    ),
    *(("bfloat16", 4, 7, 128, nodes, "tree") for nodes in (8, 18)),
    *(("bfloat16", 32, 1, 128, nodes, "tree") for nodes in (16, 128)),
    *(("float16", 8, 4, 128, nodes, "tree") for nodes in (16, 32)),
    *(("bfloat16", 2, 4, 64, nodes, "tree") for nodes in (4, 32)),
    *(("bfloat16", 8, 1, 80, nodes, "tree") for nodes in (64, 128)),
    *(("bfloat16", 4, 2, 256, nodes, "tree") for nodes in (8, 64)),
    *(("bfloat16", 8, 4, 128, nodes, "tree", "window") for nodes in (4, 32)),
    *(("bfloat16", 4, 2, 256, nodes, "tree", "softcap") for nodes in (8, 64)),
    *(("bfloat16", 4, 2, 256, nodes, "tree", "window", "softcap") for nodes in (8, 64)),
    *(("float32", 4, 7, size, 2, "tree") for size in (64, 96, 256)),
]


class Compiler:
    """Stands in a kernel's place: to launch it is to compile it."""

    def __init__(self, name: str, capability: int, found: list[dict[str, Any]]) -> None:
        self.name, self.kernel, self.capability, self.found = name, getattr(backend, name), capability, found

    def __getitem__(self, grid: tuple[int, ...]) -> Compiler:
        return self

    def __call__(self, *args: Any, **given: Any) -> None:
        """Compile for arguments like these."""
        compiled = compiled_launch(self.kernel, args, given, self.capability)
        given |= dict(zip(self.kernel.arg_names, args, strict=False))
        ptx = compiled.asm["ptx"]
        self.found.append(
            {"kernel": self.name, "capability": self.capability}
            | {name: given.get(name) for name in ("HEAD", "GROUPS", "ROWS", "KEYS", "TREE", "WINDOW", "SOFTCAP")}
            | {"warps": compiled.metadata.num_warps, "stages": compiled.metadata.num_stages}
            | resources(ptx, self.capability, compiled.metadata.num_warps, compiled.metadata.shared)
            | {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"), "copies": ptx.count("cp.async.cg")}
            | {"arithmetic": arithmetic(ptx)}
        )


def arithmetic(ptx: str) -> str:
    """A hash of what is done with floating-point numbers, and exchanged between threads, in its order.

    Kernels that have it in common round alike, if their threads hold the same elements.
    """
    found = re.findall(r"^\s*(?:@%p\d+ )?(\w+[\w.:]*)\s.*;", ptx, re.MULTILINE)
    kept = [each for each in found if re.search(r"\.(f|bf)(16|32)|shfl\.sync\.bfly", each)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def resources(ptx: str, capability: int, warps: int, shared: int) -> dict[str, int]:
    """What a program takes of a multiprocessor, in bytes where it is memory, and how many programs fit into one."""
    taken = assembled(ptx)
    registers = taken["registers"]
    total, _, most, threads = LIMITS[capability]
    by_registers = 65_536 // (-(-registers // 8) * 8 * 32 * warps)
    fit = min(most, threads // (32 * warps), by_registers, total * 1024 // (shared + 1024))
    return {"registers": registers, "spills": taken["spills"], "shared": shared, "programs": fit}


def compiled(
    capability: int, dtype: str, kv_heads: int, groups: int, size: int, nodes: int, kind: str, *more: str
) -> Iterator[dict[str, Any]]:
    """The kernels of one pass."""
    found: list[dict[str, Any]] = []
    kept = {name: getattr(backend, name) for name in (*NAMES, "_generation")}
    try:
        for name in NAMES:
            setattr(backend, name, Compiler(name, capability, found))
        backend._generation = lambda device: capability // 10
        type_ = getattr(torch, dtype)
        query = torch.zeros(nodes, kv_heads * groups, size, dtype=type_).transpose(0, 1)
        keys, new = (torch.zeros(kv_heads, many, size, dtype=type_) for many in (1024, nodes))
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool).tril() if kind == "tree" else None
        length = torch.zeros((), dtype=torch.int32)
        wants = AttentionSpec(4096 if "window" in more else None, 50.0 if "softcap" in more else None)
        attention = backend.TritonAttention(Layout(kv_heads, groups, type_, query.device), length, nodes, ancestors)
        attention(query, keys, keys, 1.0, wants)
        backend.TritonAttention.store(keys, keys, new, new, length)
    finally:
        for name, value in kept.items():
            setattr(backend, name, value)
    for each in found:
        yield {"dtype": dtype, "nodes": nodes} | each


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown; a kernel that several passes share is shown once."""
    columns = ("kernel", "dtype", "head size", "for", "rows", "keys per tile", "warps", "stages")
    columns += tuple(
        f"sm_{capability} {name}" for capability in LIMITS for name in ("registers", "spilled bytes", "KB", "programs")
    )
    rows: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for each in found:
        words = ["tree" if each["TREE"] else "chain"] if each["TREE"] is not None else []
        words += ["window"] if each["WINDOW"] else []
        words += ["soft cap"] if each["SOFTCAP"] else []
        words += [f"{each['GROUPS']} heads"] if each["GROUPS"] else []
        layout = (each["ROWS"], each["KEYS"] or "", each["warps"], each["stages"])
        key = (each["kernel"], each["dtype"], each["HEAD"], ", ".join(words), *layout)
        rows.setdefault(key, {})[each["capability"]] = each
    yield "| " + " | ".join(columns) + " |"
    yield "| --- | --- | ---: | --- |" + " ---: |" * (len(columns) - 4)
    for key, by in sorted(rows.items(), key=lambda row: [str(x).rjust(4) for x in row[0]]):
        cells = [str(cell) for cell in key]
        for capability in LIMITS:
            each = by.get(capability)
            cells += (
                ["", "", "", ""]
                if each is None
                else [
                    str(each["registers"]),
                    str(each["spills"]),
                    f"{each['shared'] / 1024:.1f}",
                    str(each["programs"]),
                ]
            )
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a JSON line per kernel instead of a table")
    parser.add_argument("--case", action="append", default=[], help="as told in the file's docstring")
    args = parser.parse_args()
    cases: list[tuple[Any, ...]] = [
        tuple(int(word) if word.isdigit() else word for word in case.split(",")) for case in args.case
    ]
    found = []
    for case in cases or [(capability, *shape) for shape in SHAPES for capability in LIMITS]:
        for each in compiled(*case):
            found.append(each)
            if args.json:
                print(json.dumps(each), flush=True)
    if not args.json:
        print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
