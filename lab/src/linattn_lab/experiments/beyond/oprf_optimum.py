"""The tilt of optimal positive random features, from a scan, in closed form, and as it is miscopied.

With features exp(A|w|² + √(1 - 4A)·w·x - |x|²/2) one estimate of the kernel at s = |x + y|² has second moment, relative
to the squared kernel,

    ((1 + ρ)²/(4ρ))^(D/2) · e^(ρs),   ρ = 1/(1 - 8A)

least where A = (1 - 2f - √((2f + 1)² + 8f))/16 with f = s/D. Notes in circulation have 1/8 for 1/16 and f = s: a tilt
far beyond the optimum, worse than none.

Letters: D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus, Oprf, features
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Verdict
from linattn_lab.experiments.inputs import mean_and_error, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest, in_series, value_at

CLAIM = "A = (1 - 2f - √((2f + 1)² + 8f))/16 with f = s/D minimises the variance of optimal positive random features."
SOURCE = "Likhosherstov et al. 2022 (arXiv 2205.15317), OPRF, restated per dimension; linattn.feature_maps.Oprf"
AXES = Axes("s = |x + y|²", "log of the second moment / squared kernel", log_x=True)

_OPTIMUM = "Oprf, closed form"
_NONE = "FAVOR+: no tilt"
_MISCOPIED = "1/8 for 1/16 and f = s"
_SAMPLED = "Oprf, sampled, D = 16"
_HEAD_DIM, _SAMPLED_DIM = 64, 16
_SUM_SQUARES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_SAMPLED_AT = (0.25, 0.5, 1.0)
_BATCHES = 20
_GRID = 10_001
_BAND = 1e-9


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment."""

    estimates: int
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(estimates=200_000, seconds=0.5)
FULL = Config(estimates=4_000_000, seconds=10)


def rows(config: Config) -> Iterator[Measurement]:
    """Second moments with the closed form's tilt, with none, and with the miscopied one; and sampled."""
    for s in _SUM_SQUARES:
        yield Measurement(_OPTIMUM, s, partial(_optimum, s))
        yield Measurement(_NONE, s, partial(_untilted, s))
        yield Measurement(_MISCOPIED, s, partial(_miscopied, s))
    for s in _SAMPLED_AT:
        yield Measurement(_SAMPLED, s, partial(_sampled, config, s))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The closed form is where a scan has its minimum, and what samples show."""
    optimum, sampled = in_series(rows, _OPTIMUM), farthest(in_series(rows, _SAMPLED))
    missed = max(abs(row.value - (row.expected or 0.0)) for row in optimum)
    last = optimum[-1]
    none, miscopied = (value_at(rows, series, last.x) for series in (_NONE, _MISCOPIED))
    return decide(
        holds=missed < _BAND and deviation(sampled) < STANDARD_ERRORS,
        fails=missed > _BAND or deviation(sampled) > 2 * STANDARD_ERRORS,
        figure=f"logarithms of second moments at the closed form's tilt are within {missed:.0e} of the least of a "
        f"scan; "
        f"at s = {last.x:.0f} and D = {_HEAD_DIM} it is {last.value:.1f}, {none.value:.0f} without a tilt and "
        f"{miscopied.value:.0f} with the miscopied one; sampled ones are {deviation(sampled):.1f} standard errors off",
        tolerance=f"{_BAND:.0e} in the logarithm, above rounding and above half the curvature times the square of the "
        f"last scan's step; samples within {STANDARD_ERRORS:.0f} standard errors",
    )


def _log_second_moment(tilt: Tensor, s: float) -> Tensor:
    """(D/2)·log((1 + ρ)²/(4ρ)) + ρs."""
    rho = 1 / (1 - 8 * tilt)
    return _HEAD_DIM / 2 * torch.log((1 + rho).square() / (4 * rho)) + rho * s


def _optimum(s: float) -> Figure:
    """At the library's tilt, by its own variance; expected is the least value of two nested scans over A < 1/8."""
    at = torch.tensor(s, dtype=torch.float64)
    found = torch.log1p(Oprf(_HEAD_DIM, 1, draw="iid", mean_square=s).relative_variance(at, at)).item()
    low, high = -1.0, 0.12
    for _ in range(2):
        tilts = torch.linspace(low, high, _GRID, dtype=torch.float64)
        best = int(_log_second_moment(tilts, s).argmin())
        low, high = tilts[max(best - 1, 0)].item(), tilts[min(best + 1, _GRID - 1)].item()
    return Figure(found, expected=_log_second_moment(tilts, s).min().item())


def _untilted(s: float) -> Figure:
    """FAVOR+'s, e^s."""
    at = torch.tensor(s, dtype=torch.float64)
    return Figure(torch.log1p(FavorPlus(_HEAD_DIM, 1, draw="iid").relative_variance(at, at)).item(), expected=s)


def _miscopied(s: float) -> Figure:
    """At the tilt of the formula in circulation."""
    tilt = torch.tensor((1 - 2 * s - math.sqrt((2 * s + 1) ** 2 + 8 * s)) / 8, dtype=torch.float64)
    return Figure(_log_second_moment(tilt, s).item())


def _sampled(config: Config, s: float) -> Figure:
    """Logarithm of the mean of squared one-feature estimates over the squared kernel, x = y = z/2 with |z|² = s."""
    each = config.estimates // _BATCHES
    # q = D^(1/4)·x, and x has one coordinate: √s/2.
    q = torch.zeros(1, _SAMPLED_DIM, dtype=torch.float64)
    q[0, 0] = _SAMPLED_DIM**0.25 * math.sqrt(s) / 2
    means = []
    for batch in range(_BATCHES):
        purpose = seed("optimum", config.seed, s, batch)
        oprf = Oprf(_SAMPLED_DIM, each, draw="iid", mean_square=s, seed=purpose)
        estimates = each * features(oprf, q, "query") * features(oprf, q, "key")
        means.append((estimates / oprf.kernel(q, q)).square().mean().item())
    mean, error = mean_and_error(means)
    at = torch.tensor(s, dtype=torch.float64)
    expected = torch.log1p(Oprf(_SAMPLED_DIM, 1, draw="iid", mean_square=s).relative_variance(at, at)).item()
    return Figure(math.log(mean), error / mean, expected=expected)
