"""Feature maps that are exact: polynomials of q·k, each monomial stored once.

(x·y)^p = Σ over monomials α of degree p of (p!/α!)·x^α·y^α, so that √(p!/α!)·x^α are features whose inner product is
the kernel to rounding. One coordinate more, of constant value, brings in the lower degrees. Letters as in
feature_maps/__init__.py, p degree.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import final

import torch
from torch import Tensor

from linattn.feature_maps.base import FeatureMap, UncastBuffers, in_both_dtypes
from linattn.softmax.checking import check_count, check_number, temperature


class MonomialMap(UncastBuffers, FeatureMap):
    """All monomials of one degree in the scaled coordinates and, if `constant` > 0, in one constant coordinate."""

    index: Tensor
    squares: Tensor

    def __init__(self, head_dim: int, degree: int, constant: float, scale: float | None) -> None:
        check_count("head_dim", head_dim)
        num_variables = head_dim + (constant > 0)
        super().__init__(head_dim, math.comb(num_variables + degree - 1, degree))
        self.degree = degree
        self.constant = constant
        self.scale = temperature(scale, head_dim)
        self.nonnegative = degree % 2 == 0
        monomials = list(combinations_with_replacement(range(num_variables), degree))
        self.register_buffer("index", torch.tensor(monomials, device="cpu").mT.contiguous(), persistent=False)
        # Of each monomial's factor; beyond int64 from degree 67 on.
        squares = torch.tensor([_multinomial(one) for one in monomials], dtype=torch.float64, device="cpu")
        self.register_buffer("squares", squares, persistent=False)
        self._derive_from_buffers()

    def query(self, x: Tensor) -> Tensor:
        """Features: (..., L, D) -> (..., L, R)."""
        self._check_width(x)
        if x.dtype not in self._factors:
            x = x.to(torch.float32)
        variables = x * math.sqrt(self.scale)
        if self.constant > 0:
            first = variables.new_full((), math.sqrt(self.constant)).expand(*x.shape[:-1], 1)
            variables = torch.cat((first, variables), dim=-1)
        # Coordinates before tokens: whole rows are picked and multiplied, several times as fast as single numbers.
        rows = variables.mT.contiguous()
        phi = rows.index_select(-2, self.index[0])
        for column in self.index[1:]:
            phi.mul_(rows.index_select(-2, column))
        return phi.mul_(self._factors[x.dtype][0]).mT

    def _derive_from_buffers(self) -> None:
        """The factor of each monomial, (R, 1), for the dtypes it is used with, so that a call computes none."""
        super()._derive_from_buffers()
        with torch.inference_mode(False):
            self._factors = in_both_dtypes(self.squares.sqrt().unsqueeze(-1))

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        """scale·q·k in float64: (..., Lq, Lk)."""
        self._check_width(q, k)
        return self.scale * (q.double() @ k.double().mT)


@final
class TensorPolynomial(MonomialMap):
    """The polynomial kernel, exactly.

    φ(q)·φ(k) = (scale·q·k + constant)^degree.

    Cost: O(L·R·degree) time, O(L·R) memory; R = C(D + degree, degree), or C(D + degree - 1, degree) when constant = 0.

    Args:
        head_dim: D, the width of a query or key.
        degree: the power, p; an odd one lets weights be negative, so `nonnegative` is true for even only.
        constant: added to scale·q·k, ≥ 0; with 0 only the monomials of degree p remain.
        scale: factor on q·k, > 0; D**-0.5 if None.

    Raises:
        ValueError: if `head_dim` or `degree` is not a positive integer, `constant` is negative or not finite, or
            `scale` is not a finite number > 0.

    Example:
        >>> import torch
        >>> square = TensorPolynomial(2, degree=2, constant=0.0, scale=1.0)  # x², √2·xy, y²
        >>> square.query(torch.tensor([[3.0, 1.0]])).pow(2).round(decimals=4).tolist()  # squared: √2 is gone
        [[81.0, 18.0, 1.0]]
        >>> square.kernel(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 2.0]])).tolist()
        [[25.0]]

    Source: the multinomial theorem; as a kernel: Schölkopf and Smola 2002, section 2.3.
    """

    _settings = ("head_dim", "degree", "constant", "scale")

    def __init__(self, head_dim: int, *, degree: int = 2, constant: float = 1.0, scale: float | None = None) -> None:
        super().__init__(head_dim, check_count("degree", degree), check_number("constant", constant), scale)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """(scale·q·k + constant)^degree in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        return (self._logits(q, k) + self.constant) ** self.degree


@final
class Taylor(MonomialMap):
    """The softmax kernel's Taylor polynomial at 0, exactly; good while |scale·q·k| stays below about 1.

    φ(q)·φ(k) = 1 + t, or 1 + t + t²/2, with t = scale·q·k. The second is ≥ 1/2 everywhere; the first is negative for
    t < -1, so only order 2 is `nonnegative`.

    Cost: O(L·R) time and memory; R = 1 + D for order 1, (D + 1)(D + 2)/2 for order 2.

    Args:
        head_dim: D, the width of a query or key.
        order: 1 or 2.
        scale: factor on q·k, > 0; D**-0.5 if None.

    Raises:
        ValueError: if `head_dim` is not a positive integer, `order` is neither 1 nor 2, or `scale` not finite and > 0.

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
    _settings = ("head_dim", "order", "scale")

    def __init__(self, head_dim: int, *, order: int = 2, scale: float | None = None) -> None:
        if type(order) is not int or order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order!r}; for higher powers use TensorPolynomial")
        super().__init__(head_dim, order, 1.0, scale)
        # At order 2 (1 + t)² has the terms 1, 2t and t²; wanted are 1, t and t²/2: halve all but the first monomial.
        self.squares[1:] /= order
        self._derive_from_buffers()

    @property
    def order(self) -> int:
        """Order of the Taylor polynomial, 1 or 2."""
        return self.degree

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """1 + t (+ t²/2) with t = scale·q·k, in float64: (..., Lq, D), (..., Lk, D) -> (..., Lq, Lk)."""
        t = self._logits(q, k)
        return 1 + t if self.order == 1 else 1 + t + t.square() / 2


def _multinomial(monomial: Sequence[int]) -> int:
    """p!/α! of a monomial, the numbers of its p factors."""
    return math.factorial(len(monomial)) // math.prod(map(math.factorial, Counter(monomial).values()))
