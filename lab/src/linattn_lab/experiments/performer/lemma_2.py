"""All three formulas of the variance are right, for independent rows.

The variance of one kernel entry, in the form that shows what matters: with s = |x + y|² and D = |x - y|²,

    m·MSE/exp(2x·y) = cosh(D) - 1  trigonometric,    exp(s) - 1  positive,    cosh(s) - 1  hyperbolic

for m independent rows: each estimator is exact at one end of the angle and worst at the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest
from linattn_lab.experiments.pairs import (
    ESTIMATORS,
    LARGEST_SQUARE,
    Pair,
    Projection,
    estimates,
    paper_error,
    variance_figure,
)

CLAIM = (
    "The mean squared errors of m independent features are exp(|x + y|²)·(1 - exp(-|x - y|²))²/(2m·SM²) for "
    "trigonometric ones, exp(|x + y|²)·SM²·(1 - exp(-|x + y|²))/m for positive ones, and (1 - exp(-|x + y|²))/2 times "
    "the latter for hyperbolic ones, with SM = exp(x·y)."
)
SOURCE = "Performer paper (arXiv 2009.14794), lemma 2"
AXES = Axes("angle between x and y [degrees]", "m·(variance over draws)/exp(2x·y)", log_y=True)


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    lengths: tuple[float, ...] = (0.5, 1.0)
    degrees: tuple[float, ...] = (30, 60, 90, 120, 150)
    num_rows: int = 16
    head_dim: int = 16


QUICK = Config(draws=20_000, seconds=1)
FULL = Config(draws=200_000, seconds=8)


def rows(config: Config) -> Iterator[Measurement]:
    """The variance of each estimator over the angle, as far as its tails let it be sampled."""
    for name in ESTIMATORS:
        for length in config.lengths:
            pairs = _pairs(config, name, length)
            for index, pair in enumerate(pairs):
                take = partial(_variance, config, name, pairs, index)
                yield Measurement(f"{name}, |x| = |y| = {length}", pair.degrees, take)


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The variance that lies farthest from its formula."""
    worst = farthest(rows)
    coarsest = max(STANDARD_ERRORS * (row.standard_error or 0) / row.value for row in rows)
    return decide(
        holds=deviation(worst) <= STANDARD_ERRORS,
        fails=deviation(worst) > STANDARD_ERRORS,
        figure=f"of {len(rows)} sampled variances the farthest from its formula lies {deviation(worst):.1f} standard "
        f"errors away ({worst.series}, {worst.x:.0f}°); an error of {coarsest:.0%} would have shown in any of them",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors, from the fourth moment over draws; exponentials only where "
        f"|x + y|² ≤ {LARGEST_SQUARE:.0f}: beyond, a sample does not see the tail that carries its fourth moment",
    )


def _pairs(config: Config, name: str, length: float) -> tuple[Pair, ...]:
    """The pairs at which this estimator's variance can be sampled."""
    pairs = (Pair(length, length, degrees) for degrees in config.degrees)
    return tuple(pair for pair in pairs if pair.has_light_tails(name))


def _variance(config: Config, name: str, pairs: tuple[Pair, ...], index: int) -> Figure:
    """Variance over draws at one angle, relative to the squared kernel, times m."""
    sample = estimates(name, pairs, Projection(config.num_rows, config.head_dim, "iid"), config.draws, config.seed)
    square = pairs[index].kernel ** 2
    return variance_figure(sample[:, index], paper_error(name, pairs[index]) / square, square / config.num_rows)
