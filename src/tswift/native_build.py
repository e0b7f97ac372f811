"""C files of the package: compiled by the user's compiler when first needed,
and kept for later processes.

What is loaded runs with the user's rights. So it is kept in a folder that nobody else can write to,
beside a hash of its content, and a file that does not fit its hash is not loaded but made anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tswift.errors import SlowWarning
from tswift.files import cache_folder
from tswift.machine import architecture, processor_features
from tswift.stages import tell

# Without traps, loops with a choice in them become vectors; no result changes by that.
_FLAGS = ("-std=gnu11", "-O3", "-g0", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
# For what every processor of a kind has; what adds to atomic numbers on ARM would be in a library
# of GCC's.
_VECTORS = {"x86_64": ("-mavx2", "-mfma", "-mf16c"), "aarch64": ("-mno-outline-atomics",)}
_DOTS = "-march=armv8.2-a+dotprod"
# What a library uses of libc and libm is in every process with PyTorch. Zig, which has them as
# sources, would take four seconds to make them anew. What is missing shows when it is loaded.
_LINKED = ("-shared", *(() if sys.platform == "darwin" else ("-nostdlib", "-Wl,-z,now")))
_FULL = (errno.ENOSPC, errno.EDQUOT)
# seconds that a compiler is waited for before that is told, and after
_QUIET, _PATIENCE = 30, 600
# Zig's compiler: with the headers and for the processors that are named, whatever is here; it
# would make -O2 of the other -O3
_ZIG = ("-P", "-m", "ziglang", "cc", "-Xclang", "-O3", "-target")
_ZIGS = {_DOTS: "-mcpu=generic+dotprod"}  # what it calls otherwise
_SYSTEM = "macos" if sys.platform == "darwin" else "linux-gnu"
_INSTALL = {
    "": "pip install 'tswift[compiler]'",  # everywhere
    "apt-get": "apt-get install build-essential",  # Debian and Ubuntu; gcc alone has no headers
    "apk": "apk add build-base",
    "dnf": "dnf install gcc",
    "xcode-select": "xcode-select --install",
}


class Unbuilt(Exception):
    """Why there is no library, in one line that goes on after what it is for."""


class _Final(Unbuilt):
    """What other options would not mend."""


def build(source: Path, *defined: str, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile a C file, which may use AVX2, FMA and F16C on an x86 processor, to a library,
    unless that was done before, and load it.

    ``defined`` are macros, as ``NAME=value``. If the compiler refuses the other options, as GCC 7
    does those for AVX-512, it is compiled without. What was compiled is kept in
    :func:`cache_folder`. Where there is none, or no room in it, it is compiled among temporary
    files, anew in every process. What failed is not tried again in the same process.

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
        retried = options and not isinstance(error, _Final)
        return _attempted(source, *defined) if retried else str(error)


def _built(source: Path, *defined: str, options: tuple[str, ...]) -> ctypes.CDLL:
    command = compiler_command(*defined, options=options)
    key = hashlib.sha256("\0".join([_text(source), *command]).encode()).hexdigest()[:20]
    cache = cache_folder()
    file = cache / f"{source.stem}-{key}.so" if cache else None
    library = _load(file) if file else None
    if library is not None:
        return library
    tell(f"compiling {source.name}")
    full: OSError | None = None
    for place in dict.fromkeys((cache, None)):
        try:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                compiled, made = (Path(folder) / name for name in ("made.o", "made.so"))
                _compile([*command, "-c", str(source), "-o", str(compiled)])
                _compile([*_compiler(), *_LINKED, str(compiled), "-o", str(made)])
                library = ctypes.CDLL(str(made))
                if file:
                    _keep(made, file)
                return library
        except OSError as error:
            if error.errno in _FULL:
                full = error
            elif full is None:
                raise Unbuilt(
                    f"fails: what the C compiler made does not load ({_first_line(str(error))})"
                ) from error
    assert full is not None
    raise _Final(f"cannot be compiled: {full.strerror} ({cache or tempfile.gettempdir()})")


def compiler_command(*defined: str, options: tuple[str, ...] = ()) -> list[str]:
    """All that the compiler is told but which file it reads, and what it makes of it.

    Raises:
        Unbuilt: there is no compiler, or none of ours serves this processor.
    """
    own = _VECTORS.get(architecture())
    found = torch.backends.cpu.get_cpu_capability()  # PyTorch looks for AVX2, too
    if own is None or ("-mavx2" in own and not found.startswith(("AVX2", "AVX512"))):
        raise Unbuilt("needs an x86 processor with AVX2 or a 64-bit ARM processor")
    compiler = _compiler()
    if "ziglang" in compiler:
        options = tuple(_ZIGS.get(option, option) for option in options)
    return [*compiler, *_FLAGS, *own, *options, *(f"-D{macro}" for macro in defined)]


def structures(*sources: Path) -> Any:
    """The structures that C files declare, by name: of pointers, numbers,
    and structures that come before.
    """
    known: dict[str, Any] = {
        "int64_t": ctypes.c_int64,
        "uint64_t": ctypes.c_uint64,
        "float": ctypes.c_float,
        "double": ctypes.c_double,
    }
    text = "".join(source.read_text() for source in sources)
    plain = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for declared, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", plain, re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for line in filter(None, map(str.strip, declared.split(";"))):
            kind: Any
            kind, names = line.split(maxsplit=1)
            pointers = re.findall(r"\*(\w+)", names)
            kind = ctypes.c_void_p if pointers else known.get(kind)
            fields += [(each.strip(), kind) for each in pointers or names.split(",")]
        assert len(dict(fields)) == len(fields), f"{name} has two fields of one name"
        if all(kind for _, kind in fields):  # others are C's own
            known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return SimpleNamespace(**known)


def _text(source: Path) -> str:
    """A C file's text, and that of the files of ours that it includes."""
    text = source.read_text()
    included = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    return "\0".join([text, *(_text(source.parent / name) for name in included)])


