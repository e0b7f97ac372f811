"""A C file of ours, compiled for this machine when it is first needed and kept for later processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_FLAGS = ("-std=gnu11", "-O3", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-shared", "-fPIC")
_PATIENCE = 120  # seconds


class Unbuilt(Exception):
    """Why there is no library, in one line that goes on after what it is for."""


def build(source: Path, *defined: str, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile a C file to a library, unless that was done before, and load it.

    If the compiler refuses the options, as GCC 7 does those for AVX-512, it is compiled without.

    What was compiled is kept in ``tswift`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``). Where
    that cannot be written, it is compiled anew in every process. What failed is not tried again in the same process.

    Args:
        source: the file; it needs no library and may use AVX2, FMA and F16C.
        defined: macros, as ``NAME=value``.
        options: of the compiler, besides.

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
    if platform.machine() not in ("x86_64", "AMD64") or not _capable():
        raise Unbuilt("needs an x86 processor with AVX2")
    command = [*_compiler(), *_FLAGS, *options, *(f"-D{macro}" for macro in defined)]
    key = hashlib.sha256("\0".join([source.read_text(), *command]).encode()).hexdigest()[:20]
    name = f"{source.stem}-{key}.so"
    cache = _cache()
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


def _capable() -> bool:
    """Whether the processor has AVX2, which PyTorch looks for, too."""
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))


@functools.cache
def widest_vectors() -> tuple[str, ...]:
    """The compiler's options for AVX-512, and for its sums of 16-bit products, where the processor has them."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return ()
    sums = ("-mavx512vnni",) if "avx512_vnni" in Path("/proc/cpuinfo").read_text() else ()
    return ("-mavx512f", "-mavx512bw", "-mprefer-vector-width=512", *sums)


def _cache() -> Path | None:
    """Where libraries are kept; None if nothing can be."""
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
