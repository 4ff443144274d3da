"""Orthogonal rows lower the variance by at least what the paper's bound says.

The exact gain, the bound on it, and samples of it:

The paper bounds the mean squared error of m ≤ d orthogonal positive features by that of independent ones less

    2(m - 1)/(m(d + 2))·(SM - exp(-(|x|² + |y|²)/2))²

The exact one follows from E exp((w + w')·z) = 1F1(d; d/2; |z|²/2) for orthogonal rows; the bound is loose by little.
Blocks of orthogonal rows gain beyond m = d too, where the theorem says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest, in_series, value_at
from linattn_lab.experiments.pairs import Draw, Pair, Projection, closed_error, estimates, paper_error, variance_figure

CLAIM = (
    "With m ≤ d orthogonal rows the mean squared error of positive features is at most that of independent rows less "
    "2(m - 1)/(m(d + 2))·(SM - exp(-(|x|² + |y|²)/2))²."
)
SOURCE = "Performer paper (arXiv 2009.14794), theorem 2"
AXES = Axes("angle between x and y [degrees]", "mean squared error of positive features", log_y=True)

_INDEPENDENT = "independent rows, closed form"
_BOUND = "the theorem's bound"
_ORTHOGONAL = "orthogonal rows, closed form"
_SAMPLED = "orthogonal rows, sampled"
_BLOCKS = "three orthogonal blocks, sampled"
_BLOCKS_IID = "as many independent rows, closed form"
_DECISIVE = 120.0


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment: at 120° |x + y|² is 1, as far as a variance can be sampled."""

    draws: int
    degrees: tuple[float, ...] = (_DECISIVE, 130, 140, 150, 160)
    length: float = 1.0
    num_blocks: int = 3
    head_dim: int = 16


QUICK = Config(draws=30_000, seconds=2)
FULL = Config(draws=300_000, seconds=20)


def rows(config: Config) -> Iterator[Measurement]:
    """The three closed forms, and sampled variances of one block and of several."""
    one, several = config.head_dim, config.num_blocks * config.head_dim
    for index, degrees in enumerate(config.degrees):
        pair = Pair(config.length, config.length, degrees)
        yield Measurement(_INDEPENDENT, degrees, partial(_closed, config, one, "iid", pair))
        yield Measurement(_BOUND, degrees, partial(_bound, config, pair))
        yield Measurement(_ORTHOGONAL, degrees, partial(_closed, config, one, "orthogonal", pair))
        yield Measurement(_SAMPLED, degrees, partial(_sampled, config, one, index))
        yield Measurement(_BLOCKS, degrees, partial(_sampled, config, several, index))
        yield Measurement(_BLOCKS_IID, degrees, partial(_closed, config, several, "iid", pair))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Whether exact ≤ bound ≤ independent at all angles, and whether samples agree with the exact value."""
    bounds = in_series(rows, _BOUND)
    exact = [value_at(rows, _ORTHOGONAL, bound.x).value for bound in bounds]
    independent = [value_at(rows, _INDEPENDENT, bound.x).value for bound in bounds]
    sampled = [value_at(rows, _SAMPLED, bound.x) for bound in bounds]
    ordered = all(low <= bound.value <= high for low, bound, high in zip(exact, bounds, independent, strict=True))
    above = [_standard_errors_above(row, bound.value) for row, bound in zip(sampled, bounds, strict=True)]
    worst = farthest(sampled + in_series(rows, _BLOCKS))
    block = value_at(rows, _BLOCKS, _DECISIVE)
    decisive = value_at(rows, _SAMPLED, _DECISIVE)
    gain = -_standard_errors_above(decisive, value_at(rows, _INDEPENDENT, _DECISIVE).value)
    return decide(
        holds=ordered and gain > STANDARD_ERRORS and deviation(worst) <= STANDARD_ERRORS,
        fails=not ordered or max(above) > STANDARD_ERRORS,
        figure=f"at {_DECISIVE:.0f}°: {exact[0]:.3e} exactly, {decisive.value:.3e} ± {decisive.standard_error:.0e} "
        f"sampled, below the bound's {bounds[0].value:.3e} and the {independent[0]:.3e} of independent rows; with "
        f"{QUICK.num_blocks} blocks {block.value:.3e}, of independent rows "
        f"{value_at(rows, _BLOCKS_IID, _DECISIVE).value:.3e}",
        tolerance=f"none between closed forms; samples within {STANDARD_ERRORS:.0f} standard errors of the exact value "
        f"(the farthest: {deviation(worst):.1f}), and at {_DECISIVE:.0f}° below independent rows by more ({gain:.1f})",
    )


def _standard_errors_above(row: FigureRow, bound: float) -> float:
    """By how many of its standard errors a sampled value exceeds a bound; negative below it."""
    return (row.value - bound) / (row.standard_error or 1)


def _closed(config: Config, num_rows: int, draw: Draw, pair: Pair) -> Figure:
    """Mean squared error in closed form; of independent rows beside the paper's."""
    expected = paper_error("positive", pair) / num_rows if draw == "iid" else None
    return Figure(closed_error("positive", pair, Projection(num_rows, config.head_dim, draw)), None, expected)


def _bound(config: Config, pair: Pair) -> Figure:
    """The theorem's right-hand side for a full block, m = d."""
    dim = config.head_dim
    distance = pair.kernel - math.exp(-(pair.norm_x**2 + pair.norm_y**2) / 2)
    return Figure(paper_error("positive", pair) / dim - 2 * (dim - 1) / (dim * (dim + 2)) * distance**2)


def _sampled(config: Config, num_rows: int, index: int) -> Figure:
    """Variance over draws of orthogonal blocks."""
    pairs = tuple(Pair(config.length, config.length, degrees) for degrees in config.degrees)
    own = Projection(num_rows, config.head_dim, "orthogonal")
    sample = estimates("positive", pairs, own, config.draws, config.seed)[:, index]
    return variance_figure(sample, closed_error("positive", pairs[index], own))
