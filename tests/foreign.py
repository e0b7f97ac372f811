"""C programs compiled for an ARM processor, and run by qemu, as if they were this process's own:
``pytest -p tests.foreign``, with Debian's ``gcc-aarch64-linux-gnu`` and ``qemu-user-static``.

A pointer that a function is given is one of this process: foreign.c fetches what is behind it.
``TSWIFT_ARM`` names features of the processor, as Linux does. With more than one thread qemu 7.2
does not always come to an end.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.helpers import CPU
from tswift import native_build

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64-static"
ROOT = "/usr/aarch64-linux-gnu"
MISSING = [tool for tool in (COMPILER, EMULATOR) if not shutil.which(tool)]
DOTS = "asimddp"  # with which integers are summed by other instructions, and nothing else differs
_WORD = struct.Struct("q")
_PAGE = 4096
_DTYPES = torch.float32, torch.bfloat16, torch.float16


class Machine:
    """A process of the other processor."""

    def __init__(self):
        with tempfile.TemporaryDirectory() as folder:
            driver = Path(folder) / "driver"
            source = Path(__file__).with_suffix(".c")
            kept = ("-Wl,--no-as-needed", "-lm", "-ldl", "-pthread")  # for the libraries
            subprocess.run([COMPILER, "-O1", source, "-o", driver, *kept], check=True)
            self._process = subprocess.Popen(
                [EMULATOR, "-cpu", "max", "-L", ROOT, driver],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self.ask("/" + ROOT.strip("/") + "/lib/libm.so.6")
        self._memory = os.open("/proc/self/mem", os.O_RDWR)

    def ask(self, name: str) -> int:
        """A library's handle by its path, or a function's address."""
        return self._asked(_WORD.pack(0) + _WORD.pack(len(name)) + name.encode())

    def call(self, function: int, whole: list[int], floats: list[float]) -> int:
        padded = [*whole, *[0] * (10 - len(whole))]
        real = [*floats, *[0.0] * (2 - len(floats))]
        return self._asked(struct.pack("2q10q2f", function, 0, *padded, *real))

    def _asked(self, request) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        while True:
            kind, word = chr(self._word()), self._word()
            if kind == "r":
                return word
            if kind == "p":
                self._process.stdin.write(os.pread(self._memory, _PAGE, word))
                self._process.stdin.flush()
            else:
                os.pwrite(self._memory, self._read(self._word()), word)

    def _word(self) -> int:
        return int(_WORD.unpack(self._read(_WORD.size))[0])

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(size)
        assert len(found) == size, f"the emulator ended: {self._process.wait()}"
        return found


@functools.cache
def machine() -> Machine:
    return Machine()


class _Function(ctypes._CFuncPtr):
    """A function of the other processor, whose address others may be given."""

    _flags_ = 1
    _restype_ = ctypes.c_int

    def __call__(self, *given):
        kinds = self.argtypes or ()
        given = tuple(kind(each) for kind, each in zip(kinds, given, strict=False)) or given
        whole, floats = list[int](), list[float]()
        for each in given:
            if isinstance(each, (ctypes.c_float, ctypes.c_double)):
                floats.append(each.value)
            elif hasattr(each, "_obj"):  # by reference
                whole.append(ctypes.addressof(each._obj))
            elif isinstance(each, (ctypes.Array, ctypes.Structure)):
                whole.append(ctypes.addressof(each))
            else:
                whole.append(getattr(each, "value", each) or 0)
        address = ctypes.cast(self, ctypes.c_void_p).value or 0
        return machine().call(address, [_signed(each) for each in whole], floats)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 == 1 else number


class Library:
    """As ctypes' ``CDLL``."""

    def __init__(self, path: str):
        self._handle = machine().ask(path)
        if not self._handle:
            raise OSError(f"{path} does not load")

    def __getattr__(self, name: str) -> _Function:
        function = _Function(machine().ask(f"{self._handle} {name}"))
        setattr(self, name, function)
        return function


def pytest_configure():
    """Have all C programs be those of the other processor."""
    os.environ["CC"] = COMPILER
    features = {*os.environ.get("TSWIFT_ARM", "").split()}
    native_build.architecture = lambda: "aarch64"
    native_build.processor_features = lambda: features
    native_build.ctypes = SimpleNamespace(**{**vars(ctypes), "CDLL": Library})


def hashes(integers_only: bool) -> dict[str, str]:
    """Of what the C programs compute by one thread: attention, products with weights of every kind
    and, unless only sums of integers are asked for, the recurrence, tokens drawn, and what is
    recalled.
    """
    from tests.attention.test_native import attend, made
    from tests.drafting.test_history import RULES, recalled, thoughts, words
    from tests.forward.test_recurrent import random_rows
    from tests.lossless.bits import bits
    from tests.sampling.test_sampler_c import rows as logits_of
    from tswift.forward.cpu.products import PackedFloats, PackedLinear, multiply
    from tswift.forward.recurrent import step_states
    from tswift.models.codes import quantize
    from tswift.sampling.rule import Sampler

    torch.set_num_threads(1)
    floats = () if integers_only else _DTYPES
    found = {}
    for dtype in (*floats, torch.int16, torch.int8):
        for nodes, prefix in ((1, 700), (7, 130)):
            out = attend(*made(2, 3, 16, prefix, nodes, dtype))
            found[f"attention of {nodes} nodes in {dtype}"] = bits(out)
    torch.manual_seed(0)
    rows, weight = torch.randn(13, 97), torch.randn(40, 97)
    packed = {str(dtype): PackedFloats(weight.to(dtype)) for dtype in floats}
    packed |= {f"{count} bits": quantize(weight[:, 1:], count) for count in (4, 8)}
    for name, each in packed.items():
        linear = PackedLinear(each)
        own = rows[:, -linear.in_features :]
        outs = [multiply(linear.c, own[:n]) for n in (1, 2, 3, 13)]
        found[f"products with {name}"] = bits(*outs)
    if integers_only:
        return found
    for heads in (2, 4):
        stepped, state = random_rows(9, heads, 24, 80)
        chain = step_states(stepped, state, range(9), range(-1, 8), torch.empty_like(state))
        tree = step_states(stepped, state, range(9), [-1, 0, 0, 1, 1, 2, -1, 6, 7])
        found[f"a recurrence of {heads} heads"] = bits(chain, tree)
    for name, params in RULES.items():
        text = words(60)
        recall, _ = recalled(text, thoughts(60), [21, 1, 3, 30, *[1] * 5], params)
        guesses = recall.guess([[text[-1]], [text[-1], 4, 1]], 3)
        found[f"recalled by {name}"] = str([(each.tokens, each.place) for each in guesses])
        rule = Sampler(params, 1, 300, CPU, prompt=2)
        rule.extend(text)
        logits, tokens = logits_of("usual", 5, 300, 1, torch.float32), torch.tensor(text[-5:])
        nodes = tokens, torch.arange(60, 65), torch.ones(5, 5, dtype=torch.bool).tril()
        found[f"drawn by {name}"] = str(rule.draw_nodes(logits, nodes)[0])
    return found


def main():
    """Print the hashes, in JSON."""
    pytest_configure()
    print(json.dumps(hashes(integers_only=DOTS not in os.environ["TSWIFT_ARM"])))


if __name__ == "__main__":
    main()
