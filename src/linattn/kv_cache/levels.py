"""Levels that standard normal numbers are rounded to with the least mean square error, for 0 to 8 bits a number.

Source: Lloyd 1982 (Least squares quantization in PCM, doi 10.1109/TIT.1982.1056489); Max 1960 (Quantizing for minimum
distortion, doi 10.1109/TIT.1960.1057548), whose table I has the first of them to four digits.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_BITS = 8
"""Of a number."""

# Newton's steps: from levels of the asymptotic density four would do for 8 bits.
_STEPS = 12


def _positive_levels(number: int) -> Tensor:
    """The upper half of 2·`number` levels, float64: each the mean of the numbers that are nearest to it."""
    # Newton's method on l_i - E[x | e_i < x < e_i+1] = 0, whose derivatives are tridiagonal, for e the middles.
    # Many levels are as dense as the density's cubic root, which is that of a normal number of variance 3.
    shares = (torch.arange(number, dtype=torch.float64, device="cpu") + number + 0.5) / (2 * number)
    levels: Tensor = math.sqrt(3) * torch.special.ndtri(shares)
    for _ in range(_STEPS):
        edges = pad(pad(_middles(levels), (1, 0)), (0, 1), value=math.inf)
        density, share = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi), _shares(edges)
        mean = -density.diff() / share
        # Derivatives of the mean in its edges, halved: an edge moves half as far as a level beside it; two do not move.
        left = 0.5 * density[1:-1] * (mean[1:] - edges[1:-1]) / share[1:]
        right = 0.5 * density[1:-1] * (edges[1:-1] - mean[:-1]) / share[:-1]
        slope = torch.diag(1 - pad(left, (1, 0)) - pad(right, (0, 1))) - torch.diag(left, -1) - torch.diag(right, 1)
        levels = levels + torch.linalg.solve(slope, mean - levels)
    return levels


def _middles(levels: Tensor) -> Tensor:
    """Middles between neighbours."""
    return (levels[1:] + levels[:-1]) / 2


def _shares(edges: Tensor) -> Tensor:
    """Probabilities of a standard normal number between neighbouring ones of at least 0."""
    beyond: Tensor = torch.special.erfc(edges / math.sqrt(2))
    return -beyond.diff() / 2


_UPPER = [_positive_levels(2**bits // 2) for bits in range(1, MOST_BITS + 1)]
_LEVELS = [torch.zeros(1, dtype=torch.float64, device="cpu"), *(torch.cat((-x.flip(0), x)) for x in _UPPER)]


def _distortion(upper: Tensor) -> float:
    """Mean square error of levels that are means of what they stand for, by their upper half."""
    edges = pad(pad(_middles(upper), (1, 0)), (0, 1), value=math.inf)
    return 1 - 2 * float(_shares(edges) @ upper.square())


DISTORTION = (1.0, *map(_distortion, _UPPER))
"""Mean square error of rounding a standard normal number to each number of bits, from 0 to 8."""

_TABLE = torch.cat(_LEVELS)
# Middles below and above each level of 0, 1, … 8 bits, filled up.
_ROW = 2**MOST_BITS + 1
_EDGES = torch.stack(
    [pad(pad(_middles(x), (1, 0), value=-math.inf), (0, _ROW - len(x)), value=math.inf) for x in _LEVELS]
)
# The level next to each multiple of 1/256 from -5 to 5, of each number of bits: no two levels are nearer to each other.
_STEPS_OF_ONE, _REACH = 256, 1280
_LISTED = torch.arange(-_REACH, _REACH + 1, dtype=torch.float32, device="cpu") / _STEPS_OF_ONE
_NUMBERS = torch.stack([torch.searchsorted(_middles(x), _LISTED.double()) for x in _LEVELS]).int()
_NEAREST = torch.cat([x[number] for x, number in zip(_LEVELS, _NUMBERS, strict=True)]).float()

COMPILED = (_TABLE.float(), _NEAREST, _NUMBERS, _EDGES.float())
"""The levels and what finds them, as compiled code takes them: `table`, the nearest listed ones, numbers, and edges."""
COMPILED_SIZES = (_REACH, _STEPS_OF_ONE, _ROW)
"""Listed multiples on each side of 0, their number in 1, and edges of each number of bits."""


def table(like: Tensor) -> Tensor:
    """Levels of 0, 1, … 8 bits one after the other, (511,): those of b bits begin at 2^b - 1."""
    return _TABLE.to(like)


def near_levels(x: Tensor, bits: Tensor) -> Tensor:
    """A level next to each number, of bits that broadcast, float32: the nearest to within 1/256, and faster than it."""
    place = _listed(x, bits)
    return _NEAREST.to(x.device).index_select(0, place.flatten()).view(place.shape)


def level_numbers(x: Tensor, bits: Tensor) -> Tensor:
    """The number of the nearest level, from 0 on, int32, of bits that broadcast; of two as near the lower."""
    place, edges = _listed(x, bits), _EDGES.to(x).flatten()
    number = _NUMBERS.to(x.device).flatten().index_select(0, place.flatten()).view(place.shape)
    below = (number + bits.int() * _ROW).flatten()
    # Between multiples the nearest level is the one next to the listed one, if not that.
    is_higher = x > edges.index_select(0, below + 1).view(place.shape)
    is_lower = x <= edges.index_select(0, below).view(place.shape)
    return number + is_higher.int() - is_lower.int()


def _listed(x: Tensor, bits: Tensor) -> Tensor:
    """Where the multiple nearest to a number is in the list of its bits; a place of the list for what is no number."""
    places = (x * _STEPS_OF_ONE).round_().clamp(-_REACH, _REACH).nan_to_num_(0.0).int()
    return places.add_(bits.int() * len(_LISTED) + _REACH)
