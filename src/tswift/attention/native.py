"""Tree attention on the CPU by a C kernel of our own, prefix and tree in one go.

PyTorch's CPU operator multiplies 2 to 16 rows far below the processor's bandwidth: 8 rows took it 2.5 times as long as
one. The kernel reads keys and values once for all rows. As all C files of ours, it is compiled where the user has a C
compiler, when it is first needed, and kept for later processes (:func:`build`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tswift.attention.sdpa import MOST_WIDTH, Attention, Layout, TreeAttention

_FLAGS = ("-std=gnu11", "-O3", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-shared", "-fPIC")
_PATIENCE = 120  # seconds


class Unbuilt(Exception):
    """Why there is no library, in one line that goes on after what it is for."""


def build(source: Path, *defined: str, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile a C file, which may use AVX2, FMA and F16C, to a library, unless that was done before, and load it.

    ``defined`` are macros, as ``NAME=value``. If the compiler refuses the other options, as GCC 7 does those for
    AVX-512, it is compiled without. What was compiled is kept in the user's cache folder (:func:`cache_folder`). Where
    that cannot be written, it is compiled anew in every process. What failed is not tried again in the same process.

    Raises:
        Unbuilt: there is no compiler, or it fails; or the processor cannot run the library.
    """
    library = _attempted(source, *defined, options=options)
    if isinstance(library, str):
        raise Unbuilt(library)
    return library


@functools.cache
def _attempted(source: Path, *defined: str, options: tuple[str, ...] = ()) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        return _built(source, *defined, options=options)
    except Unbuilt as error:
        return _attempted(source, *defined) if options else str(error)


def _built(source: Path, *defined: str, options: tuple[str, ...]) -> ctypes.CDLL:
    vectors = torch.backends.cpu.get_cpu_capability()  # PyTorch looks for AVX2, too
    if platform.machine() not in ("x86_64", "AMD64") or not vectors.startswith(("AVX2", "AVX512")):
        raise Unbuilt("needs an x86 processor with AVX2")
    command = [*_compiler(), *_FLAGS, *options, *(f"-D{macro}" for macro in defined)]
    key = hashlib.sha256("\0".join([source.read_text(), *command]).encode()).hexdigest()[:20]
    name = f"{source.stem}-{key}.so"
    cache = cache_folder()
    if cache and (cache / name).exists():
        with contextlib.suppress(OSError):  # what lies there may be broken
            return ctypes.CDLL(str(cache / name))
    try:
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / name
            _compile([*command, str(source), "-o", str(made)])
            library = ctypes.CDLL(str(made))
            if cache:
                with contextlib.suppress(OSError):
                    made.replace(cache / name)  # at once, whoever else does it
    except OSError as error:
        raise Unbuilt(f"fails: what the C compiler made does not load ({_first_line(str(error))})") from error
    return library


@functools.cache
def widest_vectors() -> tuple[str, ...]:
    """The compiler's options for AVX-512, and for its sums of 16-bit products, where the processor has them."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return ()
    sums = ("-mavx512vnni",) if "avx512_vnni" in Path("/proc/cpuinfo").read_text() else ()
    return ("-mavx512f", "-mavx512bw", "-mprefer-vector-width=512", *sums)


def cache_folder() -> Path | None:
    """``tswift`` in ``XDG_CACHE_HOME``, else ``~/.cache``; None if nothing can be kept there."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(given) if given else Path.home() / ".cache") / "tswift"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter if there is no home
        return None
    return folder if os.access(folder, os.W_OK) else None


