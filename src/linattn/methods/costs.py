"""Numbers that attention keeps of a text per head: by a map, and by softmax.

Letters: L tokens, D head width, Dv value width, R features, M exponents, W window.
"""

from __future__ import annotations

from linattn.feature_maps import FeatureMap


def map_state_numbers(feature_map: FeatureMap, *, value_dim: int, window: int | None = None) -> int:
    """Numbers in a head's state, whatever the length of the text: S, z and maxima, and keys of two blocks of a window.

        R·(Dv + 1) + M + 2W·(D + Dv)

    Example:
        >>> from linattn.feature_maps import Expansion
        >>> map_state_numbers(Expansion(4, num_centres=2), value_dim=3, window=16)  # 10·4 + 2 + 32·7
        266
    """
    sums = feature_map.num_features * (value_dim + 1) + feature_map.num_exponents
    return sums + 2 * (window or 0) * (feature_map.head_dim + value_dim)


def exact_state_numbers(num_tokens: int, *, head_dim: int, value_dim: int) -> int:
    """Numbers that exact attention keeps per head, every key and value: L·(D + Dv)."""
    return num_tokens * (head_dim + value_dim)