def _load(file: Path) -> ctypes.CDLL | None:
    """The library in a file of the cache; None unless the file has the content that was written."""
    with contextlib.suppress(OSError):
        if _hash_file(file).read_bytes() == _hash(file):
            return ctypes.CDLL(str(file))
    return None


def _keep(made: Path, file: Path) -> None:
    """Move a new library into the cache, and its hash beside it; nothing where that fails,
    as on a full disk.
    """
    digest = made.with_suffix(".sha256")
    with contextlib.suppress(OSError):
        digest.write_bytes(_hash(made))
        for each in (made, digest):
            with each.open("rb") as written:
                # or a power cut could leave the new name with half of the content
                os.fsync(written.fileno())
        made.replace(file)  # in one step: another process may do the same
        digest.replace(_hash_file(file))


def _hash_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _hash(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


@functools.cache
def widest_vectors() -> tuple[str, ...]:
    """The compiler's options for AVX-512, and for sums of products of integers,
    where the processor has them; on an ARM processor, for the latter.
    """
    features = processor_features()
    if architecture() == "aarch64":
        return (_DOTS,) if "asimddp" in features else ()
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return ("-mavxvnni",) if "avx_vnni" in features else ()
    sums = ("-mavx512vnni",) if "avx512_vnni" in features else ()
    return ("-mavx512f", "-mavx512bw", "-mprefer-vector-width=512", *sums)


def _compiler() -> list[str]:
    """The C compiler's command: ``CC``, or the first that is found, or that of the package
    ``ziglang``.
    """
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unbuilt(f"needs a C compiler: CC cannot be read: {error}") from error
    candidates = [given] if given else [["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    if given:
        raise Unbuilt(f"needs a C compiler: {given[0]} (CC) is not there")
    if find_spec("ziglang"):
        return [sys.executable, *_ZIG, f"{architecture()}-{_SYSTEM}"]
    mends = [how for tool, how in _INSTALL.items() if not tool or shutil.which(tool)][:2]
    raise Unbuilt(f"needs a C compiler: get one by {' or by '.join(mends)}, or name one by CC")


def _compile(command: list[str]) -> None:
    """Run a compiler, whose last word is the file that it makes; others are made beside it.

    OSError where there is no room for them.
    """
    beside = str(Path(command[-1]).parent)
    folders = dict.fromkeys(("TMPDIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), beside)
    try:
        compiler = subprocess.Popen(
            command,
            env={**os.environ, **folders, "LC_ALL": "C"},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise Unbuilt(f"needs a C compiler: {_first_line(str(error))}") from error
    with compiler:
        try:
            said = _waited_for(compiler)
        except BaseException:
            compiler.kill()
            raise
    if compiler.returncode:
        for number in _FULL:
            if os.strerror(number) in said:
                raise OSError(number, os.strerror(number))
        raise Unbuilt(f"needs another C compiler: {_first_line(said)}")


def _waited_for(compiler: subprocess.Popen[str]) -> str:
    """What a compiler has said when it ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return compiler.communicate(timeout=_QUIET)[1]
    warnings.warn(
        f"a C program is compiled, once; after {_QUIET} s it is not done, as on a machine that is "
        f"busy, and {_PATIENCE // 60} minutes more are given to it",
        SlowWarning,
        stacklevel=2,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        return compiler.communicate(timeout=_PATIENCE)[1]
    raise _Final(f"was not compiled within {_PATIENCE // 60} minutes, as on a machine that is busy")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[0][:200]


_POOL = Path(__file__).with_name("pool.c")


@functools.cache
def parallel_region() -> int:
    """The address of a function that shares work with threads: ``tswift_parallel`` in pool.c.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    return ctypes.cast(build(_POOL).tswift_parallel, ctypes.c_void_p).value or 0
