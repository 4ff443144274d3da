"""Positive random features for the softmax kernel; letters as in feature_maps/__init__.py."""

from __future__ import annotations

from typing import final

from torch import Tensor

from linattn.feature_maps._moments import exponential_variance
from linattn.feature_maps._softmax_estimator import ExponentialEstimator


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
        draw: "orthogonal" (lower variance for small s) or "iid".
        lengths: "chi" (unbiased) or "fixed" (biased, lower variance).
        scale: factor on q·k, > 0; D**-0.5 if None.
        seed: of the draw, 0 ≤ seed < 2**63.
        num_heads: draw one W per key/value head; one for all if None.

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
