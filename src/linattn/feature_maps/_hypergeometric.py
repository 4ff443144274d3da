"""The two hypergeometric functions that moments of random projections are made of, in float64.

0F1(;b;z) = Σ z^k/((b)_k k!) and 1F1(a;b;z) = Σ (a)_k z^k/((b)_k k!), (a)_k = a(a+1)…(a+k-1).

For z ≥ 0 all terms are positive: the logarithm is returned, to 1e-12. For z < 0 the sums cancel; what is needed there
are means of cosines, numbers in [-1, 1], and they are returned to an absolute 1e-13. Letters as in
feature_maps/__init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_RESCALE = 2.0**-500
_RESCALE_EVERY = 16
_LARGEST_FREQUENCY = 2000


def log_0f1(b: float, z: Tensor) -> Tensor:
    """log 0F1(;b;z) for z ≥ 0, elementwise, in float64."""
    z = z.double()
    return _log_series(z, lambda k: z / ((k + 1) * (b + k)))


def log_1f1(a: float, b: float, z: Tensor) -> Tensor:
    """log 1F1(a;b;z) for a, b > 0 and z ≥ 0, elementwise, in float64."""
    z = z.double()
    return _log_series(z, lambda k: z * ((a + k) / ((k + 1) * (b + k))))


def damped_1f1(a: float, b: float, z: Tensor) -> Tensor:
    """1F1(a;b;-z) = exp(-z)·1F1(b - a;b;z) (Kummer) for z ≥ 0 and |b - a| ≤ b, in [-1, 1], to an absolute 1e-13."""
    z = z.double()
    term = torch.exp(-z)
    total, magnitude, k = term.clone(), term.clone(), 0
    while bool((term.abs() > 1e-17 * magnitude).any()):
        term = term * (z * ((b - a + k) / ((k + 1) * (b + k))))
        total, magnitude, k = total + term, magnitude + term.abs(), k + 1
    return total


def sphere_cosine(head_dim: int, square: Tensor) -> Tensor:
    """0F1(;D/2;-square/4): the mean of cos(√square·u), u one coordinate of a uniform unit vector; absolute 1e-13."""
    frequency = square.double().sqrt()
    finite = frequency[frequency.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    if largest > _LARGEST_FREQUENCY:
        raise ValueError(
            f"moments of cosines with lengths fixed to √D are computed up to D·|u|² = {_LARGEST_FREQUENCY**2}, got "
            f"{largest**2:.4g}; the estimate is useless long before: lower the scale of the inputs"
        )
    # Exact for polynomials up to twice the number of nodes; cos needs about frequency/2. Powers of two, to cache.
    nodes, weights = _gegenbauer(head_dim, 2 ** math.ceil(math.log2(64 + largest)))
    nodes, weights = nodes.to(frequency.device), weights.to(frequency.device)
    # One node at a time: the outer product of all entries and all nodes may not fit.
    total = torch.zeros_like(frequency)
    for node, weight in zip(nodes, weights, strict=True):
        total = total + weight * torch.cos(frequency * node)
    return total


@lru_cache(maxsize=32)
def _gegenbauer(head_dim: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Gauss nodes and weights for the density ∝ (1 - u²)^((D-3)/2) on [-1, 1]; for D = 1 the two points ±1."""
    k = torch.arange(1, num_nodes, dtype=torch.float64, device="cpu")
    square = k * (k + head_dim - 3) / ((2 * k + head_dim - 2) * (2 * k + head_dim - 4))
    square[0] = 1 / head_dim  # the general term is 0/0 there for D = 2
    off = square.sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0].square()


def _log_series(like: Tensor, ratio: Callable[[int], Tensor]) -> Tensor:
    """log of 1 + ratio(0) + ratio(0)·ratio(1) + …, all terms ≥ 0, rescaled on the way so that it does not overflow."""
    term, total, shift = torch.ones_like(like), torch.ones_like(like), torch.zeros_like(like)
    k = 0
    while bool((term > 1e-17 * total).any()):
        term = term * ratio(k)
        total = total + term
        k += 1
        if k % _RESCALE_EVERY == 0:
            large = total > 1 / _RESCALE
            term = torch.where(large, term * _RESCALE, term)
            total = torch.where(large, total * _RESCALE, total)
            shift = torch.where(large, shift - math.log(_RESCALE), shift)
    return total.log() + shift
