"""What does the compiler make of the Triton kernels, for GPUs that are not here? (development only)

Every launch that the attention backend would make is compiled instead, and assembled once more for
the assembler's account of registers and spills. Prints a Markdown table, or a JSON line per kernel.
TRITON_INTERPRET must not be set.

    python -m benchmarks.offline --json
    python -m benchmarks.offline --case 90,bfloat16,8,4,128,32,tree --case 80,float16,2,2,64,1,chain

A case is compute capability, dtype, KV heads, query heads per KV head, head size, nodes, ``tree``
or ``chain``, and optionally ``window``, ``softcap`` and ``int8``, a cache of codes. Or it is
compute capability, dtype, KV heads, query heads per KV head, head size, hidden size, size of the
MLP, and ``layer``: the kernels between a layer's products; optionally ``norms`` of heads, and
``int8``. With ``codes`` in the place of ``layer``, products of codes, of forms as GGUF files call
them: of most matrices, of values' and of the LM head. Or it is compute capability, dtype, KV heads,
head size, nodes, and ``walk``: the kernels
that lay a tree out, walk it and commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource

from benchmarks import tables
from tswift.attention import triton as backend
from tswift.attention.sdpa import AttentionSpec, Layout
from tswift.caches import FullKV, KVShape
from tswift.decoding import device_tree_check, device_tree_triton
from tswift.decoding.device_tree import Path as Walked
from tswift.forward.cuda import code_kernels, layer_kernels, recurrence_triton
from tswift.forward.recurrence import Rows
from tswift.models.codes import CodesOnDevice
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler

_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    int: "i32",
    float: "fp32",
}
# what makes floats of codes
_OF_CODES = ("cvt.rn.f32.s8", "cvt.rn.f16.s16", "sub.bf16x2")
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


def compiled_launch(
    kernel: Any, args: tuple[Any, ...], named: Mapping[str, Any], capability: int
) -> Any:
    """The kernel as Triton would compile it for these arguments of a launch,
    for a compute capability such as 90.
    """
    options = {name: named[name] for name in _OPTIONS if named.get(name) is not None}
    values = dict(zip(kernel.arg_names, args, strict=False)) | dict(named)
    fixed, signature, aligned = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            fixed[name] = value
            signature[name] = "constexpr"
            continue
        tensor = isinstance(value, Tensor)
        signature[name] = _TYPES[value.dtype if tensor else type(value)]
        whole = tensor or isinstance(value, int)
        if (
            whole
            and not parameter.do_not_specialize
            and (value.data_ptr() if tensor else value) % 16 == 0
        ):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    with patch.object(CUDABackend, "make_cubin", lambda *given: b""):  # `assembled` makes one
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assembled(ptx: str) -> dict[str, int]:
    """Registers, and bytes of stack and spills, of a thread, as the assembler reports them,
    and instructions of a warp in the loop that multiplies: the longest, of several.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        (target,) = re.findall(r"\.target (\w+)", ptx)
        # Triton has two, and which of them takes its code depends on its version
        assembler = get_ptxas(int(re.sub(r"\D", "", target))).path
        command = [assembler, "-v", f"--gpu-name={target}", source, "-o", made]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", made]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "stack": max(int(stack) for stack, _, _ in numbers),
        "spills": max(int(stores) + int(loads) for _, stores, loads in numbers),
        "loop": longest_loop(code),
    }


def longest_loop(code: str) -> int:
    """Instructions of the longest innermost loop that multiplies matrices; 0 for none.

    Args:
        code: as ``nvdisasm -c`` prints it.
    """
    begins: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in code.splitlines():
        label = re.match(r"(\.L_x_\d+):", line.strip())
        if label is not None:
            begins[label[1]] = len(instructions)
        instructions += re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*);", line)
        back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if back is not None and back[1] in begins:
            loops.append((begins[back[1]], len(instructions)))
    inner = [
        (begin, end)
        for begin, end in loops
        if not any(begin <= other[0] and other[1] < end for other in loops)
        and any("MMA" in each for each in instructions[begin:end])
    ]
    return max((end - begin for begin, end in inner), default=0)


