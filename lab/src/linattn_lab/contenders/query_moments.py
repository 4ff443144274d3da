"""Running mean and covariance of the queries, by which Expected Attention judges keys; letters as in __init__.py."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Tokens after which a query counts 1/e of a new one: of several blocks, so that a text's next subject is followed.
_MEMORY = 600.0


class QueryMoments(NamedTuple):
    """Weight, mean and scatter of queries times the scale, per key/value head: the queries of a group share it.

    Kept around the mean, so that no large squares are subtracted.
    """

    weight: float  # their number, earlier ones counting less
    mean: Tensor  # (B, H, D), 0 before the first query
    scatter: Tensor  # (B, H, D, D), Σ (q - mean)(q - mean)ᵀ

    @classmethod
    def empty(cls, key: Tensor) -> QueryMoments:
        """Of no queries, for keys like these (B, H, L, D)."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        mean = key.new_zeros(*key.shape[:2], key.shape[-1], dtype=dtype)
        return cls(0.0, mean, mean.new_zeros(*mean.shape, key.shape[-1]))

    def add(self, query: Tensor, scale: float) -> QueryMoments:
        """With queries (B, H, G, n, D) too, n ≥ 1, after the others have faded by their n tokens; O(G·n·D²)."""
        rows = query.to(self.mean.dtype).flatten(2, 3) * scale
        fade = math.exp(-query.shape[3] / _MEMORY)
        before, number = self.weight * fade, rows.shape[2]
        mean = rows.mean(2)
        apart, step = rows - mean.unsqueeze(2), (mean - self.mean).unsqueeze(-1)
        share = number / (before + number)
        scatter = self.scatter * fade + apart.mT @ apart + before * share * (step @ step.mT)
        return QueryMoments(before + number, self.mean + share * (mean - self.mean), scatter)

    @property
    def covariance(self) -> Tensor:
        """(B, H, D, D); 0 before the first query."""
        return self.scatter / max(self.weight, 1.0)
