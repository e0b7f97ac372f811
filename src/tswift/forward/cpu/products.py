"""Linear layers and embeddings whose weights are packed, and products.c, which multiplies them.

Packed weights are floats, in 16 bits where that is enough, or integer codes of 4 or 8 bits. With
codes the inputs of a layer are rounded, too: to integers of 8 or 16 bits, with a step for every row
and block. So the sum of a block's products is an exact integer, whatever its order, and the blocks
are added up in float32 in one order. A row therefore has the same bits whatever other rows are
multiplied with it, on every processor, and with any number of threads.

Where there is no C program, PyTorch multiplies: floats that are made of the codes, and inputs as
they are.
"""

from __future__ import annotations

import ctypes
import warnings
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tswift.attention.backends import HALVES
from tswift.errors import SlowWarning
from tswift.machine import ask_for_huge_pages, available_bytes, processor, return_free_memory
from tswift.models.codes import Codes, Packed, PackedCodes
from tswift.native_build import Unbuilt, build, parallel_region, structures, widest_vectors

INPUT_BITS = 16  # to which the inputs of linear layers are rounded
_SOURCE = Path(__file__).with_name("program.c")
# of weights and scales, as in products.c
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PIECE = 1 << 22  # weights that are packed at a time
_LINE = 64  # bytes of a line of the cache
# codes are fetched so many bytes before they are multiplied: a step of one node of SmolLM2's took
# 0.7 to 0.9 of the time that it takes with products.c's number, which was found on an AMD EPYC
_AHEAD_ON_INTEL = "FAR_AHEAD=2048"
_PAGE = 1 << 21  # bytes of a large page
_MOVED = 1 << 26  # bytes after which the memory that they were in is given back
_FLOAT = torch.float32.itemsize
_FLOATS_SHARE = 0.5  # of the free memory, that floats made of codes take at most

# the structures that the program shares with Python
C = structures(*(_SOURCE.with_name(name) for name in ("products.c", "recurrence.c", "program.c")))


