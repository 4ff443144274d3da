"""Who sees whom exactly, key by key and query by query.

Letters: N queries, M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal(places: Tensor, num_keys: int) -> Tensor:
    """(N, M): whether a query at this place sees a key, at its own place at the latest."""
    return torch.arange(num_keys) <= places.unsqueeze(-1)


def first_live(live: Tensor) -> Tensor:
    """How many keys of a row (B, M) come before its first live one."""
    return (~live).long().cumprod(-1).sum(-1)


def turned(places: Tensor, live: Tensor, *, is_causal: bool) -> Tensor:
    """Places (N,) counted from each row's first live key, (B, N); those before it come last without causality."""
    found = places - first_live(live).unsqueeze(-1)
    return found if is_causal else found % max(live.shape[1], 1)


def near(places: Tensor, live: Tensor, window: int, *, is_causal: bool) -> Tensor:
    """(B, 1, 1, N, M): whether a key is in the query's own block or a neighbouring one; causally the one before."""
    num_keys = live.shape[1]
    own, other = (turned(x, live, is_causal=is_causal) // window for x in (places, torch.arange(num_keys)))
    apart = (own.unsqueeze(-1) - other.unsqueeze(-2))[:, None, None]
    return (apart >= 0) & (apart <= 1) & causal(places, num_keys) if is_causal else apart.abs() <= 1
