"""Fixtures for all tests: a tiny random Llama with heads,
saved in the format of real checkpoints.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.training.tiny import Tiny
    from tswift.loading.model import LoadedModel

# One thread for torch, here and in subprocesses: tiny models only lose by more, and test processes
# run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# What passes cost, and compiled C, is remembered by the tests, and not where the user's own runs
# would find it. Test processes that run side by side or that tests start share it, as each head
# size takes the compiler two seconds.
if "TSWIFT_TESTS_CACHE" in os.environ:
    _CACHE = None
else:
    _CACHE = os.environ["TSWIFT_TESTS_CACHE"] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
        prefix="tswift-cache-"
    )
    os.environ["HF_DATASETS_CACHE"] = os.path.join(os.environ["XDG_CACHE_HOME"], "datasets")
    # or each process compiles all sources and tests anew
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False

import torch

gc.disable()  # until all is imported, see pytest_collection_finish

try:
    from hypothesis import Phase, settings
except ImportError:  # a machine that is borrowed for its GPU need not have it
    pass
else:
    # the same examples at every run, but at night; a tiny model's first pass takes longer than
    # others
    settings.register_profile(
        "dev", max_examples=20, deadline=None, derandomize=True, database=None
    )
    settings.register_profile("usual", settings.get_profile("dev"), max_examples=10)
    settings.register_profile("ci", settings.get_profile("dev"), max_examples=50)
    # the first example that fails will do
    settings.register_profile(
        "planted", settings.get_profile("dev"), phases=(Phase.explicit, Phase.generate)
    )
    settings.register_profile("nightly", max_examples=300, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))

# Without a GPU, Triton kernels are interpreted; that is decided when triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure():
    if _CACHE:
        _hand_on(_COMPILED, Path(_CACHE, "tswift"))


def pytest_unconfigure():
    if _CACHE:
        _hand_on(Path(_CACHE, "tswift"), _COMPILED)
        shutil.rmtree(_CACHE, ignore_errors=True)


_COMPILED = Path(__file__).parents[1] / "build" / "compiled"


def _hand_on(libraries: Path, folder: Path):
    """Copy compiled C of the last three days, which is called by its sources and checked when it is
    loaded.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)
    for file in libraries.glob("*.s[oh]*"):
        if time.time() - file.stat().st_mtime < 3 * 24 * 3600:
            shutil.copy2(file, folder)


def pytest_collection_finish():
    """What has been imported stays: no collection of garbage need look at it again."""
    gc.freeze()
    gc.enable()
    if "triton.runtime.interpreter" in sys.modules:
        _sum_products_in_one_order()
        _refuse_masks_of_numbers()
        _patch_once_a_launch()
        _make_types_once()


def _sum_products_in_one_order():
    """Let Triton's interpreter add up a product of matrices in one order.

    It takes numpy's, which on some processors sums a row by its place and by how many rows there
    are.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_self, a: TensorHandle, b: TensorHandle, added: TensorHandle, *_how):
        left, right = (part.data.astype(added.data.dtype) for part in (a, b))
        total = added.data.copy()
        with np.errstate(invalid="ignore"):  # infinity times 0, in tests of rows beside others
            for inner in range(left.shape[-1]):
                total += left[..., inner, None] * right[..., inner, None, :]
        return TensorHandle(total, added.dtype.scalar)

    InterpreterBuilder.create_dot = dot


def _refuse_masks_of_numbers():
    """Let every version of Triton's interpreter refuse what 3.9 does:
    a mask of a block and a number's comparison, which it holds as numbers.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def strict(name: str, place: int):
        theirs = getattr(InterpreterBuilder, name)

        def call(self, *given: TensorHandle, **named):
            if given[place].data.dtype != np.bool_:
                raise ValueError("mask has unsupported dtype")
            return theirs(self, *given, **named)

        setattr(InterpreterBuilder, name, call)

    strict("create_masked_load", 1)
    strict("create_masked_store", 2)


