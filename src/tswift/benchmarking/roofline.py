"""The roofline: the least time that passes and decodes can take on a machine (paper, table 2).

A pass must read the weights and the KV cache once, and must compute on every node. Both overlap, so
the floor of a pass is the longer of the two. Activations, the draft tree's own keys and values, and
sampling are left out: they are small, and a floor may lie below the truth but never above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int32, c_int64
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from tswift.attention.backends import HALVES
from tswift.benchmarking.config import RooflineQuery, fit_grid, fit_note
from tswift.benchmarking.record import Environment, Machine, Options, to_json
from tswift.decoding.pass_costs import STEADY
from tswift.errors import InputError, no_such
from tswift.forward.cpu.products import library
from tswift.forward.cpu.program import may_serve
from tswift.loading.packing import gguf_bytes, rounded_bytes
from tswift.machine import ask_for_huge_pages, available_bytes, environment, synchronize
from tswift.models.architecture import (
    is_moe,
    max_positions,
    own_quantization,
    refuse_routed,
)
from tswift.models.checkpoint import Checkpoint, as_input_error, silence
from tswift.models.codes import holds_codes
from tswift.models.config import SHAPE_PREFIX
from tswift.models.devices import find_device, find_dtype, kv_dtype_for, own_dtype
from tswift.models.shapes import Shape, shape_of
from tswift.native_build import Unbuilt, build, widest_vectors
from tswift.tables import Table, duration, quantity

if TYPE_CHECKING:
    from tswift.loading.model import LoadedModel

CONTEXTS = (4096, 20_000, 40_000, 60_000, 80_000, 100_000, 131_072)

Context = TypeVar("Context", float, np.ndarray)  # tokens attended to: a number, or several
_READ_BYTES = {"cpu": 2**29, "cuda": 2**32}  # beyond any processor's caches
_TRIES = 5  # whatever else the machine does, some of them are undisturbed
_LEAST_SECONDS = 0.1
_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # of square matrices
_LEAST_READ = 2**22  # of fewer bytes a measurement would be of the call
_RATES = Path(__file__).with_name("rates.c")
_ROUNDS = 1_000_000  # of multiply-adds, some milliseconds
_WIDEST = 32  # bits
_BUSY = (
    "measured beside other work (repeats usually took {:.2f} times the least): floors may be high."
)
_LONG = 0.02  # seconds; a product that takes so long is big enough


# Published: the paper's table 2 for the A100; NVIDIA's data sheets for the others. FLOP rates are
# dense and of 16 bits. Measured: the H100 of results/h100.
MACHINES = {
    "a100-80g": Machine(2.04e12, 312e12),
    "h100": Machine(3.08e12, 799e12),
    "h100-sxm": Machine(3.35e12, 989e12),
    "h200": Machine(4.8e12, 989e12),
}
_DTYPES = ("bfloat16", "float16")
# Seconds that a pass of up to 16 nodes took for each layer beside its bytes, by device and whether
# weights are codes, and where that was measured
_BESIDE = {
    ("h100", False): (57e-6, "on one H100 (results/h100)"),
    ("h100", True): (72e-6, "with weights of codes on one H200 (results/h200)"),
}


def find_machine(name: str, dtype: str) -> Machine:
    """A published machine, if its rate in this dtype is known."""
    if name not in MACHINES:
        raise no_such("device", name, ("here", "cpu", "cuda", *MACHINES), "device")
    if dtype not in _DTYPES:
        rate = f"{name} is known by its rate in {' and '.join(_DTYPES)}, not in {dtype}"
        raise InputError(f"{rate}; give one of these, or --bandwidth and --flops", "dtype")
    return MACHINES[name]


def machine_for(model: LoadedModel) -> Machine:
    """Rates of a model's device, for floors of passes over that model."""
    target = model.target
    shape = _measured_shape(model)
    return measure_machine(target.device, target.dtype, shape)


def _measured_shape(model: LoadedModel) -> Shape | None:
    """What a pass reads and multiplies; None where that is not known: quantised weights,
    or mixtures of experts.
    """
    target = model.target
    if is_moe(target.model.config) or (model.quantization and not holds_codes(target.model)):
        return None
    return shape_of(target.model, target.dtype.itemsize, target.kv_shape.dtype.itemsize)


