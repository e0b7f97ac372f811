"""Matrices of weights as integer codes of 4 or 8 bits, and the forms in which they are packed:
one for a C program, one for kernels on a device.

A weight is ``scale * code + minimum``, with a scale and a minimum for every block of 32 (or 16)
inputs of an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BLOCK = 32  # inputs with one scale, unless a file says 16
LEAST_BLOCK = 16
_UNPACKED = 256  # rows that are unpacked at a time
_AT_A_TIME = 1 << 13  # rows that become floats at a time, on a device
_GROUP = 16  # outputs that lie together in the packed form
_CENTRES = (8, 16, 32, 128)  # codes that stand for 0 in usual formats
UNIT = 64  # inputs whose codes lie together on a device
LINES = 64  # outputs whose units lie together there
WORDS = 16  # places between inputs whose codes share a word there
MIDDLE = {4: 8, 8: 128}  # what is taken from a code there, by its bits


@dataclass(frozen=True)
class Codes:
    """A matrix of weights: ``weight[o, i] = scale[o, i // block] * codes[o, i] + minimum[o, i //
    block]``.

    Attributes:
        codes: ``[outputs, inputs]`` uint8, up to 15 or 255.
        scale, minimum: ``[outputs, inputs // block]`` float32.
        bits: of a code, 4 or 8.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int

    @property
    def block(self) -> int:
        """Inputs with the same scale and minimum."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantized(self) -> Tensor:
        """The weights ``[outputs, inputs]`` in float32."""
        blocks = self.codes.unflatten(1, (-1, self.block)).float()
        return (self.scale.unsqueeze(2) * blocks + self.minimum.unsqueeze(2)).flatten(1)


def quantize(weight: Tensor, bits: int) -> Codes:
    """Codes of a matrix, each weight rounded to the nearest between the least and the largest of
    its block.

    Raises:
        ValueError: the inputs are no multiple of a block.
    """
    inputs = weight.shape[1]
    block = BLOCK if inputs % BLOCK == 0 else LEAST_BLOCK
    if inputs % block:
        raise ValueError(f"{inputs} inputs are no multiple of {block}")
    blocks = weight.detach().float().unflatten(1, (-1, block))
    minimum = blocks.amin(2).half().float()
    maximum = blocks.amax(2)
    # by a tensor: on CUDA PyTorch would multiply by the reciprocal of a number of the host
    scale = ((maximum - minimum) / torch.full_like(maximum, 2**bits - 1)).half().float()
    counts = (blocks - minimum.unsqueeze(2)) / scale.clamp(min=1e-12).unsqueeze(2)
    return Codes(
        counts.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(1), scale, minimum, bits
    )


class Packed(nn.Module):
    """Weights in a form of a product: bytes that are no parameters.

    Attributes:
        bytes: in whatever shape.
        outputs, inputs: of the matrix.
        kind: of the numbers, or of codes' scales and minima.
        bits: of a code; 0 for floats.
        block: inputs of a block of codes; 0 for floats.
        centre: the code that stands for 0 everywhere; 0 for none.
        floats: all weights ``[outputs, inputs]`` in float32, where there is no C product that would
            read them packed; None where they are made anew for each product.
    """

    bytes: Tensor
    floats: Tensor | None = None
    outputs: int
    inputs: int
    bits: int
    block: int
    centre: int

    @property
    def kind(self) -> torch.dtype:  # noqa: D102
        raise NotImplementedError

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, ``[..., inputs]`` float32."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """All weights, ``[outputs, inputs]`` float32."""
        return self.rows(torch.arange(self.outputs))


class PackedCodes(Packed):
    """Codes as the C product reads them.

    Groups of 16 outputs lie one after the other; in a group the blocks of inputs; in a block the
    codes of four inputs of each output, then those of the next four, and so on; at last the 16
    scales and the 16 minima, in float16 where that loses nothing. With 4 bits, the codes of four
    inputs and of the next four share their bytes. Where one code stands for 0 everywhere, there are
    no minima.
    """

    bytes: Tensor  # [groups, blocks, bytes] uint8

    def __init__(self, codes: Codes) -> None:
        if codes.bits not in (4, 8) or codes.block not in (16, 32):
            raise ValueError(
                f"no packed form for codes of {codes.bits} bits in blocks of {codes.block}"
            )
        centres = (code for code in _CENTRES if torch.equal(codes.minimum, -code * codes.scale))
        centre = next(centres, 0)
        factors = [codes.scale] if centre else [codes.scale, codes.minimum]
        half = all(torch.equal(each.half().float(), each) for each in factors)
        data = _packed(codes, [each.half() if half else each for each in factors])
        outputs, inputs = codes.codes.shape
        self._hold(data, outputs, inputs, codes.bits, codes.block, centre, half)

    @classmethod
    def kept(cls, data: Tensor, form: Sequence[int]) -> PackedCodes:
        """What was packed before: its bytes, and its :attr:`form`."""
        packed = cls.__new__(cls)
        packed._hold(data, *form)
        return packed

    def _hold(
        self, data: Tensor, outputs: int, inputs: int, bits: int, block: int, centre: int, half: int
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.inputs = inputs
        self.bits = bits
        self.block = block
        self.centre = centre
        self.halves = bool(half)
        self.register_buffer("bytes", data)

    @property
    def form(self) -> tuple[int, ...]:
        """Outputs, inputs, bits, block, the code that stands for 0,
        and whether scales are in float16.
        """
        return self.outputs, self.inputs, self.bits, self.block, self.centre, int(self.halves)

    @property
    def kind(self) -> torch.dtype:
        """Of the scales and minima."""
        return torch.float16 if self.halves else torch.float32

    @property
    def _coded(self) -> int:
        """Bytes of a block's codes, of a group."""
        return self.block * _GROUP * self.bits // 8

    @property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """Views of the bytes: those of codes ``[groups, blocks, n, 16, 4]``,
        and scales, or scales and minima, ``[groups, blocks, n, 16]``.
        """
        codes = self.bytes[:, :, : self._coded].unflatten(2, (-1, _GROUP, 4))
        return codes, self.bytes[:, :, self._coded :].view(self.kind).unflatten(2, (-1, _GROUP))

    def codes(self) -> Codes:
        """The codes that were packed."""
        codes, factors = (each.movedim(3, 1).flatten(0, 1)[: self.outputs] for each in self._parts)
        return self._unpacked(codes, factors)

    def whole(self) -> Tensor:
        """All weights, ``[outputs, inputs]`` float32."""
        return self.codes().dequantized() if self.floats is None else self.floats

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, ``[..., inputs]`` float32."""
        if self.floats is not None:
            return self.floats[outputs]
        # several times as large on the way
        found = [self._rows(some) for some in outputs.flatten().split(_UNPACKED)]
        return torch.cat(found).view(*outputs.shape, self.inputs)

    def chosen(self, outputs: Tensor) -> PackedCodes:
        """The codes of some outputs ``[n]``, at least one, as they are."""
        parts = self._picked(nn.functional.pad(outputs, (0, -len(outputs) % _GROUP)))
        groups = (each.unflatten(0, (-1, _GROUP)).movedim(1, 3).contiguous() for each in parts)
        data = torch.cat([each.view(torch.uint8).flatten(2) for each in groups], 2)
        return self.kept(data, (len(outputs), *self.form[1:]))

    def _rows(self, wanted: Tensor) -> Tensor:
        fours, factors = self._picked(wanted)
        return self._unpacked(fours.unsqueeze(3).view(torch.uint8), factors).dequantized()

    def _picked(self, outputs: Tensor) -> list[Tensor]:
        """Of some outputs, ``[n, blocks, ..]``: codes, four as one number, which is less work to
        move, and scales and minima.
        """
        codes, factors = self._parts
        parts = codes.view(torch.int32).squeeze(4), factors
        return [each[outputs // _GROUP, :, :, outputs % _GROUP] for each in parts]

    def _unpacked(self, codes: Tensor, factors: Tensor) -> Codes:
        """Those of outputs whose parts these are, ``[outputs, blocks, n, 4]`` and
        ``[outputs, blocks, n]``.
        """
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 3)
        scale, *minima = factors.float().unbind(2)
        minimum = minima[0] if minima else -self.centre * scale
        return Codes(codes.flatten(1), scale.contiguous(), minimum.contiguous(), self.bits)


class CodesOnDevice(Packed):
    """Codes as the kernels of a device read them.

    A unit is 64 inputs of 64 outputs, one output after the other; units lie in the order of inputs,
    then of outputs, and missing outputs are filled up. A word of two bytes has the codes of inputs
    16 places apart, from its last bits on: 4 codes of 4 bits or 2 of 8. A middle is taken from all
    codes, so that most stand near 0: with 8 bits, bytes are signed numbers. Blocks have float32
    scales; where the middle does not stand for 0, each is beside its minimum, and both are float16
    if that loses nothing.

    Args:
        codes: on the device where they stay.

    Raises:
        ValueError: the inputs are no multiple of a unit.
    """

    bytes: Tensor  # words, [outputs / 64, inputs / 64, 64, 64 * bits / 16] int16
    factors: Tensor  # [inputs / block, outputs, filled up, 1 or 2] float32 or float16

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        self.outputs, self.inputs = codes.codes.shape
        self.bits, self.block = codes.bits, codes.block
        if self.inputs % UNIT:
            raise ValueError(f"{self.inputs:,} inputs are no multiple of {UNIT}")
        if self.bits not in MIDDLE or self.block not in (LEAST_BLOCK, BLOCK):
            raise ValueError(f"no kernel takes {self.bits} bits in blocks of {self.block}")
        self.centre = MIDDLE[self.bits]
        if self.bits == 8:
            most = int(codes.codes.max())  # less the centre it has to be a signed byte
            zeros = (
                code
                for code in _CENTRES
                if most - code < 128 and torch.equal(codes.minimum, -code * codes.scale)
            )
            self.centre = next(zeros, self.centre)
        minima = bool((codes.minimum + self.centre * codes.scale).any())
        # uint8, which wraps around as signed numbers do
        words = _words(codes.codes if self.bits == 4 else codes.codes - self.centre, self.bits)
        factors = [codes.scale, codes.minimum] if minima else [codes.scale]
        # a scale alone would be too short to be fetched ahead
        half = minima and all(torch.equal(each.half().float(), each) for each in factors)
        words, *factors = (
            nn.functional.pad(each, (0, 0, 0, -self.outputs % LINES)) for each in (words, *factors)
        )
        units = words.unflatten(0, (-1, LINES)).unflatten(2, (-1, UNIT * self.bits // 16))
        self.register_buffer("bytes", units.transpose(1, 2).contiguous())
        both = torch.stack([each.t() for each in factors], 2)
        self.register_buffer("factors", both.half() if half else both)

    @property
    def kind(self) -> torch.dtype:
        """Of the scales and minima."""
        return self.factors.dtype

    @property
    def form(self) -> tuple[int, int, bool, torch.dtype]:
        """What a kernel is compiled for: bits, inputs of a block, whether there are minima, and the
        dtype of scales.
        """
        return self.bits, self.block, self.factors.shape[2] == 2, self.kind

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, ``[..., inputs]`` float32."""
        wanted = outputs.flatten()
        lines = self.bytes[wanted // LINES, :, wanted % LINES].view(len(wanted), -1, 1, WORDS)
        places = torch.arange(0, 16, self.bits, device=lines.device).short().view(-1, 1)
        codes = lines >> places & 2**self.bits - 1
        # with 8 bits bytes are signed
        numbers = codes - self.centre if self.bits == 4 else codes.to(torch.int8)
        blocks = numbers.float().view(len(wanted), -1, self.block)
        scale, *minimum = self.factors[:, wanted].float().transpose(0, 1).split(1, 2)
        weights = blocks * scale
        for each in minimum:
            weights += each + self.centre * scale
        return weights.view(*outputs.shape, self.inputs)

    def whole(self) -> Tensor:
        """All weights, ``[outputs, inputs]`` float32."""
        every = torch.arange(self.outputs, device=self.bytes.device)
        return torch.cat([self.rows(some) for some in every.split(_AT_A_TIME)])


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Words ``[outputs, inputs * bits / 16]`` int16 of codes ``[outputs, inputs]`` uint8: see
    :class:`CodesOnDevice`.
    """
    parts = numbers.unflatten(1, (-1, 16 // bits, WORDS)).unbind(2)
    words = torch.zeros_like(parts[0], dtype=torch.int16)
    for at, part in enumerate(parts):  # in place, as a device may be nearly full
        words.add_(part, alpha=2 ** (at * bits))
    return words.flatten(1)


def _packed(codes: Codes, factors: Sequence[Tensor]) -> Tensor:
    """``[groups, blocks, bytes]`` uint8, of codes, and scales or scales and minima:
    see :class:`PackedCodes`.
    """
    outputs, inputs = codes.codes.shape
    missing = -outputs % _GROUP
    matrix, *padded = (
        nn.functional.pad(each, (0, 0, 0, missing)) if missing else each.contiguous()
        for each in (codes.codes, *factors)
    )
    blocks = inputs // codes.block
    # [groups, blocks, fours, outputs of a group]: four codes are moved as one number
    fours = matrix.view(torch.int32).view(-1, _GROUP, blocks, codes.block // 4).permute(0, 2, 3, 1)
    if codes.bits == 4:
        fours = fours[:, :, ::2] | fours[:, :, 1::2] << 4
    tails = [
        each.view(-1, _GROUP, blocks).transpose(1, 2).contiguous().view(torch.uint8)
        for each in padded
    ]
    return torch.cat([fours.contiguous().view(torch.uint8).flatten(2), *tails], 2).contiguous()


def holds_codes(network: nn.Module) -> bool:
    """Whether any matrix of a network is codes."""
    return any(isinstance(module, Packed) and module.bits > 0 for module in network.modules())


def holds_packed(network: nn.Module) -> bool:
    """Whether any matrix of a network is packed, so that its weights are no parameters."""
    return any(isinstance(module, Packed) for module in network.modules())


def is_packed_floats(module: object) -> bool:
    """Whether this is a packed matrix of floats."""
    return isinstance(module, Packed) and module.bits == 0


def read_bytes(network: nn.Module) -> int:
    """Bytes of weights that a pass over a network with packed ones reads:
    all but embeddings of which only rows are.
    """
    read = sum(each.nbytes for each in network.parameters())
    for module in network.modules():
        packed = getattr(module, "packed", None)
        if isinstance(packed, Packed) and hasattr(module, "in_features"):
            held = [packed.floats] if packed.floats is not None else packed.buffers()
            read += sum(each.nbytes for each in held)
    return read
