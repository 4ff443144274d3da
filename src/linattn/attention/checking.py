"""Refuse maps, tokens and states that do not belong together: compiled code would trust what a file put there.

Of states shapes, dtypes and devices alone are compared, all of a kind at once, since every token of a stream passes
here: what differs is looked for where something does. Letters as in attention/__init__.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linattn.attention.bound_map import named_tensors
from linattn.attention.window import WindowKeys, check_width
from linattn.feature_maps import FeatureMap
from linattn.softmax.checking import TOKEN_DTYPES, Qkv, check_kind, check_tensor, check_tokens, checked, refuse
from linattn.softmax.row_groups import RowGroups, check_groups, check_next_tokens

if TYPE_CHECKING:
    from linattn.attention.state import State


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


def check_heads(feature_map: FeatureMap, head_dim: int, num_kv_heads: int) -> None:
    """Refuse a map that was built for heads of another width, or for another number of them."""
    if feature_map.head_dim != head_dim:
        raise ValueError(
            f"the feature map was built for head_dim={feature_map.head_dim}, got heads of width {head_dim}; build it "
            f"with head_dim={head_dim}"
        )
    num_heads = getattr(feature_map, "num_heads", None)
    if num_heads is not None and num_heads != num_kv_heads:
        raise ValueError(
            f"the feature map holds one set of parameters for each of {num_heads} key/value heads, got {num_kv_heads} "
            f"heads; build it with num_heads={num_kv_heads}, or num_heads=None to share one set"
        )


def checked_for(
    feature_map: FeatureMap, tokens: Qkv, key_mask: Tensor | None, key_bias: Tensor | None, *, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`linattn.softmax.checking.checked`, and what is no map, or was not built for these tensors, refused."""
    check_map(feature_map)
    query, key, value, bias = checked(tokens, key_mask, key_bias, enable_gqa=enable_gqa)
    check_heads(feature_map, query.shape[-1], key.shape[1])
    _, held = next(named_tensors(feature_map), (None, query))
    if held.device != query.device:
        raise ValueError(f"the feature map is on {held.device}, the tensors on {query.device}; call feature_map.to(…)")
    return query, key, value, bias


def live_keys(bias: Tensor | None) -> Tensor | None:
    """Which keys statistics of the call are taken over, (B, Hkv or 1, Lk): those that have any weight; None for all."""
    return None if bias is None else bias != -torch.inf


_REMEDY = "pass a state as linear_attention_with_state or State.empty gave it, or rebuild it from the tokens"


def check_tensors(state: State, feature_map: FeatureMap | None = None, head_dim: int | None = None) -> None:
    """Refuse a state whose tensors do not belong together, or are not those of a map and a width of keys."""
    S, z, m, window, apart = state.S, state.z, state.m, state.window, state.apart
    if not isinstance(S, Tensor) or S.ndim != 4 or S.dtype not in TOKEN_DTYPES:
        refuse("S", S, "float32 or float64 of shape (B, H, R, Dv)", _REMEDY)
    (batch, heads, num_features, value_dim), dtype, device = S.shape, S.dtype, S.device
    num_exponents = m.shape[-1] if isinstance(m, Tensor) and m.ndim == 3 else 1
    if feature_map is not None:
        num_features, num_exponents = feature_map.num_features, feature_map.num_exponents
    elif num_features and (num_exponents == 0 or num_features % num_exponents):
        refuse("m", m, f"of M exponents, a divisor of R = {num_features}", _REMEDY)
    check_tensor("S", S, (batch, heads, num_features, value_dim), dtype, device, _REMEDY)
    check_tensor("z", z, (batch, heads, num_features), dtype, device, _REMEDY)
    check_tensor("m", m, (batch, heads, num_exponents), dtype, device, _REMEDY)
    if window is not None:
        _check_keys(S, window, _head_dim_of(window) if head_dim is None else head_dim)
    if apart is not None:
        check_tensor("apart", apart, (batch, heads), torch.float64, device, _REMEDY)


def check_continues(state: State, key: Tensor, value: Tensor, feature_map: FeatureMap, window: int | None) -> None:
    """Refuse tokens that do not continue a state, and a state whose tensors do not belong together."""
    S = state.S
    if not isinstance(S, Tensor) or S.ndim != 4:
        check_tensors(state)
    remedy = f"build it with State.empty(…, dtype={key.dtype})"
    check_next_tokens((*S.shape[:2], S.shape[3]), S.dtype, S.device, key, value, remedy)
    first = _first(state.window)
    held = None if first is None else getattr(first, "width", first)
    if held != window:
        raise ValueError(f"the state was built with window={held}, got window={window}; give the same one")
    state.check_tensors(feature_map, key.shape[-1])


def _first(window: object) -> object:
    """The keys of a window, or those of its first group of rows."""
    return window.keys[0] if isinstance(window, RowGroups) and window.keys else window


def _head_dim_of(window: object) -> int:
    """How wide the keys are that a state keeps; 0 where it keeps none."""
    recent = getattr(_first(window), "recent", None)
    key = recent[0] if isinstance(recent, tuple) and recent else None
    return key.shape[-1] if isinstance(key, Tensor) and key.ndim == 4 else 0


def _check_keys(S: Tensor, window: object, head_dim: int) -> None:
    """The keys beside the sums."""
    if isinstance(window, RowGroups):
        check_groups(window, len(S), _REMEDY)
        widths = [getattr(group, "width", None) for group in window.keys]
        if any(width != widths[0] for width in widths):
            raise ValueError(f"the state's windows must be of one width, got {widths}; {_REMEDY}")
        for rows, group in zip(window.rows, window.keys, strict=True):
            _check_keys(S[: len(rows)], group, head_dim)
        return
    check_kind(WindowKeys, "window", window, _REMEDY)
    assert isinstance(window, WindowKeys)
    check_width(window.width)
    sizes = (*S.shape[:2], head_dim, S.shape[3])
    check_tokens("window.recent", window.recent, 2 * window.width, sizes, S.dtype, S.device, _REMEDY)
