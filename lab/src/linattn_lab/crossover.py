"""From which length on linear attention is faster than softmax, as times at growing lengths tell.

Letters: L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Crossover:
    """From which length on linear attention is faster, at every length measured from there on.

    Attributes:
        length: interpolated between two measured lengths; None where there are no such two.
        between: the two; None where linear attention is faster at all lengths or not at the last one.
        always: whether it is faster at every length.
        last: the last length at which both were measured.
    """

    length: float | None
    between: tuple[int, int] | None
    always: bool
    last: int


def find_crossover(points: Sequence[tuple[int, float, float]]) -> Crossover:
    """From which length on the first contender is faster than the second, at every later point.

    Between the last point at which it is not and the next, log(first / second) is taken as linear in log L.

    Example:
        >>> find_crossover([(64, 2.0, 1.0), (256, 8.0, 16.0)])  # L/32 and L²/4096 cross at 128
        Crossover(length=128.0, between=(64, 256), always=False, last=256)

    Source: linear interpolation.
    """
    last = points[-1][0]
    slower = [index for index, (_, first, second) in enumerate(points) if not first < second]
    if not slower or slower[-1] == len(points) - 1:
        return Crossover(None, None, always=not slower, last=last)
    (left, *before), (right, *after) = points[slower[-1]], points[slower[-1] + 1]
    excess, gain = math.log(before[0] / before[1]), math.log(after[1] / after[0])
    length = left * (right / left) ** (excess / (excess + gain))
    return Crossover(length, (left, right), always=False, last=last)
