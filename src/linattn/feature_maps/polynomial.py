"""The softmax kernel's Taylor polynomial, exactly, each monomial stored once.

(1 + x·y)^p = Σ over monomials α of degree p of (p!/α!)·x^α·y^α, in the coordinates and one more of constant value, so
that multiples of x^α are features whose inner product is the polynomial to rounding.

Letters: L tokens, D head width, R features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Self, final

import torch
from torch import Tensor

from linattn.feature_maps._arguments import check_count, temperature
from linattn.feature_maps._base import FeatureMap


@final
class Taylor(FeatureMap):
    """The softmax kernel's Taylor polynomial at 0, exactly; good while |scale·q·k| stays below about 1.

    φ(q)·φ(k) = 1 + t, or 1 + t + t²/2, with t = scale·q·k. The second is ≥ 1/2 everywhere; the first is negative for
    t < -1, so only order 2 is `nonnegative`.

    Cost: O(L·R) time and memory; R = 1 + D for order 1, (D + 1)(D + 2)/2 for order 2.

    Args:
        head_dim: D, the width of a query or key.
        order: 1 or 2.
        scale: factor on q·k, > 0; D**-0.5 if None.

    Raises:
        ValueError: if `head_dim` is not a positive integer, `order` is neither 1 nor 2, or `scale` is not a finite
            number > 0.

    Example:
        >>> import torch
        >>> taylor = Taylor(1, order=2, scale=1.0)  # 1, x, x²/√2
        >>> taylor.query(torch.tensor([[2.0]])).pow(2).round(decimals=4).tolist()
        [[1.0, 4.0, 8.0]]
        >>> taylor.kernel(torch.tensor([[2.0]]), torch.tensor([[-1.0]])).tolist()  # 1 - 2 + 4/2
        [[1.0]]

    Source: Arora et al. 2024 (arXiv 2402.18668), section 4; monomials stored once.
    """

    softmax_kernel = True
    index: Tensor

    def __init__(self, head_dim: int, *, order: int = 2, scale: float | None = None) -> None:
        if isinstance(order, bool) or order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order!r}")
        super().__init__(head_dim, math.comb(check_count("head_dim", head_dim) + order, order))
        self.order = order
        self.scale = temperature(scale, head_dim)
        self.nonnegative = order == 2
        monomials = list(combinations_with_replacement(range(head_dim + 1), order))
        # Integers, which no cast of the module to half precision can round.
        self.register_buffer("index", torch.tensor(monomials, device="cpu").mT.contiguous(), persistent=False)
        self._prepare()

    def query(self, x: Tensor) -> Tensor:
        """Features: (..., L, D) -> (..., L, R)."""
        self._check_width(x)
        if x.dtype not in self._factors:
            x = x.to(torch.float32)
        variables = x * math.sqrt(self.scale)
        variables = torch.cat((variables.new_ones(()).expand(*x.shape[:-1], 1), variables), dim=-1)
        # Coordinates before tokens: whole rows are picked and multiplied, several times as fast as single numbers.
        rows = variables.mT.contiguous()
        phi = rows.index_select(-2, self.index[0])
        for column in self.index[1:]:
            phi.mul_(rows.index_select(-2, column))
        return phi.mul_(self._factors[x.dtype]).mT

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """1 + t (+ t²/2) with t = scale·q·k, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        self._check_width(q)
        self._check_width(k)
        t = self.scale * (q.double() @ k.double().mT)
        return 1 + t if self.order == 1 else 1 + t + t.square() / 2

    def extra_repr(self) -> str:
        """The map's settings."""
        return f"head_dim={self.head_dim}, order={self.order}, scale={self.scale}"

    def _prepare(self) -> None:
        """The factor of each monomial, (R, 1), for the dtypes it is used with, so that a call computes none."""
        with torch.inference_mode(False):
            # (1 + t)² has the terms 1, 2t and t²; wanted are 1, t and t²/2: all but the first monomial are halved.
            squares = 1.0 + (self.index[0] != self.index[-1]).double()
            squares[1:] /= self.order
            factors = squares.sqrt().unsqueeze(-1)
            self._factors = {torch.float64: factors, torch.float32: factors.to(torch.float32)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the model."""
        super()._apply(fn, recurse)
        self._prepare()
        return self
