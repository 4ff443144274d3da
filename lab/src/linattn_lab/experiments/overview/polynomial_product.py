"""φ(q)·φ(k) with φ(x) = (x/√d + 1)^k is a sum over coordinates of powers, not a power of a sum.

    φ(q)·φ(k) = Σ_l (q_l k_l/d + (q_l + k_l)/√d + 1)^k

The claimed form adds an N×N matrix to an N×d one. Its only sensible reading sums Q + K over coordinates; with the one
read as a matrix of ones it is wrong for every k, with the one summed over coordinates too (d) it is right for k = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.feature_maps import ElementwisePolynomial, features
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, overall_relative_error
from linattn_lab.experiments.judging import decide, in_series

CLAIM = "For φ(x) = (x/√d + 1)^k, φ(Q)φ(K)ᵀ = (QKᵀ/d + (Q + K)/√d + 1)^k."
SOURCE = 'overview, section "Quantifying the error"'
AXES = Axes("degree k", "relative difference from φ(Q)φ(K)ᵀ", log_y=True)

_CLAIMED = "power of the sum, 1 a matrix of ones"
_SUMMED = "power of the sum, 1 summed to d, best factor"
_RIGHT = "sum of the powers"
_DEGREES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: int
    head_dim: int = 16


QUICK = Config(num_tokens=128, seconds=0.2)
FULL = Config(num_tokens=512, seconds=1)


def rows(config: Config) -> Iterator[Measurement]:
    """Every degree in both readings, and as it is."""
    for series in (_CLAIMED, _SUMMED, _RIGHT):
        for degree in _DEGREES:
            yield Measurement(series, degree, partial(_difference, config, series, degree))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """An identity: one of the readings within rounding at every degree, or none."""
    claimed, summed, right = (in_series(rows, series) for series in (_CLAIMED, _SUMMED, _RIGHT))
    rounding = 2.0**-52 * 2 * _DEGREES[-1] * (FULL.head_dim + 3)
    holds = any(max(row.value for row in readings) < rounding for readings in (claimed, summed))
    return decide(
        holds=holds,
        fails=not holds,
        figure=f"the form claimed is off by {min(row.value for row in claimed):.0%} to "
        f"{max(row.value for row in claimed):.0%}; granted d for 1 and the best factor it is right for k = 1 and off "
        f"by {summed[1].value:.1%} to {summed[-1].value:.1%} for k = 2 to {_DEGREES[-1]}; "
        f"Σ_l (q_l k_l/d + (q_l + k_l)/√d + 1)^k is right to {max(row.value for row in right):.0e}",
        tolerance=f"an identity: within {rounding:.0e}, the rounding of sums of {FULL.head_dim} powers",
    )


def _difference(config: Config, series: str, degree: int) -> Figure:
    """A form of the kernel from the inner product of the features."""
    query, key, product, sums = _forms(config)
    phi = ElementwisePolynomial(config.head_dim, degree=degree)
    exact = features(phi, query, "query") @ features(phi, key, "key").mT
    if series == _RIGHT:
        products = query.unsqueeze(1) * key / config.head_dim
        found = (products + (query.unsqueeze(1) + key) * config.head_dim**-0.5 + 1).pow(degree).sum(-1)
    elif series == _CLAIMED:
        found = (product + sums + 1).pow(degree)
    else:
        found = (product + sums + config.head_dim).pow(degree)
        found = found * ((found * exact).sum() / found.square().sum())
    return Figure(overall_relative_error(found, exact), expected=None if series == _RIGHT else 0.0)


@lru_cache(maxsize=1)
def _forms(config: Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys (N, d), QKᵀ/d and the sums over coordinates of (q + k)/√d, (N, N)."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, 1.0, "product", config.seed)
    query, key = tokens.query[0, 0], tokens.key[0, 0]
    sums = torch.add(query.sum(-1, keepdim=True), key.sum(-1)) * config.head_dim**-0.5
    return query, key, query @ key.mT / config.head_dim, sums
