"""A small instance of any feature map, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from linattn.feature_maps import FEATURE_MAPS, FeatureMap


@pytest.fixture(scope="session")
def build() -> Callable[..., FeatureMap]:
    """build(name, head_dim=6, **options): the map, with 16 features where that is free and fitted where it must be."""

    def make(name: str, head_dim: int = 6, **options: Any) -> FeatureMap:
        parameters = inspect.signature(FEATURE_MAPS[name]).parameters
        if "num_features" in parameters:
            options.setdefault("num_features", 16)
        if "mean_square" in parameters:
            options.setdefault("mean_square", 1.0)
        if "centres" in parameters:
            options.setdefault("num_centres", 3)
            options.setdefault("centres", torch.linspace(-1, 1, 3).unsqueeze(-1).expand(3, head_dim).double())
        return FEATURE_MAPS[name](head_dim, **options)

    return make
