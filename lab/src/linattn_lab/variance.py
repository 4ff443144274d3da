"""Variance of the kernel estimates of random features over draws, in closed form.

One kernel entry is estimated by f·(mean over rows of g(w_i)), where g(w) is exp(w·z), cosh(w·z) or cos(w·z). With u the
vector that enters (x + y, or x - y for cosines; x = √scale·q, y = √scale·k), everything follows from two functions of
|u|²:

    G(|u|²)  = E exp(w·u)            chi lengths exp(|u|²/2)          fixed lengths 0F1(;D/2; D|u|²/4)
    G₂(|u|²) = E exp((w + w')·u)     chi lengths 1F1(D;D/2;|u|²/2)    fixed lengths 0F1(;D/2; D|u|²/2)

for a row w and for two rows w ⊥ w' of one orthogonal block; means of cosines are G(-|u|²), G₂(-|u|²), of
chi lengths here. With m rows and P ordered orthogonal pairs the variance relative to the squared mean is

    (E g² / (E g)² - 1)/m + P/m²·(E g(w)g(w') / (E g)² - 1).

1F1(a;b;z) = Σ (a)_k z^k/((b)_k k!), (a)_k = a(a+1)…(a+k-1). For z < 0 its terms cancel; what is needed there are means
of cosines, numbers in [-1, 1], and they are returned to an absolute 1e-13.

Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 2, for independent rows; the pair terms follow from
|w + w'|² being chi-square with 2D degrees of freedom (or 2D exactly), its direction uniform.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus, FeatureMap, Hyperbolic, Oprf, Trigonometric
from linattn.feature_maps.random_features import SoftmaxEstimator, log_0f1, log_series, squares_of_pairs


class Rows(NamedTuple):
    """Numbers of a draw that its moments depend on."""

    num_rows: int
    num_pairs: int
    head_dim: int
    lengths: Literal["chi", "fixed"]

    @classmethod
    def of(cls, feature_map: SoftmaxEstimator) -> Rows:
        """Those of a map's draw: ordered pairs of rows of one block, Σ n_b·(n_b - 1), the last block what remains."""
        blocks, rest = divmod(feature_map.num_rows, feature_map.head_dim)
        pairs = blocks * feature_map.head_dim * (feature_map.head_dim - 1) + rest * (rest - 1)
        is_orthogonal = feature_map.draw == "orthogonal"
        return cls(feature_map.num_rows, pairs if is_orthogonal else 0, feature_map.head_dim, feature_map.lengths)


def relative_variance(feature_map: FeatureMap, sum_square: Tensor, difference_square: Tensor) -> Tensor:
    """Variance of φ(q)·φ(k) over draws divided by the squared kernel, in float64, of the shape of the arguments.

    Args:
        feature_map: one of FavorPlus, Hyperbolic, Trigonometric and a fitted Oprf.
        sum_square: |x + y|², x = √scale·q and y = √scale·k; any shape.
        difference_square: |x - y|², of the same shape.

    Raises:
        ValueError: the variance is not a function of these alone, as that of `RandomRelu` and `Sderf`.

    Example:
        >>> s = torch.tensor([0.0, 1.0])
        >>> relative_variance(FavorPlus(2, 4, draw="iid"), s, s).round(decimals=4).tolist()  # (exp(s) - 1)/4
        [0.0, 0.4296]

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 2; Likhosherstov et al. 2022 (arXiv 2205.15317) for Oprf.
    """
    if isinstance(feature_map, FavorPlus | Hyperbolic):
        rows = Rows.of(feature_map)
        return _of_exponentials(sum_square, rows, is_hyperbolic=isinstance(feature_map, Hyperbolic))
    if isinstance(feature_map, Trigonometric):
        return _of_cosines(difference_square, Rows.of(feature_map))
    if isinstance(feature_map, Oprf):
        rows, stretch = Rows.of(feature_map), 1 - 4 * feature_map.tilt
        s, spread = sum_square.double(), 1 - 8 * feature_map.tilt
        constant = feature_map.head_dim * (math.log(stretch) - math.log(spread) / 2)
        return _combined(torch.expm1(constant + s * (2 * stretch / spread - 1)), _pair_excess(s, rows), rows)
    raise ValueError(
        f"the variance of {type(feature_map).__name__} depends on more than |x ± y|²; estimate it over redraws of the "
        "map"
    )


