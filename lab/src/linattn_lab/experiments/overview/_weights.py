"""Attention weights as the overview compares them: their logarithms, and the divergence between two of them."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap


def softmax_log_weights(query: Tensor, key: Tensor) -> Tensor:
    """Logarithms of softmax attention's weights at scale d^(-1/2)."""
    return torch.log_softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)


def kernel_log_weights(feature_map: FeatureMap, query: Tensor, key: Tensor) -> Tensor:
    """Logarithms of the weights that a positive map's kernel gives."""
    kernel = feature_map.kernel(query, key)
    return (kernel / kernel.sum(-1, keepdim=True)).log()


def divergence(log_p: Tensor, log_q: Tensor) -> float:
    """KL(p‖q) of rows of weights, mean over rows."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
