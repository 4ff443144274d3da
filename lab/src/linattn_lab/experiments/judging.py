"""From figures to a verdict: comparisons that know their sampling error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from linattn_lab.experiments.experiment import FigureRow, Status, Verdict

STANDARD_ERRORS = 4.0
"""How many standard errors decide: one true figure in 16,000 lies outside."""


def in_series(rows: Iterable[FigureRow], series: str) -> list[FigureRow]:
    """The rows of one curve in the order of their abscissae."""
    return sorted((row for row in rows if row.series == series), key=lambda row: row.x)


def value_at(rows: Iterable[FigureRow], series: str, x: float) -> FigureRow:
    """The row of one curve at one abscissa."""
    return next(row for row in rows if row.series == series and row.x == x)


def decide(*, holds: bool, fails: bool, figure: str, tolerance: str) -> Verdict:
    """A verdict from two tests of which at most one may be true; undecided where neither is."""
    if holds and fails:
        raise ValueError(f"the figures cannot both bear a claim out and refute it: {figure}")
    status: Status = "holds" if holds else "fails" if fails else "undecided"
    return Verdict(status, figure, tolerance)


def deviation(row: FigureRow) -> float:
    """|value - expected| in standard errors; where nothing was sampled, in units of float64 rounding of the larger."""
    if row.expected is None:
        raise ValueError(f"{row.claim}: {row.series} at {row.x} has nothing to be compared with")
    unit = row.standard_error or 2.0**-52 * max(abs(row.value), abs(row.expected), 2.0**-1000)
    return abs(row.value - row.expected) / unit


def farthest(rows: Sequence[FigureRow]) -> FigureRow:
    """The row whose value lies most standard errors from what is expected of it."""
    return max(rows, key=deviation)


def slope(rows: Sequence[FigureRow]) -> tuple[float, float]:
    """Slope of log value against log x by least squares, and its standard error from those of the values.

    The standard error is 0 where no value was sampled.
    """
    x = [math.log(row.x) for row in rows]
    y = [math.log(row.value) for row in rows]
    centre = sum(x) / len(x)
    spread = sum((one - centre) ** 2 for one in x)
    steepness = sum((one - centre) * other for one, other in zip(x, y, strict=True)) / spread
    noise = sum(((one - centre) * (row.standard_error or 0) / row.value) ** 2 for one, row in zip(x, rows, strict=True))
    return steepness, math.sqrt(noise) / spread
