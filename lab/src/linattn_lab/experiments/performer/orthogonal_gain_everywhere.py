"""The gain of orthogonal rows is a matter of scale, and positive features have the least of it.

With independent rows m·variance/exp(2x·y) = exp(s) - 1 for positive features, s = |x + y|². A block of m = d orthogonal
rows takes (m - 1)·(1 - exp(-s)·1F1(d; d/2; s/2)) from it: m·exp(-s) of the whole, next to nothing beyond log m.
Tokens with standard normal entries have s near 2√d. Hyperbolic features have the same correction and trigonometric ones
its like, but variances of second order in a small argument: there it removes all but 3/(d + 2) of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest, in_series, value_at
from linattn_lab.experiments.pairs import ESTIMATORS, Pair, Projection, closed_error, estimates, variance_ratio

CLAIM = (
    "Orthogonal rows further reduce the variance, so that even fewer random features do, and work particularly well "
    "with positive random features for softmax."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 2.4"
AXES = Axes(
    "|x + y|², or |x - y|² for trigonometric features", "variance with orthogonal rows over independent", log_x=True
)

_DIM = 64
_TYPICAL = 2 * math.sqrt(_DIM)
_SAMPLED = "sampled"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment: a full block, m = d."""

    draws: int
    squares: tuple[float, ...] = (0.01, 0.1, 0.5, 1, 2, 4, 8, _TYPICAL, 24)
    sampled: tuple[float, ...] = (0.5, 1)
    head_dim: int = _DIM


QUICK = Config(draws=2000, seconds=2)
FULL = Config(draws=20_000, seconds=20)


def rows(config: Config) -> Iterator[Measurement]:
    """The ratio of the variances over the scale, closed forms and samples."""
    for name in ESTIMATORS:
        for square in config.squares:
            yield Measurement(name, square, partial(_closed, config, name, square))
    for name in ("positive", "hyperbolic"):
        for index, square in enumerate(config.sampled):
            yield Measurement(f"{name}, {_SAMPLED}", square, partial(_sampled, config, name, index))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """What orthogonal rows save of positive features at the scale of standard normal tokens, against one of m."""
    positive = in_series(rows, "positive")
    others = [max(value_at(rows, name, row.x).value for name in ESTIMATORS if name != "positive") for row in positive]
    saved = 1 - value_at(rows, "positive", _TYPICAL).value
    gains = [1 / value_at(rows, name, 1).value for name in ("positive", "hyperbolic", "trigonometric")]
    behind = [row.value > other for row, other in zip(positive, others, strict=True) if row.x < _TYPICAL]
    worst = farthest([row for row in rows if row.standard_error])
    agrees = deviation(worst) <= STANDARD_ERRORS
    return decide(
        holds=agrees and saved >= 1 / _DIM and not any(behind),
        fails=agrees and saved < 1 / _DIM and all(behind),
        figure=f"at the |x + y|² = {_TYPICAL:.0f} of standard normal tokens of width {_DIM} orthogonal rows save "
        f"{saved:.1e} of the variance of positive features; at 1 they lower it {gains[0]:.2f} times, that of "
        f"hyperbolic ones {gains[1]:.1f} and that of trigonometric ones {gains[2]:.1f} times",
        tolerance=f"none for closed forms, from which samples lie {deviation(worst):.1f} of {STANDARD_ERRORS:.0f} "
        f"standard errors at most; refuted if less than one row in {_DIM} is saved, and if positive features gain "
        "less than both others wherever any gain",
    )


def _pair(name: str, square: float) -> Pair:
    """x = y for exponentials, x = -y for cosines, with the given square."""
    return Pair(math.sqrt(square) / 2, math.sqrt(square) / 2, 180 if name == "trigonometric" else 0)


def _blocks(config: Config) -> tuple[Projection, Projection]:
    """A block of orthogonal rows and as many independent ones."""
    dim = config.head_dim
    return Projection(dim, dim, "orthogonal"), Projection(dim, dim, "iid")


def _closed(config: Config, name: str, square: float) -> Figure:
    """Ratio of the library's closed forms."""
    orthogonal, independent = (closed_error(name, _pair(name, square), own) for own in _blocks(config))
    return Figure(orthogonal / independent)


def _sampled(config: Config, name: str, index: int) -> Figure:
    """Ratio of two variances over draws, beside the closed form."""
    pairs = tuple(_pair(name, square) for square in config.sampled)
    orthogonal, independent = (
        estimates(name, pairs, own, config.draws, config.seed)[:, index] for own in _blocks(config)
    )
    return variance_ratio(orthogonal, independent, _closed(config, name, config.sampled[index]).value)
