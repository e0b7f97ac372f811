"""Exact passes: of one fixed number of rows, so that a token has the same bits in each.

A product over one row sums in another order than one over forty, so in bfloat16 two candidates that
nearly tie swap, and texts of different methods differ. Passes of one fixed number of rows sum alike
(``Target.fixed_rows``), unless something in the model depends on other rows, or on a row's index.
That is tested once per loaded model, on this machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tswift.attention.sdpa import MAX_WIDTH, ROWS
from tswift.caches import FullKV, KVShape
from tswift.checking import Compared, difference
from tswift.forward.cpu.products import multiplies_integers
from tswift.forward.cuda.fused_layers import is_fused
from tswift.forward.hf import watched
from tswift.forward.passes import PROMPT_CHUNK, Forwarded, Nodes
from tswift.forward.target import Target
from tswift.forward.text import chunks, forward_wide
from tswift.machine import available_bytes
from tswift.models.architecture import is_moe

_LEAST_WIDTH = 16
_HELD_KEYS = 1_500  # random keys in the cache: several chunks of every attention
# there a text that long is cut otherwise; at most so many bytes
_HELD_ON_CUDA = 20_000
_HELD_BYTES = 3 << 30
_ROOM_SHARE = 0.8  # of the free memory, that they may take
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
    width = target.fixed_rows
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
        return target.forward(Nodes(tokens, before + depths, kv, ancestors))

    def alone(depth: int) -> Forwarded:  # one by one, as plain decoding does
        found = forward(ids[:1], index[:1], None)
        for place in index[1 : depth + 1].split(1) if depth else ():
            kv.commit([0])
            found = target.forward(Nodes(ids[place], before + place, kv))
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
    """How many tokens a cache holds in which exact passes are tried: a device that weights nearly
    fill has no room for many.
    """
    if shape.device.type != "cuda":
        return _HELD_KEYS
    many = min(_HELD_ON_CUDA, _HELD_BYTES // shape.bytes_per_token)
    free = available_bytes(shape.device)
    fits = free is None or many * shape.bytes_per_token <= _ROOM_SHARE * free
    return max(_HELD_KEYS, many if fits else 0)


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
    if target.fixed_rows is None or not (known and is_fused(target.model)):
        return False
    fault = difference(_wide_and_narrow(target, count))
    target.fallbacks.note("wide", fault)
    return fault is None


def _wide_and_narrow(target: Target, count: int) -> Iterator[Compared]:
    """What wide passes over so many tokens give, and others."""
    random = torch.Generator().manual_seed(1)
    kv, before = _held_cache(target, _HELD_KEYS, count, random)
    ids = torch.randint(target.vocab_size, (count,), generator=random).to(target.device)
    places = torch.arange(before, before + count, device=target.device)
    found = []
    for sizes, forward in (
        ([*_CHUNK_SIZES], partial(forward_wide, target)),
        (target.fixed_rows, target.forward),
    ):
        kv.length = before
        hidden = []
        for tokens, positions in zip(ids.split(sizes), places.split(sizes), strict=True):
            hidden.append(forward(Nodes(tokens, positions, kv)).hidden)
            kv.advance(len(tokens))
        found.append([torch.cat(hidden), *(buffer[:, :, before:].clone() for buffer in kv.buffers)])
    yield "rows of wide ones", found[0], found[1]


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

    def see(name: str, inputs: tuple[Tensor, ...], out: Tensor) -> None:
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
            or target.on_cuda
            or target.runner.program is not None
            or multiplies_integers(target.model)
        )
    if not exact:
        return None
    if attention == "flash":
        return "flash attention sums in an order of its own"
    if is_moe(target.model.config):
        return "an expert takes as many rows as choose it"
    if target.runner.program is not None:
        target.set_fixed_rows(target.runner.exact_rows)
    else:
        wide = target.on_cuda
        rows = ROWS // target.groups if wide else 0
        width = min(MAX_WIDTH, max(_LEAST_WIDTH, rows))
        target.set_fixed_rows(width, wide, wide and wide_text_has_the_bits)
    return None
