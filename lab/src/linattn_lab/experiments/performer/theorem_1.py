"""Fixing the lengths of the rows to √d replaces exp(x·y) by a smaller kernel; how much smaller, entries do not tell.

With w = |x + y|²/2 the ratio of the two is

    exp(-w)·0F1(; d/2; d·w/2) = exp(-w)·Σ_k w^k/k!·Π_{j<k} d/(d + 2j) ≤ 1,    near exp(-w²/d) for large d

The theorem's lower bound 1 - 2/d^(1/3) tends to 1 and is granted to matrices A with bounded norm ‖A‖_∞ ≤ C. Queries
orthogonal to all keys have entries 1, and row sums L, whatever their lengths: with the lengths √d of standard normal
tokens w = √d, and the ratio tends to 1/e. The proof takes exp(|x|²) and exp(|y|²) to be at most C too, which are no
entries of A. With that, w ≤ 2 log C and 1 - ratio = O(1/d), far less than the theorem allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import mean_figure, pair_at_angle
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, deviation, farthest, in_series
from linattn_lab.experiments.pairs import Pair, Projection, estimates

CLAIM = (
    "If ‖A‖_∞ ≤ C for the attention matrix, the entries of the regularised one are at least 1 - 2/d^(1/3) + "
    "o(d^(-1/3)) times those of A; they are at most those of A always."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 3, theorem 1"
AXES = Axes("head width d", "regularised kernel over softmax kernel", log_x=True)

_BOUND = "1 - 2/d^(1/3)"
_LONG = "entries 1: orthogonal, lengths √d"
_SHORT = "entries e: aligned, |x| = |y| = 1"
_SAMPLED = "orthogonal, |x| = |y| = 1, sampled"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    head_dims: tuple[int, ...] = (16, 64, 256, 1024, 4096, 2**16, 2**20)
    sampled: tuple[int, ...] = (4, 16)
    num_rows: int = 64


QUICK = Config(draws=6000, seconds=0.5)
FULL = Config(draws=100_000, seconds=4)


def rows(config: Config) -> Iterator[Measurement]:
    """The ratio over the head width, for long orthogonal and for short aligned vectors, and the theorem's bound."""
    for dim in config.head_dims:
        yield Measurement(_BOUND, dim, partial(Figure, 1 - 2 / dim ** (1 / 3)))
        for series in (_LONG, _SHORT):
            yield Measurement(series, dim, partial(_closed, series, dim))
    for dim in config.sampled:
        yield Measurement(_SAMPLED, dim, partial(_sampled, config, dim))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Where the bound tends to 1, whether the ratio does."""
    bounds, long, short = (in_series(rows, series) for series in (_BOUND, _LONG, _SHORT))
    worst = farthest([row for row in rows if row.standard_error])
    most = max(row.value for row in (*long, *short))
    # Twice the bound's own distance from 1 leaves the o(d^(-1/3)) as much room as the term it is small beside.
    room = 2 * (1 - bounds[-1].value)
    agrees = deviation(worst) <= STANDARD_ERRORS
    return decide(
        holds=agrees and most <= 1 and min(long[-1].value, short[-1].value) >= 1 - room,
        fails=most > 1 or (agrees and min(long[-1].value, short[-1].value) < 1 - room),
        figure=f"orthogonal queries and keys of length √d have entries 1, and a ratio that falls from "
        f"{long[0].value:.3f} at d = {long[0].x:.0f} to {long[-1].value:.3f} at d = {long[-1].x:.0f}, near 1/e = "
        f"{math.exp(-1):.3f}, where the bound says {bounds[-1].value:.3f}; with |x| = |y| = 1 it is "
        f"{short[1].value:.3f} at d = {short[1].x:.0f} and tends to 1 as 1/d; it never exceeds 1",
        tolerance=f"twice the bound's distance from 1 at the largest d, {room:.3f}, for the o(d^(-1/3)); samples lie "
        f"within {deviation(worst):.1f} of {STANDARD_ERRORS:.0f} standard errors of the closed form",
    )


def ratio(sum_square: float, head_dim: int) -> float:
    """Regularised kernel over softmax kernel at |x + y|², from the library's closed form for fixed lengths."""
    length = math.sqrt(sum_square / 2)
    x, y = pair_at_angle(length, length, 90, head_dim)  # exp(x·y) = 1
    return FavorPlus(head_dim, 1, draw="iid", lengths="fixed", scale=1.0).kernel(x, y).item()


def _closed(series: str, dim: int) -> Figure:
    """The ratio in closed form, beside its limit for large d."""
    # Orthogonal with lengths √d, which the temperature makes d^(1/4); or x = y of length 1.
    square = 2 * math.sqrt(dim) if series == _LONG else 4.0
    return Figure(ratio(square, dim), None, math.exp(-(square**2) / (4 * dim)))


def _sampled(config: Config, dim: int) -> Figure:
    """Mean of the regularised estimate over draws where exp(x·y) = 1."""
    pair = Pair(1, 1, 90)
    fixed = Projection(config.num_rows, dim, "iid", "fixed")
    sample = estimates("positive", (pair,), fixed, config.draws, config.seed)
    return mean_figure(sample[:, 0], ratio(pair.sum_square, dim))
