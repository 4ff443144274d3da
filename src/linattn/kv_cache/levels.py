"""Levels that standard normal numbers are rounded to with the least mean square error, for 0 to 8 bits a number.

Source: Lloyd 1982 (Least squares quantization in PCM, doi 10.1109/TIT.1982.1056489); Max 1960 (Quantizing for minimum
distortion, doi 10.1109/TIT.1960.1057548), whose table I has the first of them to four digits.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

MOST_BITS = 8
"""Of a number."""

# Newton's steps: from levels of the asymptotic density four would do for 8 bits.
_STEPS = 12


def _positive_levels(number: int) -> list[float]:
    """The upper half of 2·`number` levels: each the mean of the numbers that are nearest to it.

    Newton's method on l_i - E[x | e_i < x < e_i+1] = 0, whose derivatives are tridiagonal, for e the middles.
    """
    # Many levels are as dense as the density's cubic root, which is that of a normal number of variance 3.
    shares = (torch.arange(number, dtype=torch.float64, device="cpu") + number + 0.5) / (2 * number)
    levels: list[float] = (math.sqrt(3) * torch.special.ndtri(shares)).tolist()
    for _ in range(_STEPS):
        edges = [0.0, *(sum(pair) / 2 for pair in pairwise(levels)), math.inf]
        rows = []
        for level, (low, high) in zip(levels, pairwise(edges), strict=True):
            below, above, share = _density(low), _density(high), _share(low, high)
            mean = (below - above) / share
            # Derivatives of the mean in its edges, halved: an edge moves half as far as a level beside it.
            left = 0.5 * below * (mean - low) / share if low else 0.0
            right = 0.5 * above * (high - mean) / share if above else 0.0
            rows.append((-left, 1 - left - right, -right, mean - level))
        levels = [level + step for level, step in zip(levels, _tridiagonal(rows), strict=True)]
    return levels


def _density(x: float) -> float:
    """Density of a standard normal number."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _share(low: float, high: float) -> float:
    """Probability between two numbers of at least 0."""
    return (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2


def _tridiagonal(rows: list[tuple[float, float, float, float]]) -> list[float]:
    """Solve equations of (below, on, above the diagonal, right side)."""
    above: list[float] = []
    right: list[float] = []
    for below, on, over, side in rows:
        pivot = on - below * (above[-1] if above else 0)
        right.append((side - below * (right[-1] if right else 0)) / pivot)
        above.append(over / pivot)
    for i in reversed(range(len(rows) - 1)):
        right[i] -= above[i] * right[i + 1]
    return right


def _levels(bits: int) -> list[float]:
    """All 2^bits of them, ascending."""
    upper = _positive_levels(2**bits // 2) if bits else []
    return [-x for x in reversed(upper)] + upper or [0.0]


_LEVELS = [_levels(bits) for bits in range(MOST_BITS + 1)]
_EDGES = [[sum(pair) / 2 for pair in pairwise(levels)] for levels in _LEVELS]


def _distortion(levels: list[float]) -> float:
    """Mean square error of levels that are means of what they stand for."""
    edges = [-math.inf, *(sum(pair) / 2 for pair in pairwise(levels)), math.inf]
    shares = (_share(abs(high), abs(low)) if high <= 0 else _share(low, high) for low, high in pairwise(edges))
    return 1.0 if len(levels) == 1 else 1 - math.fsum(p * x * x for p, x in zip(shares, levels, strict=True))


DISTORTION = tuple(map(_distortion, _LEVELS))
"""Mean square error of rounding a standard normal number to each number of bits, from 0 to 8."""

_TABLE = torch.tensor([x for levels in _LEVELS for x in levels], dtype=torch.float64, device="cpu")
_LAST = len(_EDGES[-1])
_EDGE_TABLE = torch.tensor(
    [edges + [math.inf] * (_LAST - len(edges)) for edges in _EDGES], dtype=torch.float64, device="cpu"
)


def table(like: Tensor) -> Tensor:
    """Levels of 0, 1, … 8 bits one after the other, (511,): those of b bits begin at 2^b - 1.

    Example:
        >>> [round(x, 4) for x in table(torch.zeros(1))[3:7].tolist()]  # 2 bits
        [-1.5104, -0.4528, 0.4528, 1.5104]
    """
    return _TABLE.to(like)


def edges(bits: Tensor, like: Tensor) -> Tensor:
    """Middles (…, 255) between neighbouring levels of so many bits (…), ascending, filled up with infinities."""
    return _EDGE_TABLE.to(like)[bits.long()]
