"""Functions of symmetric matrices, and their geometric mean.

Letters: D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def spectral(matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """U f(λ) Uᵀ of symmetric U diag(λ) Uᵀ, (..., D, D): a function of the matrix, whichever eigenvectors are found."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    product: Tensor = (vectors * function(values).unsqueeze(-2)) @ vectors.mT
    return (product + product.mT) / 2


def floor_eigenvalues(matrix: Tensor, floor: float) -> Tensor:
    """The matrix with eigenvalues below `floor` times its largest raised to that."""
    return spectral(matrix, lambda x: torch.maximum(x, floor * x.amax(-1, keepdim=True)))


def geometric_mean(first: Tensor, second: Tensor) -> Tensor:
    """A # B = A^½ (A^-½ B A^-½)^½ A^½ of positive definite A and B, (..., D, D): the X with X A⁻¹ X = B."""
    root, inverse = spectral(first, torch.sqrt), spectral(first, torch.rsqrt)
    between = spectral(inverse @ second @ inverse, lambda x: x.clamp(min=0).sqrt())
    return root @ between @ root
