"""A small instance of any feature map, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from linattn.feature_maps import FEATURE_MAPS, FeatureMap


@pytest.fixture(scope="session")
def build() -> Callable[..., FeatureMap]:
    """build(name, head_dim=6, **options): the map, with 16 features where that is free and an Oprf already fitted."""

    def make(name: str, head_dim: int = 6, **options: Any) -> FeatureMap:
        parameters = inspect.signature(FEATURE_MAPS[name]).parameters
        if "num_features" in parameters:
            options.setdefault("num_features", 16)
        if "mean_square" in parameters:
            options.setdefault("mean_square", 1.0)
        return FEATURE_MAPS[name](head_dim, **options)

    return make
