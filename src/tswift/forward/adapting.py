"""A transformers model made ready to decode: attention and layers replaced and tested,
exact passes checked.

Logits with and without our attention are compared, which shows whatever an architecture does that
it does not.

A product over one row sums in another order than one over forty, so in bfloat16 two candidates that
nearly tie swap, and texts of different methods differ. Passes of one fixed number of rows sum alike
(``Target.width``), unless something in the model depends on other rows, or on a row's index. That
is tested once per loaded model, on this machine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tswift.attention.backends import BACKENDS, choose, why_not
from tswift.attention.backends_check import fails
from tswift.attention.sdpa import MAX_WIDTH, ROWS
from tswift.caches import FullKV, KVShape
from tswift.errors import InputError, NoFault, cause_of, fault_of
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.products import finely_rounded, multiplies_integers
from tswift.forward.cuda.fused_layers import fuse, is_fused, separate_layers
from tswift.forward.cuda.layers_check import try_kernels
from tswift.forward.hf import UnsupportedModel, watched
from tswift.forward.passes import PROMPT_CHUNK, Forwarded
from tswift.forward.recurrent import kernel_fault
from tswift.forward.target import Target
from tswift.forward.text import chunks, first_broken, forward_wide
from tswift.machine import synchronize
from tswift.models.architecture import heads_of, is_moe, max_positions
from tswift.models.codes import holds_codes
from tswift.models.config import SHAPE_PREFIX
from tswift.models.devices import dtype_name, keep_precision, kv_dtype_for
from tswift.native_build import Unbuilt
from tswift.remembered import NO_CHECKS, Checks
from tswift.stages import tell

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def select_backend(
    attention: str, dtype: torch.dtype, device: torch.device, config: PreTrainedConfig
) -> tuple[str, str]:
    """The attention backend that a name stands for,
    and a note if it is not the one that should serve here.

    A backend serves if it computes of random rows what sdpa computes.
    """
    kv_heads, groups, width = heads_of(config)
    backend = choose(attention, dtype, device, width)
    tried = backend != "sdpa" and (backend == "native" or device.type == "cuda")
    reason = fails(backend, dtype, device, width, (kv_heads, groups)) if tried else None
    if attention == "auto" and backend == "sdpa" and device.type == "cuda":
        reason = why_not("triton", dtype, device, width)
    if reason is None:
        return backend, ""
    if attention != "auto":
        raise InputError(reason, "attention")
    return "sdpa", reason


def try_graphs(target: Target) -> None:
    """Try whether passes can be captured as CUDA graphs."""
    if target.replays and target.device.type == "cuda":
        kv = FullKV(target.kv_shape, 1)
        target.prepare(kv, 1)
        for static in target.runner.passes[kv]:
            static.capture(kv.length)


@torch.inference_mode()
def measured_pass(target: Target) -> tuple[float, Tensor]:
    """Seconds of a pass over one token, the best of some, and its last hidden state."""
    kv = FullKV(target.kv_shape, 2)
    zero = torch.zeros(1, dtype=torch.int64, device=target.device)
    run: Callable[[], Forwarded] = partial(target.forward_eager, zero, zero, kv)
    if target.replays:
        length = torch.zeros((), dtype=torch.int32, device=target.device)
        run = target.capture(partial(target.compute_static, zero, zero, kv, length, None))
    seconds = []
    for _ in range(_REPEATS):
        synchronize(target.device)
        started = time.perf_counter()
        forwarded = run()
        synchronize(target.device)
        seconds.append(time.perf_counter() - started)
    return min(seconds), forwarded.hidden.clone()


_REPEATS = 10


_LEAST_WIDTH = 16
_HELD_KEYS = 1_500  # random keys in the cache: several chunks of every attention
# there a text that long is cut otherwise; at most so many bytes
_HELD_ON_CUDA = 20_000
_HELD_BYTES = 3 << 30
_OTHER_LENGTHS = (0, 99, 700)  # other lengths of the cache
_PROMPT_SIZES = (512, 77)  # tokens of prompts: one chunk that is full, and one that is not
_CHUNK_SIZES = (PROMPT_CHUNK, 77)  # tokens of wide passes over a text


class Inexact(Exception):
    """Why a token's bits depend on how it is forwarded, in one line."""


