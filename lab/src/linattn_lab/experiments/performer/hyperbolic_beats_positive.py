"""Hyperbolic features have less variance than as many positive ones: much less at small s, hardly less at large s.

A row makes two hyperbolic features or one positive one. With r features of either kind the variances have the ratio

    [(cosh s - 1)/(r/2)] / [(exp(s) - 1)/r] = 1 - exp(-s),    s = |x + y|²

below 1 everywhere, for half the products with a projection. It is much where s is small (2.5 times less at s = 0.5) and
nothing to speak of where positive features are in trouble (2% at s = 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest, in_series, value_at
from linattn_lab.experiments.pairs import Pair, Projection, closed_error, estimates, variance_ratio

CLAIM = "The hyperbolic estimator is strictly more accurate than the positive one with twice as many random features."
SOURCE = "Performer paper (arXiv 2009.14794), section 3, what follows lemma 2"
AXES = Axes("s = |x + y|²", "variance of hyperbolic features over that of as many positive ones", log_x=True)

_CLOSED = "closed form"
_SAMPLED = "sampled"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    squares: tuple[float, ...] = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16)
    sampled: tuple[float, ...] = (0.25, 0.5, 1)
    num_features: int = 32
    head_dim: int = 16


QUICK = Config(draws=20_000, seconds=0.5)
FULL = Config(draws=400_000, seconds=7)


def rows(config: Config) -> Iterator[Measurement]:
    """The ratio at equal features: in closed form everywhere, sampled where tails allow."""
    for square in config.squares:
        yield Measurement(_CLOSED, square, partial(_closed, config, square))
    for index, square in enumerate(config.sampled):
        yield Measurement(_SAMPLED, square, partial(_sampled, config, index))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Whether the ratio is below 1 everywhere, and the samples agree with the closed form."""
    closed, sampled = in_series(rows, _CLOSED), in_series(rows, _SAMPLED)
    worst = farthest(sampled)
    above = any(row.value - STANDARD_ERRORS * (row.standard_error or 0) > 1 for row in sampled)
    half, four = (value_at(rows, _CLOSED, square).value for square in (0.5, 4))
    return decide(
        holds=max(row.value for row in closed) < 1 and deviation(worst) <= STANDARD_ERRORS,
        fails=max(row.value for row in closed) >= 1 or above,
        figure=f"hyperbolic features have {1 / half:.1f} times less variance than as many positive ones at s = 0.5 "
        f"and {1 - four:.0%} less at s = 4; sampled ratios lie within {deviation(worst):.1f} standard errors of "
        "1 - exp(-s)",
        tolerance=f"none for closed forms, {STANDARD_ERRORS:.0f} standard errors for sampled ratios",
    )


def _aligned(square: float) -> Pair:
    """x = y with |x + y|² = s."""
    return Pair(math.sqrt(square) / 2, math.sqrt(square) / 2, 0)


def _budget(config: Config, name: str) -> Projection:
    """The rows that make so many features."""
    num_rows = config.num_features // 2 if name == "hyperbolic" else config.num_features
    return Projection(num_rows, config.head_dim, "iid")


def _closed(config: Config, square: float) -> Figure:
    """Ratio of the library's closed forms."""
    hyperbolic, positive = (
        closed_error(name, _aligned(square), _budget(config, name)) for name in ("hyperbolic", "positive")
    )
    return Figure(hyperbolic / positive, None, -math.expm1(-square))


def _sampled(config: Config, index: int) -> Figure:
    """Ratio of two variances over independent draws."""
    pairs = tuple(_aligned(square) for square in config.sampled)
    hyperbolic, positive = (
        estimates(name, pairs, _budget(config, name), config.draws, config.seed)[:, index]
        for name in ("hyperbolic", "positive")
    )
    return variance_ratio(hyperbolic, positive, -math.expm1(-config.sampled[index]))
