"""Positive random features tilted for the data: alike in all directions, or in each by itself.

Letters as in feature_maps/__init__.py.
"""

import math
from typing import Any, Self, final

import torch
from torch import Tensor

from linattn.feature_maps._fitted import FittedMap, grouped_sample, second_moment, shared, spectral, token_mean
from linattn.feature_maps.base import has_number, in_both_dtypes
from linattn.feature_maps.random_base import Draw
from linattn.feature_maps.random_features import ExponentialEstimator
from linattn.softmax.checking import check_number


def _best_tilt(f: Any) -> Any:
    """The coefficient of w² in a direction where (x̃ + ỹ)² has the mean f ≥ 0, a number or a tensor of them."""
    return (1 - 2 * f - ((2 * f + 1) ** 2 + 8 * f) ** 0.5) / 16


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
        return float(_best_tilt(self._mean_square / self.head_dim))

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
        return self.head_dim / 4 * math.log(1 - 4 * self.tilt) + super()._constant()

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
        """Take mean_square for the tilt, and derive the weights."""
        self._derived_from = self._versions()
        if has_number(self.mean_square):
            value = float(self.mean_square)
            self._mean_square = None if math.isnan(value) else value
        super()._derive_from_buffers()


@final
class Sderf(ExponentialEstimator, FittedMap):
    """SDERF (FAVOR#): positive random features tilted by the second moments of x + y, unbiased for the softmax kernel.

    φ_i(x) = det(I - 4A)^¼·exp(w_iᵀA w_i + w_iᵀ(I - 4A)^½ x̃ - |x̃|²/2)/√R with x̃ = √scale·x. A is a function of the
    matrix S = E(x̃ + ỹ)(x̃ + ỹ)ᵀ: the same eigenvectors, and for each eigenvalue λ of S the eigenvalue
    a = (1 - 2λ - √((2λ + 1)² + 8λ))/16 ≤ 0, which minimises the mean logarithm of the second moment among independent
    rows. E φ(q)·φ(k) = exp(scale·q·k) for every A; S = s·I/D is `Oprf` with mean_square = s, A = 0 is FAVOR+.

    With independent rows and ρ = (1 - 8a)⁻¹ for each eigenvalue, the relative variance at z = x̃ + ỹ is
    (exp(Σ_l [½·log((1 + ρ_l)²/(4ρ_l)) + ρ_l·z_l²]) - 1)/R, z_l the coordinates along the eigenvectors: the more S is
    concentrated in few directions, the lower. For orthogonal rows no closed form is known: a tilt that differs between
    directions leaves them no longer orthogonal.

    Cost: O(L·R·D) time, O(L·R) memory; `fit` O(L·D² + D³) for each head.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R.
        draw, scale, seed, num_heads: as in `RandomFeatureMap`.
        second_moment: S, (Hkv, D, D) or (D, D), floating, symmetric, positive semidefinite; None: `fit` measures it.

    Raises:
        ValueError: if a size is not a positive integer, an option is not one of those above, or `second_moment` is not
            such a matrix. Using the map before `second_moment` is known raises too.

    Example:
        >>> sderf = Sderf(2, 4, second_moment=torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        >>> (16 * sderf.tilt + torch.eye(2)).round(decimals=4).tolist()  # 1 + (1 - 2 - √17), and nothing to tilt
        [[-4.1231, 0.0], [0.0, 1.0]]

    Source: Likhosherstov et al. 2023 (arXiv 2302.00787), SDERF; restated as functions of one matrix, so that no choice
    of eigenvectors enters.
    """

    fitted_buffers = _decomposed = ("second_moment",)
    _fitted_sizes = (("head_dim", "head_dim"),)
    _option = "second_moment"
    second_moment: Tensor | None
    _tilt: Tensor | None = None
    _stretch: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        draw: Draw = "orthogonal",
        scale: float | None = None,
        seed: int = 0,
        num_heads: int | None = None,
        second_moment: Tensor | None = None,
    ) -> None:
        super().__init__(head_dim, num_features, draw=draw, lengths="chi", scale=scale, seed=seed, num_heads=num_heads)
        self.register_buffer("second_moment", None)
        if second_moment is not None:
            self._set_fitted(second_moment)

    @property
    def tilt(self) -> Tensor:
        """A, (D, D) or (Hkv, D, D), in float64; its eigenvalues are ≤ 0."""
        self._fitted()
        assert self._tilt is not None
        return self._tilt

    def fit(self, query: Tensor, key: Tensor) -> Self:
        """Measure S: the mean of (x̃ + ỹ)(x̃ + ỹ)ᵀ over all pairs of a query and a key of its head, one per key head.

        S = E x̃x̃ᵀ + E ỹỹᵀ + x̄ȳᵀ + ȳx̄ᵀ. Cost: O(B·(H·Lq + Hkv·Lk)·D² + Hkv·D³) time.

        Arguments and errors are those of `FittedMap.fit`; a map drawn for another number of heads is refused too.

        Example:
            >>> one, two = torch.ones(1, 1, 5, 1), 2 * torch.ones(1, 1, 3, 1)
            >>> Sderf(1, 8, scale=1.0).fit(one, two).second_moment.tolist()  # (1 + 2)²
            [[[9.0]]]
        """
        grouped = grouped_sample(query, key, self.head_dim)
        with torch.no_grad():
            x, y = grouped.double(), key.double()
            cross = (token_mean(x, None).mT @ token_mean(y, None)).mean(0)
            self._set_fitted(self.scale * (second_moment(x) + second_moment(y) + cross + cross.mT))
        return self

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input in float32 or float64, and the weights in its dtype; refuses other heads than those of S."""
        self._fitted()
        self._check_heads(x)
        return super()._operands(x)

    def _own_constants(self, weights: Tensor) -> Tensor:
        """wᵀA w + ¼·log det(I - 4A), computed anew where W was swapped for one call."""
        if self._tilt is not None and self._prepared_from is self.projection:
            return self._constants[weights.dtype][0]
        return self._row_constants().to(weights.dtype)

    def _row_constants(self) -> Tensor:
        """wᵀA w + ¼·log det(I - 4A) of each row, (1, R) or (Hkv, 1, R)."""
        quadratic = ((self.projection @ self.tilt) * self.projection).sum(-1)
        return torch.unsqueeze(quadratic + torch.linalg.slogdet(self._stretch)[1].unsqueeze(-1) / 2, -2)

    def _weights(self, projection: Tensor) -> Tensor:
        """W·(I - 4A)^½ as it multiplies inputs."""
        return super()._weights(projection if self._tilt is None else projection @ self._stretch)

    def _prepare(self) -> None:
        """W and the constants for the dtypes they are used with."""
        super()._prepare()
        if self._tilt is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._constants = in_both_dtypes(self._row_constants())

    def _check_fitted(self, *tensors: Tensor) -> None:
        """Refuse second moments of another shape or of other heads, and what is none."""
        super()._check_fitted(*tensors)
        (moment,) = tensors
        if moment.dim() == 3 and self.num_heads is not None and moment.shape[0] not in (1, self.num_heads):
            raise ValueError(
                f"Sderf was drawn for num_heads={self.num_heads}, got second moments of {moment.shape[0]} heads; build "
                f"it with num_heads={moment.shape[0]}, or num_heads=None to share one draw"
            )
        if not has_number(moment):
            return
        size = moment.abs().amax((-2, -1), keepdim=True)
        if not bool(((moment - moment.mT).abs() <= 1e-6 * size).all()):
            raise ValueError("second_moment must be symmetric; give E (x + y)(x + y)ᵀ, or call fit")
        if bool((torch.linalg.eigvalsh(moment) < -1e-6 * size.squeeze(-1)).any()):
            raise ValueError("second_moment must be positive semidefinite; give E (x + y)(x + y)ᵀ, or call fit")

    def _derive_from_buffers(self) -> None:
        """A and (I - 4A)^½ for the current S, and then what is made with them."""
        if self.second_moment is not None:
            with torch.inference_mode(False), torch.no_grad():
                # Rounding may leave a mean below 0.
                moment = shared(self.second_moment)
                self._tilt = spectral(moment, lambda f: _best_tilt(f.clamp(min=0)))
                # From S too: the rounding of a large A may leave 1 - 4a below 0.
                self._stretch = spectral(moment, lambda f: (1 - 4 * _best_tilt(f.clamp(min=0))).sqrt())
        super()._derive_from_buffers()
