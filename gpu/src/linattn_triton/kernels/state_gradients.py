"""The kernel that sums the gradients of states, from the last group to the first. Letters as in linattn_triton."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_triton.kernels.blocks import (
    add_dot,
    as_features,
    at_head,
    column_powers,
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
def state_gradients(
    query, side, grad_out, rows, peaks, start, kept_states, last, cut, per_segment, num_segments,
    shape: tl.constexpr, has_start: tl.constexpr, is_kept: tl.constexpr,
):  # fmt: skip
    """Gradients of the states after each group, as later rows leave them, and of those before segments of blocks."""
    num_tiles: tl.constexpr = shape.total // shape.tile
    tile, rest = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    segment, head = rest % num_segments, rest // num_segments
    if has_start:
        S, z = load_state(start[0], rest, tile, shape), load_sums(start[1], rest, tile, shape)
    else:
        S = tl.full([shape.tile, shape.padded_dv], 0.0, tl.float32)
        z = tl.full([shape.tile], 0.0, tl.float32)
    w = load_weights(side, head, cut, tile, shape)
    peaks += head.to(tl.int64) * (cut.num_groups + 1)
    first = segment * per_segment
    stop = tl.minimum(first + per_segment, cut.num_blocks)
    for back in range(stop - first):
        i = stop - 1 - back
        group = i // cut.per_group
        peak = tl.load(peaks + group)
        if ((i + 1) % cut.per_group == 0) | (i + 1 == cut.num_blocks):
            if is_kept:
                store_state(kept_states[0], kept_states[1], head * cut.num_groups + group, tile, S, z, shape)
            fall = tl.exp2(peak - tl.load(peaks + group + 1))
            S, z = S * fall, z * fall
        numbers, there = tokens_of(i, cut, shape)
        for member in range(cut.members):
            row = head * cut.members + member
            at = row.to(tl.int64) * cut.length + numbers
            shift = tl.load(rows.shift + at, mask=there, other=float("inf"))
            factor = tl.exp2(peak - tl.load(rows.peak + at, mask=there, other=float("inf")))
            factor *= tl.load(rows.inverse + at, mask=there, other=0.0)
            begin = at_head(query, row, cut.heads * cut.members)
            vectors = load_vector_columns(begin, query.token, numbers, there, shape)
            powers = column_powers(vectors, w, side, head, cut, begin, query.token, numbers, there, tile, shape)
            phi = as_features(powers, shift[None, :], there[None, :], shape) * factor[None, :]
            values = at_head(grad_out, row, cut.heads * cut.members)
            grad = load_operand(values, grad_out.token, numbers, there, shape)
            S = add_dot(operand(phi, shape), grad, S, shape)
            z -= tl.sum(phi * tl.load(rows.delta + at, mask=there, other=0.0)[None, :], 1)
    store_state(last[0], last[1], rest, tile, S, z, shape)
