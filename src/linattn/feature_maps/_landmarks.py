"""Landmarks among points: k-means++ and a few of Lloyd's steps, for all heads at once.

Letters: H heads, N points, R landmarks, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_landmarks(points: Tensor, num_landmarks: int, *, seed: int, num_steps: int) -> Tensor:
    """R centres of points (H, N, D), (H, R, D), in float64: a pure function of its arguments.

    The first centre is a point drawn uniformly, each next a point drawn in proportion to its squared distance to the
    nearest centre so far (Arthur and Vassilvitskii 2007); then `num_steps` times every centre moves to the mean of the
    points nearest to it. Where there are fewer distinct points than landmarks, some landmarks coincide.

    Cost: O(H·N·R·D) time for each step, O(H·N·R) memory.
    """
    points = points.double()
    generator = torch.Generator(device="cpu").manual_seed(seed)
    # All numbers are drawn before, on the CPU: neither device nor data changes how many are taken.
    uniform = torch.rand(points.shape[0], num_landmarks, generator=generator, dtype=torch.float64, device="cpu")
    centres = _seeded(points, uniform.to(points.device))
    for _ in range(num_steps):
        centres = _moved(points, centres)
    return centres


def _seeded(points: Tensor, uniform: Tensor) -> Tensor:
    """k-means++: one point for each of the numbers (H, R) in [0, 1)."""
    heads, count, dim = points.shape
    distance = points.new_ones(heads, count)
    centres = points.new_empty(heads, uniform.shape[1], dim)
    for index in range(uniform.shape[1]):
        mass = distance.cumsum(-1)
        chosen = torch.searchsorted(mass, uniform[:, index, None] * mass[:, -1:], right=True).clamp(max=count - 1)
        centre = points.gather(1, chosen.unsqueeze(-1).expand(-1, -1, dim))
        centres[:, index] = centre.squeeze(1)
        square = (points - centre).square().sum(-1)
        distance = square if index == 0 else torch.minimum(distance, square)
    return centres


def _moved(points: Tensor, centres: Tensor) -> Tensor:
    """Each centre at the mean of the points nearest to it; one without points stays."""
    nearest = torch.cdist(points, centres).argmin(-1)
    total = torch.zeros_like(centres).scatter_add_(1, nearest.unsqueeze(-1).expand_as(points), points)
    count = torch.zeros_like(centres[..., 0]).scatter_add_(1, nearest, torch.ones_like(points[..., 0])).unsqueeze(-1)
    return torch.where(count > 0, total / count.clamp(min=1), centres)
