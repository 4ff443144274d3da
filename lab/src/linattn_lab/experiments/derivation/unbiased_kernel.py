"""A finite draw is unbiased for the kernel, at any width and with orthogonal rows as well.

Each row of the projection is standard Gaussian on its own, orthogonal to others or not, and a mean needs no more. What
dependence changes is the variance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import mean_figure
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest
from linattn_lab.experiments.pairs import Draw, Pair, Projection, estimates

CLAIM = "φ(q)·φ(k) with finitely many samples is an unbiased estimator of exp(q·k)."
SOURCE = 'derivation, section "Finite-Dimensional Random Features"'
AXES = Axes("angle between q and k, degrees", "mean of φ(q)·φ(k) over draws, divided by exp(q·k)")

_DRAWS: tuple[Draw, ...] = ("iid", "orthogonal")
# A finding refutes the claim from twice as many standard errors on as it is allowed.
_REFUTED = 2 * STANDARD_ERRORS


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment.

    The length gives |q + k|² < 2 at every angle: an estimate's tails are light enough there for a mean of draws.
    """

    draws: int
    num_features: tuple[int, ...] = (1, 16, 48)
    angles: tuple[float, ...] = (0, 45, 90, 135)
    length: float = 0.7
    head_dim: int = 16


QUICK = Config(draws=5_000, seconds=1)
FULL = Config(draws=100_000, seconds=15)


def rows(config: Config) -> Iterator[Measurement]:
    """The mean at every angle, width and draw; 48 features are three orthogonal blocks."""
    for draw in _DRAWS:
        for width in config.num_features:
            for index, angle in enumerate(config.angles):
                yield Measurement(f"{draw}, r = {width}", angle, partial(_mean, config, draw, width, index))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The mean farthest from 1, in its standard errors."""
    worst = farthest(rows)
    return decide(
        holds=deviation(worst) <= STANDARD_ERRORS,
        fails=deviation(worst) > _REFUTED,
        figure=f"of {len(rows)} means the farthest is {worst.value:.4f} ({worst.series}, {worst.x:.0f} degrees), "
        f"{deviation(worst):.1f} standard errors from 1",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors over independent draws; refuted from {_REFUTED:.0f} on",
    )


def _mean(config: Config, draw: Draw, width: int, index: int) -> Figure:
    """Mean over draws at one angle."""
    pairs = tuple(Pair(config.length, config.length, angle) for angle in config.angles)
    sample = estimates("positive", pairs, Projection(width, config.head_dim, draw), config.draws, config.seed)
    return mean_figure(sample[:, index] / pairs[index].kernel, expected=1.0)
