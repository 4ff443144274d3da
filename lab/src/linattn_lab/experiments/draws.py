"""Estimates of the softmax kernel over many draws of positive random features.

Letters: D head width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.inputs import seed

Draw = Literal["iid", "orthogonal"]

# Draws held at once, so that their projections fit in memory.
_AT_ONCE = 1000


def kernel_ratios(q: Tensor, k: Tensor, num_features: int, draw: Draw, num_draws: int, *parts: float | str) -> Tensor:
    """φ(q)·φ(k) divided by exp(q·k), (draws, n), for n pairs, (n, D): the same draws for all of them."""
    found = []
    for start in range(0, num_draws, _AT_ONCE):
        count = min(_AT_ONCE, num_draws - start)
        # One draw a head: many in one call.
        favor = FavorPlus(
            q.shape[-1],
            num_features,
            draw=draw,
            scale=1.0,
            seed=seed(draw, num_features, start, *parts),
            num_heads=count,
        )
        exponents = favor.query(q.expand(count, -1, -1)) + favor.key(k.expand(count, -1, -1))
        found.append(exponents.exp().sum(-1) / (q * k).sum(-1).exp())
    return torch.cat(found)
