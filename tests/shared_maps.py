"""The grid's maps, and an expansion whose centres serve any number of heads."""

from __future__ import annotations

from grid import HEAD_DIM, build, sample
from linattn.feature_maps import Expansion, FeatureMap

SHARED = "Expansion-shared"


def built(name: str) -> FeatureMap:
    """A map by name."""
    if name != SHARED:
        return build(name)
    return Expansion(HEAD_DIM, 3).fit(*(x[:, :1] for x in sample(HEAD_DIM)))
