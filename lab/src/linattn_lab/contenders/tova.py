"""TOVA: token omission via attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from linattn.kv_cache.budget import Sizes
from linattn_lab.contenders.eviction import Eviction, Held
from linattn_lab.contenders.query_moments import QueryMoments


@dataclass(frozen=True)
class Tova(Eviction):
    """Keys to which the latest query attends most, mean over its heads; nothing else is kept, no window, no sinks.

    worth_j = a_ij, i the latest query
    """

    kind = "TOVA"
    source = "Oren et al. 2024 (arXiv 2401.06104)"

    @classmethod
    def within(cls, num_bytes: int, sizes: Sizes) -> Self:
        """The largest in so many bytes."""
        return cls(cls.keys_within(num_bytes, sizes))

    def worth(self, held: Held, moments: QueryMoments, scale: float) -> Tensor:
        """The latest query's attention."""
        return held.latest
