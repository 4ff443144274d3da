"""Positive random features with the variance-optimal Gaussian tilt; letters as in feature_maps/__init__.py."""

import math
from typing import Self, final

import torch
from torch import Tensor

from linattn.feature_maps._fitted import FittedMap, grouped_sample, token_mean
from linattn.feature_maps._moments import combine, pair_excess
from linattn.feature_maps._softmax_estimator import ExponentialEstimator
from linattn.feature_maps.arguments import check_number
from linattn.feature_maps.base import has_number
from linattn.feature_maps.random_base import Draw


@final
class Oprf(ExponentialEstimator, FittedMap):
    """FAVOR++: positive random features tilted for the data's mean |x + y|², unbiased for the softmax kernel.

    φ_i(x) = (1 - 4A)^(D/4)·exp(A|w_i|² + √(1 - 4A)·w_i·x̃ - |x̃|²/2)/√R with x̃ = √scale·x and, for f = mean_square/D,
    A = (1 - 2f - √((2f + 1)² + 8f))/16 ≤ 0, which minimises the variance at |x̃ + ỹ|² = mean_square among independent
    rows. E φ(q)·φ(k) = exp(scale·q·k) for every A; A = 0 is FAVOR+.

    Cost: O(L·R·D) time, O(L·R) memory; R rows.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R.
        draw, scale, seed, num_heads: as in `RandomFeatureMap`.
        mean_square: mean of |x̃ + ỹ|² over pairs of query and key, ≥ 0; None to measure it with `fit`.

    Raises:
        ValueError: if a size is not a positive integer, an option is not one of those above, or `mean_square` is
            negative or not finite. Using the map before `mean_square` is known raises too.

    Example:
        >>> oprf = Oprf(2, 4, mean_square=2.0)  # f = 1, A = (1 - 2 - √17)/16
        >>> round(16 * oprf.tilt + 1, 4)
        -4.1231

    Source: Likhosherstov et al. 2022 (arXiv 2205.15317), OPRF; its optimum restated per dimension.
    """

    _settings = (*ExponentialEstimator._settings, "_mean_square")
    mean_square: Tensor
    _mean_square: float | None = None
    _decomposed = ("mean_square",)
    _log_constant: float = 0.0

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        draw: Draw = "orthogonal",
        scale: float | None = None,
        seed: int = 0,
        num_heads: int | None = None,
        mean_square: float | None = None,
    ) -> None:
        super().__init__(head_dim, num_features, draw=draw, lengths="chi", scale=scale, seed=seed, num_heads=num_heads)
        self.register_buffer("mean_square", torch.tensor(math.nan, dtype=torch.float64, device="cpu"))
        self._set_mean_square(mean_square)

    @property
    def tilt(self) -> float:
        """A, the coefficient of |w|²; ≤ 0."""
        self._follow_buffers()
        if self._mean_square is None:
            raise ValueError(
                "Oprf does not know the data's mean |x + y|²: call fit(query, key) on sample inputs, or give "
                "mean_square to the constructor"
            )
        f = self._mean_square / self.head_dim
        return (1 - 2 * f - math.sqrt((2 * f + 1) ** 2 + 8 * f)) / 16

    def fit(self, query: Tensor, key: Tensor) -> Self:
        """Measure mean_square: the mean of |x̃ + ỹ|² over all pairs of a query and a key of its head.

        mean_square = E|x̃|² + E|ỹ|² + 2·x̄·ȳ. Cost: O(B·(H·Lq + Hkv·Lk)·D) time; waits for the device.

        Arguments and errors are those of `FittedMap.fit`.

        Example:
            >>> import torch
            >>> ones = torch.ones(1, 1, 5, 4)
            >>> round(Oprf(4, 8).fit(ones, ones).mean_square.item(), 6)  # |2·1|²/√4
            8.0
        """
        grouped = grouped_sample(query, key, self.head_dim)
        with torch.no_grad():
            x, y = grouped.double(), key.double()
            inner = (token_mean(x, None) * token_mean(y, None)).sum(-1).mean()
            mean_square = x.square().sum(-1).mean() + y.square().sum(-1).mean() + 2 * inner
        self._set_mean_square(max(0.0, self.scale * float(mean_square)))
        return self

    def _own_constants(self, weights: Tensor) -> Tensor:
        """A|w|² from the weights √(scale·(1 - 4A))·w."""
        # D·R operations, nothing beside the product with x.
        return weights.square().sum(-2, keepdim=True) * (self.tilt / (self.scale * (1 - 4 * self.tilt)))

    def _constant(self) -> float:
        """The logarithm of φ's constant factor."""
        return self._log_constant + super()._constant()

    def relative_variance(self, sum_square: Tensor, difference_square: Tensor) -> Tensor:
        """Variance over draws divided by the squared kernel; a function of `sum_square` alone."""
        rows, stretch = self._rows(), 1 - 4 * self.tilt
        s, spread = sum_square.double(), 1 - 8 * self.tilt
        constant = self.head_dim * (math.log(stretch) - math.log(spread) / 2)
        return combine(torch.expm1(constant + s * (2 * stretch / spread - 1)), pair_excess(s, rows), rows)

    def _weights(self, projection: Tensor) -> Tensor:
        """√(1 - 4A)·W as it multiplies inputs."""
        stretch = 1.0 if self._mean_square is None else math.sqrt(1 - 4 * self.tilt)
        return super()._weights(projection) * stretch

    def _set_mean_square(self, value: float | None) -> None:
        """Take a new mean_square, or None, and derive what depends on it."""
        self._mean_square = None if value is None else check_number("mean_square", value)
        with torch.no_grad():
            self.mean_square.fill_(math.nan if self._mean_square is None else self._mean_square)
        self._derive_from_buffers()

    def _derive_from_buffers(self) -> None:
        """Derive what depends on mean_square, the constant of φ, and then the weights."""
        self._derived_from = self._versions()
        if has_number(self.mean_square):
            value = float(self.mean_square)
            self._mean_square = None if math.isnan(value) else value
        if self._mean_square is not None:
            self._log_constant = self.head_dim / 4 * math.log(1 - 4 * self.tilt)
        super()._derive_from_buffers()
