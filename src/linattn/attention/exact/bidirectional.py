"""Exact keys and the map's, every key in view; letters as in exact/__init__.py."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.exact.heavy import attend_to_all, heaviest, picked
from linattn.attention.exact.map_part import MapPart
from linattn.attention.exact.neighbourhood import near
from linattn.attention.partial import Partial, combine
from linattn.attention.softmax import inert
from linattn.attention.sums import Sums


def attend(
    map_part: MapPart,
    query: Tensor,  # (B, H, G, Lq, D)
    key: Tensor,  # (B, H, Lk, D)
    value: Tensor,  # (B, H, Lk, Dv)
    bias: Tensor | None,  # (B, H or 1, Lk)
    nothing: Sums,
    *,
    window: int,
    num_heavy: int,
) -> Partial:
    """Rows (B, H, G, Lq, ·): neighbouring blocks and heavy keys exactly, what comes before and after by the map.

    With a window the map's keys are two parts, before and after the neighbourhood.
    """
    scale, rest, parts = map_part.scale, bias, []
    if bias is not None:
        key, value = inert(key, bias), inert(value, bias)
    if num_heavy and key.shape[2]:
        mass = map_part.backend.column_mass(map_part.bound, query, key, bias)
        chosen = heaviest(mass, bias, num_heavy)
        every = mass.new_zeros(mass.shape) if bias is None else bias.expand(mass.shape)
        rest = every.scatter(-1, chosen, -torch.inf)
        own = every.gather(-1, chosen)
        parts.append(attend_to_all(query, picked(key, chosen), picked(value, chosen), own, scale))
    if window:
        parts.append(near(query, key, value, rest, window=window, scale=scale, is_causal=False).partial)
        parts.append(map_part.earlier_blocks(query, key, value, rest, nothing, window))
        parts.append(map_part.later_blocks(query, key, value, rest, nothing, window))
    else:
        parts.append(map_part.all_keys(query, key, value, rest, nothing))
    return combine(*parts)
