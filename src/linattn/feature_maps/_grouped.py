"""The protocol of maps whose features fall into groups, of which a query reads one.

Letters as in feature_maps/__init__.py, N queries, C groups, F = R/C features of a group.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from linattn.feature_maps._base import FeatureMap


class GroupedFeatureMap(FeatureMap):
    """φ(k) = [exp(ℓ_c(k))·ψ(k)] for c = 1 … C, and φ(q) = one-hot(c(q)) ⊗ χ(q; place_c, z_c).

    Abstract. A query reads the F features of one group alone, which depends on where it lies, and may look at that
    group's sums z of the keys it sees before it reads: its features are those of one query in one state. Hence a state
    costs C·F·Dv multiply-adds per key and F·Dv per query.

    Attributes:
        num_groups: C.
        num_local: F.
    """

    exponential = False
    num_groups: int
    num_local: int

    def __init__(self, head_dim: int, num_groups: int, num_local: int) -> None:
        super().__init__(head_dim, num_groups * num_local)
        self.num_groups, self.num_local = num_groups, num_local

    @property
    def positive_normalizer(self) -> bool:
        """True: query features are centred on the z they are divided by."""
        return True

    @property
    def num_exponents(self) -> int:
        """C: one running maximum for each group."""
        return self.num_groups

    @abstractmethod
    def places(self) -> Tensor:
        """Statistics that χ needs of each group, such as its centre: (C, W), (Hkv, C, W) or (B, Hkv, C, W), any W."""

    @abstractmethod
    def group(self, x: Tensor) -> Tensor:
        """The group each query reads: (..., L, D) -> (..., L), integers in [0, C)."""

    @abstractmethod
    def local_query(self, x: Tensor, place: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """χ (..., N, F) of queries and the logarithm (..., N) of a factor left out of it.

        Args:
            x: queries, (..., N, D).
            place: of their groups, (..., N, W) or (..., 1, W).
            z: sums Σ exp(ℓ_c(k))·ψ(k) of the query's group over the keys it sees, (..., N, F) or (..., 1, F), on any
                scale; 0 where it sees none.
        """

    @abstractmethod
    def least_normalizer(self, z: Tensor) -> Tensor:
        """A lower bound of χ·z in exact arithmetic: (..., F) -> (...)."""

    def normalizer(self, chi: Tensor, z: Tensor) -> Tensor:
        """χ·z, (..., F) and (..., F) -> (...); its least value where cancellation has left nothing of it."""
        total, least = (chi * z).sum(-1), self.least_normalizer(z)
        return torch.where(total < least / 2, least, total)

    @abstractmethod
    def key(self, x: Tensor) -> Tensor:
        """ψ, the factor of a key's features that all groups share: (..., L, D) -> (..., L, F)."""

    @abstractmethod
    def key_log_weight(self, x: Tensor) -> Tensor:
        """ℓ, the logarithm of each group's weight of a key: (..., L, D) -> (..., L, C)."""

    def query(self, x: Tensor) -> Tensor:
        """φ(q) before any key was seen, all groups written out: (..., L, D) -> (..., L, R)."""
        group = self.group(x)
        places = self.places().expand(*group.shape[:-1], -1, -1)
        place = torch.take_along_dim(places, group.unsqueeze(-1), dim=-2)
        local, _ = self.local_query(x, place, place.new_zeros(self.num_local))
        chosen = group.unsqueeze(-1) == torch.arange(self.num_groups, device=x.device)
        return (chosen.unsqueeze(-1) * local.unsqueeze(-2)).flatten(-2)
