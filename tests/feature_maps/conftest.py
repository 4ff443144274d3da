"""A small instance of any feature map, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from linattn.feature_maps import FEATURE_MAPS, FeatureMap, FittedMap


@pytest.fixture(scope="session")
def build() -> Callable[..., FeatureMap]:
    """build(name, head_dim=6, **options): the map, with 16 features where that is free, fitted for all heads alike."""

    def make(name: str, head_dim: int = 6, **options: Any) -> FeatureMap:
        parameters = inspect.signature(FEATURE_MAPS[name]).parameters
        if "num_features" in parameters:
            options.setdefault("num_features", 16)
        if "mean_square" in parameters:
            options.setdefault("mean_square", 1.0)
        built = FEATURE_MAPS[name](head_dim, **options)
        if isinstance(built, FittedMap) and name != "Oprf":
            generator = torch.Generator().manual_seed(12)
            query, key = (torch.randn(1, 1, 40, head_dim, generator=generator) for _ in range(2))
            built.fit(query, key + 0.2)
        return built

    return make
