"""The normaliser is the sum of a row of A over its L keys; a sum over d terms does not normalise.

D⁻¹A averages the values when its rows sum to 1: D_ii = Σ_{j=1..L} A_ij. As printed, the sum runs over the first index
and stops at the head's width d. Even with the index mended it is right at L = d alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens
from linattn_lab.experiments.judging import decide, in_series

CLAIM = "Att = D⁻¹AV with D = diag(Σ_{i=1..d} A_ij)."
SOURCE = "time to perform, section I"
AXES = Axes("tokens L", "root mean square of a row sum of D⁻¹A, less 1", log_x=True)

PRINTED = "Σ over the first index up to d, as printed"
MENDED = "Σ over keys up to d"
RIGHT = "Σ over keys up to L"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment; no length is below d, where a sum up to d would not exist."""

    num_tokens: tuple[int, ...] = (16, 32, 64, 128, 256)
    head_dim: int = 16
    sigma: float = 0.5


QUICK = Config(seconds=0.1)
FULL = Config(num_tokens=(16, 32, 64, 128, 256, 512, 1024), seconds=0.2)


def rows(config: Config) -> Iterator[Measurement]:
    """All readings at every length."""
    for count in config.num_tokens:
        for series in (PRINTED, MENDED, RIGHT):
            yield Measurement(series, count, partial(_row_sums, config, series, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The printed sum's farthest row sums, beside those of the right one."""
    worst, mended, right = (
        max(in_series(rows, series), key=lambda row: row.value) for series in (PRINTED, MENDED, RIGHT)
    )
    rounding = worst.x * 2.0**-52
    return decide(
        holds=worst.value <= rounding,
        fails=worst.value > rounding,
        figure=f"rows of D⁻¹A, to sum to 1, are off by {worst.value:.2g} at L = {worst.x:.0f} as printed, by "
        f"{mended.value:.2g} with the index mended, and by {right.value:.0e} with a sum over all L keys",
        tolerance=f"a sum of {worst.x:.0f} positive terms is rounded to {rounding:.0e} at most",
    )


def _row_sums(config: Config, series: str, num_tokens: int) -> Figure:
    """How far rows of D⁻¹A are from sums of 1; expected is what the claim needs."""
    query, key, _ = gaussian_tokens(num_tokens, config.head_dim, config.sigma, "normaliser", config.seed)
    weights = (query @ key.mT).exp().squeeze()
    averaging = weights / _normaliser(weights, series, config.head_dim).unsqueeze(-1)
    return Figure((averaging.sum(-1) - 1).square().mean().sqrt().item(), expected=0.0)


def _normaliser(weights: Tensor, series: str, head_dim: int) -> Tensor:
    """The diagonal of D."""
    if series == PRINTED:
        return weights[:head_dim].sum(0)
    return weights[:, :head_dim].sum(1) if series == MENDED else weights.sum(1)