def variance(feature_map: SoftmaxEstimator, q: Tensor, k: Tensor) -> Tensor:
    """Variance of φ(q)·φ(k) over draws, in float64; O(Lq·Lk·D).

    Args:
        feature_map: as in `relative_variance`.
        q: (..., Lq, D), any floating dtype.
        k: (..., Lk, D).

    Returns:
        (..., Lq, Lk).

    Raises:
        ValueError: as `relative_variance`; vectors of another width than the map's.

    Example:
        >>> x = torch.tensor([[0.5, 0.0]])  # |2x|² = 1, kernel exp(1/4)
        >>> round(variance(FavorPlus(2, 4, draw="iid", scale=1.0), x, x).item(), 4)  # (exp(1) - 1)/4·exp(1/2)
        0.7082

    Source: as `relative_variance`.
    """
    kernel = feature_map.kernel(q, k)
    squares = squares_of_pairs(q, k, feature_map.scale)
    return relative_variance(feature_map, *squares) * kernel.square()


def _log_mean_exp(square: Tensor, head_dim: int, lengths: Literal["chi", "fixed"]) -> Tensor:
    """log G(square), square ≥ 0."""
    if lengths == "chi":
        return square.double() / 2
    return log_0f1(head_dim / 2, square * (head_dim / 4))


def _of_exponentials(s: Tensor, rows: Rows, *, is_hyperbolic: bool = False) -> Tensor:
    """Relative variance with g = exp, or cosh, as a function of s = |x + y|²."""
    log_mean = _log_mean_exp(s, rows.head_dim, rows.lengths)
    second = torch.expm1(_log_mean_exp(4 * s, rows.head_dim, rows.lengths) - 2 * log_mean)
    if is_hyperbolic:
        # (G(4s) + 1)/2 over G(s)², less one.
        second = (second + torch.expm1(-2 * log_mean)) / 2
    return _combined(second, _pair_excess(s, rows), rows)


def _of_cosines(d: Tensor, rows: Rows) -> Tensor:
    """Relative variance with g = cos, of chi lengths, as a function of d = |x - y|²; infinite where the mean is 0."""
    mean_square, dim = torch.exp(-d.double()), rows.head_dim
    second = (1 + mean_square.square()) / 2
    pair = damped_1f1(dim, dim / 2, d / 2) if rows.num_pairs else mean_square  # G₂(-d)
    # Divide last: the parts may each be infinite relative to a mean that has underflowed.
    return _combined(second - mean_square, pair - mean_square, rows) / mean_square


def _pair_excess(s: Tensor, rows: Rows) -> Tensor:
    """G₂(s)/G(s)² - 1: what each ordered pair of orthogonal rows adds, relative to the squared mean."""
    if not rows.num_pairs:
        return torch.zeros_like(s, dtype=torch.float64)
    dim = rows.head_dim
    if rows.lengths == "chi":
        return torch.expm1(log_1f1(dim, dim / 2, s / 2) - s.double())
    return torch.expm1(log_0f1(dim / 2, s * (dim / 2)) - 2 * _log_mean_exp(s, dim, rows.lengths))


def _combined(second: Tensor, pair: Tensor, rows: Rows) -> Tensor:
    """second/m + P/m²·pair."""
    return second / rows.num_rows + (rows.num_pairs / rows.num_rows**2) * pair


def log_1f1(a: float, b: float, z: Tensor) -> Tensor:
    """log 1F1(a;b;z) for a, b > 0 and z ≥ 0, elementwise, in float64."""
    return log_series(z.double(), lambda k: (a + k) / ((k + 1) * (b + k)))


def damped_1f1(a: float, b: float, z: Tensor) -> Tensor:
    """1F1(a;b;-z) = exp(-z)·1F1(b - a;b;z) (Kummer) for z ≥ 0 and |b - a| ≤ b, in [-1, 1], to an absolute 1e-13."""
    z = z.double()
    term = torch.exp(-z)
    total, magnitude, k = term.clone(), term.clone(), 0
    while bool((term.abs() > 1e-17 * magnitude).any()):
        term = term * (z * ((b - a + k) / ((k + 1) * (b + k))))
        total, magnitude, k = total + term, magnitude + term.abs(), k + 1
    return total