def _compiler() -> list[str]:
    """The C compiler's command: ``CC``, or the first that is found."""
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unbuilt(f"needs a C compiler: CC cannot be read: {error}") from error
    candidates = [given] if given else [["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise Unbuilt(f"needs a C compiler: {given[0]} (CC) is not there" if given else "needs a C compiler")


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unbuilt(f"needs a C compiler: {_first_line(str(error))}") from error
    if done.returncode:
        raise Unbuilt(f"needs another C compiler: {_first_line(done.stderr)}")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[0][:200]


_SOURCE, _POOL = Path(__file__).with_name("native.c"), Path(__file__).with_name("pool.c")
_MOST_ROWS = 128  # with more, as in a prompt's chunks, the stock operators compute well
_WIDEST = 256  # head size
_TILE = 16  # head sizes are a multiple
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 3}


class _Call(ctypes.Structure):
    """``Call`` in native.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "ancestors", "depths", "out")),
        *((name, ctypes.c_void_p) for name in ("scratch", "parallel", "key_steps", "value_steps")),
        *((name, ctypes.c_int64) for name in ("keys_head", "values_head", "kv_heads", "rows", "prefix", "nodes")),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class NativeAttention(Attention):
    """Attention for x86 CPUs in float32, bfloat16 and float16.

    Keys and values are read in their own dtype; all else is computed in float32. With ``steps`` they are int16: see
    native.c. A path's slots are in the order of its positions. Head sizes that are no multiple of 16 or above 256,
    passes with more than 64 nodes and 128 rows per KV head, and those that are differentiated are left to
    :class:`~tswift.attention.sdpa.TreeAttention`.
    """

    EXACT: ClassVar[bool] = True

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        self._given = layout, int(prefix), nodes, ancestors
        self._stock: Attention | None = None
        self._ancestors = None if ancestors is None else ancestors.contiguous()
        self._depths = None if ancestors is None else ancestors.sum(1) - 1
        self._threads = torch.get_num_threads()
        self._scratch = torch.empty(0, dtype=torch.float32, device=layout.device)
        self.steps: Tensor | None = None  # [2, kv heads, d], as a layer's of KVShape

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        layout, prefix, nodes, _ = self._given
        rows, width = layout.groups * nodes, query.shape[-1]
        kernel = _kernel(width, keys.dtype)
        learns = query.requires_grad and torch.is_grad_enabled()  # the kernel has no gradient
        if kernel is None or learns or (nodes > MOST_WIDTH and rows > _MOST_ROWS):
            self._stock = self._stock or TreeAttention(*self._given)
            return self._stock(query, keys, values, scale)
        keys, values = (x if x.stride()[1:] == (width, 1) else x.contiguous() for x in (keys, values))
        packed = query.to(torch.float32).contiguous()
        out = torch.empty_like(packed)
        given = packed, keys, values, self._ancestors, self._depths, out, None
        call = _Call(
            *(None if each is None else each.data_ptr() for each in given),
            parallel_region(),
            *((None, None) if self.steps is None else (each.data_ptr() for each in self.steps)),
            *(keys.stride(0), values.stride(0), len(keys), rows, prefix, nodes, self._threads),
            scale * math.log2(math.e),
        )
        size = kernel.tswift_scratch(ctypes.byref(call))
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.float32, device=layout.device)
        call.scratch = self._scratch.data_ptr()
        kernel.tswift_attend(ctypes.byref(call))
        return out.to(query.dtype)


def takes(width: int) -> bool:
    """Whether the kernel can be built for heads of a size; others are left to the stock operators."""
    return 0 < width <= _WIDEST and width % _TILE == 0


def library(width: int, dtype: torch.dtype) -> ctypes.CDLL:
    """The kernel for a head size and a dtype of keys and values, one of :data:`KINDS`.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    defined = f"WIDTH={width}", f"KIND={KINDS[dtype]}", f"DRAFTED={MOST_WIDTH}"
    kernel = build(_SOURCE, *defined, options=widest_vectors())
    kernel.tswift_scratch.restype = ctypes.c_int64
    return kernel


@functools.cache
def _kernel(width: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """What computes heads of this size; None if the stock operators have to."""
    if not takes(width) or dtype not in KINDS:
        return None
    try:
        return library(width, dtype)
    except Unbuilt:  # another size was built when the model was loaded: its layers have heads of several
        return None


@functools.cache
def parallel_region() -> int:
    """The address of a function that shares work with threads: ``tswift_parallel`` in pool.c.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    return ctypes.cast(build(_POOL).tswift_parallel, ctypes.c_void_p).value or 0
