"""Noise as a pure function of (seed, position, token): the same bits on any device, in any order, for any subset."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _splitmix(value: int) -> int:
    """SplitMix64's output function (Steele et al., 2014) on a Python integer."""
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    # a logical shift; int64 shifts are arithmetic
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(value: Tensor) -> Tensor:
    """As :func:`_splitmix`, of int64."""
    value = (value ^ _shift(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_2)
    return value ^ _shift(value, 31)


def seed_stream(seed: int) -> int:
    """What stands for a seed (any integer, taken modulo 2^64) in the noise of its positions: an int64."""
    return _signed(_splitmix(seed & _MASK))


def noise_bits(seed: int, positions: Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """64 random bits for each (position, token id): a pure function of the three integers.

    Args:
        seed: any integer, taken modulo 2^64.
        positions: ``n`` positions in the text; as an int64 tensor on the tokens' device nothing is copied to it.
        tokens: ``[m]`` int64 token ids, or ``[n, m]`` for others at each position.

    Returns:
        ``[n, m]`` int64.
    """
    if not isinstance(positions, Tensor):
        positions = torch.tensor(list(positions), dtype=torch.int64).to(tokens.device, non_blocking=True)
    start = _mixed((positions + 1) * _signed(_GOLDEN) + seed_stream(seed))
    return _mixed(start[:, None] + tokens * _signed(_GOLDEN))


def gumbel(seed: int, positions: Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise ``[n, m]`` (float64) for each (position, token id); never infinite."""
    # 52 bits and a half: the largest value is still below 1 in float64
    uniform = (_shift(noise_bits(seed, positions, tokens), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))
