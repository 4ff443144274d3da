"""Exponents taken apart: a product with W, and a term of each row that leaves no trace in any feature.

Letters: L tokens, D head width, R features, m rows of W (m = R, or R/2 where each is used with both signs).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class Powers(NamedTuple):
    """Exponents of exp(p·log 2 + t): powers of two p = log₂e·(W·x̃ + o), |p|·log 2 ≤ reach·|x̃| + offset, and t(|x̃|).

    t = constant - |x̃|²/2 for x̃ = √scale·x. Attention that keeps one exponent per head needs p alone in every feature;
    t is a factor on a key's weight, and cancels from a query's.
    """

    weights: Tensor  # √scale·W as it multiplies x from the right, (D, m) or (H, D, m)
    doubled: Tensor  # the same times log₂e
    constants: Tensor | None  # o·log₂e, (1, R) or (H, 1, R)
    reach: Tensor  # the largest |w|, () or (H,)
    offset: Tensor  # the largest |o|, () or (H,)
    scale: float
    constant: float
    is_paired: bool  # whether the second half of the features takes -W

    @classmethod
    def of(
        cls,
        weights: Tensor,
        constants: Tensor | None,
        scale: float,
        constant: float,
        is_paired: bool,
        dtype: torch.dtype,
    ) -> Powers:
        """From weights and constants in float64."""
        reach = torch.linalg.vector_norm(weights, dim=-2).amax(-1) / math.sqrt(scale)
        offset = torch.zeros_like(reach) if constants is None else constants.abs().amax((-2, -1))
        own = None if constants is None else (constants * LOG2_E).to(dtype)
        doubled = (weights * LOG2_E).to(dtype)
        return cls(weights.to(dtype), doubled, own, reach.to(dtype), offset.to(dtype), scale, constant, is_paired)

    @property
    def is_by_head(self) -> bool:
        """Whether heads have weights or constants of their own."""
        return self.weights.dim() == 3 or (self.constants is not None and self.constants.dim() == 3)

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        """p, written into `out`: (..., L, D) -> (..., L, R)."""
        if self.is_paired:
            positive, negative = out.chunk(2, -1)
            torch.neg(multiplied(x, self.doubled, positive), out=negative)
        else:
            multiplied(x, self.doubled, out)
        return out if self.constants is None else out.add_(self.constants)

    @property
    def is_composed(self) -> bool:
        """Whether p is more than one product for all heads."""
        return self.is_paired or self.is_by_head or self.constants is not None

    def exponents(self, x: Tensor) -> Tensor:
        """p·log 2 + t in fewer calls than there are terms, for a few rows: (..., D) -> (..., R); not `is_composed`."""
        rows = x.reshape(-1, x.shape[-1])
        term = torch.add(self.constant, torch.linalg.vecdot(rows, rows).unsqueeze(-1), alpha=-self.scale / 2)
        return torch.addmm(term, rows, self.weights).view(*x.shape[:-1], self.weights.shape[-1])

    def term(self, x: Tensor) -> Tensor:
        """t: (..., L, D) -> (..., L)."""
        # One pass that keeps nothing: the squares themselves would be another block of memory.
        lengths = torch.linalg.vector_norm(x, dim=-1)
        term: Tensor = lengths.square_().mul_(-self.scale / 2).add_(self.constant)
        return term

    def lowest_term(self, limit: float) -> Tensor:
        """The t of the longest rows whose every |p|·log 2 is at most `limit`; () or (H,), inf where none is."""
        longest = (limit - self.offset) / self.reach
        return torch.where(longest >= 0, self.constant - longest.square() / 2, torch.inf)

    def vjp(self, x: Tensor, grad: Tensor, total: Tensor | None) -> Tensor:
        """The gradient of x, from that of p·log 2 + t (..., L, R) and its sum over features; None for sums of 0."""
        if self.is_paired:
            positive, negative = grad.chunk(2, -1)
            grad = positive - negative
        found = torch.matmul(grad, self.weights.mT)
        return found if total is None else found.addcmul_(x, total, value=-self.scale)


def multiplied(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """x·weights, (..., L, D) and (D, R) or (H, D, R), written into `out`, rows of which may lie apart."""
    if weights.dim() == 2 and x.is_contiguous():
        torch.mm(x.view(-1, x.shape[-1]), weights, out=out.view(-1, out.shape[-1]))
    elif weights.dim() == 2 and x.dim() > 2 and out.is_contiguous():
        batch = out.flatten(0, -3)
        torch.bmm(x.flatten(0, -3), weights.expand(batch.shape[0], -1, -1), out=batch)
    elif out.is_contiguous():
        torch.matmul(x, weights.expand(*x.shape[:-2], -1, -1), out=out)
    else:
        out.copy_(torch.matmul(x, weights))
    return out
