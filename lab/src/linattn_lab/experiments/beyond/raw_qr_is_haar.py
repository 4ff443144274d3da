"""The Q that a QR routine returns is not uniformly distributed: the routine fixes the signs of R's diagonal.

By Householder reflections the diagonal of Q is mostly of one sign, so that the rows w of a random projection made of
it have E w ≠ 0 in every coordinate on average, and the estimate of exp(w·z - |z|²/2) depends on the direction of z.
Multiplying each column of Q by the sign of R's diagonal makes Q uniform (Haar). Public implementations of FAVOR+ leave
that factor out; cosines and hyperbolic cosines, being even, do not notice.

Letters: D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import generator, mean_figure, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest, in_series

CLAIM = "The Q of a Gaussian matrix's QR decomposition gives uniformly random orthogonal directions."
SOURCE = "assumed by public implementations of FAVOR+; what is true, in Mezzadri 2007 (arXiv math-ph/0609050)"
AXES = Axes(
    "width, and direction of z",
    "estimate of the kernel over the kernel; mean coordinate",
    names=(
        "D = 16, z = +(1, …, 1)",
        "D = 16, z = -(1, …, 1)",
        "D = 64, z = +(1, …, 1)",
        "D = 64, z = -(1, …, 1)",
        "D = 16, mean of w",
        "D = 64, mean of w",
    ),
)

_RAW = "Q as returned"
_SIGNED = "FavorPlus: Q with the signs of R"
_SUM_SQUARE = 2.0
_BATCHES = 20
_CASES = ((16, 1.0), (16, -1.0), (64, 1.0), (64, -1.0))
_DIMS = (16, 64)


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment: draws of a D×D projection are `numbers` over D²."""

    numbers: int


QUICK = Config(numbers=2**21, seconds=1)
FULL = Config(numbers=2**24, seconds=9)


def rows(config: Config) -> Iterator[Measurement]:
    """Both draws in two opposite directions, at two widths."""
    for x in range(len(_CASES)):
        for series in (_RAW, _SIGNED):
            yield Measurement(series, x, partial(_ratio, config, series, x))
    for x, head_dim in enumerate(_DIMS, start=len(_CASES)):
        for series in (_RAW, _SIGNED):
            yield Measurement(series, x, partial(_mean, config, series, head_dim))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Uniform directions leave the kernel unbiased in every direction."""
    raw, signed = in_series(rows, _RAW), in_series(rows, _SIGNED)
    worst = deviation(farthest(raw))
    kernels, means = raw[: len(_CASES)], raw[len(_CASES) :]
    return decide(
        holds=worst < STANDARD_ERRORS,
        fails=worst > 2 * STANDARD_ERRORS,
        figure=f"the kernel is estimated as {', '.join(f'{row.value:.2f}' for row in kernels)} of itself along z = "
        f"+(1, …, 1) and -(1, …, 1) with D = 16, then 64, and coordinates have means "
        f"{', '.join(f'{row.value:.3f}' for row in means)}, up to {worst:.0f} standard errors off; with the signs of R "
        f"the kernel is {', '.join(f'{row.value:.3f}' for row in signed[: len(_CASES)])}",
        tolerance=f"1, and 0 for the means, within {STANDARD_ERRORS:.0f} standard errors over {_BATCHES} batches of "
        f"draws; refuted beyond {2 * STANDARD_ERRORS:.0f}",
    )


def _ratio(config: Config, series: str, x: int) -> Figure:
    """Mean over draws of exp(w·z - |z|²/2), |z|² = 2, and its standard error over batches."""
    head_dim, sign = _CASES[x]
    z = torch.full((head_dim,), sign * math.sqrt(_SUM_SQUARE / head_dim), dtype=torch.float64)
    estimates = torch.exp(_projections(config, series, head_dim) @ z - _SUM_SQUARE / 2)
    return mean_figure(estimates.reshape(_BATCHES, -1).mean(1), expected=1.0)


def _mean(config: Config, series: str, head_dim: int) -> Figure:
    """Mean of all coordinates of all rows, and its standard error over batches."""
    return mean_figure(_projections(config, series, head_dim).reshape(_BATCHES, -1).mean(1), expected=0.0)


@lru_cache(maxsize=4)
def _projections(config: Config, series: str, head_dim: int) -> Tensor:
    """Draws of orthogonal rows with the lengths of Gaussian ones, (draws, D, D)."""
    draws = config.numbers // head_dim**2 // _BATCHES * _BATCHES
    if series == _SIGNED:
        purpose = seed("directions", config.seed, head_dim)
        return FavorPlus(head_dim, head_dim, num_heads=draws, seed=purpose).projection
    source = generator("directions", "raw", config.seed, head_dim)
    gaussian, lengths = torch.randn(2, draws, head_dim, head_dim, generator=source, dtype=torch.float64)
    norms: Tensor = torch.linalg.vector_norm(lengths, dim=-1, keepdim=True)
    directions: Tensor = torch.linalg.qr(gaussian).Q
    return norms * directions
