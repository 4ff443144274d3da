"""Running mean and variances of a head's queries, by which keys are merged; letters as in exact/__init__.py."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Tokens after which a query counts 1/e of a new one: a text's next subject is followed.
_MEMORY = 150.0


class QueryMoments(NamedTuple):
    """Weight, means and scatter of queries times the scale, per key/value head: the queries of a group share it.

    Kept around the mean, so that no large squares are subtracted. Gradients follow the mean, by which keys are
    weighed; the scatter only says which keys are merged, and is a constant. The variances of the coordinates say that
    as well as the whole covariance does, in D numbers.
    """

    weight: Tensor  # (B, H), number of tokens, earlier ones counting less
    means: Tensor  # (B, H, G, D), of each query head, 0 before the first query; G is 1 then
    scatter: Tensor  # (B, H, D), Σ (q - mean)² over all heads of the group, on average

    @classmethod
    def empty(cls, key: Tensor) -> QueryMoments:
        """Of no queries, for keys like these (B, H, L, D)."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        means = key.new_zeros(*key.shape[:2], 1, key.shape[-1], dtype=dtype)
        return cls(means.new_zeros(key.shape[:2]), means, torch.zeros_like(means[:, :, 0]))

    def add(self, query: Tensor, live: Tensor, scale: float) -> QueryMoments:
        """With queries (B, H, G, n, D) too, but for those of tokens that are not live (B, H or 1, n); O(G·n·D)."""
        there = live[:, :, None, :, None]
        rows = torch.where(there, query.to(self.means.dtype) * scale, 0)
        number = live.sum(-1).to(self.means.dtype)  # (B, H or 1)
        means = rows.sum(3) / number.clamp(min=1)[..., None, None]
        with torch.no_grad():
            mean = means.mean(2)
            apart = torch.where(there, rows - mean[:, :, None, None], 0)
            weight = self.weight + number
            share = number / torch.where(weight == 0, 1, weight)
            between = (self.weight * share).unsqueeze(-1) * (mean - self.mean).square()
            scatter = self.scatter + apart.square().sum(3).mean(2) + between
        return QueryMoments(weight, self.means + share[..., None, None] * (means - self.means), scatter)

    def decay(self, num_tokens: int) -> QueryMoments:
        """As they count so many tokens later."""
        factor = math.exp(-num_tokens / _MEMORY)
        return QueryMoments(self.weight * factor, self.means, self.scatter * factor)

    @property
    def mean(self) -> Tensor:
        """(B, H, D), over the heads of the group."""
        return self.means.mean(2)

    @property
    def spread(self) -> Tensor:
        """Standard deviations (B, H, D) of the coordinates; 0 before the first query."""
        return (self.scatter / torch.where(self.weight == 0, 1, self.weight).unsqueeze(-1)).sqrt()
