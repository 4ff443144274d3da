"""Exact keys and the map's, every key in view; letters as in _exact/__init__.py."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention._blocked import Moments, column_mass
from linattn.attention._exact.far import Far
from linattn.attention._exact.heavy import attend_to_all, heaviest, picked
from linattn.attention._exact.neighbourhood import near
from linattn.attention.partial import Partial, combine


def attend(
    far: Far,
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,  # (B, H, Lk, Dv)
    mask: Tensor | None,  # (B, 1, Lk)
    nothing: Moments,
    *,
    window: int,
    num_heavy: int,
) -> Partial:
    """Rows (B, H, G, Lq, ·): neighbouring blocks and heavy keys exactly, what comes before and after by the map.

    With a window the map's keys are two parts, before and after the neighbourhood.
    """
    scale, rest, parts = far.feature_map.scale, mask, []
    if mask is not None:
        key, value = (torch.where(mask.unsqueeze(-1), x, 0) for x in (key, value))
    if num_heavy and key.shape[2]:
        mass = column_mass(far.feature_map, far.own, query, key, mask)
        chosen = heaviest(mass, mask, num_heavy)
        seen = key.new_ones(1, 1, key.shape[2], dtype=torch.bool) if mask is None else mask
        seen = seen.expand(mass.shape)
        rest = seen.scatter(-1, chosen, False)
        live = seen.gather(-1, chosen)
        parts.append(attend_to_all(query, picked(key, chosen), picked(value, chosen), live, scale))
    if window:
        parts.append(near(query, key, value, rest, window=window, scale=scale, is_causal=False).partial)
        parts.append(far.earlier_blocks(query, key, value, rest, nothing, window))
        parts.append(far.later_blocks(query, key, value, rest, nothing, window))
    else:
        parts.append(far.all_keys(query, key, value, rest, nothing))
    return combine(*parts)
