"""Positive features win at angles near 180°; where vectors are short, trigonometric ones win well beyond 90°.

The figure's function r = MSE(trigonometric)/MSE(positive) for |x| = |y| = l at an angle φ, independent rows:

    r(φ, l) = (cosh D - 1)/(exp(s) - 1),    s = 2l²(1 + cos φ), D = 2l²(1 - cos φ)

With δ = π - φ → 0, s → l²δ²: r grows as 1/δ², without bound. The two tie at 119°, 100°, 94° and 92.5° for l = 0.5 to 2:
for short vectors trigonometric features are the better ones well beyond a right angle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest, in_series, value_at
from linattn_lab.experiments.pairs import Pair, Projection, closed_error, estimates, paper_error, variance_ratio

CLAIM = (
    "For angles large enough, hence small enough values of the softmax kernel, positive features are arbitrarily more "
    "accurate than trigonometric ones."
)
SOURCE = "Performer paper (arXiv 2009.14794), figure 2"
AXES = Axes("angle between x and y [degrees]", "MSE of trigonometric over MSE of positive features", log_y=True)

_TIE = "both are as accurate"
_SLICE = "|x| = |y| = {}"
_NEAR = (178.0, 179.0)


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    lengths: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    degrees: tuple[float, ...] = (15, 30, 45, 60, 75, 90, 105, 120, 135, 150, 160, 170, 175, *_NEAR)
    sampled: tuple[float, ...] = (30, 60, 90, 120, 150, 170)
    num_rows: int = 16
    head_dim: int = 16


QUICK = Config(draws=20_000, seconds=1)
FULL = Config(draws=200_000, seconds=6)


def rows(config: Config) -> Iterator[Measurement]:
    """The figure's slices, their crossings of r = 1, and sampled ratios where tails allow."""
    for length in config.lengths:
        curve = _SLICE.format(length)
        for degrees in config.degrees:
            pair = Pair(length, length, degrees)
            expected = paper_error("trigonometric", pair) / paper_error("positive", pair)
            yield Measurement(curve, degrees, partial(_closed, config, pair, expected))
        tie = Pair(length, length, crossing(length))
        yield Measurement(_TIE, tie.degrees, partial(_closed, config, tie, 1.0))
        pairs = tuple(Pair(length, length, degrees) for degrees in config.sampled)
        pairs = tuple(pair for pair in pairs if pair.has_light_tails("positive"))
        for index, pair in enumerate(pairs if length <= 1 else ()):
            yield Measurement(f"{curve}, sampled", pair.degrees, partial(_sampled, config, pairs, index))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Whether r grows as 1/(180° - φ)² towards 180°, and the samples lie on the curves."""
    worst = farthest([row for row in rows if row.standard_error])
    near = [[value_at(rows, _SLICE.format(length), degrees).value for degrees in _NEAR] for length in QUICK.lengths]
    growths = [after / before for before, after in near]
    law = ((180 - _NEAR[0]) / (180 - _NEAR[1])) ** 2
    # With s = (lδ)²: exp(s) - 1 = s·(1 + s/2), and cosh D - 1 is less than its limit by a factor 1 - s·coth(D/2), which
    # is at most 2.2 for D ≥ 1. Together below 3s.
    margin = 3 * (max(QUICK.lengths) * math.radians(180 - _NEAR[0])) ** 2
    end = value_at(rows, _SLICE.format(1.0), _NEAR[1]).value
    ties = ", ".join(f"{row.x:.1f}°" for row in reversed(in_series(rows, _TIE)))
    return decide(
        holds=all(abs(growth / law - 1) < margin for growth in growths) and deviation(worst) <= STANDARD_ERRORS,
        fails=any(growth < 1 for growth in growths),
        figure=f"from {_NEAR[0]:.0f}° to {_NEAR[1]:.0f}° the ratio grows {min(growths):.3f} to {max(growths):.3f} "
        f"times, to {end:.1e} at length 1; up to {ties} for lengths {', '.join(map(str, QUICK.lengths))} trigonometric "
        f"features are the better ones; samples lie within {deviation(worst):.1f} standard errors",
        tolerance=f"{law:.0f} times is the limit of 1/(180° - φ)², reached to 3(lδ)² = {margin:.1%}, δ = 2°; "
        f"{STANDARD_ERRORS:.0f} standard errors for sampled ratios",
    )


def crossing(length: float) -> float:
    """The angle at which both estimators are as accurate, by bisection on the library's closed forms."""
    low, high = 1.0, 179.0
    for _ in range(50):
        middle = (low + high) / 2
        pair = Pair(length, length, middle)
        low, high = (middle, high) if _ratio(pair, Projection(1, QUICK.head_dim, "iid")) < 1 else (low, middle)
    return low


def _ratio(pair: Pair, projection: Projection) -> float:
    """r from the library's closed forms."""
    return closed_error("trigonometric", pair, projection) / closed_error("positive", pair, projection)


def _closed(config: Config, pair: Pair, expected: float) -> Figure:
    """r, and what the paper's lemma or the tie says it is."""
    return Figure(_ratio(pair, Projection(config.num_rows, config.head_dim, "iid")), None, expected)


def _sampled(config: Config, pairs: tuple[Pair, ...], index: int) -> Figure:
    """r from variances over independent draws."""
    own = Projection(config.num_rows, config.head_dim, "iid")
    trigonometric, positive = (
        estimates(name, pairs, own, config.draws, config.seed)[:, index] for name in ("trigonometric", "positive")
    )
    return variance_ratio(trigonometric, positive, _ratio(pairs[index], own))