@torch.inference_mode()
def fingerprint(target: Target) -> str:
    """Hash of what a model computes on this machine in passes of its fixed width: same hash,
    same bits.

    Raises:
        Inexact: a token's bits depend on its place in a pass, on the other nodes, or on whether its
            ancestors are drafted or committed.
    """
    width = target.width
    device = target.device
    assert width is not None
    random = torch.Generator().manual_seed(0)
    kv, before = _held_cache(target, _held_by(target.kv_shape), width, random)
    ids = torch.randint(target.vocab_size, (width,), generator=random).to(device)
    index = torch.arange(width, device=device)
    mark = kv.mark()

    def forward(
        tokens: Tensor, depths: Tensor, ancestors: Tensor | None, held: int = before
    ) -> Forwarded:
        kv.rewind(mark._replace(length=held))
        return target.forward(tokens, before + depths, kv, ancestors)

    def alone(depth: int) -> Forwarded:  # one by one, as plain decoding does
        found = forward(ids[:1], index[:1], None)
        for place in index[1 : depth + 1].split(1) if depth else ():
            kv.commit([0])
            found = target.forward(ids[place], before + place, kv, None)
        return found

    def repeated() -> Forwarded:  # the same token on every row
        return forward(
            ids[:1].expand(width), index * 0, torch.eye(width, dtype=torch.bool, device=device)
        )

    def chain() -> Forwarded:
        return forward(ids, index, None)

    def tree() -> Forwarded:  # the chain's first half, other nodes between
        on_path = index % 2 == 0
        ancestors = (index <= index[:, None]) & on_path | (index == index[:, None])
        tokens = torch.where(on_path, ids[index // 2], ids.flip(0))
        return forward(tokens, (index + 1) // 2, ancestors)

    same = repeated()
    rows = range(width)
    _compare(target, (same, [0] * width, repeated), (same, rows, repeated), "its place in the pass")
    whole = chain()
    written = [buffer[:, :, before:].clone() for buffer in kv.buffers]
    _compare(target, (whole, [0], chain), (same, [0], repeated), "other nodes")
    half = width // 2
    _compare(
        target, (whole, rows[:half], chain), (tree(), rows[: 2 * half : 2], tree), "other nodes"
    )
    for depth in (0, 1, 2):
        single = partial(alone, depth)
        _compare(
            target, (whole, [depth], chain), (single(), [0], single), "its ancestors being drafted"
        )
        for buffer, known in zip(kv.buffers, written, strict=True):
            if not torch.equal(buffer[:, :, before + depth], known[:, :, depth]):
                raise Inexact("keys and values depend on a token's ancestors being drafted")
    parts = [whole.hidden, target.logits(whole.hidden)]
    # one pass may round alike by chance
    parts += [forward(ids, index, None, held).hidden for held in _OTHER_LENGTHS if held <= before]
    if target.chunked_prompt:
        parts += [_prompt(target, count, ids) for count in _PROMPT_SIZES]
    return _digest(parts)


def _digest(parts: Sequence[Tensor]) -> str:
    bits = b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    return hashlib.sha256(bits).hexdigest()[:16]


def _held_by(shape: KVShape) -> int:
    """How many tokens a cache holds in which exact passes are tried."""
    if shape.device.type != "cuda":
        return _HELD_KEYS
    return max(_HELD_KEYS, min(_HELD_ON_CUDA, _HELD_BYTES // shape.bytes_per_token))


def _held_cache(
    target: Target, held: int, more: int, random: torch.Generator
) -> tuple[FullKV, int]:
    """A cache with random keys and values, as many as a model may have, room for more tokens,
    and how many it holds.
    """
    before = max(0, min(held, target.max_positions - more))  # learned positions end
    kv = FullKV(target.kv_shape, before + more)
    for part in (0, 1):
        drawn: dict[tuple[int, ...], Tensor] = {}  # layers that are alike hold the same
        for layer, kept in enumerate(kv.shape.kept):
            if (size := (kept.heads, before, kept.head_dim)) not in drawn:
                drawn[size] = torch.randn(size, generator=random).to(target.device)
            kv.keep(part, layer, 0, drawn[size])
    if kv.states is not None:
        for state in (kv.states.rows, kv.states.matrices):
            state.copy_(torch.randn(state.shape, generator=random))
    return kv, before


@torch.inference_mode()
def wide_text_has_the_bits(target: Target) -> bool:
    """Whether wide passes over a text give a token the bits that those of the width give it.

    They may where prompts have wide passes, and layers and attention are of kernels that should
    make rows alike. What has to be compiled for them is, the first time a text is to be forwarded.
    """
    count = sum(_CHUNK_SIZES)
    known = target.chunked_prompt and target.replays and count <= target.max_positions
    if target.width is None or not (known and is_fused(target.model)):
        return False
    fault = fault_of(partial(_other_bits, target, count))
    target.fallbacks.note("wide", fault)
    return fault is None


def _other_bits(target: Target, count: int) -> str | None:
    """That wide passes over so many tokens give other bits; None if they do not."""
    random = torch.Generator().manual_seed(1)
    kv, before = _held_cache(target, _HELD_KEYS, count, random)
    ids = torch.randint(target.vocab_size, (count,), generator=random).to(target.device)
    places = torch.arange(before, before + count, device=target.device)
    found = []
    narrow = partial(target.forward, ancestors=None)
    for sizes, forward in (
        ([*_CHUNK_SIZES], partial(forward_wide, target)),
        (target.width, narrow),
    ):
        kv.length = before
        hidden = []
        for tokens, positions in zip(ids.split(sizes), places.split(sizes), strict=True):
            hidden.append(forward(tokens, positions, kv).hidden)
            kv.advance(len(tokens))
        found.append([torch.cat(hidden), *(buffer[:, :, before:].clone() for buffer in kv.buffers)])
    alike = all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    return None if alike else "a token has other bits in wide ones"


def _prompt(target: Target, count: int, ids: Tensor) -> Tensor:
    """States of a prompt's chunks, whose products have other shapes."""
    count = min(count, target.max_positions)
    text = ids.repeat(-(-count // len(ids)))[:count].tolist()
    return torch.cat(
        [forwarded.hidden for forwarded in chunks(target, text, FullKV(target.kv_shape, count))]
    )


# a pass, rows in it, and how to run it again
_Rows = tuple[Forwarded, Sequence[int], Callable[[], Forwarded]]


def _compare(target: Target, one: _Rows, other: _Rows, cause: str) -> None:
    """Compare rows that should have the same bits, and name the first module where they differ."""
    hidden = [forwarded.hidden[list(rows)] for forwarded, rows, _ in (one, other)]
    logits = [target.logits(forwarded.hidden)[list(rows)] for forwarded, rows, _ in (one, other)]
    differ = [(first != second).any(-1) for first, second in (hidden, logits)]
    wrong = (differ[0] | differ[1]).nonzero().flatten().tolist()
    if not wrong:
        return
    outputs = [_outputs(target, run, rows[wrong[0]]) for _, rows, run in (one, other)]
    for (name, input, out), (_, other_input, other_out) in zip(*outputs, strict=True):
        if not torch.equal(out, other_out):
            where = name if torch.equal(input, other_input) else f"what comes before {name}"
            break
    else:
        where = "the layers" if differ[0].any() else "the LM head"
    raise Inexact(f"the result of {where} depends on {cause}")


def _outputs(
    target: Target, run: Callable[[], Forwarded], row: int
) -> list[tuple[str, Tensor, Tensor]]:
    """Name, input and output of one row, for every module that has both per row,
    in the order of execution.
    """
    outputs: list[tuple[str, Tensor, Tensor]] = []

    def see(name: str, inputs: tuple[Any, ...], out: Any) -> None:
        if inputs and all(
            isinstance(value, Tensor) and value.dim() == 3 for value in (inputs[0], out)
        ):
            outputs.append((name, inputs[0][0, row].clone(), out[0, row].clone()))

    with watched(dict(target.model.named_modules()), see):
        run()
    return outputs


def choose_fixed_rows(target: Target, attention: str, exact: bool | None) -> str | None:
    """Give a model's passes their fixed width, if they are to be exact, before any are prepared.

    By default they are where texts of different methods would part, or where it costs nothing. The
    width is that of a usual draft tree, which costs little more than one row; the C program's rows
    are exact however many there are.

    Returns:
        Why they are not although they should be; None if nothing is amiss.
    """
    if exact is None:  # a cache is never wider than the model
        exact = target.kv_shape.dtype.itemsize < torch.float32.itemsize
        exact = (
            exact
            or target.device.type == "cuda"
            or target.runner.program is not None
            or multiplies_integers(target.model)
        )
    if not exact:
        return None
    if target.split:
        return "ranks hold the model together"
    if attention == "flash":
        return "flash attention sums in an order of its own"
    if is_moe(target.model.config):
        return "an expert takes as many rows as choose it"
    if target.runner.program is not None:
        target.set_fixed_rows(target.runner.most_exact)
    else:
        rows = 0 if target.device.type == "cpu" else ROWS // target.groups
        wide = target.device.type == "cuda"
        width = min(MAX_WIDTH, max(_LEAST_WIDTH, rows))
        target.set_fixed_rows(width, wide, wide and wide_text_has_the_bits)
    return None


_ROUNDED = 1e-2  # most that logits may differ by where inputs are rounded to 16 bits
# Most that logits may differ by: in units of the KV cache's last place, and in units of their own
# spread. A cache of 16 bits came to 7 in a real model, and to 38 with 16 times its
# positions (--yarn), which makes attention sharper. One that is read wrongly comes to the spread.
_CACHED = 128
_MISREAD = 1.0
_TRIED = 24  # tokens that a model is tried with
_DOUBTED = ("cuda",)  # devices on which a backend's kernels may never have run before


def wrap_model(
    network: PreTrainedModel,
    model: str,
    backend: str,
    kv_dtype: torch.dtype | None = None,
    usual: bool = False,
    checks: Checks = NO_CHECKS,
) -> Target:
    """The model with our attention, after a check that it gives the logits of transformers' own.

    Args:
        network: a causal language model of transformers.
        model: its name.
        backend: a key of :data:`~tswift.attention.backends.BACKENDS`.
        kv_dtype: of the KV cache; None for the model's own.
        usual: whether nobody asked for that dtype: where no program serves, the model's own takes
            its place.
        checks: what such a check found before.

    Raises:
        InputError: the model, or a cache in this dtype, cannot be served exactly.
    """
    keep_precision(network.device)
    known = backend == "native" and checks.found("logits") is not None
    target = _as_compared(network, backend, kv_dtype) if known else None
    if target is not None:
        return target
    tell("comparing its logits with those of transformers")
    with finely_rounded(network):
        target = _compared(network, model, backend, kv_dtype, usual)
    if holds_codes(network) and target.runner.program is not None:
        # with the inputs as they are to be rounded
        target.pack()
    if target.runner.program is not None and not target.fallbacks:
        checks.keep("logits", "those of transformers")
    return target


def _as_compared(
    network: PreTrainedModel, backend: str, kv_dtype: torch.dtype | None
) -> Target | None:
    """The model with its C program and its cache, which gave the right logits when they were tried
    here; None if the program is not to be had any more.
    """
    target = Target(network, BACKENDS[backend]())
    try:
        target.pack()
        if kv_dtype is not None and kv_dtype != target.dtype:
            target.set_kv_dtype(kv_dtype_for(kv_dtype, target.dtype, target.device, program=True))
    except (Unfit, Unbuilt):
        return None
    return None if target.runner.program is None else target


def _try_program(
    target: Target, ids: Tensor, expected: Mapping[int, Tensor], allowed: float
) -> None:
    """Let a C program make the passes of a model, if its logits are those ``expected`` from a
    place in a text on.
    """
    fault: str | None = "a C program gave other logits"
    try:
        target.pack()
        if all(_apart(target, ids, at, place) <= allowed for place, at in expected.items()):
            fault = None
    except Unfit as error:
        fault = NoFault(error)
    except Unbuilt as error:  # which was told before anything was loaded
        fault = NoFault(f"a C program {error}")
    if fault is not None:
        target.pack(False)
        target.fallbacks.note("layers", fault)


def _compared(
    network: PreTrainedModel,
    model: str,
    backend: str,
    kv_dtype: torch.dtype | None,
    usual: bool,
) -> Target:
    config = network.config.get_text_config()
    count = min(_TRIED, config.max_position_embeddings)
    ids = (torch.arange(count, device=network.device) * 7919 + 13) % config.vocab_size
    # the one that does all a model asks for; sdpa passes over soft caps
    network.set_attn_implementation("eager")
    with torch.inference_mode(), _reading_text(network, model):
        expected = network(ids.unsqueeze(0), use_cache=False).logits[0].double()
        far = max(0, max_positions(config) - count) if backend == "native" else 0
        places = torch.arange(far, far + count, device=network.device).unsqueeze(0)
        expected_far = (
            network(ids.unsqueeze(0), position_ids=places, use_cache=False).logits[0]
            if far
            else expected
        )
    try:
        target = Target(network, BACKENDS[backend]())
        _doubt_features(target, backend)
        if not (expected.amax(-1) < torch.inf).all():
            raise _not_finite(target, model, ids.tolist())
        if backend == "triton" and not target.split:
            target.fallbacks.note("layers", fuse(network, try_kernels))
            if target.kv_shape.states is not None and _doubted(target):
                target.fallbacks.note("states", kernel_fault(network.device))
        apart = _apart(target, ids, expected)
    except UnsupportedModel as error:
        reason = f"has {error}, which tswift cannot serve exactly yet"
        raise InputError(f"{model} ({network.config.model_type}) {reason}", "model") from None
    # random weights in 16 bits round worse than trained ones: 0.15 was seen, with the same
    # architecture on both sides
    allowed = 0.5 if model.startswith(SHAPE_PREFIX) else 0.25
    if target.dtype.itemsize >= 4:
        allowed = 1e-3
    if multiplies_integers(network):
        allowed = max(allowed, _ROUNDED)
    if not apart <= allowed and is_fused(network):
        separate_layers(network)
        target.fallbacks.note("layers", "kernels in their place gave other logits")
        apart = _apart(target, ids, expected)
    if not apart <= allowed:
        decoder = signature(network.get_decoder().forward).parameters
        why = "" if "position_ids" in decoder else "; its decoder takes no positions"
        reason = f"is not served exactly: logits differ{why}"
        raise InputError(f"{model} ({network.config.model_type}) {reason}", "model")
    if backend == "native" and not target.split:
        _try_program(target, ids, {0: expected, far: expected_far.double()}, allowed)
    served = target.runner.program is not None
    if kv_dtype is not None and kv_dtype != target.dtype and (served or not usual):
        _narrow_cache(target, model, kv_dtype, usual, partial(_apart, target, ids, expected))
    return target


def _doubted(target: Target) -> bool:
    """Whether kernels may never have run on its device before."""
    return target.device.type in _DOUBTED


def _doubt_features(target: Target, backend: str) -> None:
    """Note a kernel that computes what the model's attention has otherwise than PyTorch does,
    on devices where that is doubted.
    """
    if not (_doubted(target) and target.attention_features and BACKENDS[backend]().SPECS):
        return
    kinds = {
        (spec.window, spec.softcap, spec.sinks is None): spec for spec in target.layer_specs if spec
    }
    shape = target.kv_shape
    heads = (shape.heads, target.groups)
    reason = fails(backend, target.dtype, target.device, shape.head_dim, heads, kinds.values())
    target.fallbacks.note("features", reason and f"{reason} with {target.attention_features}")


def _narrow_cache(
    target: Target,
    model: str,
    kv_dtype: torch.dtype,
    usual: bool,
    apart: Callable[[], float],
) -> None:
    """Have a cache in this dtype, where the model bears it.

    Args:
        usual: leave the model's own if it does not, as nobody asked for this one.
        apart: how far the logits are off.
    """
    try:
        target.set_kv_dtype(kv_dtype_for(kv_dtype, target.dtype, target.device, program=True))
        reason = None
    except Unfit as error:
        reason = f"cannot have a cache in {dtype_name(kv_dtype)}: {error}"
    if reason is None and target.kv_shape.apart and _doubted(target):
        reason = _codes_fault(target)
    if reason is None and not apart() <= min(_CACHED * target.kv_shape.eps, _MISREAD):
        reason = f"does not bear a cache in {dtype_name(target.kv_shape.dtype)}"
    if reason is not None and target.kv_shape.dtype != target.dtype:
        target.set_kv_dtype(target.dtype)
    if reason is not None and not usual:
        raise InputError(f"{model} {reason}", "kv_dtype")
    target.fallbacks.note("cache", reason)


def _codes_fault(target: Target) -> str | None:
    """Why kernels on a device do not serve a cache of codes; None if they do."""
    shape = target.kv_shape
    heads = (shape.heads, target.groups)
    fault = fails("triton", target.dtype, target.device, shape.head_dim, heads, codes=True)
    if fault is None and is_fused(target.model):
        layer = target.model.get_decoder().layers[0]
        fault = fault_of(partial(try_kernels, layer, target.dtype, codes=True))
    return fault and f"cannot have a cache in {dtype_name(shape.dtype)}: {fault}"


@contextmanager
def _reading_text(network: PreTrainedModel, model: str) -> Iterator[None]:
    """Refuse a model that asks for more than token ids and positions."""
    try:
        yield
    except Exception as error:  # modeling code says in many ways what it misses
        kind = network.config.model_type
        cause = cause_of(error)
        if isinstance(error, TypeError | AttributeError):  # of arguments and parts that are missing
            cause = "its class asks for more than token ids"
        raise InputError(
            f"{model} ({kind}) does not run on text alone ({cause})", "model"
        ) from None


def _not_finite(target: Target, model: str, ids: list[int]) -> InputError:
    broken = first_broken(target, ids, FullKV(target.kv_shape, len(ids)))
    where = f"; the first output that is not finite is that of {broken[0]}" if broken else ""
    reason = f"its weights are broken, or {dtype_name(target.dtype)} is too narrow for it"
    return InputError(f"{model} gives logits that are NaN or infinite{where}: {reason}", "model")


@torch.inference_mode()
def _apart(target: Target, ids: Tensor, expected: Tensor, far: int = 0) -> float:
    """How far a text's logits are from those expected, at most, in units of their spread.

    What all logits of a row have in common changes no probability, and is left out: in 16 bits it
    was half of SmolLM2's rounding.

    The text's first half is a chunk, the rest a tree with wrong tokens beside it. It begins at the
    position ``far``, where what depends on positions may come to something else than at the
    beginning.
    """
    kv = FullKV(target.kv_shape, 2 * len(ids))
    half = len(ids) // 2
    start = torch.arange(far, far + half, device=ids.device)
    before = [target.forward(ids[:half], start, kv, None).hidden]
    kv.commit(range(half))
    nodes = torch.arange(2 * (len(ids) - half), device=ids.device)
    right = nodes % 2 == 0  # the text; an odd node stands beside the next one
    tokens = torch.where(right, ids[half + nodes // 2], ids[nodes // 4])
    ancestors = (nodes <= nodes[:, None]) & right | (nodes == nodes[:, None])
    hidden = target.forward(tokens, far + half + (nodes + 1) // 2, kv, ancestors).hidden
    ours = target.logits(torch.cat([*before, hidden[right]])).double()
    apart = ours - expected
    apart = apart - apart.mean(-1, keepdim=True)
    return apart.abs().max().item() / max(expected.std().item(), 1e-6)
