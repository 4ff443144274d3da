"""Large deviations are rarer with orthogonal rows than with independent ones, though the bounds hardly differ.

Measured: deviations of a kernel estimate, counted.

For lengths fixed to √d the paper bounds P(estimate > a) by exp(-θma)·M(θ)^m, M the moment generating function of what
one row contributes, and with orthogonal rows by

    exp(-θma)·(M(θ)^m - exp(-m(|x|² + |y|²)/2)·θ⁴·m(m - 1)/(4(d + 2))·|x + y|⁴)

Strictly better, by some parts in 10¹⁰. The probabilities themselves differ visibly, with Gaussian lengths too, where M
is infinite, once the deviation exceeds the standard deviation √((exp(s) - 1)/m) of independent rows. Just above the
mean orthogonal rows are the likelier to exceed it: the less skewed an estimate, the more often it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, value_at
from linattn_lab.experiments.pairs import Draw, Pair, Projection, estimates

CLAIM = (
    "Orthogonal rows bound the probabilities of large deviations of a kernel estimate strictly better than independent "
    "ones."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 4, theorem 3"
AXES = Axes("a over exp(x·y)", "probability that the estimate exceeds a", log_y=True)

_PAIR = Pair(1, 1, 120)
_NODES = 4001
_BOUND = "the theorem's bound, "
_DRAWS: tuple[Draw, ...] = ("orthogonal", "iid")
_LENGTHS: tuple[Literal["chi", "fixed"], ...] = ("chi", "fixed")


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment: a full block, m = d, and |x + y|² = 1."""

    draws: int
    thresholds: tuple[float, ...] = (1.05, 1.2, 1.5, 1.75, 2.0)
    head_dim: int = 16


QUICK = Config(draws=30_000, seconds=1.5)
FULL = Config(draws=300_000, seconds=14)


def rows(config: Config) -> Iterator[Measurement]:
    """Four tails, rows of either draw with lengths of either kind; and the bounds for lengths √d."""
    for threshold in config.thresholds:
        for draw in _DRAWS:
            yield Measurement(_BOUND + draw, threshold, partial(_bound, config, draw, threshold))
    for lengths in _LENGTHS:
        for draw in _DRAWS:
            own = Projection(config.head_dim, config.head_dim, draw, lengths)
            for threshold in config.thresholds:
                yield Measurement(_tail(draw, lengths), threshold, partial(_probability, config, own, threshold))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Whether bounds are valid and orthogonal ones below the others, and the probabilities of large deviations too."""
    gaps = [
        (one.x, _gap(one, other))
        for lengths in _LENGTHS
        for one, other in zip(*(in_series(rows, _tail(draw, lengths)) for draw in _DRAWS), strict=True)
    ]
    # One row has variance exp(s) - 1 with s = 1; lengths √d have less.
    spread = math.sqrt(math.expm1(_PAIR.sum_square) / QUICK.head_dim)
    large = [gap for threshold, gap in gaps if threshold > 1 + spread]
    one, other = (value_at(rows, _tail(draw, "chi"), 1.5).value for draw in _DRAWS)
    near = [value_at(rows, _tail(draw, "chi"), 1.05).value for draw in _DRAWS]
    fixed, free = (value_at(rows, _tail(draw, "fixed"), 1.5).value for draw in _DRAWS)
    better, worse = (in_series(rows, _BOUND + draw) for draw in _DRAWS)
    strict = all(low.value < high.value for low, high in zip(better, worse, strict=True))
    tails = [row for draw in _DRAWS for row in in_series(rows, _tail(draw, "fixed"))]
    excess = max(
        (tail.value - bound.value) / (tail.standard_error or 1)
        for tail, bound in zip(tails, [*better, *worse], strict=True)
    )
    bounds = [value_at(rows, _BOUND + draw, 1.5).value for draw in _DRAWS]
    return decide(
        holds=strict and excess <= STANDARD_ERRORS and min(large) > STANDARD_ERRORS,
        fails=not strict or excess > STANDARD_ERRORS or min(large) < -STANDARD_ERRORS,
        figure=f"with lengths √d an estimate exceeds 1.5 times exp(x·y) with probability {fixed:.4f} (orthogonal) "
        f"against {free:.4f}, where both bounds are {bounds[1]:.3f} and differ by {1 - bounds[0] / bounds[1]:.0e} of "
        f"it; with Gaussian lengths {one:.3f} against {other:.3f}; the least of {len(large)} such differences is "
        f"{min(large):.1f} standard errors; 1.05 times it with probability {near[0]:.3f} against {near[1]:.3f}",
        tolerance="none between bounds, in float64; "
        f"a deviation beyond {spread:.2f}, one standard deviation, counts as large, and each difference has "
        f"to exceed {STANDARD_ERRORS:.0f} standard errors of a count",
    )


def _tail(draw: str, lengths: str) -> str:
    """Name of a curve."""
    return f"{draw}, {'Gaussian lengths' if lengths == 'chi' else 'lengths √d'}"


def _gap(orthogonal: FigureRow, independent: FigureRow) -> float:
    """By how many standard errors independent rows are the more likely to exceed a threshold."""
    error = math.hypot(orthogonal.standard_error or 0, independent.standard_error or 0)
    return (independent.value - orthogonal.value) / error


def _probability(config: Config, own: Projection, threshold: float) -> Figure:
    """Share of the draws whose estimate exceeds so many times the kernel, with a binomial standard error."""
    sample = estimates("positive", (_PAIR,), own, config.draws, config.seed)[:, 0]
    share = (sample > threshold * _PAIR.kernel).double().mean().item()
    # One count more than there are: a share of 0 is not known exactly.
    upper = share + 1 / config.draws
    return Figure(share, math.sqrt(upper * (1 - share) / config.draws))


def _bound(config: Config, draw: Draw, threshold: float) -> Figure:
    """The theorem's bound at the θ that is best for independent rows, m = d and lengths √d."""
    dim, level = config.head_dim, threshold * _PAIR.kernel
    norms, square = _PAIR.norm_x**2 + _PAIR.norm_y**2, _PAIR.sum_square
    # One coordinate u of a uniform unit vector has density (1 - u²)^((d - 3)/2).
    u = torch.linspace(-1, 1, _NODES, dtype=torch.float64)[1:-1]
    log_density = torch.log_softmax((dim - 3) / 2 * torch.log1p(-u * u), 0)
    contribution = torch.exp(math.sqrt(dim * square) * u - norms / 2)

    def log_moment(theta: float) -> float:
        """m·log M(θ)."""
        return dim * torch.logsumexp(log_density + theta * contribution, 0).item()

    # Convex in θ: halve the interval that holds a zero of the derivative.
    low, high, step = 0.0, 10.0, 1e-6
    while high - low > step:
        middle = (low + high) / 2
        rises = log_moment(middle + step) - log_moment(middle) > step * dim * level
        low, high = (low, middle) if rises else (middle, high)
    moment = math.exp(log_moment(low))
    gap = math.exp(-dim * norms / 2) * low**4 * dim * (dim - 1) / (4 * (dim + 2)) * square**2
    return Figure(math.exp(-low * dim * level) * (moment - (gap if draw == "orthogonal" else 0)))
