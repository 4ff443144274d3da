"""How far approximate attention rows are from the exact ones: pure functions, float64 inside, one figure per head.

Letters: B batch, H query heads, Lk keys, n chosen queries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def total_variation(log_exact: Tensor, weights: Tensor) -> Tensor:
    """Total variation between exact rows, given as logarithms (B, H, n, Lk), and rows that sum to 1: (H,) float64.

        ½ Σ_j |p_ij − a_ij|, mean over batch and chosen queries; in [0, 1] for nonnegative weights, unbounded for others

    A head whose weights are not finite has inf; `weights` may be broadcast.

    Example:
        >>> round(total_variation(torch.tensor([[[[0.75, 0.25]]]]).log(), torch.tensor([0.5, 0.5])).item(), 6)
        0.25
    """
    distance = (log_exact.double().exp() - weights.double()).abs().sum(-1) / 2
    mean = distance.mean(dim=(0, 2))
    return torch.where(mean.isfinite(), mean, torch.inf)


def kl_divergence(log_exact: Tensor, weights: Tensor) -> Tensor:
    """Kullback-Leibler divergence of approximate attention rows from the exact ones, as `total_variation`'s, in nats.

        KL(p‖a) = Σ_j p_ij (ln p_ij − ln a_ij), mean over batch and chosen queries

    A head where a weight is not positive though the exact one is has nan: no divergence exists.

    Example:
        >>> exact = torch.tensor([[[[0.5, 0.5]]]]).log()
        >>> round(kl_divergence(exact, torch.tensor([0.25, 0.75])).item(), 4)  # ½ ln 2 + ½ ln ⅔
        0.1438
        >>> kl_divergence(exact, torch.tensor([1.25, -0.25])).tolist()
        [nan]
    """
    log_exact, weights = log_exact.double(), weights.double().expand(log_exact.shape)
    exact = log_exact.exp()
    attended = exact > 0
    # The logarithm of a negative weight is nan, of zero −inf: both mean that there is no divergence.
    terms = torch.where(attended, exact * (log_exact - weights.log()), 0.0)
    mean = terms.sum(-1).mean(dim=(0, 2))
    return torch.where(mean.isfinite(), mean, torch.nan)
