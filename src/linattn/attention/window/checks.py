"""Refuse windows, and maps and calls that cannot have one; letters as in window/__init__.py."""

from __future__ import annotations

from linattn.feature_maps import FeatureMap

# Keys are numbered in 32 bits.
_MOST = 2**31


def check_window(window: object, feature_map: FeatureMap, num_queries: int, num_keys: int, *, is_causal: bool) -> None:
    """Refuse what is no window's width, and one that this map or this call cannot have."""
    check_width(window)
    if not shares_normalizer(feature_map):
        raise ValueError(
            f"a window needs a map whose weights share the softmax kernel's scale and sum to a positive number, got "
            f"{type(feature_map).__name__}; use Expansion, or FavorPlus, Hyperbolic, Oprf or Sderf"
        )
    if num_keys < num_queries if is_causal else num_keys != num_queries:
        wanted = "no more queries than keys" if is_causal else "as many queries as keys"
        raise ValueError(
            f"a window needs {wanted}, got {num_queries} queries and {num_keys} keys; leave it out where positions do "
            "not correspond"
        )


def check_width(window: object) -> None:
    """Refuse what is no power of two."""
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window must be an integer or None, got {window!r}; write window=32")
    if not 0 < window < _MOST or window.bit_count() != 1:
        raise ValueError(f"the window must be a power of two below 2³¹, as 16 or 32, got {window}; None is no window")


def shares_normalizer(feature_map: FeatureMap) -> bool:
    """Whether a map's weights share the softmax kernel's scale and sum to a positive number."""
    return feature_map.softmax_kernel and feature_map.positive_normalizer
