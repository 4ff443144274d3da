"""Random features for the softmax kernel, and for the arc-cosine kernel; letters as in feature_maps/__init__.py."""

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from linattn.feature_maps.powers import Powers, add_multiplied_
from linattn.feature_maps.random_base import Draw, Lengths, RandomFeatureMap
from linattn.softmax.checking import check_number
from linattn.softmax.precision import LOG2_E
from linattn.softmax.tracing import outside_transforms

# Of a sum that grows beyond float64, and after how many terms that is looked at.
_RESCALE, _RESCALE_EVERY = 2.0**-500, 16


class SoftmaxEstimator(RandomFeatureMap):
    """A random map whose φ(q)·φ(k) estimates exp(scale·q·k), or what fixed lengths make of it."""

    softmax_kernel = True

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """E φ(q)·φ(k) over draws, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        self._check_width(q, k)
        if self.lengths == "fixed":
            # exp(-(|x|² + |y|²)/2)·0F1(;D/2; D|x + y|²/4), |x|² + |y|² being half of both squares.
            sums, differences = squares_of_pairs(q, k, self.scale)
            return torch.exp(log_0f1(self.head_dim / 2, sums * (self.head_dim / 4)) - (sums + differences) / 4)
        return torch.exp(self.scale * torch.matmul(q.double(), k.double().mT))


class ExponentialEstimator(SoftmaxEstimator):
    """φ(x) = exp(W·x̃ - |x̃|²/2 + b), b a constant of each feature."""

    exponential = True
    _powers: dict[torch.dtype, Powers]

    def query(self, x: Tensor) -> Tensor:
        """Exponents of the features: (..., L, D) -> (..., L, R)."""
        x, weights = self._operands(x)
        # In place: the product is nobody else's.
        exponents = torch.matmul(x, weights).sub_(self._half_square(x, -self._constant()))
        constants = self._own_constants(weights)
        return exponents if constants is None else exponents.add_(constants)

    def write_query_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """In one product, which all terms are added to; W is multiplied by log₂e beforehand."""
        x, _ = self._operands(x)
        powers = self.powers(x.dtype) or self._apart(self._weights(self.projection), x.dtype)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        term = lengths.mul_(lengths).mul_(-LOG2_E / 2 * powers.scale)
        torch.add(columns + powers.shift, term if rows is None else term.add_(rows), out=out)
        doubled = torch.cat((powers.doubled, -powers.doubled), -1) if powers.is_paired else powers.doubled
        return add_multiplied_(out, x, doubled)

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """grad·Wᵀ - scale·x·Σ grad."""
        x, weights = self._operands(x)
        return torch.matmul(grad, weights.mT).addcmul_(x, grad.sum(-1, keepdim=True), value=-self.scale)

    def powers(self, dtype: torch.dtype) -> Powers | None:
        """The exponents taken apart, once after each change of W; None where W was swapped for one call."""
        self._follow_buffers()
        if self._prepared_from is not self.projection:
            return None
        if dtype not in self._powers:
            with torch.inference_mode(False), torch.no_grad(), outside_transforms():
                self._powers[dtype] = self._apart(self._prepared[torch.float64][0], dtype)
        return self._powers[dtype]

    def _apart(self, weights: Tensor, dtype: torch.dtype) -> Powers:
        """The exponents taken apart, for weights in float64, of which the second half may be the first with -W."""
        weights = weights[..., : self.num_rows]
        constants, constant = self._own_constants(weights), self._constant()
        o = None if constants is None else (constants * LOG2_E).to(dtype)
        shift = (((weights.new_zeros(1, 1) if constants is None else constants) + constant) * LOG2_E).to(dtype)
        doubled, is_paired = (weights * LOG2_E).to(dtype), self.features_per_row == 2
        return Powers(weights.to(dtype), doubled, o, shift, self.scale, constant, is_paired)

    def _prepare(self) -> None:
        """Forget the exponents taken apart."""
        super()._prepare()
        self._powers = {}

    def _own_constants(self, weights: Tensor) -> Tensor | None:
        """The part of b that differs between features, (1, R) or (H, 1, R) in the weights' dtype; None for nothing."""
        return None

    def _constant(self) -> float:
        """b, where it is the same for all features."""
        return -math.log(self.num_features) / 2


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

    Source: Choromanski et al. 2021 (arXiv 2009.14794), lemma 1 and section 2.4; signs of the orthogonal draw as in
    Mezzadri 2007 (arXiv math-ph/0609050).
    """


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
        # W for each head: torch writes one for all into contiguous memory alone.
        torch.matmul(x, weights.expand(*x.shape[:-2], -1, -1), out=out)
        return out.clamp_(min=0).add_(self.floor / math.sqrt(self.num_rows))

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
        product = x * y * (torch.sin(theta) + (math.pi - theta) * torch.cos(theta)) / (2 * math.pi)
        half = self.head_dim / 2
        gain = math.sqrt(half) * math.exp(math.lgamma(half) - math.lgamma(half + 0.5))  # √D/E χ_D
        first = (gain if self.lengths == "fixed" else 1.0) / math.sqrt(2 * math.pi) * (x + y)
        mean: Tensor = product + self.floor * first + self.floor**2
        return mean

    def _weights(self, projection: Tensor) -> Tensor:
        """W/√R as it multiplies inputs: the rectifier is homogeneous."""
        return super()._weights(projection) / math.sqrt(self.num_rows)


def squares_of_pairs(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """scale·|q + k|² and scale·|q - k|² of all pairs, (..., Lq, Lk), in float64."""
    x, y = q.double(), k.double()
    norms = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    products = 2 * (x @ y.mT)
    # Rounding may leave a square a little below 0.
    return ((norms + products) * scale).clamp(min=0), ((norms - products) * scale).clamp(min=0)


def log_0f1(b: float, z: Tensor) -> Tensor:
    """log 0F1(;b;z) = log Σ z^k/((b)_k k!), (a)_k = a(a+1)…(a+k-1), for z ≥ 0, elementwise, in float64, to 1e-12."""
    return log_series(z.double(), lambda k: 1 / ((k + 1) * (b + k)))


def log_series(z: Tensor, ratio: Callable[[int], float]) -> Tensor:
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
