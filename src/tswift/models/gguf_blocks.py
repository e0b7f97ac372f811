"""The types of tensors in a GGUF file that are read as codes: each a row of :data:`CODED`,
and a function that makes codes, scales and minima of its blocks of bytes.

Names are those of llama.cpp's C structures: ``d`` is a scale, ``m`` or ``dmin`` a minimum, ``qs``
are codes or their low bits, ``qh`` their high bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Decoded = tuple[Bytes, Floats, Floats]


def _fields(packed: Bytes, bits: int, width: int) -> Bytes:
    """Numbers of a few bits: of each ``width`` bytes the lowest bits of all come first,
    then the next bits of all.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    parts = packed.reshape(len(packed), -1, 1, width) >> shifts & np.uint8(2**bits - 1)
    return parts.reshape(len(packed), -1)


def _half(blocks: Bytes, at: int) -> Floats:
    """The number in float16 that begins at a byte of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _by_32(zero: int, high: bool = False) -> Callable[[Bytes], Decoded]:
    """Decodes blocks of 32 inputs with codes of 4 bits, or of 5 where they have ``high`` ones.

    Args:
        zero: the code that stands for 0, where blocks have no minimum; 0 where they have one.
        high: whether the fifth bits of all come before the others.
    """

    def decode(blocks: Bytes) -> Decoded:
        d = _half(blocks, 0)
        at = 2 if zero else 4
        codes = _fields(blocks[:, at + 4 * high :], 4, 16)
        if high:
            qh = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
            codes |= qh << np.uint8(4)
        return codes, d, -zero * d if zero else _half(blocks, 2)

    return decode


def _q8_0(blocks: Bytes) -> Decoded:
    d = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), d, -128 * d


def _q2_k(blocks: Bytes) -> Decoded:
    scales = blocks[:, :16]
    qs = blocks[:, 16:80]
    d = _half(blocks, 80)
    dmin = _half(blocks, 82)
    return _fields(qs, 2, 32), d * (scales & 15), -(dmin * (scales >> 4))


def _q3_k(blocks: Bytes) -> Decoded:
    hmask = blocks[:, :32]
    qs = blocks[:, 32:96]
    scales = blocks[:, 96:108]
    d = _half(blocks, 108)
    sixth = _fields(scales[:, :8], 4, 8) | _fields(scales[:, 8:], 2, 4) << np.uint8(4)
    scale = d * (sixth.astype(np.float32) - 32)
    return _fields(qs, 2, 32) | _fields(hmask, 1, 32) << np.uint8(2), scale, -4 * scale


def _scales_of_k(scales: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits, from 12 bytes."""
    low = scales[:, :4]
    middle = scales[:, 4:8]
    high = scales[:, 8:]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minimum = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scale, minimum


def _q4_k(blocks: Bytes) -> Decoded:
    scale, minimum = _scales_of_k(blocks[:, 4:16])
    return _fields(blocks[:, 16:], 4, 32), _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q5_k(blocks: Bytes) -> Decoded:
    qh = _fields(blocks[:, 16:48], 1, 32) << np.uint8(4)
    codes, scale, minimum = _q4_k(np.delete(blocks, slice(16, 48), axis=1))
    return codes | qh, scale, minimum


def _q6_k(blocks: Bytes) -> Decoded:
    ql = blocks[:, :128]
    qh = blocks[:, 128:192]
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    scale = _half(blocks, 208) * scales.astype(np.float32)
    return _fields(ql, 4, 64) | _fields(qh, 2, 32) << np.uint8(4), scale, -32 * scale


class Coded(NamedTuple):
    """How a type is held and read."""

    bits: int  # of a code here
    block: int  # inputs that share a scale
    numbers: int  # that scale a block: a minimum, too, unless one code stands for 0
    bytes: int  # of each of these
    decode: Callable[[Bytes], Decoded]


CODED = {
    Kind.Q4_0: Coded(4, 32, 1, 2, _by_32(8)),
    Kind.Q4_1: Coded(4, 32, 2, 2, _by_32(0)),
    Kind.Q5_0: Coded(8, 32, 1, 2, _by_32(16, True)),
    Kind.Q5_1: Coded(8, 32, 2, 2, _by_32(0, True)),
    Kind.Q8_0: Coded(8, 32, 1, 2, _q8_0),
    Kind.Q2_K: Coded(4, 16, 2, 4, _q2_k),
    Kind.Q3_K: Coded(4, 16, 2, 4, _q3_k),
    Kind.Q4_K: Coded(4, 32, 2, 4, _q4_k),
    Kind.Q5_K: Coded(8, 32, 2, 4, _q5_k),
    Kind.Q6_K: Coded(8, 16, 1, 4, _q6_k),
}
