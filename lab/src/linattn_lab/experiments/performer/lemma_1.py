"""Both formulas have the mean exp(x·y), with independent and with orthogonal rows.

Two ways to write exp(x·y) as a mean of positive numbers over a standard Gaussian w, with z = x + y:

    exp(x·y) = exp(-(|x|² + |y|²)/2)·E exp(w·z) = exp(-(|x|² + |y|²)/2)·E cosh(w·z)

from E exp(w·z) = exp(|z|²/2) and w having the law of -w. Each row of an orthogonal draw is standard Gaussian too, so
that the same means come of it, within one block and beyond.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import mean_figure
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest
from linattn_lab.experiments.pairs import Draw, Pair, Projection, estimates

CLAIM = (
    "The softmax kernel is the mean of a product of positive features, and of a hyperbolic cosine: φ(x)·φ(y) is "
    "an unbiased estimate of exp(x·y)."
)
SOURCE = "Performer paper (arXiv 2009.14794), lemma 1, and section 2.4 for orthogonal rows"
AXES = Axes("angle between x and y [degrees]", "mean of φ(x)·φ(y) over draws")

_NAMES = ("positive", "hyperbolic")
_DRAWS: tuple[Draw, ...] = ("iid", "orthogonal")


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; |x + y|² stays below 2, where a mean can be sampled."""

    draws: int
    lengths: tuple[float, float] = (0.9, 0.5)
    degrees: tuple[float, ...] = (0, 30, 60, 90, 120, 150, 180)
    num_rows: int = 24  # a block and a half
    head_dim: int = 16


QUICK = Config(draws=20_000, seconds=2)
FULL = Config(draws=200_000, seconds=16)


def rows(config: Config) -> Iterator[Measurement]:
    """The mean of either estimator with either draw, over the angle."""
    for name in _NAMES:
        for draw in _DRAWS:
            for index, degrees in enumerate(config.degrees):
                yield Measurement(f"{name}, {draw}", degrees, partial(_mean, config, name, draw, index))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The mean that lies farthest from exp(x·y)."""
    worst = farthest(rows)
    coarsest = max(STANDARD_ERRORS * (row.standard_error or 0) / row.value for row in rows)
    return decide(
        holds=deviation(worst) <= STANDARD_ERRORS,
        fails=deviation(worst) > STANDARD_ERRORS,
        figure=f"of {len(rows)} means the farthest from exp(x·y) lies {deviation(worst):.1f} standard errors away "
        f"({worst.series}, {worst.x:.0f}°); a bias of {coarsest:.1%} would have shown in any of them",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors over draws, nothing else: a mean is exact in expectation",
    )


def _mean(config: Config, name: str, draw: Draw, index: int) -> Figure:
    """Mean over draws at one angle."""
    pairs = tuple(Pair(*config.lengths, degrees) for degrees in config.degrees)
    sample = estimates(name, pairs, Projection(config.num_rows, config.head_dim, draw), config.draws, config.seed)
    return mean_figure(sample[:, index], pairs[index].kernel)
