"""Reordering the products changes nothing but rounding.

(QKᵀ)V = Q(KᵀV) term by term; in floating point each side rounds its n·d products and sums, so that both differ by at
most 2·(n + d)·u times |Q||K|ᵀ|V|, u = 2⁻⁵³, the same sums of absolute values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens
from linattn_lab.experiments.judging import decide

CLAIM = "(QKᵀ)V = Q(KᵀV): the order of the products may be changed."
SOURCE = 'kernel trick, section "The Core Insight: Associativity"'
AXES = Axes("tokens n", "largest |difference| / (|Q||K|ᵀ|V|)", log_x=True, log_y=True)

DIFFERENCE = "float64"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: tuple[int, ...]
    head_dim: int = 64


QUICK = Config(num_tokens=(64, 256, 1024), seconds=0.3)
FULL = Config(num_tokens=(64, 256, 1024, 4096), seconds=4)


def rows(config: Config) -> Iterator[Measurement]:
    """The difference at every length."""
    for count in config.num_tokens:
        yield Measurement(DIFFERENCE, count, partial(_difference, config, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Every difference is rounding, or one is not."""
    worst = max(rows, key=lambda row: row.value / _rounding(row.x))
    return decide(
        holds=worst.value <= _rounding(worst.x),
        fails=worst.value > _rounding(worst.x),
        figure=f"both orders differ by {worst.value:.1e} of the sum of absolute terms at {worst.x:.0f} tokens",
        tolerance=f"n + d roundings on each side, {_rounding(worst.x):.1e} if all of them add up",
    )


def _rounding(num_tokens: float) -> float:
    """2·(n + d)·2⁻⁵³."""
    return 2 * (num_tokens + QUICK.head_dim) * 2.0**-53


def _difference(config: Config, num_tokens: int) -> Figure:
    """Largest entry of the difference, relative to that of the absolute terms."""
    q, k, v = (x.squeeze() for x in gaussian_tokens(num_tokens, config.head_dim, 1.0, "associativity", config.seed))
    difference = (q @ k.mT) @ v - q @ (k.mT @ v)
    terms = q.abs() @ (k.abs().mT @ v.abs())
    return Figure((difference.abs() / terms).max().item())