def _patch_once_a_launch():
    """Let Triton's interpreter replace the language's functions once a launch:
    it does so again in each call of a function of a kernel, which takes a quarter of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    of_all = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    right = interpreter._patch_lang
    interpreter._patch_lang = lambda fn: right(of_all)
    interpreter.InterpretedFunction.__call__ = lambda self, *given, **named: self.rewrite()(
        *given, **named
    )


def _make_types_once():
    """Let Triton's interpreter make each type once, and compute nothing for assertions about
    overflows, which it does not make: half of its time goes into both.
    """
    from triton.language import core
    from triton.runtime import interpreter

    blocks: dict[tuple[int, ...], core.block_type] = {}
    numpys: dict[str, np.dtype] = {}
    make, of_numpy = core.block_type.__init__, interpreter._get_np_dtype
    scalar = core.constexpr(1), core.tuple([])

    def block(self, element: core.dtype, shape):
        key = id(element), *map(core._unwrap_if_constexpr, shape)
        if key not in blocks:
            make(self, element, shape)
            self.of_tensor = (
                core.constexpr(self.numel),
                core.tuple([core.constexpr(size) for size in self.shape]),
            )
            blocks[key] = self
        self.__dict__.update(blocks[key].__dict__)

    def tensor(self, handle, kind: core.dtype):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = kind.of_tensor if kind.is_block() else scalar

    def numpys_of(kind: core.dtype) -> np.dtype:
        name = kind.scalar.name
        if name not in numpys:
            numpys[name] = of_numpy(kind)
        return numpys[name]

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpys_of
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


SENTENCES = [
    "The ship had lain three days becalmed, and the captain would not leave the deck.",
    "It was a truth that nobody in the drawing-room cared to hear, and so nobody spoke it.",
    "Café, naïve, größer, façade: words that take more bytes than they have letters.",
] * 20
_SIZES: dict[str, object] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def make_checkpoint(folder: Path, **changes) -> Path:
    """Write a tiny random Llama, its tokenizer and its heads to ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from recipes.corpus import train_tokenizer
    from tswift.speculators.heads import ChainedHeads

    tokenizer = train_tokenizer(SENTENCES, 320)
    settings = {
        **_SIZES,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        model.lm_head.weight.mul_(15)  # or every token would be about equally likely
        model.model.embed_tokens.weight.mul_(20)
    heads = ChainedHeads(model.config.hidden_size, 3)
    for head in heads.heads:
        torch.nn.init.normal_(head.linear.weight, std=0.02)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    heads.save(folder / "heads.safetensors")
    return folder


@pytest.fixture(autouse=True, scope="session")
def known_machine() -> Iterator[None]:
    """No second is spent on measuring this machine for a benchmark of a tiny model,
    or on what its steps cost: each is taken once; git is asked once.
    """
    import tswift.benchmarking.run as module
    from tswift import machine
    from tswift.benchmarking.roofline import Machine
    from tswift.drafting import costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "machine_for", lambda model: Machine(bandwidth=2e10, flops=1e11))
        patch.setattr(costs, "_REPEATS", (1, 1))
        patch.setattr(machine, "_git_commit", functools.cache(machine._git_commit))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_disk_is_waited_for() -> Iterator[None]:
    """That a file is to be written through is seen, and takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """What a test has started and failed to stop is killed, and is there for no other test."""
    from tests.jobs.killing import PROCESSES

    kept = len(PROCESSES)  # of a module's or session's fixtures
    yield
    for process in PROCESSES[kept:]:
        process.send(signal.SIGKILL)
        process.wait()
    del PROCESSES[kept:]


@pytest.fixture
def signals_heard() -> Iterator[None]:
    """A test that sends this process signals hears them, also in the background."""
    from tests.jobs import killing

    with killing.signals_heard():
        yield


@pytest.fixture(autouse=True, scope="session")
def every_check_is_made() -> Iterator[None]:
    """However often a model is loaded: a test may change what is checked."""
    from tswift import remembered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "cache_folder", lambda: None)
        yield


@pytest.fixture(scope="module")
def load_once() -> Iterator[Callable[..., LoadedModel]]:
    """For as long as this lasts, no model is loaded twice in the same way, by whoever loads it:
    what loads them.
    """
    import tswift.jobs.job
    import tswift.jobs.verification
    import tswift.machine
    from tswift.loading import model as loading

    real = loading.load_model
    remembered = functools.cache(loading.load_model)

    def cached(*arguments, **named) -> LoadedModel:
        try:
            return remembered(*arguments, **named)
        except TypeError:  # what cannot be remembered
            return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        for module in [
            module for name, module in sys.modules.items() if name.startswith("tswift.")
        ]:
            if getattr(module, "load_model", None) is real:
                patch.setattr(module, "load_model", cached)
        # asks git, which takes longer
        patch.setattr(tswift.machine, "_output", lambda command: None)
        yield cached


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with a tiny random Llama (float32, 4,096 positions),
    its tokenizer and three chained heads.
    """
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """A model that was trained for half a second, one of random weights, and a corpus."""
    from tests.training.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_shapes(monkeypatch):
    """Shapes small enough to be built in no time: ``shape:tiny`` and, with a tied LM head,
    ``shape:tied``.
    """
    from transformers import LlamaConfig, Qwen2Config

    from tswift.models.checkpoint import SHAPES

    settings = {**_SIZES, "bos_token_id": 7, "eos_token_id": 7, "dtype": "bfloat16"}
    monkeypatch.setitem(SHAPES, "tiny", LlamaConfig(**settings, tie_word_embeddings=False))
    monkeypatch.setitem(SHAPES, "tied", Qwen2Config(**settings, tie_word_embeddings=True))
