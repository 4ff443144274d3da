"""Rectified random features: the arc-cosine kernel; letters as in feature_maps/__init__.py."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from linattn.feature_maps._arguments import check_number
from linattn.feature_maps._moments import Lengths, chi_moment_ratio
from linattn.feature_maps._powers import multiplied
from linattn.feature_maps._random_base import Draw, RandomFeatureMap


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
        ValueError: if a size is not a positive integer, an option is not one of those above, or `floor` is negative or
            not finite.

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
        return self._mean(*self._polar(q, k))

    def variance(self, q: Tensor, k: Tensor) -> Tensor:
        """Variance of φ(q)·φ(k) over independent rows, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk).

        Raises:
            ValueError: if two rows of the draw are orthogonal, where no closed form is known.
        """
        if self._rows().num_pairs:
            raise ValueError(
                'RandomRelu has no closed-form variance for draw="orthogonal": build it with draw="iid", or measure '
                "the variance over redraws"
            )
        polar = self._polar(q, k)
        return (self._second_moment(*polar) - self._mean(*polar).square()) / self.num_rows

    def _weights(self, projection: Tensor) -> Tensor:
        """W/√R as it multiplies inputs: the rectifier is homogeneous."""
        return super()._weights(projection) / math.sqrt(self.num_rows)

    def _polar(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """|x̃| (..., Lq, 1), |ỹ| (..., 1, Lk) and the angle (..., Lq, Lk), in float64."""
        self._check_width(q)
        self._check_width(k)
        q, k = q.double() * math.sqrt(self.scale), k.double() * math.sqrt(self.scale)
        x, y = q.norm(dim=-1).unsqueeze(-1), k.norm(dim=-1).unsqueeze(-2)
        # arccos loses half the digits near 0 and π; vectors of equal lengths and atan2 lose none.
        # A zero vector may have any angle: every term with its length is 0.
        u, v = q.unsqueeze(-2) * y.unsqueeze(-1), k.unsqueeze(-3) * x.unsqueeze(-1)
        return x, y, 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))

    def _moment(self, degree: int) -> float:
        """The factor by which the lengths change a Gaussian moment of this degree."""
        return 1.0 if self.lengths == "chi" else chi_moment_ratio(self.head_dim, degree)

    def _mean(self, x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
        """E (a⁺ + f)(b⁺ + f) for a = w·x̃, b = w·ỹ, f the floor."""
        first = self._moment(1) / math.sqrt(2 * math.pi) * (x + y)
        return self._moment(2) * _product(x, y, theta) + self.floor * first + self.floor**2

    def _second_moment(self, x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
        """E (a⁺ + f)²(b⁺ + f)², by degree in a and b."""
        f, cosine = self.floor, torch.cos(theta)
        squares = x.square() * y.square() / (2 * math.pi)
        fourth = squares * (3 * torch.sin(theta) * cosine + (math.pi - theta) * (1 + 2 * cosine.square()))
        third = x * y * (x + y) * (1 + cosine).square() / (2 * math.sqrt(2 * math.pi))
        second = (x.square() + y.square()) / 2 * f**2 + 4 * f**2 * _product(x, y, theta)
        first = (x + y) / math.sqrt(2 * math.pi)
        lower = self._moment(2) * second + 2 * f**3 * self._moment(1) * first + f**4
        return self._moment(4) * fourth + 2 * f * self._moment(3) * third + lower


def _product(x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """E a⁺b⁺ for Gaussian w: half the arc-cosine kernel of order 1."""
    return x * y * (torch.sin(theta) + (math.pi - theta) * torch.cos(theta)) / (2 * math.pi)
