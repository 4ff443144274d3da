"""Checks of calls with a feature map, and their words; limits of one backend live with that backend.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap
from linattn.feature_maps._swapping import named_tensors
from linattn.softmax.checking import checked


def check_map(feature_map: object) -> None:
    """Refuse what is not a feature map."""
    if isinstance(feature_map, type) and issubclass(feature_map, FeatureMap):
        raise TypeError(
            f"feature_map must be an instance, got the class {feature_map.__name__}; build it first, for example "
            f"{feature_map.__name__}(head_dim, …)"
        )
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(
            f"feature_map must be a linattn.feature_maps.FeatureMap, got {type(feature_map).__name__}; "
            "linattn.feature_maps.FEATURE_MAPS lists the maps there are"
        )


def checked_for(
    feature_map: FeatureMap,
    tokens: tuple[Tensor, Tensor, Tensor],
    key_mask: Tensor | None,
    key_bias: Tensor | None,
    *,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`linattn.softmax.checking.checked`, and tensors the map was not built for refused."""
    query, key, value, bias = checked(tokens, key_mask, key_bias, enable_gqa=enable_gqa)
    _check_fits_map(query, key, feature_map)
    return query, key, value, bias


def _check_fits_map(query: Tensor, key: Tensor, feature_map: FeatureMap) -> None:
    """Refuse tensors the map was not built for."""
    if query.shape[-1] != feature_map.head_dim:
        raise ValueError(
            f"the feature map was built for head_dim={feature_map.head_dim}, got queries and keys of width "
            f"{query.shape[-1]}; build it with head_dim={query.shape[-1]}"
        )
    heads = getattr(feature_map, "num_heads", None)
    if heads is not None and heads != key.shape[1]:
        raise ValueError(
            f"the feature map holds one set of parameters for each of {heads} key/value heads, got {key.shape[1]} "
            f"heads; build it with num_heads={key.shape[1]}, or num_heads=None to share one set"
        )
    _, held = next(named_tensors(feature_map), (None, query))
    if held.device != query.device:
        raise ValueError(
            f"the feature map is on {held.device}, the tensors on {query.device}; move it with feature_map.to(…)"
        )


def live_keys(key_mask: Tensor | None, key_bias: Tensor | None) -> Tensor | None:
    """Which keys statistics of the call are taken over: (B, Lk), or (B, Hkv or 1, Lk) where a bias masks some."""
    if key_bias is None:
        return key_mask
    live = key_bias != -torch.inf
    return live if key_mask is None else live & key_mask.unsqueeze(1)
