"""The kernel that folds keys and values into states, group by group. Letters as in linattn_triton."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_triton.kernels.blocks import (
    add_dot,
    as_features,
    at_head,
    column_powers,
    load_keys,
    load_operand,
    load_state,
    load_sums,
    load_vector_columns,
    load_weights,
    operand,
    store_state,
    tokens_of,
)


@triton.jit
def key_states(
    key, value, side, keys, peaks, start, kept_states, last, cut, per_segment, num_segments,
    shape: tl.constexpr, has_start: tl.constexpr, is_kept: tl.constexpr,
):  # fmt: skip
    """The states before each group, relative to the peaks before it, and those after segments of blocks."""
    num_tiles: tl.constexpr = shape.total // shape.tile
    tile, rest = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    segment, head = rest % num_segments, rest // num_segments
    if has_start:
        S, z = load_state(start[0], rest, tile, shape), load_sums(start[1], rest, tile, shape)
    else:
        S = tl.full([shape.tile, shape.padded_dv], 0.0, tl.float32)
        z = tl.full([shape.tile], 0.0, tl.float32)
    begin, values = at_head(key, head, cut.heads), at_head(value, head, cut.heads)
    w, row = load_weights(side, head, cut, tile, shape), head.to(tl.int64) * cut.length
    peaks += head.to(tl.int64) * (cut.num_groups + 1)
    first = segment * per_segment
    for i in range(first, tl.minimum(first + per_segment, cut.num_blocks)):
        group = i // cut.per_group
        peak = tl.load(peaks + group + 1)
        if i % cut.per_group == 0:
            if is_kept:
                store_state(kept_states[0], kept_states[1], head * cut.num_groups + group, tile, S, z, shape)
            fall = tl.exp2(tl.load(peaks + group) - peak)
            S, z = S * fall, z * fall
        numbers, there = tokens_of(i, cut, shape)
        shift, offset, live = load_keys(keys, row + numbers, there)
        shift += tl.where(live, peak - offset, 0.0)
        vectors = load_vector_columns(begin, key.token, numbers, live, shape)
        powers = column_powers(vectors, w, side, head, cut, begin, key.token, numbers, live, tile, shape)
        phi = as_features(powers, shift[None, :], live[None, :], shape)
        v = load_operand(values, value.token, numbers, live, shape)
        S = add_dot(operand(phi, shape), v, S, shape)
        z += tl.sum(phi, 1)
    store_state(last[0], last[1], rest, tile, S, z, shape)
