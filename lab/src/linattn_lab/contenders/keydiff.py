"""KeyDiff: keep the keys that are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.nn.functional import normalize

from linattn.kv_cache.budget import Sizes
from linattn_lab.contenders.eviction import Eviction, Held
from linattn_lab.contenders.query_moments import QueryMoments


@dataclass(frozen=True)
class KeyDiff(Eviction):
    """Keys of the least cosine to the mean direction of the keys that are held; half of the room is for the latest.

        worth_j = -cos(k_j, mean of k/|k|)

    The paper's rule judges a prompt's keys and takes the latest without judging them; half is H2O's share.
    """

    kind = "KeyDiff"
    source = "Park et al. 2025 (arXiv 2504.15364)"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        count = cls.keys_within(num_bytes, sizes)
        return cls(count, num_recent=count // 2)

    def worth(self, held: Held, moments: QueryMoments, scale: float) -> Tensor:
        """How unlike the others they are."""
        direction = normalize(held.key, dim=-1)
        anchor = normalize(direction.mean(2, keepdim=True), dim=-1)
        return -(direction * anchor).sum(-1)
