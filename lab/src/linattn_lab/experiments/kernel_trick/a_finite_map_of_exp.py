"""No feature map of finite width has the exponential as its inner product.

If exp(q·k) = φ(q)·φ(k) with d_φ features, no Gram matrix of any n points has a rank above d_φ. Its rank is n for any n
distinct points: exp is a power series with positive coefficients, a kernel of infinitely many features. In one
dimension they fall off so fast that rounding hides all but the first; in more dimensions every point counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import generator, mean_figure
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series

CLAIM = "A feature map φ satisfies exp(q·k) = φ(q)·φ(k)."
SOURCE = 'kernel trick, section "The Solution: Kernel Feature Maps"'
AXES = Axes("points n", "numerical rank of exp(x_i·x_j), mean over sets of points")

_CURVE = "d = {}"
# Of the largest singular value; rounding leaves n·2⁻⁵² of it, which is less up to 450 points.
_THRESHOLD = 1e-13


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_points: tuple[int, ...] = (5, 10, 15, 30, 60)
    dimensions: tuple[int, ...] = (1, 2, 4)
    sets: int = 12


QUICK = Config(seconds=0.2)
FULL = Config(num_points=(5, 10, 15, 30, 60, 120, 240), seconds=3)


def rows(config: Config) -> Iterator[Measurement]:
    """The rank in every dimension, of ever more points."""
    for dimension in config.dimensions:
        for count in config.num_points:
            yield Measurement(_CURVE.format(dimension), count, partial(_rank, config, dimension, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Whether twice the points still have a larger rank, in the most dimensions."""
    *_, half, full = in_series(rows, _CURVE.format(QUICK.dimensions[-1]))
    low = in_series(rows, _CURVE.format(QUICK.dimensions[0]))[-1]
    margin = STANDARD_ERRORS * math.hypot(half.standard_error or 0.0, full.standard_error or 0.0)
    grows = full.value - half.value > margin
    return decide(
        holds=not grows,
        fails=grows,
        figure=f"in {QUICK.dimensions[-1]} dimensions {half.x:.0f} points have rank {half.value:.0f} and {full.x:.0f} "
        f"have {full.value:.0f}: φ needs a feature for every point; in one dimension {low.value:.0f} do, to rounding",
        tolerance=f"singular values above {_THRESHOLD:.0e} of the largest are counted, which rounding cannot make; "
        f"with a finite φ the rank would stop, {STANDARD_ERRORS:.0f} standard errors over sets aside ({margin:.1f})",
    )


def _rank(config: Config, dimension: int, num_points: int) -> Figure:
    """Mean rank over sets of points with N(0, 1) coordinates."""
    source = generator("gram", config.seed, dimension, num_points)
    points = torch.randn(config.sets, num_points, dimension, generator=source, dtype=torch.float64)
    return mean_figure(torch.linalg.matrix_rank((points @ points.mT).exp(), rtol=_THRESHOLD).double())