def measure_machine(
    device: torch.device, dtype: torch.dtype, shape: Shape | None = None
) -> Machine:
    """Rates of a device, each the best of several tries: a floor must not lie above the truth.

    What passes over a small model read stays in the processor's caches, and integers are multiplied
    faster than floats: with a ``shape`` the rates are those of as many bytes as it reads, and of
    the narrowest numbers that it multiplies.
    """
    room = available_bytes(device)
    size = _READ_BYTES[device.type]
    if shape is not None and device.type == "cpu":
        size = min(size, max(shape.weight_bytes, _LEAST_READ))
    numbers = torch.empty(min(size, room // 4 if room else size) // 4, device=device)
    ask_for_huge_pages(numbers)  # as KV caches have them
    numbers.fill_(1)
    best, spread = _repeated(numbers.sum, device)
    bandwidth = numbers.nbytes / best
    rates = []
    for width in _SIZES:
        left, right = torch.rand(2, width, width, device=device).to(dtype)
        seconds, apart = _repeated(partial(torch.matmul, left, right), device)
        spread = max(spread, apart)
        rates.append(2 * width**3 / seconds)
        if seconds > _LONG:
            break
    if shape is not None and device.type == "cpu":
        rates.append(_multiplied(shape.narrowest_bits))
    return Machine(bandwidth, max(rates), spread if spread > STEADY else None)


def _multiplied(bits: int) -> float:
    """Operations per second of multiply-adds in registers, by all threads; 0 without a C compiler,
    or for 64 bits.
    """
    if bits > _WIDEST:
        return 0.0
    try:
        library = build(_RATES, options=widest_vectors())
    except Unbuilt:
        return 0.0
    library.tswift_multiply.restype = c_int64
    asked = c_int64(_ROUNDS), c_int64(bits), (c_int32 * 2)(3, 5)
    threads = torch.get_num_threads()
    rates = list[float]()
    with ThreadPoolExecutor(threads) as pool:
        begun = started = time.perf_counter()
        while len(rates) <= _TRIES or started - begun < _LEAST_SECONDS:
            started = time.perf_counter()
            counts = [
                work.result()
                for work in [pool.submit(library.tswift_multiply, *asked) for _ in range(threads)]
            ]
            rates.append(sum(counts) / (time.perf_counter() - started))
    return max(rates)


def _repeated(work: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """The least seconds of some repeats, and how many times as long they usually took."""
    seconds = list[float]()
    while len(seconds) <= _TRIES or sum(seconds) < _LEAST_SECONDS:
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    seconds = sorted(seconds[1:])  # the first one warms up
    return seconds[0], seconds[len(seconds) // 2] / seconds[0]


def read_bytes(shape: Shape, context: Context) -> Context:
    """Of weights, states, and the KV cache of ``context`` tokens."""
    return shape.weight_bytes + shape.state_bytes + context * shape.kv_bytes


def loading_seconds(shape: Shape, machine: Machine, context: Context) -> Context:
    """Seconds to read the weights, states, and the KV cache of ``context`` tokens."""
    return read_bytes(shape, context) / machine.bandwidth


def computing_seconds(shape: Shape, machine: Machine, context: Context, nodes: float) -> Context:
    """Seconds to compute on ``nodes`` nodes that attend to ``context`` tokens each."""
    return nodes * shape.flops(context) / machine.flops


def pass_seconds(shape: Shape, machine: Machine, context: Context, nodes: float) -> Context:
    """Floor of a pass: the longer of loading and computing."""
    loading = loading_seconds(shape, machine, context)
    seconds: Context = np.maximum(loading, computing_seconds(shape, machine, context, nodes))
    return seconds


def plain_seconds(shape: Shape, machine: Machine, context: int, tokens: int) -> float:
    """Floor of plain decoding of so many tokens after ``context``: the sum over its passes."""
    contexts = context + np.arange(tokens, dtype=float)
    return float(pass_seconds(shape, machine, contexts, 1).sum())


def plain_floor(model: LoadedModel, machine: Machine) -> Callable[[int, int], float] | None:
    """:func:`plain_seconds` of a model; None for one of quantised weights,
    or a mixture of experts.
    """
    shape = _measured_shape(model)
    return None if shape is None else partial(plain_seconds, shape, machine)


def roofline_tables(query: RooflineQuery) -> tuple[list[Table], Options]:
    """The tables of ``tswift roofline``, and all of it for JSON; of the model,
    its configuration alone is read.
    """
    checkpoint = Checkpoint.find(query.model)
    config = checkpoint.config
    is_shape = query.model.startswith(SHAPE_PREFIX)
    refuse_routed(config, query.model)
    if kind := own_quantization(config):
        raise InputError(
            f"{query.model} is quantised ({kind}); its configuration does not tell what a pass "
            "reads",
            "model",
        )
    place = (
        find_device("auto" if query.device in (None, "here") else query.device)
        if query.here
        else None
    )
    dtype = own_dtype(config) if query.dtype == "auto" else find_dtype(query.dtype)
    on_cpu = place is not None and place.type == "cpu"
    coded = query.weights is not None or (checkpoint.gguf is not None and checkpoint.gguf.kinds)
    if query.weights is not None and checkpoint.gguf is not None:
        raise InputError(f"{query.model} is a GGUF file, whose codes are what they are", "weights")
    if query.dtype == "auto" and on_cpu and (coded or not is_shape):
        dtype = torch.float32  # as `generate` and `bench` take it
    elif query.dtype == "auto" and coded and dtype not in HALVES:
        dtype = torch.bfloat16
    words = str(dtype).removeprefix("torch.")
    with silence(), as_input_error(query.model):
        in_c = not on_cpu or _has_programs()
        serves = in_c and may_serve(checkpoint.skeleton)
        kept = kv_dtype_for(query.kv_dtype, dtype, place or torch.device("cuda"), serves)
        shape = shape_of(checkpoint.skeleton, dtype.itemsize, kept.itemsize)
        # without C codes are made floats, once where memory has room
        if in_c and query.weights is not None:
            read = rounded_bytes(checkpoint.skeleton, query.weights, dtype, read=True)
            shape = replace(shape, coded_bytes=read)
        elif in_c and coded and checkpoint.gguf is not None:
            shape = replace(shape, coded_bytes=gguf_bytes(checkpoint.gguf, dtype, read=True))
    if query.bandwidth is not None and query.flops is not None:
        machine = Machine(query.bandwidth * 1e9, query.flops * 1e12)
        where = "as given"
    elif place is None:
        machine = find_machine(str(query.device), words)
        where = str(query.device)
    else:
        machine = measure_machine(place, dtype, shape)
        where = f"{Environment(**environment(place)).machine}, measured"
    beside = _BESIDE.get((where, shape.coded_bytes is not None))
    found = floors(shape, machine, query, max_positions(config), beside)
    rounded = {} if query.weights is None else {"weights": query.weights}
    about = {"model": query.model, "dtype": words, **rounded, "device": where}
    return found.tables(", ".join(about.values())), {**about, **found.as_dict()}


def _has_programs() -> bool:
    """Whether C programs can be compiled here."""
    try:
        library()
    except Unbuilt:
        return False
    return True


@dataclass(frozen=True)
class PassFloor:
    """The least time of a pass."""

    context: int
    nodes: int
    read_bytes: int
    loading_seconds: float
    computing_seconds: float
    floor_seconds: float
    reckoned_seconds: float | None = None  # what it takes, as one took that was measured


@dataclass(frozen=True)
class Floors:
    """Floors of passes, and of a job by plain decoding."""

    shape: Shape
    machine: Machine
    prefill: int  # the job's
    length: int
    passes: Sequence[PassFloor]
    plain_seconds: float  # of the job, prefill apart
    note: str = ""  # that the model has no room for what would be usual
    reckoned: str = ""  # where what passes take beside their floor was measured

    def as_dict(self) -> Options:
        """Everything, ready for JSON."""
        shape = asdict(replace(self.shape, states=None))
        del shape["states"]
        for name in ("weight_bytes", "kv_bytes", "state_bytes"):
            shape[name] = getattr(self.shape, name)
        words = ("note", "reckoned")
        rest = {name: value for name, value in asdict(self).items() if name not in words}
        for each in rest["passes"]:
            if each["reckoned_seconds"] is None:
                del each["reckoned_seconds"]
        return {**rest, "machine": to_json(self.machine), "shape": shape}

    def tables(self, label: str) -> list[Table]:
        """Figures of the paper's table 2, and floors of passes."""
        shape = self.shape
        machine = self.machine
        longest = max(floor.context for floor in self.passes)
        rates = {
            "memory bandwidth": quantity(machine.bandwidth, "B/s"),
            "peak": quantity(machine.flops, "FLOP/s"),
            "parameters": f"{shape.parameters:,}",
            "model weights, read by every pass": quantity(shape.weight_bytes, "B"),
            "KV cache of a token": f"{shape.kv_bytes:,} B",
            "states, read and written by a pass": quantity(shape.state_bytes, "B"),
            f"operations of a node at {longest:,} tokens": quantity(shape.flops(longest), "FLOP"),
            "loading time of the weights": _milliseconds(loading_seconds(shape, machine, 0), 1),
            f"computing time of a node at {longest:,} tokens": _milliseconds(
                computing_seconds(shape, machine, longest, 1), 1
            ),
            f"plain decoding of {self.length:,} tokens after {self.prefill:,}": duration(
                self.plain_seconds
            ),
        }
        if not shape.states:
            del rates["states, read and written by a pass"]
        rows = [
            [
                f"{floor.context:,}",
                f"{floor.nodes:,}",
                quantity(floor.context * shape.kv_bytes, "B"),
                quantity(floor.read_bytes, "B"),
                _milliseconds(floor.loading_seconds),
                _milliseconds(floor.computing_seconds),
                _milliseconds(floor.floor_seconds),
            ]
            for floor in self.passes
        ]
        columns = ["context", "nodes", "KV cache", "read", "loading", "computing", "floor"]
        notes = [
            "floor: the longer of the two, since a machine can load and compute at the same time. "
            "Real passes take longer: tswift bench says by how much.",
            *([f"{self.note}."] if self.note else []),
            *([_BUSY.format(machine.spread)] if machine.spread else []),
        ]
        reckoned = [each.reckoned_seconds for each in self.passes if each.reckoned_seconds]
        if reckoned:
            columns.append("reckoned")
            rows = [[*row, _milliseconds(each)] for row, each in zip(rows, reckoned, strict=True)]
            notes.append(
                "reckoned, not measured: the floor, and for each layer what a pass of Llama 3.1 "
                f"8B's shape took beside it {self.reckoned}."
            )
        return [
            Table(f"Roofline: {label}", ["what", "value"], [*rates.items()], left=1),
            Table(f"Least time of a pass: {label}", columns, rows, notes=notes),
        ]


def floors(
    shape: Shape,
    machine: Machine,
    query: RooflineQuery,
    positions: int,
    beside: tuple[float, str] | None = None,
) -> Floors:
    """Floors that a query asks for, of a model with so many ``positions``, and what a pass takes if
    a layer takes so many seconds more ``beside`` them, as was measured somewhere.
    """
    more, measured = beside or (0.0, "")
    given = "prefill" in query.given, "length" in query.given
    prefill, (length,), gave_way = fit_grid(query.prefill, (query.length,), given, positions)
    note = fit_note(query.model, positions, prefill, (length,)) if gave_way else ""
    usual = [context for context in CONTEXTS if context <= positions]
    contexts = query.contexts or usual or [positions]
    for context in contexts:
        if context > positions:
            raise InputError(
                f"{context:,} is more than the model's {positions:,} positions", "context"
            )
    if prefill + length > positions:
        need = f"{prefill:,} prompt tokens and {length:,} new ones need {prefill + length:,}"
        raise InputError(f"{need} positions, the model has {positions:,}", "length")
    passes = [
        PassFloor(
            context,
            nodes,
            int(read_bytes(shape, context)),
            loading_seconds(shape, machine, context),
            computing_seconds(shape, machine, context, nodes),
            floor := float(pass_seconds(shape, machine, context, nodes)),
            floor + shape.layers * more if more else None,
        )
        for context in contexts
        for nodes in query.nodes
    ]
    plain = plain_seconds(shape, machine, prefill, length)
    return Floors(shape, machine, prefill, length, passes, plain, note, measured)


def _milliseconds(seconds: float, digits: int = 2) -> str:
    """Milliseconds, with two significant digits where decimals would show nothing."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{digits}f} ms" if milliseconds >= 0.1 else f"{milliseconds:.2g} ms"
