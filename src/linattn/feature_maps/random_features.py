"""Random features for the softmax kernel, and for the arc-cosine kernel; letters as in feature_maps/__init__.py."""

import math
from typing import final

import torch
from torch import Tensor

from linattn.feature_maps._moments import Lengths, cosine_variance, exponential_variance
from linattn.feature_maps._softmax_estimator import ExponentialEstimator, SoftmaxEstimator
from linattn.feature_maps.arguments import check_number
from linattn.feature_maps.powers import multiplied
from linattn.feature_maps.random_base import Draw, RandomFeatureMap


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

    φ(x) = [exp(±w_i·x̃ - |x̃|²/2)]/√R with x̃ = √scale·x, i = 1..R/2, the positive signs first; φ(q)·φ(k) is a mean of
    cosh(w_i·(x̃ + ỹ)) and E φ(q)·φ(k) = exp(scale·q·k). With independent rows the relative variance is (cosh(s) - 1)/m,
    s = scale·|q + k|²: never above FAVOR+'s at the same R, and far below it for s < 1, the more so with orthogonal
    rows. With lengths="fixed" the estimate has mean exp(-(|x̃|² + |ỹ|²)/2)·0F1(;D/2; D·s/4).

    Cost: O(L·R·D) time, O(L·R) memory; R/2 rows.

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

    def relative_variance(self, sum_square: Tensor, difference_square: Tensor) -> Tensor:
        """Variance over draws divided by the squared kernel; a function of `sum_square` alone."""
        return exponential_variance(sum_square, self._rows(), is_hyperbolic=True)

    def _weights(self, projection: Tensor) -> Tensor:
        """W and -W as they multiply inputs."""
        weights = super()._weights(projection)
        return torch.cat((weights, -weights), dim=-1)


@final
class Trigonometric(SoftmaxEstimator):
    """Random Fourier features with the norms kept as weights, unbiased for the softmax kernel.

    φ(x) = exp(|x̃|²/2)·[cos(w_i·x̃), sin(w_i·x̃)]/√m with x̃ = √scale·x, i = 1..m; E φ(q)·φ(k) = exp(scale·q·k). `query`
    and `key` return the bounded part, the exponential is `query_log_weight` and `key_log_weight`. With independent rows
    the relative variance is (cosh(d) - 1)/m, d = scale·|q - k|²: exact for q = k, worst for opposed q and k, whose
    estimated weights may be negative.

    Cost: O(L·R·D/2) time, O(L·R) memory; R/2 rows.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R, even.
        draw, scale, seed, num_heads: as in `RandomFeatureMap`.
        lengths: "chi" alone: a cosine's mean over rows of one length may be negative.

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
    _lengths = ("chi",)

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


@final
class RandomRelu(RandomFeatureMap):
    """The rectifier of a random projection, raised by a floor: not the softmax kernel, but bounded variance.

    φ_i(x) = (max(w_i·x̃, 0) + floor)/√R with x̃ = √scale·x. With θ the angle between q and k,
    E φ(q)·φ(k) = |x̃||ỹ|(sin θ + (π - θ)·cos θ)/(2π) + floor·(|x̃| + |ỹ|)/√(2π) + floor²,
    the arc-cosine kernel of order 1 and the floor's terms (lengths="fixed" multiplies |x̃| and |ỹ| in the middle term by
    √D/E χ_D).

    Cost: O(L·R·D) time, O(L·R) memory; R rows.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R.
        draw, lengths, seed, num_heads: as in `RandomFeatureMap`.
        scale: factor on q·k, > 0; D**-0.5 if None. Without a floor attention does not depend on it.
        floor: added to every rectified value, ≥ 0; it mixes uniform averaging in. With 0 a query on the negative
            side of all rows gives no weight to any key, and its output is 0.

    Raises:
        ValueError: if a size is no positive integer, an option is none of those above, or `floor` is < 0 or not finite.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> relu = RandomRelu(2, 16, scale=1.0, floor=0.0)
        >>> relu.kernel(x, x).round(decimals=6).tolist()  # θ = 0: |x|²·π/(2π)
        [[12.5]]

    Source: Choromanski et al. 2021 (arXiv 2009.14794), generalised attention; the kernel and its moments: Cho and Saul
    2009, equations 3 to 6.
    """

    _settings = (*RandomFeatureMap._settings, "floor")

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        draw: Draw = "orthogonal",
        lengths: Lengths = "chi",
        scale: float | None = None,
        seed: int = 0,
        num_heads: int | None = None,
        floor: float = 1e-3,
    ) -> None:
        super().__init__(
            head_dim, num_features, draw=draw, lengths=lengths, scale=scale, seed=seed, num_heads=num_heads
        )
        self.floor = check_number("floor", floor)

    def query(self, x: Tensor) -> Tensor:
        """Features: (..., L, D) -> (..., L, R)."""
        x, weights = self._operands(x)
        return torch.relu(torch.matmul(x, weights)) + self.floor / math.sqrt(self.num_rows)

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        """`query` with the product written into `out`."""
        x, weights = self._operands(x)
        return multiplied(x, weights, out).clamp_(min=0).add_(self.floor / math.sqrt(self.num_rows))

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """E φ(q)·φ(k) over draws, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        self._check_width(q, k)
        q, k = q.double() * math.sqrt(self.scale), k.double() * math.sqrt(self.scale)
        x, y = q.norm(dim=-1).unsqueeze(-1), k.norm(dim=-1).unsqueeze(-2)
        # arccos loses half the digits near 0 and π; vectors of equal lengths and atan2 lose none.
        # A zero vector may have any angle: every term with its length is 0.
        u, v = q.unsqueeze(-2) * y.unsqueeze(-1), k.unsqueeze(-3) * x.unsqueeze(-1)
        theta = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
        # Half the arc-cosine kernel of order 1.
        product: Tensor = x * y * (torch.sin(theta) + (math.pi - theta) * torch.cos(theta)) / (2 * math.pi)
        half = self.head_dim / 2
        gain = math.sqrt(half) * math.exp(math.lgamma(half) - math.lgamma(half + 0.5))  # √D/E χ_D
        first = (gain if self.lengths == "fixed" else 1.0) / math.sqrt(2 * math.pi) * (x + y)
        return product + self.floor * first + self.floor**2

    def _weights(self, projection: Tensor) -> Tensor:
        """W/√R as it multiplies inputs: the rectifier is homogeneous."""
        return super()._weights(projection) / math.sqrt(self.num_rows)
