"""Positive random features in antithetic pairs; letters as in feature_maps/__init__.py."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from linattn.feature_maps._moments import hyperbolic_variance
from linattn.feature_maps._powers import multiplied
from linattn.feature_maps._softmax_estimator import ExponentialEstimator


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
        return hyperbolic_variance(sum_square, self._rows())
