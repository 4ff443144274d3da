"""Large deviations of a kernel estimate, counted, with orthogonal and with independent rows.

The paper's bounds are of Chernoff's kind and go through E exp(θZ), Z what one row contributes. It states them for
lengths fixed to √d: Z is lognormal where rows are Gaussian, and that mean infinite for every θ > 0. The probability
itself is smaller with orthogonal rows for lengths of either kind where |x + y|² is small, once the deviation exceeds
the standard deviation √((exp(s) - 1)/m) of independent rows. Just above the mean it is the larger: the less skewed an
estimate, the more often it exceeds its mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from linattn.lab.experiments.experiment import Axes, Figure, Measurement, Row, Verdict
from linattn.lab.experiments.judging import STANDARD_ERRORS, decide, in_series, value_at
from linattn.lab.experiments.performer._pairs import Draw, Pair, Projection, estimates

CLAIM = (
    "Orthogonal rows bound the probabilities of large deviations of a kernel estimate strictly better than independent "
    "ones."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 4, theorem 3"
AXES = Axes("a over exp(x·y)", "probability that the estimate exceeds a", log_y=True)

_PAIR = Pair(1, 1, 120)
_LENGTHS: tuple[Literal["chi", "fixed"], ...] = ("chi", "fixed")


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment: a full block, m = d, and |x + y|² = 1."""

    draws: int
    thresholds: tuple[float, ...] = (1.05, 1.2, 1.5, 1.75, 2.0)
    head_dim: int = 16
    seed: int = 0
    seconds: float = 1.0


QUICK = Config(draws=30_000, seconds=1.5)
FULL = Config(draws=300_000, seconds=14)


def rows(config: Config) -> Iterator[Measurement]:
    """Four tails: rows of either draw with lengths of either kind."""
    for lengths in _LENGTHS:
        draws: tuple[Draw, ...] = ("orthogonal", "iid")
        for draw in draws:
            own = Projection(config.head_dim, config.head_dim, draw, lengths)
            for threshold in config.thresholds:
                yield Measurement(_tail(draw, lengths), threshold, partial(_probability, config, own, threshold))


def verdict(rows: Sequence[Row]) -> Verdict:
    """The difference of the two probabilities in its standard errors, at every threshold."""
    gaps = [
        (one.x, _gap(one, other))
        for lengths in _LENGTHS
        for one, other in zip(*(in_series(rows, _tail(draw, lengths)) for draw in ("orthogonal", "iid")), strict=True)
    ]
    # One row has variance exp(s) - 1 with s = 1; lengths √d have less.
    spread = math.sqrt(math.expm1(_PAIR.sum_square) / QUICK.head_dim)
    large = [gap for threshold, gap in gaps if threshold > 1 + spread]
    one, other = (value_at(rows, _tail(draw, "chi"), 1.5).value for draw in ("orthogonal", "iid"))
    near = [value_at(rows, _tail(draw, "chi"), 1.05).value for draw in ("orthogonal", "iid")]
    fixed, free = (value_at(rows, _tail(draw, "fixed"), 1.5).value for draw in ("orthogonal", "iid"))
    return decide(
        holds=min(large) > STANDARD_ERRORS,
        fails=min(large) < -STANDARD_ERRORS,
        figure=f"an estimate exceeds 1.5 times exp(x·y) with probability {one:.3f} (orthogonal) against {other:.3f}, "
        f"with lengths fixed to √d {fixed:.4f} against {free:.4f}; the least of {len(large)} such differences is "
        f"{min(large):.1f} standard errors; 1.05 times it with probability {near[0]:.3f} against {near[1]:.3f}",
        tolerance=f"a deviation beyond {spread:.2f}, one standard deviation, counts as large, and each difference has "
        f"to exceed {STANDARD_ERRORS:.0f} standard errors of a count",
    )


def _tail(draw: str, lengths: str) -> str:
    """Name of a curve."""
    return f"{draw}, {'Gaussian lengths' if lengths == 'chi' else 'lengths √d'}"


def _gap(orthogonal: Row, independent: Row) -> float:
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
