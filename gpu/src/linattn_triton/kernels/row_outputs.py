"""The kernel that reads states with queries, and causally a block's own keys. Letters as in linattn_triton."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_triton.kernels.blocks import (
    HEADROOM,
    LN_2,
    NO_KEY,
    add_dot,
    as_features,
    at_head,
    highest_seen,
    load_keys,
    load_operand,
    load_operand_state,
    load_vectors,
    load_weights,
    operand,
    row_powers,
    seen_by,
    store_rows,
    tokens_of,
)


@triton.jit
def row_outputs(
    query, key, value, query_side, key_side, keys, peaks, states, outputs, cut,
    shape: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """Outputs, denominators, their exponents and the queries' shifts, over the state before each group and own keys."""
    i, row = tl.program_id(0) % cut.num_blocks, tl.program_id(0) // cut.num_blocks
    head, group = row // cut.members, i // cut.per_group
    numbers, there = tokens_of(i, cut, shape)
    begin = at_head(query, row, cut.heads * cut.members)
    vectors = load_vectors(begin, query.token, numbers, there, shape)
    num = tl.full([shape.block, shape.padded_dv], 0.0, tl.float32)
    den = tl.full([shape.block], 0.0, tl.float32)
    shift = den if shape.kind == "features" else tl.full([shape.block], NO_KEY, tl.float32)
    if is_causal:
        at = head.to(tl.int64) * cut.length + numbers
        key_shift, offset, live = load_keys(keys, at, there)
        begin_key = at_head(key, head, cut.heads)
        key_vectors = load_vectors(begin_key, key.token, numbers, live, shape)
        weights = tl.full([shape.block, shape.block], 0.0, tl.float32)
    for tile in range(shape.total // shape.tile):
        w = load_weights(query_side, head, cut, tile, shape)
        powers = row_powers(vectors, w, query_side, head, cut, begin, query.token, numbers, there, tile, shape)
        if shape.kind != "features":
            higher = tl.maximum(shift, tl.ceil(tl.max(powers, 1)) - HEADROOM)
            fall = tl.exp2(shift - higher)
            shift, num, den = higher, num * fall[:, None], den * fall
            if is_causal:
                weights = weights * fall[:, None]
        phi = as_features(powers, shift[:, None], there[:, None], shape)
        if is_causal:
            w_key = load_weights(key_side, head, cut, tile, shape)
            powers = row_powers(
                key_vectors, w_key, key_side, head, cut, begin_key, key.token, numbers, live, tile, shape
            )
            phi_key = operand(as_features(powers, key_shift[:, None], live[:, None], shape), shape)
            weights = add_dot(operand(phi, shape), tl.trans(phi_key), weights, shape)
        S, z = load_operand_state(states, head * cut.num_groups + group, tile, shape)
        num = add_dot(operand(phi, shape), S, num, shape)
        den += tl.sum(phi * z[None, :], 1)
    peak = tl.load(peaks + head.to(tl.int64) * (cut.num_groups + 1) + group)
    if is_causal:
        highest = highest_seen(offset, peak, numbers, live)
        fall = tl.exp2(peak - highest)
        factor = tl.where(seen_by(numbers, live), tl.exp2(tl.minimum(offset[None, :] - highest[:, None], 0.0)), 0.0)
        v = load_operand(at_head(value, head, cut.heads), value.token, numbers, live, shape)
        weights = operand(weights * factor, shape)
        num = add_dot(weights, v, num * fall[:, None], shape)
        den = den * fall + tl.sum(weights.to(tl.float32), 1)
        peak = highest
    at = row.to(tl.int64) * cut.length + numbers
    # A row that saw no key gives 0.
    out = num / tl.where(den == 0, float("inf"), den)[:, None]
    store_rows(outputs[0] + row.to(tl.int64) * cut.length * shape.dv, numbers, there, out, shape.dv, shape.padded_dv)
    tl.store(outputs[1] + at, den, mask=there)
    tl.store(outputs[2] + at, (peak + shift) * LN_2, mask=there)
    tl.store(outputs[3] + at, shift, mask=there)