NAMES = ("attend_chunk", "combine_chunks", "store_new")
WALK_NAMES = {
    backend: ("append_path",),
    device_tree_triton: ("lay_out_node", "walk_tree"),
}
LAYER_NAMES = (
    "add_norm_rows",
    "rotate_rows",
    "silu_mul_rows",
    "multiply_heads",
    "multiply_add",
    "multiply_silu_rows",
)
# KB of shared memory of a multiprocessor and of a program at most, programs and threads at most
LIMITS = dict.fromkeys((90, 100), (228, 227, 32, 2048)) | dict.fromkeys(
    (89, 120), (100, 99, 24, 1536)
)
LIMITS |= {80: (164, 163, 32, 2048)}
# llama3.1-8b, qwen2.5-7b, yarn-llama2-7b; the bundled models' head size, padded ones, gemma's
SHAPES = [
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
    *(
        ("bfloat16", 8, 4, 128, nodes, kind, "int8")
        for nodes, kind in ((1, "chain"), (8, "tree"), (32, "tree"), (512, "chain"))
    ),
    *(("bfloat16", 4, 2, 256, nodes, "tree", "int8") for nodes in (8, 64)),
    *(("bfloat16", 4, 2, 256, nodes, "tree", "softcap") for nodes in (8, 64)),
    *(("bfloat16", 4, 2, 256, nodes, "tree", "window", "softcap") for nodes in (8, 64)),
]
LAYERS = [  # llama3.1-8b, qwen2.5-7b, qwen3-4b, smollm2-135m, 70b; one in float16
    ("bfloat16", 8, 4, 128, 4096, 14_336, "layer"),
    ("bfloat16", 4, 7, 128, 3584, 18_944, "layer"),
    ("bfloat16", 8, 4, 128, 2560, 9728, "layer", "norms"),
    ("bfloat16", 3, 3, 64, 576, 1536, "layer"),
    ("bfloat16", 8, 8, 128, 8192, 28_672, "layer"),
    ("float16", 8, 4, 128, 4096, 14_336, "layer"),
    ("bfloat16", 8, 4, 128, 4096, 14_336, "layer", "int8"),
]


PROMPT = 512  # rows
# of codes: bits, inputs of a block, whether there are minima, and the dtype of scales; as GGUF
# files' and --weights' are
FORMS = {
    "int4": (4, 32, True, torch.float16),
    "Q4_0": (4, 32, False, torch.float32),
    "Q4_K": (4, 32, True, torch.float32),
    "int8": (8, 32, True, torch.float16),
    "Q8_0": (8, 32, False, torch.float32),
    "Q6_K": (8, 16, False, torch.float32),
}
FORMS_OF_INT4 = ("int4", "int4", "int8")  # of most products, values' and the LM head's
CODES = [
    ("bfloat16", 8, 4, 128, 4096, 14_336, "codes", *forms)
    for forms in (FORMS_OF_INT4, ("Q4_K", "Q6_K", "Q6_K"), ("Q4_0", "Q6_K", "Q6_K"), ("Q8_0",) * 3)
]

# of Qwen3.5 and of a Mamba2: heads of keys, heads, keys, values
STATES = [
    ("float32", 16, 32, 128, 128, "states", "corrects"),
    ("float32", 1, 24, 128, 64, "states"),
]
WALKS = [("bfloat16", 8, 128, nodes, "walk") for nodes in (1, 32, 128)]


class Compiler:
    """Stands in a kernel's place: to launch it is to compile it."""

    def __init__(self, name: str, capability: int, kernels: list[dict[str, Any]]) -> None:
        self.name, self.capability, self.kernels = name, capability, kernels
        places = (layer_kernels, code_kernels, device_tree_triton, backend, recurrence_triton)
        self.kernel = next(getattr(place, name) for place in places if hasattr(place, name))

    def __getitem__(self, grid: tuple[int, ...]) -> Compiler:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        """Compile for arguments like these."""
        compiled = compiled_launch(self.kernel, args, named, self.capability)
        named |= dict(zip(self.kernel.arg_names, args, strict=False))
        ptx = compiled.asm["ptx"]
        self.kernels.append(
            {"kernel": self.name, "capability": self.capability}
            | {
                name: named.get(name)
                for name in ("HEAD", "GROUPS", "ROWS", "KEYS", "TREE", "WINDOW", "SOFTCAP", "GATED")
            }
            | {"warps": compiled.metadata.num_warps, "stages": compiled.metadata.num_stages}
            | resources(ptx, self.capability, compiled.metadata.num_warps, compiled.metadata.shared)
            | {
                "wgmma": ptx.count("wgmma.mma_async"),
                "mma": ptx.count("mma.sync"),
                "copies": ptx.count("cp.async.cg"),
            }
            | {"fused": len(re.findall(r"\bfma\.rn(\.ftz)?\.f32\b", ptx))}
            | {"weights": _weights(named) if self.name.startswith("multiply") else None}
            | {"arithmetic": arithmetic(ptx)}
        )


