"""k-means in many heads at once, from a seed: the centres of an expansion, the landmarks of a Nyström map.

Letters: N points, C centres, D width.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor


def kmeans(points: Tensor, weight: Tensor, num_centres: int, *, seed: int, num_rounds: int) -> Tensor:
    """Centres (..., C, D) of points (..., N, D), by Lloyd's rounds from a k-means++ start.

    O(N·C·D) time per round and for the start. Points of weight 0, of weights (..., N), move no centre. A centre that
    loses its points keeps its place; where there are fewer distinct points than centres, some coincide. Nothing is
    random but the start's C numbers, which all heads share.

    Source: Arthur and Vassilvitskii 2007 (k-means++); Lloyd 1982.
    """
    centres = _spread_out(points, weight, num_centres, random.Random(seed))
    for _ in range(num_rounds):
        centres = means(points, weight, nearest(points, centres), centres)
    return centres


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The index (..., N) of the nearest centre of points (..., N, D) among centres (..., C, D)."""
    # |x - c|² without |x|², which all centres share.
    index: Tensor = (centres.square().sum(-1).unsqueeze(-2) / 2 - points @ centres.mT).argmin(-1)
    return index


def means(points: Tensor, weight: Tensor, cluster: Tensor, otherwise: Tensor) -> Tensor:
    """The mean (..., C, D) of each cluster's points; that of `otherwise` where a cluster has none."""
    numbers = torch.arange(otherwise.shape[-2], device=points.device)
    members = (cluster.unsqueeze(-1) == numbers) * weight.unsqueeze(-1)
    counts = members.sum(-2).unsqueeze(-1)
    return torch.where(counts > 0, members.mT @ points / counts.clamp(min=1), otherwise)


def _spread_out(points: Tensor, weight: Tensor, num_centres: int, draws: random.Random) -> Tensor:
    """k-means++: each next centre is a point drawn with probability proportional to its squared distance so far."""
    centres, distance = [], weight
    for _ in range(num_centres):
        total = distance.cumsum(-1)
        level = total[..., -1:] * draws.random()
        chosen = torch.searchsorted(total, level, right=True).clamp(max=points.shape[-2] - 1)
        centre = torch.take_along_dim(points, chosen.unsqueeze(-1), dim=-2)
        centres.append(centre)
        nearer = (points - centre).square().sum(-1) * weight
        distance = nearer if len(centres) == 1 else torch.minimum(distance, nearer)
    return torch.cat(centres, -2)
