"""Costs of methods: the numbers they keep and the operations they make, counted alike for every family.

Counts, not timings: exponentials, comparisons and the division are left out, a multiply-add is two operations.

Letters: L tokens, D head width, Dv value width, R features, M exponents, C centres, F = R/C, W window, N merged
keys.
"""

from __future__ import annotations

import statistics

from linattn.feature_maps import GroupedFeatureMap
from linattn.kv_cache import MergedKV
from linattn.kv_cache.budget import frame_bytes
from linattn.kv_cache.codes import Layout, coded_bytes
from linattn.kv_cache.partitioning import num_axes
from linattn.kv_cache.query_sample import sample_size
from linattn.methods.measures import map_state_numbers
from linattn_lab.built_methods import BuiltMethod

# The fewest queries by whose attention an encoder's keys are merged.
_SAMPLE = 64


def state_numbers(built: BuiltMethod, *, value_dim: int, is_causal: bool = True) -> int:
    """Numbers in a head's state, whatever the length of the text.

        R·(Dv + 1) + M + (2W + N)·(D + Dv)                        S, z and maxima of the map; exact and merged keys
        N, and causally 16·D                                      beside merged keys: biases, sampled queries
        N·(D·b/8 + 2 + …)/4 + 2·(D + Dv) + …                       merged keys in b bits, frames; in numbers of 4 bytes

    The window's keys are those of two blocks, beside merged keys those of the window and a block. `is_causal` matters
    to merged keys alone: a stream keeps some queries, 16 where eight heads or fewer share a key.

    Example:
        >>> from linattn.methods.method import parse_method
        >>> from linattn_lab.built_methods import build
        >>> method = parse_method("Expansion(num_centres=2) + window 16")
        >>> built = build(method, 4, num_features=None, scale=1.0, seed=0)
        >>> state_numbers(built, value_dim=3)  # 10·4 + 2 + 32·7
        266
    """
    merged, feature_map = built.method.merged, built.feature_map
    if merged is not None:
        return _merged_numbers(merged, built.head_dim, value_dim, is_causal=is_causal)
    assert feature_map is not None
    return map_state_numbers(feature_map, value_dim=value_dim, window=built.method.window)


