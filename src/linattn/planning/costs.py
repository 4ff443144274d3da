"""What a method costs: the numbers it keeps and the operations it makes, counted alike for every family.

Counts, not timings: exponentials, comparisons and the division are left out, a multiply-add is two operations.

Letters: L tokens, D head width, Dv value width, R features, M exponents, C centres, F = R/C, W window, G heavy keys.
"""

from __future__ import annotations

from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.planning.methods import Method


def state_numbers(method: Method, feature_map: FeatureMap, *, value_dim: int) -> int:
    """Numbers kept per head, whatever the length of the text.

        R·(Dv + 1) + M + (2W + G)·(D + Dv)

    S and z of the map, its running maxima, and the keys and values of the window's two blocks and of the heavy keys.

    Cost: none.

    Args:
        method: the map's exact part.
        feature_map: the map.
        value_dim: Dv.

    Returns:
        The count.

    Example:
        >>> from linattn.feature_maps import Expansion
        >>> from linattn.planning.methods import parse_method
        >>> state_numbers(parse_method("Expansion + window 16"), Expansion(4, 2), value_dim=3)  # 10·4 + 2 + 32·7
        266

    Source: `linattn.State`, counted.
    """
    kept = 0 if method.exact is None else method.exact.cost(is_causal=True).kept
    sums = feature_map.num_features * (value_dim + 1) + feature_map.num_exponents
    return sums + kept * (feature_map.head_dim + value_dim)


def flops_per_token(method: Method, feature_map: FeatureMap, *, value_dim: int, is_causal: bool) -> int:
    """Floating-point operations per head for one more token, as a key and as a query.

        maps with centres    2·C·D + 2·C·F·(Dv + 1) + 2·F·(Dv + 1)     exponents, absorbing, reading one centre
        other maps           4·R·D + 4·R·(Dv + 1)                      features of query and key, absorbing and reading
        exact part           2·(3W + G)·(D + Dv), causal 2·(2W + G)·(D + Dv)

    A window that is not causal takes the map's part twice, from both ends. Heavy keys that are not causal take the
    masses of all keys: keys once for z and once for their masses, queries once between, 4·C·D + 4·C·F + 2·F or
    6·R·(D + 1).

    The features of every other map are counted as one product with R·D numbers; elementwise maps need
    less, and so do maps that make two features of one row (Hyperbolic, Trigonometric, Hedgehog).

    Cost: none.

    Args:
        method: the map's exact part.
        feature_map: the map.
        value_dim: Dv.
        is_causal: a causal query's window has its own block and the one before, another's also the one after.

    Returns:
        The count.

    Example:
        >>> from linattn.feature_maps import FavorPlus
        >>> from linattn.planning.methods import parse_method
        >>> method = parse_method("FavorPlus")
        >>> flops_per_token(method, FavorPlus(4, 8), value_dim=3, is_causal=False)  # 4·8·4 + 4·8·4
        256

    Source: none, a count.
    """
    head_dim, width = feature_map.head_dim, value_dim + 1
    if isinstance(feature_map, GroupedFeatureMap):
        centres, local = feature_map.num_groups, feature_map.num_local
        count = 2 * centres * head_dim + 2 * centres * local * width + 2 * local * width
        masses = 4 * centres * head_dim + 4 * centres * local + 2 * local
    else:
        count = 4 * feature_map.num_features * (head_dim + width)
        masses = 6 * feature_map.num_features * (head_dim + 1)
    if method.exact is None:
        return count
    added = method.exact.cost(is_causal=is_causal)
    return added.map_folds * count + added.column_masses * masses + 2 * added.seen * (head_dim + value_dim)


def exact_state_numbers(num_tokens: int, *, head_dim: int, value_dim: int) -> int:
    """Numbers exact attention keeps per head: L·(D + Dv), every key and value.

    Cost: none.

    Args:
        num_tokens: L.
        head_dim: D.
        value_dim: Dv.

    Returns:
        The count.

    Example:
        >>> exact_state_numbers(10, head_dim=4, value_dim=3)
        70

    Source: none, a count.
    """
    return num_tokens * (head_dim + value_dim)


def exact_flops_per_token(num_tokens: int, *, head_dim: int, value_dim: int, is_causal: bool) -> int:
    """Operations of exact attention per head and token: 2·L·(D + Dv), causal (L + 1)·(D + Dv), the mean over queries.

    Cost: none.

    Args:
        num_tokens: L.
        head_dim: D.
        value_dim: Dv.
        is_causal: whether later keys are hidden.

    Returns:
        The count.

    Example:
        >>> exact_flops_per_token(10, head_dim=4, value_dim=3, is_causal=False)
        140

    Source: none, a count.
    """
    return (num_tokens + 1 if is_causal else 2 * num_tokens) * (head_dim + value_dim)
