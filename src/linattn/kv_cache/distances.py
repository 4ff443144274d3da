"""Distances between keys and their values; letters as in kv_cache/__init__.py.

Letters: n keys, P = D + Dv width of a key and its value, r axes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kv_cache.partitioning import finite

# Axes, and the share of P from which there are more. On MiniLM's heads (P = 64) and on Gemma's (P = 512) the nearest of
# 64 to 256 clusters along these gives rows as near to softmax's as along all coordinates, or nearer.
_AXES, _WIDTHS_PER_AXIS = 16, 8
# Of subspace iteration.
_TURNS = 2


class Metric(NamedTuple):
    """Metric of distances between keys and their values (B, H, n, D + Dv): those of (x - mean)·factor."""

    mean: Tensor  # (B, H, 1, D + Dv); around 0 differences of large products would lose digits
    factor: Tensor  # (B, H, 1, D + Dv)

    @classmethod
    def of(cls, x: Tensor, share: Tensor, spread: Tensor, values: float = 1.0) -> Metric:
        """Of keys as queries of this spread (B, H, D) see them, and values that count `values` times as much.

        Mean and variances are by these shares (B, H, n); absent keys have none, and are 0.
        """
        share, width = share.unsqueeze(2), spread.shape[-1]
        mean = share @ x
        # In place, here and below: fresh memory for all keys costs as much as what is computed in it.
        variance = share @ (x - mean).pow_(2)
        wide = (variance[..., :width] * spread.unsqueeze(2).square()).sum(-1, keepdim=True)
        narrow = variance[..., width:].sum(-1, keepdim=True)
        worth = (wide / torch.where(narrow == 0, 1, narrow)).sqrt() * values
        factor = torch.cat((spread.unsqueeze(2), worth.expand_as(variance[..., width:])), -1)
        # Mapped by torch.vmap where the factor is, by queries alone: what is multiplied in place must be.
        return cls(mean + factor.new_zeros(()), factor)

    def points(self, x: Tensor) -> Tensor:
        """Keys and values (B, H, n, D + Dv) as points between which distances are squares of differences."""
        return (x - self.mean).mul_(self.factor)


def num_axes(width: int) -> int:
    """r for keys and values of P numbers.

    Example:
        >>> num_axes(8), num_axes(64), num_axes(512)
        (8, 16, 64)
    """
    return min(max(_AXES, width // _WIDTHS_PER_AXIS), width)


class Axes(NamedTuple):
    """A few directions of a metric, along which nearly all of the distances between keys lie."""

    turn: Tensor  # (B, H, P, r), of keys and values as they are
    shift: Tensor  # (B, H, 1, r)

    @classmethod
    def of(cls, metric: Metric, point: Tensor) -> Axes:
        """The widest ones of points (B, H, n, P) of the metric: nearly their first principal axes. O(n·P·r)."""
        width, point = point.shape[-1], finite(point)
        # From the widest coordinates on, by subspace iteration.
        widest = point.square().sum(2).topk(num_axes(width), -1).indices.unsqueeze(2)
        axes = (widest == torch.arange(width, device=widest.device).unsqueeze(-1)).to(point.dtype)
        for _ in range(_TURNS):
            axes = torch.linalg.qr(point.mT @ (point @ axes)).Q
        turn = metric.factor.mT * axes
        return cls(turn, metric.mean @ turn)

    def along(self, x: Tensor) -> Tensor:
        """Coordinates (B, H, n, r) of keys and values (B, H, n, P)."""
        return finite(x @ self.turn - self.shift)
