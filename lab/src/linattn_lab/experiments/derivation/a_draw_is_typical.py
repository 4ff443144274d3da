"""Unbiased is not typical: most draws lie far below exp(q·k), a few far above.

One term of the estimate is lognormal, exp(w·z - |z|²/2) with z = q + k: mean 1, median exp(-|z|²/2). A mean over r of
them comes near 1 once r exceeds e^s - 1, s = |z|²; before that the mean is carried by draws that hardly ever come.
Tokens with N(0, 1) entries of width 64 have s of about 16, under the scale 1/√64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import mean_figure
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, value_at
from linattn_lab.experiments.pairs import Pair, Projection, estimates

CLAIM = "exp(q·k) ≈ φ(q)·φ(k) for finitely many samples."
SOURCE = 'derivation, section "Bringing It Back to the Attention Formula"; how many samples is not said'
AXES = Axes("s = |q + k|²", "φ(q)·φ(k) divided by exp(q·k), or share of draws", log_x=True)

MEDIAN = "median of the draws"
MEAN = "mean of the draws"
BELOW = "share of draws below half of exp(q·k)"
# An estimate counts as an approximation within a factor of two.
_FACTOR = 2.0


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; the width of a head changes nothing, only |q + k| does."""

    draws: int
    squares: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16)
    num_features: int = 256
    head_dim: int = 2


QUICK = Config(draws=4_000, seconds=1)
FULL = Config(draws=100_000, seconds=20)


def rows(config: Config) -> Iterator[Measurement]:
    """Median, mean and lower tail at every s."""
    for square in config.squares:
        yield Measurement(MEDIAN, square, partial(_median, config, square))
        yield Measurement(MEAN, square, partial(_mean, config, square))
        yield Measurement(BELOW, square, partial(_below, config, square))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The median farthest from the truth: within a factor of two, or not."""
    worst = max(in_series(rows, MEDIAN), key=lambda row: abs(math.log(row.value)))
    below = value_at(rows, BELOW, worst.x).value
    margin = STANDARD_ERRORS * (worst.standard_error or 0.0)
    low, high = worst.value - margin, worst.value + margin
    return decide(
        holds=low > 1 / _FACTOR and high < _FACTOR,
        fails=high < 1 / _FACTOR or low > _FACTOR,
        figure=f"at s = {worst.x:g} the median draw is {worst.value:.2f} of exp(q·k), and {below:.0%} of the draws lie "
        "below its half: unbiased, but not near until r exceeds e^s - 1",
        tolerance=f"the median within a factor of {_FACTOR:.0f}, {STANDARD_ERRORS:.0f} standard errors aside "
        f"({worst.standard_error or 0:.3f} each)",
    )


def _median(config: Config, square: float) -> Figure:
    """The middle draw; its standard error is half the distance of the order statistics one deviation around it."""
    ratios = _ratios(config, square)
    middle, deviation = config.draws // 2, math.isqrt(config.draws) // 2
    error = (ratios[middle + deviation] - ratios[middle - deviation]) / 2
    return Figure(ratios[middle].item(), error.item(), expected=1.0)


def _mean(config: Config, square: float) -> Figure:
    """The mean, whose standard error is itself an estimate of little worth once s is large."""
    return mean_figure(_ratios(config, square), expected=1.0)


def _below(config: Config, square: float) -> Figure:
    """How many draws are less than half the truth."""
    share = (_ratios(config, square) < 1 / _FACTOR).double().mean().item()
    return Figure(share, math.sqrt(share * (1 - share) / config.draws), expected=0.0)


@lru_cache(maxsize=1)
def _ratios(config: Config, square: float) -> Tensor:
    """Estimate divided by truth over draws, ascending."""
    length = math.sqrt(square) / 2
    pair, rows = Pair(length, length, 0), Projection(config.num_features, config.head_dim, "iid")
    return (estimates("positive", (pair,), rows, config.draws, config.seed)[:, 0] / pair.kernel).sort().values
