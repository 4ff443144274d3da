"""Paired comparison of two methods over the same passages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

_LEVEL, _NUM_ANGLES = 0.95, 200_000


@dataclass(frozen=True)
class Ratio:
    """A ratio in the geometric mean over passages, and where it lies with 95 % confidence.

    Attributes:
        mean: the geometric mean.
        low: the lower end; null where a single passage says nothing of others, as the next.
        high: the upper end.
    """

    mean: float
    low: float | None
    high: float | None


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio | None:
    """The first over the second on the same passages, with Student's interval of the logarithms.

        exp(m ± t·s/√n),   m and s the mean and standard deviation of log(first_i / second_i), t with n - 1 degrees

    Of few passages it is wide, as it must be: a bootstrap of three is never wider than their range.

    Returns:
        A `Ratio`; None where there is no passage, or a figure is 0, infinite or NaN, which has no finite logarithm.

    Example:
        >>> paired_ratio([2.0, 4.0], [1.0, 2.0])  # twice as much on every passage
        Ratio(mean=2.0, low=2.0, high=2.0)

    Source: Student 1908 (doi 10.1093/biomet/6.1.1).
    """
    if len(first) != len(second):
        raise ValueError(f"paired figures are of the same passages, got {len(first)} and {len(second)}")
    if not first or not all(0 < figure < math.inf for figure in (*first, *second)):
        return None
    logs = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None)
    half = student_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@cache
def student_quantile(degrees: int) -> float:
    """What 95 % of Student's distribution lies within, on both sides of 0, to three digits.

    It is √n·tan θ, the density of θ being in proportion to cosⁿ⁻¹ θ, which is added up.

    Example:
        >>> round(student_quantile(2), 2), round(student_quantile(9), 2)
        (4.3, 2.26)
    """
    angles = torch.linspace(0, math.pi / 2, _NUM_ANGLES, dtype=torch.float64)
    shares = angles.cos().pow(degrees - 1).cumsum(0)
    return math.sqrt(degrees) * math.tan(float(angles[shares < _LEVEL * shares[-1]][-1]))
