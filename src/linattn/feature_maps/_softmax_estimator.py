"""Random maps that estimate the softmax kernel, and their variance; letters as in feature_maps/__init__.py."""

import math

import torch
from torch import Tensor

from linattn.feature_maps._moments import log_mean_exp
from linattn.feature_maps.powers import Powers, add_multiplied_
from linattn.feature_maps.random_base import RandomFeatureMap
from linattn.softmax.precision import LOG2_E
from linattn.softmax.tracing import outside_transforms


class SoftmaxEstimator(RandomFeatureMap):
    """A random map whose φ(q)·φ(k) estimates exp(scale·q·k), or what fixed lengths make of it."""

    softmax_kernel = True

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """E φ(q)·φ(k) over draws, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        if self.lengths == "fixed":
            return self._fixed_kernel(*self._squares(q, k))
        self._check_width(q, k)
        return torch.exp(self.scale * torch.matmul(q.double(), k.double().mT))

    def variance(self, q: Tensor, k: Tensor) -> Tensor:
        """Variance of φ(q)·φ(k) over draws, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        return self.relative_variance(*self._squares(q, k)) * self.kernel(q, k).square()

    def _fixed_kernel(self, sums: Tensor, differences: Tensor) -> Tensor:
        """E φ(q)·φ(k) for lengths √D: exp(-(|x|² + |y|²)/2)·G(|x + y|²), |x|² + |y|² being half of both squares."""
        return torch.exp(log_mean_exp(sums, self.head_dim, "fixed") - (sums + differences) / 4)

    def _squares(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """|x + y|² and |x - y|² of all pairs, in float64."""
        self._check_width(q, k)
        x, y = q.double(), k.double()
        norms = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
        products = 2 * (x @ y.mT)
        # Rounding may leave a square a little below 0.
        return ((norms + products) * self.scale).clamp(min=0), ((norms - products) * self.scale).clamp(min=0)


class ExponentialEstimator(SoftmaxEstimator):
    """φ(x) = exp(W·x̃ - |x̃|²/2 + b), b a constant of each feature."""

    exponential = True
    _powers: dict[torch.dtype, Powers]

    def query(self, x: Tensor) -> Tensor:
        """Exponents of the features: (..., L, D) -> (..., L, R)."""
        x, weights = self._operands(x)
        # In place: the product is nobody else's.
        return self._shifted_(torch.matmul(x, weights), x, weights)

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

    def _shifted_(self, exponents: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """W·x̃ - |x̃|²/2 + b, written over W·x̃."""
        exponents, constants = exponents.sub_(self._half_square(x, -self._constant())), self._own_constants(weights)
        return exponents if constants is None else exponents.add_(constants)

    def _own_constants(self, weights: Tensor) -> Tensor | None:
        """The part of b that differs between features, (1, R) or (H, 1, R) in the weights' dtype; None for nothing."""
        return None

    def _constant(self) -> float:
        """b, where it is the same for all features."""
        return -math.log(self.num_features) / 2
