"""FAVOR+ as public implementations stabilise it: features over the largest one without its norm, plus an epsilon.

    φ(q) = exp(w·q - |q|²/2 - max over features of w·q) + ε
    φ(k) = exp(w·k - |k|²/2 - max over features and all keys of w·k) + ε

Letters: L tokens, R features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus


def max_normalised_keys(favor: FavorPlus, key: Tensor) -> Tensor:
    """Key features as they are before the epsilon is added, (..., L, R)."""
    exponents = favor.key(key)
    return torch.exp(exponents - (exponents + _half_square(favor, key)).amax((-2, -1), keepdim=True))


def max_normalised_attention(favor: FavorPlus, tokens: tuple[Tensor, Tensor, Tensor], epsilon: float) -> Tensor:
    """Attention with the epsilon added to all features, every query seeing every key."""
    phi_q, phi_k = _features(favor, tokens, epsilon)
    return phi_q @ (phi_k.mT @ tokens[2]) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))


def causal_max_normalised_attention(favor: FavorPlus, tokens: tuple[Tensor, Tensor, Tensor], epsilon: float) -> Tensor:
    """The same, query i seeing keys j ≤ i: all weights are formed, then those of later keys dropped."""
    phi_q, phi_k = _features(favor, tokens, epsilon)
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ tokens[2] / weights.sum(-1, keepdim=True)


def _features(favor: FavorPlus, tokens: tuple[Tensor, Tensor, Tensor], epsilon: float) -> tuple[Tensor, Tensor]:
    """Features of queries and keys, the epsilon added."""
    exponents = favor.query(tokens[0])
    phi_q = torch.exp(exponents - (exponents + _half_square(favor, tokens[0])).amax(-1, keepdim=True))
    return phi_q + epsilon, max_normalised_keys(favor, tokens[1]) + epsilon


def _half_square(favor: FavorPlus, x: Tensor) -> Tensor:
    """What the exponents lack of the projections whose maximum is taken, but for a constant: (..., L, 1)."""
    return x.square().sum(-1, keepdim=True) * (favor.scale / 2)
