"""The kernel of the gradients of keys, values and biases. Letters as in linattn_triton."""

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
    store_given,
    store_rows,
    tokens_of,
)


@triton.jit
def own_rows(value, grad_out, rows, row, offset, numbers, there, live, cut, shape: tl.constexpr):
    """A row head's gradients as operands, how its queries weigh a block's keys, and what that pulls on them, (C, C)."""
    at = row.to(tl.int64) * cut.length + numbers
    inverse = tl.load(rows.inverse + at, mask=there, other=0.0)
    delta = tl.load(rows.delta + at, mask=there, other=0.0)
    highest = tl.load(rows.peak + at, mask=there, other=float("inf"))
    begin = at_head(grad_out, row, cut.heads * cut.members)
    grad = load_operand(begin, grad_out.token, numbers, there, shape)
    factor = tl.exp2(tl.minimum(offset[:, None] - highest[None, :], 0.0)) * inverse[None, :]
    factor = tl.where((numbers[:, None] <= numbers[None, :]) & live[:, None] & there[None, :], factor, 0.0)
    pulled = operand((dot(value, tl.trans(grad), shape) - delta[None, :]) * factor, shape)
    return grad, factor, pulled


@triton.jit
def key_gradients(
    query, key, value, query_side, key_side, keys, peaks, grad_states, grad_out, rows, grads, cut, members_each,
    shape: tl.constexpr, is_causal: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """Gradients of vectors, or given exponents or features, of values and biases, by `members_each` query heads."""
    i, row = tl.program_id(0) % cut.num_blocks, tl.program_id(0) // cut.num_blocks
    parts = cut.members // members_each
    head, part, group = row // parts, row % parts, i // cut.per_group
    numbers, there = tokens_of(i, cut, shape)
    shift, offset, live = load_keys(keys, head.to(tl.int64) * cut.length + numbers, there)
    begin = at_head(key, head, cut.heads)
    vectors = load_vectors(begin, key.token, numbers, live, shape)
    v = load_operand(at_head(value, head, cut.heads), value.token, numbers, live, shape)
    peak = tl.load(peaks + head.to(tl.int64) * (cut.num_groups + 1) + group + 1)
    # Later rows are pulled on once, by the first part.
    scale = tl.where(live & (part == 0), tl.exp2(tl.minimum(offset - peak, 0.0)), 0.0)
    total = tl.full([shape.block, shape.padded_d], 0.0, tl.float32)
    of_values = tl.full([shape.block, shape.padded_dv], 0.0, tl.float32)
    curved, of_bias = tl.full([shape.block], 0.0, tl.float32), tl.full([shape.block], 0.0, tl.float32)
    for member in range(members_each if is_causal else 1):
        if is_causal:
            row_q = head * cut.members + part * members_each + member
            grad, factor, weights = own_rows(v, grad_out, rows, row_q, offset, numbers, there, live, cut, shape)
            first = at_head(query, row_q, cut.heads * cut.members)
            x_q = load_vectors(first, query.token, numbers, there, shape)
            shift_q = tl.load(rows.shift + row_q.to(tl.int64) * cut.length + numbers, mask=there, other=float("inf"))
            seen = tl.full([shape.block, shape.block], 0.0, tl.float32)
        for tile in range(shape.total // shape.tile):
            S, z = load_operand_state(grad_states, head * cut.num_groups + group, tile, shape)
            values = operand_at_hand(v, at_head(value, head, cut.heads), value.token, numbers, live, shape)
            pulled = (dot(values, tl.trans(S), shape) + z[None, :]) * scale[:, None]
            w = load_weights(key_side, head, cut, tile, shape)
            powers = row_powers(vectors, w, key_side, head, cut, begin, key.token, numbers, live, tile, shape)
            phi = as_features(powers, shift[:, None], live[:, None], shape)
            of_values = add_dot(operand(phi * scale[:, None], shape), S, of_values, shape)
            if is_causal:
                w_q = load_weights(query_side, head, cut, tile, shape)
                powers = row_powers(x_q, w_q, query_side, head, cut, first, query.token, numbers, there, tile, shape)
                phi_query = operand(as_features(powers, shift_q[:, None], there[:, None], shape), shape)
                pulled = add_dot(weights, phi_query, pulled, shape)
                seen = add_dot(operand(phi, shape), tl.trans(phi_query), seen, shape)
            of_powers = pulled * phi
            if has_bias:
                of_bias += tl.sum(of_powers, 1)
            if shape.kind == "powers":
                total = add_dot(operand(of_powers, shape), w, total, shape)
                curved += tl.sum(of_powers * load_curvature(key_side, head, cut, tile, shape)[None, :], 1)
            else:
                grad_x = of_powers if shape.kind == "exponents" else pulled * tl.exp2(-shift)[:, None]
                store_given(grads.key, row, numbers, there, tile, tl.where(live[:, None], grad_x, 0.0), cut, shape)
        if is_causal:
            of_values = add_dot(operand(seen * factor, shape), grad, of_values, shape)
            scale = scale * 0
    at = row.to(tl.int64) * cut.length
    store_rows(grads.value + at * shape.dv, numbers, there, of_values, shape.dv, shape.padded_dv)
    if has_bias:
        tl.store(grads.bias + at + numbers, of_bias, mask=there)
    if shape.kind == "powers":
        total += curved_rows(begin, key.token, numbers, live, curved, shape)
        store_rows(grads.key + at * shape.d, numbers, there, total * LN_2, shape.d, shape.padded_d)
