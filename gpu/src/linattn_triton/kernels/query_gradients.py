"""The kernel of the queries' gradients. Letters as in linattn_triton."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn_triton.kernels.blocks import (
    LN_2,
    add_dot,
    as_features,
    at_head,
    curved_rows,
    dot,
    load_curvature,
    load_keys,
    load_operand,
    load_operand_state,
    load_vectors,
    load_weights,
    operand,
    operand_at_hand,
    row_powers,
    seen_by,
    store_given,
    store_rows,
    tokens_of,
)


@triton.jit
def query_gradients(
    query, key, value, query_side, key_side, keys, peaks, states, grad_out, rows, gradient, cut,
    shape: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """Gradients of vectors (C, D), or of given exponents or features, (C, R)."""
    i, row = tl.program_id(0) % cut.num_blocks, tl.program_id(0) // cut.num_blocks
    head, group = row // cut.members, i // cut.per_group
    numbers, there = tokens_of(i, cut, shape)
    at, begin = row.to(tl.int64) * cut.length, at_head(query, row, cut.heads * cut.members)
    vectors = load_vectors(begin, query.token, numbers, there, shape)
    begin_grad = at_head(grad_out, row, cut.heads * cut.members)
    grad = load_operand(begin_grad, grad_out.token, numbers, there, shape)
    shift = tl.load(rows.shift + at + numbers, mask=there, other=float("inf"))
    inverse = tl.load(rows.inverse + at + numbers, mask=there, other=0.0)
    delta = tl.load(rows.delta + at + numbers, mask=there, other=0.0)
    highest = tl.load(rows.peak + at + numbers, mask=there, other=float("inf"))
    peak = tl.load(peaks + head.to(tl.int64) * (cut.num_groups + 1) + group)
    if is_causal:
        key_shift, offset, live = load_keys(keys, head.to(tl.int64) * cut.length + numbers, there)
        begin_key, values = at_head(key, head, cut.heads), at_head(value, head, cut.heads)
        key_vectors = load_vectors(begin_key, key.token, numbers, live, shape)
        v = load_operand(values, value.token, numbers, live, shape)
        factor = tl.exp2(tl.minimum(offset[None, :] - highest[:, None], 0.0)) * inverse[:, None]
        weights = tl.where(seen_by(numbers, live), (dot(grad, tl.trans(v), shape) - delta[:, None]) * factor, 0.0)
        weights = operand(weights, shape)
    scale = tl.exp2(peak - highest) * inverse
    total = tl.full([shape.block, shape.padded_d], 0.0, tl.float32)
    curved = tl.full([shape.block], 0.0, tl.float32)
    for tile in range(shape.total // shape.tile):
        S, z = load_operand_state(states, head * cut.num_groups + group, tile, shape)
        of_out = operand_at_hand(grad, begin_grad, grad_out.token, numbers, there, shape)
        pulled = (dot(of_out, tl.trans(S), shape) - delta[:, None] * z[None, :]) * scale[:, None]
        if is_causal:
            w = load_weights(key_side, head, cut, tile, shape)
            powers = row_powers(key_vectors, w, key_side, head, cut, begin_key, key.token, numbers, live, tile, shape)
            phi = as_features(powers, key_shift[:, None], live[:, None], shape)
            pulled = add_dot(weights, operand(phi, shape), pulled, shape)
        if shape.kind == "features":
            store_given(gradient, row, numbers, there, tile, pulled, cut, shape)
        else:
            w = load_weights(query_side, head, cut, tile, shape)
            powers = row_powers(vectors, w, query_side, head, cut, begin, query.token, numbers, there, tile, shape)
            pulled *= as_features(powers, shift[:, None], there[:, None], shape)
            if shape.kind == "exponents":
                store_given(gradient, row, numbers, there, tile, pulled, cut, shape)
            else:
                total = add_dot(operand(pulled, shape), w, total, shape)
                curved += tl.sum(pulled * load_curvature(query_side, head, cut, tile, shape)[None, :], 1)
    if shape.kind == "powers":
        total += curved_rows(begin, query.token, numbers, there, curved, shape)
        store_rows(gradient + at * shape.d, numbers, there, total * LN_2, shape.d, shape.padded_d)
