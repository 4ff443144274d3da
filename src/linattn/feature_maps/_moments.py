"""Moments of the kernel estimates of random features, in closed form.

One kernel entry is estimated by f·(mean over rows of g(w_i)), where g(w) is exp(w·z), cosh(w·z) or cos(w·z). With u the
vector that enters (x + y, or x - y for cosines), everything follows from two functions of |u|²:

    G(|u|²)  = E exp(w·u)            chi lengths exp(|u|²/2)          fixed lengths 0F1(;D/2; D|u|²/4)
    G₂(|u|²) = E exp((w + w')·u)     chi lengths 1F1(D;D/2;|u|²/2)    fixed lengths 0F1(;D/2; D|u|²/2)

for a row w and for two rows w ⊥ w' of one orthogonal block; means of cosines are G(-|u|²), G₂(-|u|²). With m rows and P
ordered orthogonal pairs the variance relative to the squared mean is

    (E g² / (E g)² - 1)/m + P/m²·(E g(w)g(w') / (E g)² - 1).

Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 2, for independent rows; the pair terms follow from
|w + w'|² being chi-square with 2D degrees of freedom (or 2D exactly), its direction uniform.

Letters: D head width, m rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps._draw import Lengths
from linattn.feature_maps._hypergeometric import damped_1f1, log_0f1, log_1f1, sphere_cosine


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


def mean_cosine(square: Tensor, head_dim: int, lengths: Lengths) -> Tensor:
    """G(-square), square ≥ 0, to an absolute 1e-13 for fixed lengths."""
    if lengths == "chi":
        return torch.exp(square.double() / -2)
    return sphere_cosine(head_dim, square * head_dim)


def exponential_variance(s: Tensor, rows: Rows) -> Tensor:
    """Relative variance with g = exp, as a function of s = |x + y|²."""
    log_mean = log_mean_exp(s, rows.head_dim, rows.lengths)
    second = torch.expm1(log_mean_exp(4 * s, rows.head_dim, rows.lengths) - 2 * log_mean)
    return combine(second, pair_excess(s, rows), rows)


def hyperbolic_variance(s: Tensor, rows: Rows) -> Tensor:
    """Relative variance with g = cosh, as a function of s = |x + y|²."""
    log_mean = log_mean_exp(s, rows.head_dim, rows.lengths)
    # (G(4s) + 1)/2 over G(s)², less one.
    up = torch.expm1(log_mean_exp(4 * s, rows.head_dim, rows.lengths) - 2 * log_mean)
    second = (up + torch.expm1(-2 * log_mean)) / 2
    return combine(second, pair_excess(s, rows), rows)


def cosine_variance(d: Tensor, rows: Rows) -> Tensor:
    """Relative variance with g = cos, as a function of d = |x - y|²; infinite where the mean is 0."""
    mean_square = mean_cosine(d, rows.head_dim, rows.lengths).square()
    second = (1 + mean_cosine(4 * d, rows.head_dim, rows.lengths)) / 2
    pair = _pair_cosine(d, rows) if rows.num_pairs else mean_square
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


def chi_moment_ratio(head_dim: int, power: int) -> float:
    """D^(p/2) / E[χ_D^p]: what a homogeneous moment of degree p gains when lengths are fixed to √D."""
    log_moment = power / 2 * math.log(2) + math.lgamma((head_dim + power) / 2) - math.lgamma(head_dim / 2)
    return math.exp(power / 2 * math.log(head_dim) - log_moment)


def _pair_cosine(d: Tensor, rows: Rows) -> Tensor:
    """G₂(-d)."""
    if rows.lengths == "chi":
        return damped_1f1(rows.head_dim, rows.head_dim / 2, d / 2)
    return sphere_cosine(rows.head_dim, 2 * rows.head_dim * d)