def _weights(named: dict[str, Any]) -> str:
    """The dtype of a product's weights."""
    first = next(named[name] for name in ("weights", "query", "gate") if name in named)
    return str(first.dtype).removeprefix("torch.")


def arithmetic(ptx: str) -> str:
    """A hash of what is done with floating-point numbers, and exchanged between threads,
    in its order.

    Kernels that have it in common round alike, if their threads hold the same elements. Left out is
    what makes floats of codes, exactly: eight warps share them as four do.
    """
    operators = re.findall(r"^\s*(?:@%p\d+ )?(\w+[\w.:]*)\s.*;", ptx, re.MULTILINE)
    operators = [name for name in operators if name not in _OF_CODES]
    kept = [name for name in operators if re.search(r"\.(f|bf)(16|32)|shfl\.sync\.bfly", name)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def resources(ptx: str, capability: int, warps: int, shared: int) -> dict[str, int]:
    """What a program takes of a multiprocessor, in bytes where it is memory,
    and how many programs fit into one.
    """
    taken = assembled(ptx)
    registers = taken["registers"]
    total, _, most, threads = LIMITS[capability]
    by_registers = 65_536 // (-(-registers // 8) * 8 * 32 * warps)
    fit = min(most, threads // (32 * warps), by_registers, total * 1024 // (shared + 1024))
    of_thread = {name: taken[name] for name in ("registers", "spills", "loop")}
    return of_thread | {"shared": shared, "programs": fit}


def compiled(
    capability: int,
    dtype: str,
    kv_heads: int,
    groups: int,
    size: int,
    nodes: int,
    kind: str,
    *more: str,
) -> list[dict[str, Any]]:
    """The kernels of one pass."""
    kernels: list[dict[str, Any]] = []
    compilers = {name: Compiler(name, capability, kernels) for name in NAMES}
    with patch.multiple(backend, generation_of=lambda device: capability // 10, **compilers):
        type_ = getattr(torch, dtype)
        query = torch.zeros(nodes, kv_heads * groups, size, dtype=type_).transpose(0, 1)
        new = torch.zeros(kv_heads, nodes, size, dtype=type_)
        keys, values = cache_of(type_, kv_heads, size, *more)
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool).tril() if kind == "tree" else None
        length = torch.zeros((), dtype=torch.int32)
        wants = AttentionSpec(
            4096 if "window" in more else None, 50.0 if "softcap" in more else None
        )
        attention = backend.TritonAttention(
            Layout(kv_heads, groups, type_, query.device), length, nodes, ancestors
        )
        attention(query, keys, values, 1.0, wants)
        backend.TritonAttention.store(keys, values, new, new, length)
    kept = {"cache": "int8"} if "int8" in more else {}
    return [{"dtype": dtype, "nodes": nodes} | kept | kernel for kernel in kernels]


def compiled_layer(
    capability: int,
    dtype: str,
    kv_heads: int,
    groups: int,
    size: int,
    hidden: int,
    inner: int,
    kind: str,
    *more: str,
) -> list[dict[str, Any]]:
    """The kernels of a layer without its attention: of a prompt, and over 32 rows, 64 and a wide
    chunk.
    """
    kernels: list[dict[str, Any]] = []
    compilers = {name: Compiler(name, capability, kernels) for name in LAYER_NAMES}
    type_ = getattr(torch, dtype)
    with patch.multiple(layer_kernels, **compilers):
        compile_prompt(type_, kv_heads, groups, size, hidden, inner, *more)
        for count in (32, 64, PROMPT):
            compile_products(type_, count, kv_heads, groups, size, hidden, inner, *more)
    shape = f"layer of {hidden:,}, {inner:,}{', norms of heads' if 'norms' in more else ''}"
    shape += ", int8 cache" if "int8" in more else ""
    return [kernel | {"dtype": dtype, "HEAD": size, "shape": shape} for kernel in kernels]


def compiled_walk(
    capability: int, dtype: str, kv_heads: int, size: int, nodes: int, kind: str
) -> list[dict[str, Any]]:
    """The kernels beside a pass that lay a tree out, walk it and commit."""
    kernels: list[dict[str, Any]] = []
    cpu = torch.device("cpu")
    depth = 4
    state, drawn, control = device_tree_check.random_state(nodes, depth, Random(0), cpu)
    longest = min(depth + 1, nodes)
    path = Walked(longest, torch.zeros(2 + 2 * longest, dtype=torch.int64))
    sampler = Sampler(SamplingParams(), 0, 100, cpu)
    own, full = (
        [torch.zeros(2, kv_heads, slots, size, dtype=getattr(torch, dtype))] * 2
        for slots in (64, 256)
    )
    with ExitStack() as patched:
        for place, names in WALK_NAMES.items():
            compilers = {name: Compiler(name, capability, kernels) for name in names}
            patched.enter_context(patch.multiple(place, **compilers))
        tree = device_tree_triton.lay_out(state, nodes, depth)
        device_tree_triton.walk(state, tree, drawn, control, sampler, path)
        if nodes > 1:
            accepted = path.places, path.slots, path.count
            backend.TritonAttention.append(full, full, *accepted)
            backend.TritonAttention.append(own, full, *accepted, state.length)
    return [kernel | {"dtype": dtype, "nodes": nodes, "HEAD": size} for kernel in kernels]


def compiled_states(
    capability: int,
    dtype: str,
    key_heads: int,
    heads: int,
    size: int,
    values: int,
    kind: str,
    *more: str,
) -> list[dict[str, Any]]:
    """The kernel that steps a recurrent layer's state: by nodes that the host knows, by a tree that
    the device makes, and by what is accepted of it.
    """
    kernels: list[dict[str, Any]] = []
    made = {"dtype": getattr(torch, dtype)}
    pairs = torch.zeros(2, 1, key_heads, size, **made)
    ones = torch.ones(2, 1, heads, **made)
    rows = Rows(*pairs, torch.zeros(1, heads, values, **made), *ones, corrects=bool(more))
    state = torch.zeros(heads, size, values, **made)
    compiler = Compiler("step_nodes", capability, kernels)
    with patch.object(recurrence_triton, "step_nodes", compiler):
        recurrence_triton.step_states(rows, state, [0], [-1], state)
        one = torch.zeros(1, dtype=torch.int64)
        recurrence_triton.step_tree(rows, state, recurrence_triton.tree_plan(one - 1))
        recurrence_triton.step_path(rows, state, recurrence_triton.path_plan(one), one)
    forms = ("by the host", "a tree", "a path")
    return [
        kernel | {"dtype": dtype, "HEAD": size, "shape": f"{values} values, {form}"}
        for kernel, form in zip(kernels, forms, strict=True)
    ]


def cache_of(type_: torch.dtype, kv_heads: int, size: int, *more: str) -> list[Tensor]:
    """Keys and values of one layer."""
    codes = "int8" in more
    kept = torch.int8 if codes else type_
    shape = KVShape(1, kv_heads, size, kept, torch.device("cpu"), steps_behind=codes)
    return FullKV(shape, 1024).parts[0][:2]


def heads_of(
    type_: torch.dtype, rows: int, kv_heads: int, groups: int, size: int, *more: str
) -> layer_kernels.HeadPlan:
    """Where heads of some rows go."""
    angles = torch.zeros(2, rows, size, dtype=type_)
    norms = (angles[0, 0], angles[0, 0]) if "norms" in more else (None, None)
    cache = cache_of(type_, kv_heads, size, *more)
    length = torch.zeros((), dtype=torch.int32)
    count = (kv_heads * groups, kv_heads)
    return layer_kernels.HeadPlan(count, tuple(angles), norms, 1e-5, *cache, length, rows)


def compile_prompt(
    type_: torch.dtype, kv_heads: int, groups: int, size: int, hidden: int, inner: int, *more: str
) -> None:
    """What stands between PyTorch's products, and before the first of ours."""
    rows = torch.zeros(32, hidden, dtype=type_)
    for added in (None, rows):
        layer_kernels.add_norm(rows, added, rows[0], 1e-5)
    layer_kernels.squares_of(rows)
    three = [
        torch.zeros(32, each * size, dtype=type_) for each in (kv_heads * groups, *[kv_heads] * 2)
    ]
    layer_kernels.rotate(three, heads_of(type_, 32, kv_heads, groups, size, *more))
    layer_kernels.silu_mul(*torch.zeros(2, 32, inner, dtype=type_))


def compile_products(
    type_: torch.dtype,
    count: int,
    kv_heads: int,
    groups: int,
    size: int,
    hidden: int,
    inner: int,
    *more: str,
) -> None:
    """Products of so many rows with weights."""

    def product(outputs: int, inputs: int) -> layer_kernels.Product:
        return layer_kernels.Product(torch.empty(outputs, inputs, dtype=type_, device="meta"))

    rows = torch.zeros(count, hidden, dtype=type_)
    tiles = -(-hidden // layer_kernels.TILE)
    states = layer_kernels.Hidden(rows, torch.zeros(count, tiles), rows[0], 1e-5)
    own = kv_heads * groups * size
    three = [product(outputs, hidden) for outputs in (own, kv_heads * size, kv_heads * size)]
    layer_kernels.project_heads(
        states, three, heads_of(type_, count, kv_heads, groups, size, *more)
    )
    for inputs in (own, inner):
        layer_kernels.add_product(
            torch.zeros(count, inputs, dtype=type_), product(hidden, inputs), rows
        )
    layer_kernels.multiply_silu(states, product(inner, hidden), product(inner, hidden))


def compiled_codes(
    capability: int,
    dtype: str,
    kv_heads: int,
    groups: int,
    size: int,
    hidden: int,
    inner: int,
    kind: str,
    *more: str,
) -> list[dict[str, Any]]:
    """The kernel of products of codes as a layer's four products and the LM head's launch it,
    over 1 row, 16, 32 and a wide chunk, with codes of the forms that :data:`FORMS` names.
    """
    kernels: list[dict[str, Any]] = []
    type_ = getattr(torch, dtype)
    first, value, end = (FORMS[name] for name in (more or FORMS_OF_INT4))

    def product(outputs: int, inputs: int, form: tuple[int, int, bool, torch.dtype] = first) -> Any:
        bits, block, minima, kept = form
        held = CodesOnDevice.__new__(CodesOnDevice)
        nn.Module.__init__(held)
        held.outputs, held.inputs, held.bits, held.block = outputs, inputs, bits, block
        held.bytes = torch.zeros(16, dtype=torch.int16)
        held.factors = torch.zeros(1, outputs, 1 + minima, dtype=kept)
        return code_kernels.CodedProduct(held)

    own, other = kv_heads * groups * size, kv_heads * size
    compiler = Compiler("multiply_codes", capability, kernels)
    with patch.multiple(code_kernels, multiply_codes=compiler):
        for count in (1, 16, 32, PROMPT):
            rows = torch.zeros(count, hidden, dtype=type_)
            three = [product(own, hidden), product(other, hidden), product(other, hidden, value)]
            code_kernels.project_heads(rows, three, heads_of(type_, count, kv_heads, groups, size))
            code_kernels.add_product(
                torch.zeros(count, inner, dtype=type_), product(hidden, inner), rows
            )
            code_kernels.multiply_silu(rows, product(inner, hidden), product(inner, hidden))
            code_kernels.multiply_rows(rows, product(128_256, hidden, end))
    follows = ("heads", "sum", "SiLU", "rows")
    forms = ", ".join(more or FORMS_OF_INT4)
    return [
        kernel
        | {"dtype": dtype, "HEAD": size}
        | {"shape": f"codes for {hidden:,}, {inner:,}: {forms}; {follows[at % 4]}"}
        for at, kernel in enumerate(kernels)
    ]


def main() -> None:
    """Compile; print a table, or a JSON line per kernel."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--json", action="store_true", help="a JSON line per kernel instead of a table"
    )
    parser.add_argument("--case", action="append", default=[], help="as the file's docstring says")
    args = parser.parse_args()
    cases: list[tuple[Any, ...]] = [
        tuple(int(word) if word.isdigit() else word for word in case.split(","))
        for case in args.case
    ]
    kernels = []
    for case in cases or [
        (capability, *shape)
        for shape in (*SHAPES, *LAYERS, *CODES, *WALKS, *STATES)
        for capability in (80, 89, 90)
        if capability != 89 or "codes" in shape
    ]:
        kinds = {"layer": compiled_layer, "codes": compiled_codes}
        kinds |= {"walk": compiled_walk, "states": compiled_states}
        one = next((made for kind, made in kinds.items() if kind in case), compiled)
        for kernel in one(*case):
            kernels.append(kernel)
            if args.json:
                print(json.dumps(kernel), flush=True)
    if not args.json:
        print(tables.markdown(kernels))


if __name__ == "__main__":
    main()
