"""Random Fourier features for the softmax kernel; letters as in feature_maps/__init__.py."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from linattn.feature_maps._moments import cosine_variance, mean_cosine
from linattn.feature_maps._softmax_estimator import SoftmaxEstimator


@final
class Trigonometric(SoftmaxEstimator):
    """Random Fourier features with the norms kept as weights, unbiased for the softmax kernel.

    φ(x) = exp(|x̃|²/2)·[cos(w_i·x̃), sin(w_i·x̃)]/√m with x̃ = √scale·x, i = 1..m; E φ(q)·φ(k) = exp(scale·q·k). `query`
    and `key` return the bounded part, the exponential is `query_log_weight` and `key_log_weight`. With independent rows
    the relative variance is (cosh(d) - 1)/m, d = scale·|q - k|²: exact for q = k, worst for opposed q and k, whose
    estimated weights may be negative.
    With lengths="fixed" the estimate has mean exp((|x̃|² + |ỹ|²)/2)·0F1(;D/2; -D·d/4).

    Cost: O(L·R·D/2) time, O(L·R) memory; R/2 rows.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R, even.
        draw, scale, seed, num_heads: as in `RandomFeatureMap`.
        lengths: "chi" (unbiased) or "fixed" (biased, lower variance).

    Raises:
        ValueError: if a size is not a positive integer, `num_features` is odd, or an option is not one of those above.

    Example:
        >>> import torch
        >>> trigonometric, x = Trigonometric(4, 8), torch.tensor([[2.0, 0.0, 0.0, 0.0]])
        >>> trigonometric.query(x).square().sum().round(decimals=5).item()  # cos² + sin², m times 1/m
        1.0
        >>> trigonometric.key_log_weight(x).tolist()  # |x̃|²/2 = (4/√4)/2
        [1.0]

    Source: Rahimi and Recht 2007; for attention Choromanski et al. 2021 (arXiv 2009.14794), section 2.3.
    """

    features_per_row = 2
    nonnegative = False

    def query(self, x: Tensor) -> Tensor:
        """Features [cos(w·x̃), sin(w·x̃)]/√m: (..., L, D) -> (..., L, R)."""
        x, weights = self._operands(x)
        angles = torch.matmul(x, weights)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(1 / math.sqrt(self.num_rows))

    def query_log_weight(self, x: Tensor) -> Tensor:
        """|x̃|²/2: (..., L, D) -> (..., L)."""
        x, _ = self._operands(x)
        return self._half_square(x).squeeze(-1)

    def key_log_weight(self, x: Tensor) -> Tensor:
        """|x̃|²/2: (..., L, D) -> (..., L)."""
        return self.query_log_weight(x)

    def relative_variance(self, sum_square: Tensor, difference_square: Tensor) -> Tensor:
        """Variance over draws divided by the squared kernel; a function of `difference_square` alone."""
        return cosine_variance(difference_square, self._rows())

    def _fixed_kernel(self, sums: Tensor, differences: Tensor) -> Tensor:
        """E φ(q)·φ(k) for lengths √D."""
        return torch.exp((sums + differences) / 4) * mean_cosine(differences, self.head_dim, "fixed")
