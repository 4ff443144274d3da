"""The kernel of one token: its key enters the sums, its queries read them, in one launch.

Each feature is relative to its own largest exponent, as states keep them. Letters as in linattn_triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_triton.kernels.blocks import (
    LN_2,
    LOG2_E,
    NO_KEY,
    at_head,
    features_of,
    load_vectors,
    load_weights,
    row_powers,
)


@triton.jit
def powers_of(rows, side, head, numbers, live, cut, tile, shape: tl.constexpr):
    """Powers (C, F) of a few vectors."""
    begin = at_head(rows, head, cut.heads)
    vectors = load_vectors(begin, rows.token, numbers, live, shape)
    w = load_weights(side, head, cut, tile, shape)
    return row_powers(vectors, w, side, head, cut, begin, rows.token, numbers, live, tile, shape)


@triton.jit
def token_step(
    query, key, value, query_side, key_side, bias, before, after, outputs, cut,
    shape: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """The sums after a token, and the rows of its G queries, by parts of the values."""
    num_parts: tl.constexpr = (shape.dv + shape.padded_dv - 1) // shape.padded_dv
    part, head = tl.program_id(0) % num_parts, tl.program_id(0) // num_parts
    columns = part * shape.padded_dv + tl.arange(0, shape.padded_dv)
    numbers = tl.arange(0, shape.block)
    is_query, is_key, is_value = numbers < cut.members, numbers == 0, columns < shape.dv
    lift = tl.full([1], 0.0, tl.float32)
    if has_bias:
        lift = tl.load(at_head(bias, head, cut.heads) + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        is_kept = lift > float("-inf")
        is_key = is_key & is_kept
        is_value = is_value & is_kept
    v = tl.load(at_head(value, head, cut.heads) + columns, mask=is_value, other=0.0).to(tl.float32)
    num = tl.full([shape.block, shape.padded_dv], 0.0, tl.float32)
    den = tl.full([shape.block], 0.0, tl.float32)
    shift = tl.full([shape.block], NO_KEY, tl.float32)
    for tile in range(shape.total // shape.tile):
        names = features_of(tile, shape)
        there, at = names < shape.num_features, head.to(tl.int64) * shape.num_features + names
        key_power = powers_of(key, key_side, head, numbers, is_key, cut, tile, shape)
        key_power = tl.sum(tl.where((numbers == 0)[:, None], key_power, 0.0), 0) + lift
        m = tl.load(before[2] + at, mask=there, other=0.0)
        former = m * LOG2_E
        is_higher = key_power > former
        highest = tl.where(is_higher, key_power, former)
        phi, fall = tl.exp2(key_power - highest), tl.exp2(former - highest)
        mask = there[:, None] & (columns < shape.dv)[None, :]
        places = at[:, None] * shape.dv + columns[None, :]
        S = tl.load(before[0] + places, mask=mask, other=0.0) * fall[:, None] + phi[:, None] * v[None, :]
        z = tl.load(before[1] + at, mask=there, other=0.0) * fall + phi
        tl.store(after[0] + places, S, mask=mask)
        tl.store(after[1] + at, z, mask=there & (part == 0))
        # A maximum that stays keeps its bits.
        tl.store(after[2] + at, tl.where(is_higher, key_power * LN_2, m), mask=there & (part == 0))
        powers = powers_of(query, query_side, head, numbers, is_query, cut, tile, shape) + highest[None, :]
        powers = tl.where(there[None, :], powers, NO_KEY)
        higher = tl.maximum(shift, tl.max(powers, 1))
        phi_query, fall = tl.exp2(powers - higher[:, None]), tl.exp2(shift - higher)
        num = tl.dot(phi_query, S, num * fall[:, None], input_precision="ieee")
        den, shift = den * fall + tl.sum(phi_query * z[None, :], 1), higher
    at = head.to(tl.int64) * cut.members + numbers
    mask = is_query[:, None] & (columns < shape.dv)[None, :]
    out = num / tl.where(den == 0, float("inf"), den)[:, None]
    tl.store(outputs[0] + at[:, None] * shape.dv + columns[None, :], out.to(outputs[0].dtype.element_ty), mask=mask)
    tl.store(outputs[1] + at, den, mask=is_query & (part == 0))
    tl.store(outputs[2] + at, shift * LN_2, mask=is_query & (part == 0))
