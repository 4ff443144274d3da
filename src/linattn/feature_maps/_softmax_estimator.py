"""Kernel and variance of the random maps that estimate the softmax kernel.

Letters: L tokens (Lq, Lk), D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.feature_maps._moments import log_mean_exp
from linattn.feature_maps._random_base import RandomFeatureMap


class SoftmaxEstimator(RandomFeatureMap):
    """A random map whose φ(q)·φ(k) estimates exp(scale·q·k), or what fixed lengths make of it."""

    softmax_kernel = True

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """E φ(q)·φ(k) over draws, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        if self.lengths == "fixed":
            return self._fixed_kernel(*self._squares(q, k))
        self._check_width(q)
        self._check_width(k)
        return torch.exp(self.scale * torch.matmul(q.double(), k.double().mT))

    def variance(self, q: Tensor, k: Tensor) -> Tensor:
        """Variance of φ(q)·φ(k) over draws, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        return self.relative_variance(*self._squares(q, k)) * self.kernel(q, k).square()

    def _fixed_kernel(self, sums: Tensor, differences: Tensor) -> Tensor:
        """E φ(q)·φ(k) for lengths √D: exp(-(|x|² + |y|²)/2)·G(|x + y|²), |x|² + |y|² being half of both squares."""
        return torch.exp(log_mean_exp(sums, self.head_dim, "fixed") - (sums + differences) / 4)

    def _squares(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """|x + y|² and |x - y|² of all pairs, in float64."""
        self._check_width(q)
        self._check_width(k)
        x, y = q.double(), k.double()
        norms = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
        products = 2 * (x @ y.mT)
        # Rounding may leave a square a little below 0.
        return ((norms + products) * self.scale).clamp(min=0), ((norms - products) * self.scale).clamp(min=0)
