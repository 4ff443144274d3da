"""H2O: heavy hitters, and as many of the latest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn_lab.contenders.eviction import Eviction, Held
from linattn_lab.contenders.query_moments import QueryMoments


@dataclass(frozen=True)
class H2O(Eviction):
    """Keys of the largest attention received so far; half of the room is for the latest keys.

    worth_j = Σ_i a_ij over the queries since the key came
    """

    kind = "H2O"
    source = "Zhang et al. 2023 (arXiv 2306.14048)"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        count = cls.keys_within(num_bytes, sizes)
        return cls(count, num_recent=count // 2)

    @classmethod
    def numbers_per_key(cls) -> int:
        """The attention received."""
        return 1

    def worth(self, held: Held, moments: QueryMoments, scale: float) -> Tensor:
        """The attention received."""
        return held.mass
