"""What a method costs: the numbers it keeps and the operations it makes, counted alike for every family.

Counts, not timings: exponentials, comparisons and the division are left out, a multiply-add is two operations.

Letters: L tokens, D head width, Dv value width, R features, M exponents, C centres, F = R/C, W window, G heavy keys, N
merged keys.
"""

from __future__ import annotations

from linattn.attention import Exact
from linattn.attention.exact.merged.distances import num_axes
from linattn.attention.exact.merged.few_bits import coded_bytes, mixed_width
from linattn.attention.exact.merged.query_sample import sample_size
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.planning.methods import Method

# The fewest queries by whose attention an encoder's keys are merged.
_SAMPLE = 64


def state_numbers(method: Method, feature_map: FeatureMap, *, value_dim: int, is_causal: bool = True) -> int:
    """Numbers in a head's state, whatever the length of the text.

        R·(Dv + 1) + M + (2W + G + N)·(D + Dv)                    S, z and maxima of the map; exact and merged keys
        N, and causally 16·D                                      beside merged keys: biases, sampled queries
        N·(⌈D·b/8⌉ + 4·⌈D/32⌉ + …)/4 + 2·(D + Dv)                  merged keys in b bits, in numbers of four bytes

    The window's keys are those of two blocks, beside merged keys those of the window and a block. `is_causal` matters
    to merged keys alone: a stream keeps some queries, 16 where eight heads or fewer share a key.

    Example:
        >>> from linattn.feature_maps import Expansion
        >>> from linattn.planning.methods import parse_method
        >>> state_numbers(parse_method("Expansion + window 16"), Expansion(4, 2), value_dim=3)  # 10·4 + 2 + 32·7
        266
    """
    sums = feature_map.num_features * (value_dim + 1) + feature_map.num_exponents
    if method.exact is None:
        return sums
    return sums + _kept_numbers(method.exact, feature_map.head_dim, value_dim, is_causal=is_causal)


def _kept_numbers(exact: Exact, head_dim: int, value_dim: int, *, is_causal: bool) -> int:
    """Numbers of an exact part's keys, and of what is kept beside merged ones."""
    both, kept = head_dim + value_dim, exact.cost(is_causal=True).kept
    if not exact.num_merged:
        return kept * both
    beside = exact.num_merged + (sample_size(1) * head_dim if is_causal else 0)
    if exact.bits is None:
        return kept * both + beside
    coded = exact.num_merged * (coded_bytes(head_dim, exact.bits) + coded_bytes(value_dim, exact.bits))
    return (kept - exact.num_merged) * both + -(-coded // 4) + 2 * both + beside


def flops_per_token(method: Method, feature_map: FeatureMap, *, value_dim: int, is_causal: bool) -> int:
    """Floating-point operations of a head per token, which is both a key and a query.

        maps with centres    2·C·D + 2·C·F·(Dv + 1) + 2·F·(Dv + 1)     exponents, absorbing, reading one centre
        other maps           4·R·D + 4·R·(Dv + 1)                      features of query and key, absorbing and reading
        exact part           2·(3W + G + N)·(D + Dv), causal 2·(2W + G + N)·(D + Dv), beside merged keys 2·(W + b + N)·…
        merging, causal      (2·(N + b)²·(D + Dv) + 4·16·(N + b)·D + 2·(N + b)·(D + Dv))/m,    b tokens of a block
        in few bits          2·(D·p(D) + Dv·p(Dv))·(2 + (W + b)/b + 2·N/m)      p the largest power of two in a width
        merging              2·64·D + 2·A·(D + Dv + N) + 2·(D + Dv)    A axes of the keys and values

    Keys are merged without causality by what 64 queries attend to, and join the nearest of N clusters; the few hundred
    keys that these are made of at first are left out, since their number does not grow with the text. Causally a merge
    is made every m = b + (N - `Exact.num_left`) tokens. In few bits rows and near keys are read in the basis of the
    codes; a text that comes token by token has its near ones there anew at every token, (W + b) in place of (W + b)/b.

    A bidirectional window computes the map's part twice, once before the window and once after it. Bidirectional heavy
    keys also need the column masses: the keys are mapped once for z and once for the masses, the queries once between,
    4·C·D + 4·C·F + 2·F or 6·R·(D + 1).

    The features of maps without centres are counted as one product with R·D numbers; elementwise maps need fewer
    operations, and so do maps that make two features of one row (Hyperbolic, Trigonometric, Hedgehog).

    Example:
        >>> from linattn.feature_maps import FavorPlus
        >>> from linattn.planning.methods import parse_method
        >>> method = parse_method("FavorPlus")
        >>> flops_per_token(method, FavorPlus(4, 8), value_dim=3, is_causal=False)  # 4·8·4 + 4·8·4
        256
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
    seen = 2 * added.seen * (head_dim + value_dim) + _merging(method.exact, head_dim, value_dim, is_causal=is_causal)
    return added.map_folds * count + added.column_masses * masses + seen


def _merging(exact: Exact, head_dim: int, value_dim: int, *, is_causal: bool) -> int:
    """Operations per token by which keys are merged."""
    if not exact.num_merged:
        return 0
    both = head_dim + value_dim
    if not is_causal:
        return 2 * _SAMPLE * head_dim + 2 * num_axes(both) * (both + exact.num_merged) + 2 * both
    blocks = exact.blocks
    pool, between = exact.num_merged + blocks.size, blocks.size + exact.num_merged - exact.num_left
    merging = (2 * pool**2 * both + 4 * sample_size(1) * pool * head_dim + 2 * pool * both) // between
    if exact.bits is None:
        return merging
    mixing = 2 * sum(width * mixed_width(width) for width in (head_dim, value_dim))
    # A row and its output, the block's keys as they leave and all near ones; at a merge all of them, out and in again.
    return merging + mixing * (2 + blocks.number + 1) + mixing * 2 * exact.num_merged // between


def exact_state_numbers(num_tokens: int, *, head_dim: int, value_dim: int) -> int:
    """Numbers that exact attention keeps per head, every key and value: L·(D + Dv)."""
    return num_tokens * (head_dim + value_dim)


def exact_flops_per_token(num_tokens: int, *, head_dim: int, value_dim: int, is_causal: bool) -> int:
    """Operations of exact attention per head and token: 2·L·(D + Dv), causal (L + 1)·(D + Dv), a mean over queries."""
    return (num_tokens + 1 if is_causal else 2 * num_tokens) * (head_dim + value_dim)
