"""Moments of the kernel estimates of random features, in closed form; letters as in feature_maps/__init__.py.

One kernel entry is estimated by f·(mean over rows of g(w_i)), where g(w) is exp(w·z), cosh(w·z) or cos(w·z). With u the
vector that enters (x + y, or x - y for cosines), everything follows from two functions of |u|²:

    G(|u|²)  = E exp(w·u)            chi lengths exp(|u|²/2)          fixed lengths 0F1(;D/2; D|u|²/4)
    G₂(|u|²) = E exp((w + w')·u)     chi lengths 1F1(D;D/2;|u|²/2)    fixed lengths 0F1(;D/2; D|u|²/2)

for a row w and for two rows w ⊥ w' of one orthogonal block; means of cosines are G(-|u|²), G₂(-|u|²), of
chi lengths here. With m rows and P ordered orthogonal pairs the variance relative to the squared mean is

    (E g² / (E g)² - 1)/m + P/m²·(E g(w)g(w') / (E g)² - 1).

0F1(;b;z) = Σ z^k/((b)_k k!) and 1F1(a;b;z) = Σ (a)_k z^k/((b)_k k!), (a)_k = a(a+1)…(a+k-1). For z ≥ 0 all terms are
positive: the logarithm is returned, to 1e-12. For z < 0 the sums cancel; what is needed there are means of cosines,
numbers in [-1, 1], and they are returned to an absolute 1e-13.

Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 2, for independent rows; the pair terms follow from
|w + w'|² being chi-square with 2D degrees of freedom (or 2D exactly), its direction uniform.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Lengths = Literal["chi", "fixed"]
_RESCALE = 2.0**-500
_RESCALE_EVERY = 16


class Rows(NamedTuple):
    """Numbers of a draw that its moments depend on."""

    num_rows: int
    num_pairs: int
    head_dim: int
    lengths: Lengths


def log_mean_exp(square: Tensor, head_dim: int, lengths: Lengths) -> Tensor:
    """log G(square), square ≥ 0."""
    if lengths == "chi":
        return square.double() / 2
    return log_0f1(head_dim / 2, square * (head_dim / 4))


def exponential_variance(s: Tensor, rows: Rows, *, is_hyperbolic: bool = False) -> Tensor:
    """Relative variance with g = exp, or cosh, as a function of s = |x + y|²."""
    log_mean = log_mean_exp(s, rows.head_dim, rows.lengths)
    second = torch.expm1(log_mean_exp(4 * s, rows.head_dim, rows.lengths) - 2 * log_mean)
    if is_hyperbolic:
        # (G(4s) + 1)/2 over G(s)², less one.
        second = (second + torch.expm1(-2 * log_mean)) / 2
    return combine(second, pair_excess(s, rows), rows)


def cosine_variance(d: Tensor, rows: Rows) -> Tensor:
    """Relative variance with g = cos, of chi lengths, as a function of d = |x - y|²; infinite where the mean is 0."""
    mean_square, dim = torch.exp(-d.double()), rows.head_dim
    second = (1 + mean_square.square()) / 2
    pair = damped_1f1(dim, dim / 2, d / 2) if rows.num_pairs else mean_square  # G₂(-d)
    # Divide last: the parts may each be infinite relative to a mean that has underflowed.
    return combine(second - mean_square, pair - mean_square, rows) / mean_square


def pair_excess(s: Tensor, rows: Rows) -> Tensor:
    """G₂(s)/G(s)² - 1: what each ordered pair of orthogonal rows adds, relative to the squared mean."""
    if not rows.num_pairs:
        return torch.zeros_like(s, dtype=torch.float64)
    dim = rows.head_dim
    if rows.lengths == "chi":
        return torch.expm1(log_1f1(dim, dim / 2, s / 2) - s.double())
    return torch.expm1(log_0f1(dim / 2, s * (dim / 2)) - 2 * log_mean_exp(s, dim, rows.lengths))


def combine(second: Tensor, pair: Tensor, rows: Rows) -> Tensor:
    """second/m + P/m²·pair."""
    return second / rows.num_rows + (rows.num_pairs / rows.num_rows**2) * pair


def log_0f1(b: float, z: Tensor) -> Tensor:
    """log 0F1(;b;z) for z ≥ 0, elementwise, in float64."""
    return _log_series(z.double(), lambda k: 1 / ((k + 1) * (b + k)))


def log_1f1(a: float, b: float, z: Tensor) -> Tensor:
    """log 1F1(a;b;z) for a, b > 0 and z ≥ 0, elementwise, in float64."""
    return _log_series(z.double(), lambda k: (a + k) / ((k + 1) * (b + k)))


def damped_1f1(a: float, b: float, z: Tensor) -> Tensor:
    """1F1(a;b;-z) = exp(-z)·1F1(b - a;b;z) (Kummer) for z ≥ 0 and |b - a| ≤ b, in [-1, 1], to an absolute 1e-13."""
    z = z.double()
    term = torch.exp(-z)
    total, magnitude, k = term.clone(), term.clone(), 0
    while bool((term.abs() > 1e-17 * magnitude).any()):
        term = term * (z * ((b - a + k) / ((k + 1) * (b + k))))
        total, magnitude, k = total + term, magnitude + term.abs(), k + 1
    return total


def _log_series(z: Tensor, ratio: Callable[[int], float]) -> Tensor:
    """log of 1 + z·ratio(0) + z²·ratio(0)·ratio(1) + …, terms ≥ 0, rescaled on the way so that it does not overflow."""
    term, total, shift = torch.ones_like(z), torch.ones_like(z), torch.zeros_like(z)
    k = 0
    while bool((term > 1e-17 * total).any()):
        term = term * (z * ratio(k))
        total = total + term
        k += 1
        if k % _RESCALE_EVERY == 0:
            large = total > 1 / _RESCALE
            term = torch.where(large, term * _RESCALE, term)
            total = torch.where(large, total * _RESCALE, total)
            shift = torch.where(large, shift - math.log(_RESCALE), shift)
    return total.log() + shift
