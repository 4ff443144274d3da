"""A finite draw is unbiased for the kernel, at any width and with orthogonal rows as well.

Each row of the projection is standard Gaussian on its own, orthogonal to others or not, and a mean needs no more. What
dependence changes is the variance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn_lab.experiments.draws import Draw, kernel_ratios
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import mean_figure, pair_at_angle
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest

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
            for angle in config.angles:
                yield Measurement(f"{draw}, r = {width}", angle, partial(_mean, config, draw, width, angle))


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


def _mean(config: Config, draw: Draw, width: int, angle: float) -> Figure:
    """Mean over draws at one angle."""
    found = _at_all_angles(config, draw, width)[:, config.angles.index(angle)]
    return mean_figure(found, expected=1.0)


@lru_cache(maxsize=1)
def _at_all_angles(config: Config, draw: Draw, width: int) -> Tensor:
    """Estimate divided by truth, (draws, angles)."""
    pairs = [pair_at_angle(config.length, config.length, angle, config.head_dim) for angle in config.angles]
    q, k = (torch.cat(side) for side in zip(*pairs, strict=True))
    return kernel_ratios(q, k, width, draw, config.draws, "unbiased", config.seed)
