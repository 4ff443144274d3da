"""Random features that estimate the softmax kernel; letters as in feature_maps/__init__.py."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from linattn.feature_maps._moments import cosine_variance, exponential_variance, mean_cosine
from linattn.feature_maps._powers import multiplied
from linattn.feature_maps._softmax_estimator import ExponentialEstimator, SoftmaxEstimator


@final
class FavorPlus(ExponentialEstimator):
    """FAVOR+: positive random features, unbiased for the softmax kernel.

    φ_i(x) = exp(w_i·x̃ - |x̃|²/2)/√R with x̃ = √scale·x; E φ(q)·φ(k) = exp(scale·q·k). With independent rows the relative
    variance is (exp(s) - 1)/R, s = scale·|q + k|²: it explodes exactly for aligned q and k.
    With lengths="fixed" the estimate has mean exp(-(|x̃|² + |ỹ|²)/2)·0F1(;D/2; D·s/4), below the softmax kernel.

    Cost: O(L·R·D) time, O(L·R) memory; R rows.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R.
        draw, scale, seed, num_heads: as in `RandomFeatureMap`; "orthogonal" draws lower the variance for small s.
        lengths: "chi" (unbiased) or "fixed" (biased, lower variance).

    Raises:
        ValueError: if a size is not a positive integer, or an option is not one of those above.

    Example:
        >>> import torch
        >>> favor = FavorPlus(2, 3)
        >>> favor.query(torch.zeros(1, 2)).exp().pow(2).sum().round(decimals=6).item()  # kernel at 0: exp(0)
        1.0
        >>> s = torch.tensor([0.0, 1.0])
        >>> FavorPlus(2, 4, draw="iid").relative_variance(s, s).round(decimals=4).tolist()  # (exp(s) - 1)/4
        [0.0, 0.4296]

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1 and section 2.4; signs of the orthogonal draw as in
    Mezzadri 2007 (arXiv math-ph/0609050).
    """

    def relative_variance(self, sum_square: Tensor, difference_square: Tensor) -> Tensor:
        """Variance over draws divided by the squared kernel; a function of `sum_square` alone."""
        return exponential_variance(sum_square, self._rows())


@final
class Hyperbolic(ExponentialEstimator):
    """Positive random features, each row used with both signs: an estimate by hyperbolic cosines.

    φ(x) = [exp(±w_i·x̃ - |x̃|²/2)]/√R with x̃ = √scale·x, i = 1..R/2; φ(q)·φ(k) is a mean of cosh(w_i·(x̃ + ỹ)) and
    E φ(q)·φ(k) = exp(scale·q·k). With independent rows the relative variance is (cosh(s) - 1)/m, s = scale·|q + k|²:
    never above FAVOR+'s at the same R, and far below it for s < 1, the more so with orthogonal rows.
    With lengths="fixed" the estimate has mean exp(-(|x̃|² + |ỹ|²)/2)·0F1(;D/2; D·s/4).

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
        >>> features = Hyperbolic(2, 4).query(torch.zeros(1, 2)).exp()  # all 1/√4
        >>> features.round(decimals=6).tolist()
        [[0.5, 0.5, 0.5, 0.5]]

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1 (SM^hyp+) and lemma 2.
    """

    features_per_row = 2

    def query(self, x: Tensor) -> Tensor:
        """Exponents ±w·x̃ - |x̃|²/2 - ½·log R: (..., L, D) -> (..., L, R), the positive signs first."""
        x, weights = self._operands(x)
        projected = torch.matmul(x, weights)
        return self._shifted_(torch.cat((projected, -projected), dim=-1), x, weights)

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        """`query` with the product and its negative written into the halves of `out`."""
        x, weights = self._operands(x)
        positive, negative = out.chunk(2, -1)
        torch.neg(multiplied(x, weights, positive), out=negative)
        return self._shifted_(out, x, weights)

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """(grad₊ - grad₋)·Wᵀ - scale·x·Σ grad."""
        x, weights = self._operands(x)
        positive, negative = grad.chunk(2, -1)
        pulled = torch.matmul(positive - negative, weights.mT)
        return pulled.addcmul_(x, grad.sum(-1, keepdim=True), value=-self.scale)

    def relative_variance(self, sum_square: Tensor, difference_square: Tensor) -> Tensor:
        """Variance over draws divided by the squared kernel; a function of `sum_square` alone."""
        return exponential_variance(sum_square, self._rows(), is_hyperbolic=True)


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

    def relative_variance(self, sum_square: Tensor, difference_square: Tensor) -> Tensor:
        """Variance over draws divided by the squared kernel; a function of `difference_square` alone."""
        return cosine_variance(difference_square, self._rows())

    def _fixed_kernel(self, sums: Tensor, differences: Tensor) -> Tensor:
        """E φ(q)·φ(k) for lengths √D."""
        return torch.exp((sums + differences) / 4) * mean_cosine(differences, self.head_dim, "fixed")