def _merged_numbers(merged: MergedKV, head_dim: int, value_dim: int, *, is_causal: bool) -> int:
    """Numbers of merged keys, of the window's, and of what is kept beside them."""
    both, near = head_dim + value_dim, _near(merged, is_causal=is_causal)
    if not is_causal:
        return (near + merged.num_merged) * both + merged.num_merged
    count = near * both + sample_size(1) * head_dim
    coded = 0
    for tier in (*merged.tiers, merged.merged_tier):
        count += tier.number
        if tier.bits is None:
            count += tier.number * both
        else:
            of_both = zip((head_dim, value_dim), tier.both_bits, strict=True)
            coded += sum(tier.number * coded_bytes(width, bits) + frame_bytes(width, 4) for width, bits in of_both)
    return count + -(-coded // 4)


def _near(merged: MergedKV, *, is_causal: bool) -> int:
    """Keys of a window and a block, and of a stream's sinks."""
    near = 0 if merged.window is None else merged.blocks.window + merged.blocks.size
    return near + (merged.num_sinks if is_causal else 0)


def flops_per_token(built: BuiltMethod, *, value_dim: int, is_causal: bool) -> int:
    """Floating-point operations of a head per token, which is both a key and a query.

        maps with centres    2·C·D + 2·C·F·(Dv + 1) + 2·F·(Dv + 1)     exponents, absorbing, reading one centre
        other maps           4·R·D + 4·R·(Dv + 1)                      features of query and key, absorbing and reading
        window               2·3W·(D + Dv), causal 2·2W·(D + Dv)
        merged keys          2·(3W + N)·(D + Dv), causal 2·(W + b + N)·(D + Dv)
        merging, causal      (2·(N + b)²·(D + Dv) + 4·16·(N + b)·D + 2·(N + b)·(D + Dv))/m,    b tokens of a block
        in few bits          2·(D·p(D) + Dv·p(Dv))·(2 + N/m)    p the largest power of two in a width, 32 at most
        merging              2·64·D + 2·A·(D + Dv + N) + 2·(D + Dv)    A axes of the keys and values

    Keys are merged without causality by what 64 queries attend to, and join the nearest of N clusters; the few hundred
    keys that these are made of at first are left out, since their number does not grow with the text. Causally a merge
    is made every m = b + (N - `MergedKV.num_left`) tokens. In few bits rows are read in the basis of the codes.

    A bidirectional window computes the map's part twice, once before the window and once after it.

    The features of maps without centres are counted as one product with R·D numbers; elementwise maps need fewer
    operations, and so do maps that make two features of one row (Hyperbolic, Trigonometric, Hedgehog).

    Example:
        >>> from linattn.methods.method import parse_method
        >>> from linattn_lab.built_methods import build
        >>> built = build(parse_method("FavorPlus"), 4, num_features=8, scale=1.0, seed=0)
        >>> flops_per_token(built, value_dim=3, is_causal=False)  # 4·8·4 + 4·8·4
        256
    """
    head_dim, width, merged, feature_map = built.head_dim, value_dim + 1, built.method.merged, built.feature_map
    if merged is not None:
        near = _near(merged, is_causal=True) if is_causal else 3 * (merged.window or 0)
        coded = sum(number for number, _ in merged.coded) if is_causal else 0
        seen = 2 * (near + coded + merged.num_merged) * (head_dim + value_dim)
        return seen + _merging(merged, head_dim, value_dim, is_causal=is_causal)
    assert feature_map is not None
    if isinstance(feature_map, GroupedFeatureMap):
        centres, local = feature_map.num_groups, feature_map.num_local
        count = 2 * centres * head_dim + 2 * centres * local * width + 2 * local * width
    else:
        count = 4 * feature_map.num_features * (head_dim + width)
    window = built.method.window
    if window is None:
        return count
    near = (2 if is_causal else 3) * window
    return (1 if is_causal else 2) * count + 2 * near * (head_dim + value_dim)


def _merging(merged: MergedKV, head_dim: int, value_dim: int, *, is_causal: bool) -> int:
    """Operations per token by which keys are merged."""
    both = head_dim + value_dim
    if not is_causal:
        return 2 * _SAMPLE * head_dim + 2 * num_axes(both) * (both + merged.num_merged) + 2 * both
    blocks, number = merged.blocks, merged.merged_tier.number
    pool, between = merged.num_merged + blocks.size, blocks.size + merged.num_merged - merged.num_left
    entire = number + blocks.size
    merging = (2 * pool**2 * both + 4 * sample_size(1) * entire * head_dim + 2 * entire * both) // between
    if merged.bits is None and not merged.coded:
        return merging if merged.num_merged else 0
    mixing = 2 * sum(layout.size * layout.block for layout in map(Layout.of, (head_dim, value_dim)))
    # A row and its output, and keys as they enter and leave, of each tier; at a merge all merged keys.
    mixed = 2 * (len(merged.tiers) + (merged.bits is not None)) * mixing
    if merged.num_merged == 0:
        return mixed
    return merging + mixed + (0 if merged.bits is None else mixing * number // between)


def exact_flops_per_token(num_tokens: int, *, head_dim: int, value_dim: int, is_causal: bool) -> int:
    """Operations of exact attention per head and token: 2·L·(D + Dv), causal (L + 1)·(D + Dv), a mean over queries."""
    return (num_tokens + 1 if is_causal else 2 * num_tokens) * (head_dim + value_dim)


def spread(samples: list[float]) -> dict[str, float]:
    """Median, minimum and maximum.

    Example:
        >>> spread([3.0, 1.0, 2.0])
        {'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