def library() -> ctypes.CDLL:
    """The compiled program.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    parallel_region()
    intel = processor().get("vendor_id") == "GenuineIntel"
    built = build(_SOURCE, *([_AHEAD_ON_INTEL] if intel else []), options=widest_vectors())
    for function in (built.tswift_block, built.tswift_lanes, built.tswift_space):
        function.restype = ctypes.c_int64
    return built


def multiply(linear: ctypes.Structure, input: Tensor, program: ctypes.CDLL | None = None) -> Tensor:
    """``[..., inputs]`` float32 to ``[..., outputs]``, by the compiled program,
    or by one that is given.

    Raises:
        Unbuilt: there is none here.
    """
    rows = input.contiguous()
    out = torch.empty(*rows.shape[:-1], linear.outputs, dtype=torch.float32)
    (program or library()).tswift_multiply(
        ctypes.byref(linear),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(rows.numel() // linear.inputs),
        ctypes.c_void_p(parallel_region()),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return out


class PackedFloats(Packed):
    """A matrix of floats in blocks of outputs, see products.c.

    Args:
        weight: ``[outputs, inputs]``; where bfloat16 or float16 hold it without loss, it is kept in
            that.

    Raises:
        Unbuilt: there is no program here.
    """

    bits = block = centre = 0

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        program = library()
        self.outputs, self.inputs = weight.shape
        self._block = int(program.tswift_block())
        self._lanes = int(program.tswift_lanes())
        pieces = weight.detach().split(
            self._block * max(1, _PIECE // weight[: self._block].numel())
        )
        narrow = (
            kind
            for kind in HALVES
            if all(torch.equal(rows.to(kind).to(rows.dtype), rows) for rows in pieces)
        )
        self._kind = weight.dtype if weight.dtype in HALVES else next(narrow, torch.float32)
        # bytes, as those of a network stay what they are when its numbers are converted
        shape = -(-self.outputs // self._block), self.inputs, self._block * self.kind.itemsize
        self.register_buffer("bytes", torch.empty(shape, dtype=torch.uint8))
        at = 0
        for rows in pieces:
            packed = self._packed(rows)
            self.bytes[at : at + len(packed)] = packed
            at += len(packed)

    def _packed(self, rows: Tensor) -> Tensor:
        padded = nn.functional.pad(rows.to(self.kind), (0, 0, 0, -len(rows) % self._block))
        packed = padded.view(-1, self._block, self.inputs).transpose(1, 2)
        if self.kind == torch.bfloat16:  # the numbers of two vectors take turns
            packed = packed.unflatten(2, (-1, 2, self._lanes)).transpose(3, 4)
        return packed.contiguous().view(len(packed), self.inputs, -1).view(torch.uint8)

    @property
    def kind(self) -> torch.dtype:
        """Of the numbers."""
        return self._kind

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, ``[..., inputs]`` float32."""
        own = outputs % self._block
        if self.kind == torch.bfloat16:
            pair = own % (2 * self._lanes)
            own = own - pair + pair % self._lanes * 2 + pair // self._lanes
        return self.bytes.view(self.kind)[outputs // self._block, :, own].float()


class PackedLinear(nn.Module):
    """A linear layer of packed weights, which stay as they are. Inputs are float32.

    Args:
        weight: the matrix; floats are packed as floats.
        bias: ``[outputs]``, or None.
        input_bits: to which inputs are rounded where the weights are codes, 8 or 16.

    Raises:
        Unbuilt: the weights are floats, and there is no program here.
    """

    def __init__(
        self,
        weight: Tensor | Codes | Packed,
        bias: Tensor | None = None,
        input_bits: int = INPUT_BITS,
    ) -> None:
        super().__init__()
        self.packed = as_packed(weight)
        self.out_features = self.packed.outputs
        self.in_features = self.packed.inputs
        self.input_bits = input_bits
        self.bias = (
            None
            if bias is None
            else nn.Parameter(bias.detach().float().contiguous(), requires_grad=False)
        )

    @property
    def c(self) -> ctypes.Structure:
        """The layer as products.c has it."""
        c = _structure(self.packed)
        c.bias = 0 if self.bias is None else self.bias.data_ptr()
        c.input_bits = self.input_bits
        return c

    @property
    def weight(self) -> Tensor:
        """The weights; unpacked anew, where they are not held as floats."""
        return self.packed.whole()

    def forward(self, input: Tensor) -> Tensor:
        """``[..., inputs]`` float32 to ``[..., outputs]``."""
        packed = self.packed
        if packed.floats is None and not (input.requires_grad and torch.is_grad_enabled()):
            with suppress(Unbuilt):
                return multiply(self.c, input.float())
        if input.numel() == packed.inputs and self.bias is None:
            # a matrix and one row took 0.96 of the time that a product of matrices did
            return torch.mv(packed.whole(), input.reshape(-1)).view(*input.shape[:-1], -1)
        return nn.functional.linear(input, packed.whole(), self.bias)

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        kind = f"{self.packed.bits} bits" if self.packed.bits else str(self.packed.kind)
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


class PackedEmbedding(nn.Module):
    """Embeddings of packed weights, of which rows are made numbers when they are looked up.

    Args:
        packed: as of a linear layer (a tied LM head), a row for every token.
        scale: a factor of all.
        dtype: of the rows.
    """

    def __init__(
        self, packed: Packed, scale: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.packed = packed
        self.num_embeddings = self.packed.outputs
        self.embedding_dim = self.packed.inputs
        self.scalar_embed_scale = scale
        self.dtype = dtype

    @property
    def c(self) -> ctypes.Structure:
        """The embeddings as products.c has them, but for the scale."""
        return _structure(self.packed)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[..., H]`` of tokens ``[...]``."""
        return self.scaled(tokens, self.scalar_embed_scale)

    def scaled(self, tokens: Tensor, scale: float) -> Tensor:
        """As :meth:`forward`, with another factor."""
        return (self.packed.rows(tokens) * scale).to(self.dtype)


def as_packed(weight: Tensor | Codes | Packed) -> Packed:
    """Weights in the form that products.c reads.

    Raises:
        Unbuilt: they are floats, and there is no program here.
    """
    if isinstance(weight, Packed):
        return weight
    return PackedCodes(weight) if isinstance(weight, Codes) else PackedFloats(weight)


def _structure(packed: Packed) -> ctypes.Structure:
    """A new structure that says to products.c what lies where."""
    return C.Linear(
        weight=packed.bytes.data_ptr(),
        inputs=packed.inputs,
        outputs=packed.outputs,
        kind=_KINDS[packed.kind],
        bits=packed.bits,
        block=packed.block,
        centre=packed.centre,
    )


def pack(network: PreTrainedModel) -> None:
    """Hold a network's matrices once, as the C products read them;
    all other numbers become float32.

    Raises:
        Unbuilt: there is no program here.
    """
    embeddings = network.get_input_embeddings()
    lm_head = network.get_output_embeddings()
    tied = lm_head.weight is embeddings.weight
    names = [name for name, module in network.named_modules() if type(module) is nn.Linear]
    for name in names:
        layer = network.get_submodule(name)
        network.set_submodule(name, PackedLinear(layer.weight, layer.bias))
    scale = float(getattr(embeddings, "scalar_embed_scale", 1))
    held = network.get_output_embeddings().packed if tied else PackedFloats(embeddings.weight)
    network.set_input_embeddings(PackedEmbedding(held, scale))
    network.float()


def multiplies_integers(network: nn.Module) -> bool:
    """Whether any matrix of a network is codes that are multiplied as such, which takes a C
    program.
    """
    with suppress(Unbuilt):
        codes = any(isinstance(module, PackedCodes) for module in network.modules())
        return codes and library() is not None
    return False


def hold_floats(network: nn.Module) -> None:
    """Make floats of the codes of a network's linear layers, in their order, as far as they take
    no more than a share of the free memory: what PyTorch multiplies where there is no C program.
    """
    layers = (module for module in network.modules() if isinstance(module, PackedLinear))
    every = [*dict.fromkeys(layer.packed for layer in layers)]
    sizes = [packed.outputs * packed.inputs for packed in every]
    most = _FLOATS_SHARE * (available_bytes(torch.device("cpu")) or 0)
    ends = [end for end in accumulate(sizes) if end * _FLOAT <= most]
    together = torch.empty(ends[-1] if ends else 0)
    ask_for_huge_pages(together)
    for packed, end, size in zip(every, ends, sizes, strict=False):
        floats = together[end - size : end].view(packed.outputs, packed.inputs)
        packed.floats = floats.copy_(packed.whole())
    if len(ends) < len(every):
        warnings.warn(
            f"{len(every) - len(ends)} of {len(every)} matrices of codes are made floats anew for "
            f"each product: all would take {sum(sizes) * _FLOAT / 1e9:.1f} GB, more than "
            f"{_FLOATS_SHARE:.0%} of the free memory",
            SlowWarning,
            stacklevel=2,
        )


def lay_together(network: nn.Module) -> None:
    """Move all packed weights of a network into one piece of memory, in the layers' order,
    unless several are in one.

    It has pages of 2 MiB, which most matrices are too small for: with those of 4 KiB they were read
    at 32 GB/s instead of 43, on an AMD EPYC.
    """
    packed = [module for module in network.modules() if isinstance(module, Packed)]
    if len(packed) != 1 and len({each.bytes.untyped_storage().data_ptr() for each in packed}) < 2:
        return
    sizes = [-(-each.bytes.nbytes // _LINE) * _LINE for each in packed]
    whole = torch.empty(sum(sizes) + _PAGE, dtype=torch.uint8)
    ask_for_huge_pages(whole)
    whole = whole[-whole.data_ptr() % _LINE :]
    moved = 0
    for each, piece in zip(packed, whole.split([*sizes, len(whole) - sum(sizes)]), strict=False):
        own = piece[: each.bytes.nbytes].view(each.bytes.shape)
        each.bytes = own.copy_(each.bytes)
        moved += len(piece)
        if moved >= _MOVED:  # or all weights would be in memory twice
            return_free_memory()
            moved = 0
