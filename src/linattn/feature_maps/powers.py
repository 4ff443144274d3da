"""Exponents taken apart: a product with W, and a term of each row; letters as in feature_maps/__init__.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.softmax.precision import LOG2_E
from linattn.softmax.tracing import is_followed


class Powers(NamedTuple):
    """Exponents of exp(p·log 2 + t): powers of two p = log₂e·(W·x̃ + o), and t = constant - |x̃|²/2 for x̃ = √scale·x."""

    weights: Tensor  # √scale·W as it multiplies x from the right, (D, m) or (H, D, m)
    doubled: Tensor  # the same times log₂e
    constants: Tensor | None  # o·log₂e, (1, R) or (H, 1, R)
    shift: Tensor  # (o + constant)·log₂e, (1, R) or (H, 1, R), or (1, 1) where o is 0
    scale: float
    constant: float
    is_paired: bool  # whether the second half of the features takes -W

    @property
    def is_composed(self) -> bool:
        """Whether p is more than one product for all heads."""
        return self.is_paired or self.weights.dim() == 3 or self.constants is not None

    def exponents(self, x: Tensor) -> Tensor:
        """p·log 2 + t in fewer calls than there are terms, for a few rows: (..., D) -> (..., R); not `is_composed`."""
        rows = x.reshape(-1, x.shape[-1])
        term = torch.add(self.constant, torch.linalg.vecdot(rows, rows).unsqueeze(-1), alpha=-self.scale / 2)
        return torch.addmm(term, rows, self.weights).view(*x.shape[:-1], self.weights.shape[-1])


def as_powers(exponents: Tensor, rows: Tensor | None, columns: Tensor, out: Tensor) -> Tensor:
    """log₂e·exponents + rows + columns, written into `out` (..., L, R), which the exponents may lie in."""
    torch.add(columns, exponents, alpha=LOG2_E, out=out)
    return out if rows is None else out.add_(rows)


def squared_length(x: Tensor) -> Tensor:
    """|x|², (..., L, 1)."""
    # A norm keeps no squares in memory, and has no second derivative at 0.
    if is_followed(x):
        return x.square().sum(-1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square()


def add_multiplied_(out: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """out + x·weights, (B, H, L, D) and (D, R) or (H, D, R), written over `out` (B, H, L, R), which is contiguous."""
    batch = out.flatten(0, -3)
    if weights.dim() == 3:
        weights = weights.expand(*x.shape[:-2], -1, -1).flatten(0, -3)
    batch.baddbmm_(x.flatten(0, -3), weights.expand(batch.shape[0], -1, -1))
    return out
