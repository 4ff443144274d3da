"""Orthogonal rows lower the error by what their pairs' covariance allows: much for sines at small scale, else little.

For one weight the variance over draws has a closed form, iid and orthogonal; to first order in 1/r the error of the
output is the mean over queries of Σ_j a_j²·relvar(x, y_j), a the exact weights. The gain of the positive features is a
factor 1.15 where s = |x + y|² is 2 on average; it is gone once s exceeds log r. It takes hundreds of draws to see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series
from linattn_lab.experiments.performer._figure_4 import (
    HEAD_DIM,
    POSITIVE,
    POSITIVE_IID,
    RANDOM,
    SIGMAS,
    TRIGONOMETRIC,
    TRIGONOMETRIC_IID,
    at,
    draw_errors,
    sampled,
)
from linattn_lab.variance import relative_variance

CLAIM = "Orthogonal random features give a lower error than iid ones, trigonometric and positive alike."
SOURCE = "Performer paper (arXiv 2009.14794), figure 4 and section 2.4"
AXES = Axes("features r", "error with iid rows over that with orthogonal rows", log_x=True, log_y=True)

_SINES, _POSITIVE = "sines and cosines", "FAVOR+"
_NAMES = {_SINES: (TRIGONOMETRIC_IID, TRIGONOMETRIC), _POSITIVE: (POSITIVE_IID, POSITIVE)}
# Where the first order in 1/r is a fair one: s and D are 2 on average.
_SMALL, _LARGE = SIGMAS[0], SIGMAS[-1]
_QUERIES = 256


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    trials: int
    draws: int
    num_features: tuple[int, ...]
    sigmas: tuple[float, ...]


QUICK = Config(trials=15, draws=16, num_features=(64,), sigmas=(_SMALL, _LARGE), seconds=8)
FULL = Config(trials=15, draws=20, num_features=(16, 64, 256), sigmas=SIGMAS, seconds=60)


def rows(config: Config) -> Iterator[Measurement]:
    """The gain at every scale and width; where it has an expectation to first order, that too."""
    for sigma in config.sigmas:
        for width in config.num_features:
            for family in _NAMES:
                yield Measurement(at(family, sigma), width, partial(_gain, config, family, width, sigma))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """At small scale both gains must show, and nowhere may orthogonal rows be worse."""
    small = [row for family in _NAMES for row in in_series(rows, at(family, _SMALL))]
    least = min(small, key=_clearly_above_one)
    worst = min(rows, key=_clearly_above_one)
    missing = max(_short_of(row) for row in small)
    large = in_series(rows, at(_POSITIVE, _LARGE))[-1]
    sines = in_series(rows, at(_SINES, _SMALL))[-1]
    error = large.standard_error or 0.0
    return decide(
        holds=_clearly_above_one(least) > STANDARD_ERRORS and _clearly_above_one(worst) > -STANDARD_ERRORS,
        fails=_clearly_above_one(worst) < -STANDARD_ERRORS or missing > STANDARD_ERRORS,
        figure=f"with σ = {_SMALL} the error falls by a factor {sines.value:.2f} for sines and at least "
        f"{least.value:.2f} ± {least.standard_error or 0.0:.2f} ({least.series}); with σ = {_LARGE} FAVOR+ gains "
        f"{large.value:.2f} ± {error:.2f}: a gain that large inputs hide",
        tolerance=f"{STANDARD_ERRORS:.0f} standard errors of the logarithm over trials from a gain of 1; refuted by a "
        f"gain below 1, or below the root of what the variances' closed forms give with σ = {_SMALL}",
    )


def _clearly_above_one(row: FigureRow) -> float:
    """By how many standard errors the logarithm of a gain exceeds 0."""
    return math.log(row.value) * row.value / (row.standard_error or math.inf)


def _short_of(row: FigureRow) -> float:
    """By how many standard errors the logarithm of a gain falls short of half of what it should be."""
    return (math.log(row.expected or 1.0) / 2 - math.log(row.value)) * row.value / (row.standard_error or math.inf)


def _gain(config: Config, family: str, width: int, sigma: float) -> Figure:
    """Geometric mean over draws of the error with iid rows over that with orthogonal rows, both on the same tokens."""
    iid, orthogonal = _NAMES[family]
    logs = torch.stack(
        [
            draw_errors(iid, width, sigma, trial, config.draws).log().mean()
            - draw_errors(orthogonal, width, sigma, trial, config.draws).log().mean()
            for trial in range(config.trials)
        ]
    )
    value = logs.mean().exp().item()
    return Figure(value, value * logs.std().item() / math.sqrt(config.trials), _first_order(family, width, sigma))


@lru_cache
def _first_order(family: str, width: int, sigma: float) -> float | None:
    """The ratio of Σ_j a_j²·relvar(x, y_j) for iid and orthogonal rows, over queries; None beyond its range."""
    if sigma > _SMALL:
        return None
    tokens, _ = sampled(sigma, 0)
    query, key = tokens.query[0, 0, :_QUERIES], tokens.key[0, 0]
    scale = HEAD_DIM**-0.5
    product = scale * (query @ key.mT)
    squares = scale * (query.square().sum(-1, keepdim=True) + key.square().sum(-1))
    weights = product.softmax(-1).square()
    iid, orthogonal = (
        relative_variance(RANDOM[name](width), squares + 2 * product, squares - 2 * product) for name in _NAMES[family]
    )
    return float((weights * iid).sum() / (weights * orthogonal).sum())
