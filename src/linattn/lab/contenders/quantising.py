"""Numbers in few bits, and back."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a scale and a zero point."""

_SCALE_BYTES = 4


def quantised(x: Tensor, bits: int, dim: int) -> Tensor:
    """Numbers rounded to 2^bits levels between the least and the largest of their group along a dimension.

        z + s·round((x - z) / s),   z = min x,   s = (max x - min x) / (2^bits - 1)

    z and s are rounded to 16 bits, as they are kept. A last group may be shorter.

    Args:
        x: any tensor.
        bits: 1 or more.
        dim: the dimension that is cut into groups of 32.

    Returns:
        As x.

    Example:
        >>> quantised(torch.tensor([0.0, 0.2, 0.9, 3.0]), 2, 0).tolist()
        [0.0, 0.0, 1.0, 3.0]

    Source: Liu et al. 2024 (arXiv 2402.02750), equation 1.
    """
    return torch.cat([_one_group(part, bits, dim) for part in x.split(GROUP, dim)], dim)


def mixed(x: Tensor) -> Tensor:
    """Rows (..., D) times a Hadamard matrix, which spreads a large coordinate over all; its own inverse.

    Of a width that is no power of two, pieces of the largest one that divides it are mixed each in itself.

    Example:
        >>> mixed(torch.tensor([4.0, 0.0, 0.0, 0.0])).tolist()
        [2.0, 2.0, 2.0, 2.0]

    Source: Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456), which rounds keys and values so.
    """
    width = x.shape[-1] & -x.shape[-1]
    found = x.unflatten(-1, (-1, width))
    for half in (2**level for level in range(width.bit_length() - 1)):
        first, second = found.unflatten(-1, (-1, 2, half)).unbind(-2)
        found = torch.stack((first + second, first - second), -2).flatten(-3)
    whole: Tensor = found.flatten(-2) * width**-0.5
    return whole


def scale_bytes(num_numbers: int) -> int:
    """Bytes of the zero points and scales of so many numbers in a row."""
    return -(-num_numbers // GROUP) * _SCALE_BYTES


def _one_group(x: Tensor, bits: int, dim: int) -> Tensor:
    """One group's numbers, rounded."""
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    zero = least.half().to(x.dtype)
    step = ((most - zero) / (2**bits - 1)).half().to(x.dtype)
    safe = torch.where(step == 0, 1, step)
    codes = ((x - zero) / safe).round().clamp(0, 2**bits - 1)
    found: Tensor = zero + codes * step
    return found
