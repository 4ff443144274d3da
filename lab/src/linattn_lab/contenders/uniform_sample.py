"""A uniform sample of all keys, each standing for as many as were left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn_lab.contenders.eviction import Eviction, Held
from linattn_lab.contenders.query_moments import QueryMoments
from linattn_lab.contenders.windows import SINKS

_SEED = 0


@dataclass(frozen=True)
class UniformSample(Eviction):
    """Sinks, the latest half, and a reservoir of the keys between, weighted by how many each stands for.

        β_j = log(keys between / keys sampled)

    A key's rank in the reservoir is drawn from its position: the same keys in every head and on every run.
    """

    kind = "uniform sample"
    source = "Vitter 1985 (doi 10.1145/3147.3165), the reservoir"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        count = cls.keys_within(num_bytes, sizes)
        return cls(count, num_recent=count // 2, num_sinks=SINKS)

    def worth(self, held: Held, moments: QueryMoments, scale: float) -> Tensor:
        """The rank of their positions in one random order."""
        last = int(held.position.max()) + 1
        order = torch.rand(last, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
        return order.to(held.key.device)[held.position].to(held.mass.dtype)

    def bias(self, held: Held, num_seen: int) -> Tensor:
        """The logarithm of how many each sampled key stands for."""
        between = (held.position >= self.num_sinks) & (held.position < num_seen - self.num_recent)
        count = between.sum(-1, keepdim=True).clamp(min=1)
        number = max(num_seen - self.num_recent - self.num_sinks, 1)
        shift = math.log(number) - count.to(held.mass.dtype).log()
        return torch.where(between, shift.clamp(min=0), 0)
