"""The kernel of the gradients of an expansion's keys, values and biases. Letters as in centres.py."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.attention.backends.triton.kernels.blocks import (
    LOG2_E,
    add_dot,
    at_head,
    dot,
    load_rows,
    operand,
    store_rows,
    tokens_of,
)
from linattn.attention.backends.triton.kernels.centres import (
    load_centre,
    load_centred_rows,
    load_lifts,
    load_moments,
    load_peak,
    picked_rows,
    rows_at,
    seen_tokens,
    steps_from,
)


@triton.jit
def own_weights(powers, whole, numbers, kept, token, at, there, highest, scalars, span):
    """How rows of the group weigh a block's keys over all they see, (C, T)."""
    peak = tl.load(highest + at, mask=there, other=float("inf"))
    power = tl.minimum(powers[:, None] + (whole[:, None] - peak[None, :]), 1.0)
    seen = tl.where(there, seen_tokens(token, span), 0)
    is_seen = (numbers[:, None] < seen[None, :]) & kept[:, None]
    return tl.where(is_seen, tl.exp2(power), 0.0) * tl.load(scalars.inverse + at, mask=there, other=0.0)[None, :]


@triton.jit
def centre_key_gradients(
    query, key, value, bias, places, sorted_rows, grad_out, highest, scalars, peaks, grad_states, found, cut,
    shape: tl.constexpr, has_bias: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """Those of a block, from the states after its group and from the group's own rows, centre by centre."""
    i, head = tl.program_id(0) % cut.num_blocks, tl.program_id(0) // cut.num_blocks
    group = i // cut.per_group
    numbers, live = tokens_of(i, cut, shape)
    whole, fraction, kept = load_lifts(bias, head, numbers, live, cut, has_bias)
    k = load_centred_rows(key, places, head, numbers, kept, cut, shape)
    v = load_rows(at_head(value, head, cut.heads), value.token, numbers, kept, shape.dv, shape.padded_dv)
    moved, values = operand(k, shape), operand(v, shape)
    of_keys = tl.full([shape.block, shape.padded_d], 0.0, tl.float32)
    of_values = tl.full([shape.block, shape.padded_dv], 0.0, tl.float32)
    of_bias = tl.full([shape.block], 0.0, tl.float32)
    starts = sorted_rows.starts + head.to(tl.int64) * (cut.num_groups * shape.num_centres + 1)
    starts += group * shape.num_centres
    for centre in range(shape.num_centres):
        c = load_centre(places, head, centre, cut, shape)
        powers = tl.sum(k * c[None, :], 1) * (places.scale * LOG2_E) + fraction
        S_one, z_one, S_key, z_key = load_moments(grad_states, head * cut.num_groups + group, centre, shape)
        peak = load_peak(peaks, head * (cut.num_groups + 1) + group + 1, centre, shape)
        weights = tl.where(kept, tl.exp2(tl.minimum(powers + (whole - peak), 1.0)), 0.0)
        pulled = tl.sum(v.to(tl.float32) * S_one[None, :], 1) + z_one
        of_values += weights[:, None] * S_one[None, :]
        if shape.order == 1:
            S_key = operand(S_key, shape)
            of_moved = dot(values, tl.trans(S_key), shape) + z_key[None, :]
            pulled += tl.sum(k * of_moved, 1)
            of_keys += weights[:, None] * of_moved
            of_values = add_dot(operand(weights[:, None] * k, shape), S_key, of_values, shape)
        of_powers = weights * pulled
        if is_causal:
            end = tl.load(starts + centre + 1)
            for begin in range(tl.load(starts + centre), end, shape.rows):
                token, at, row, there = rows_at(sorted_rows.order, head, begin, end, cut, shape)
                g = picked_rows(grad_out, row, token, there, cut.heads * cut.members, shape.dv, shape.padded_dv)
                grad = operand(g, shape)
                own = own_weights(powers, whole, numbers, kept, token, at, there, highest, scalars, sorted_rows.span)
                turned = dot(values, tl.trans(grad), shape)
                factor, of_power = own, turned - tl.load(scalars.delta + at, mask=there, other=0.0)[None, :]
                if shape.order == 1:
                    share = tl.load(scalars.share + at, mask=there, other=0.0)
                    of_mean = tl.load(scalars.of_mean + at, mask=there, other=0.0)
                    x = picked_rows(query, row, token, there, cut.heads * cut.members, shape.d, shape.padded_d)
                    steps = operand(steps_from(x, c, there, places), shape)
                    t = dot(moved, tl.trans(steps), shape)
                    extra = share[None, :] * (t - tl.load(scalars.mean + at, mask=there, other=0.0)[None, :])
                    factor = own * (1 + extra)
                    of_power += turned * extra + t * of_mean[None, :]
                    of_t = operand(own * (share[None, :] * turned + of_mean[None, :]), shape)
                    of_keys = add_dot(of_t, steps, of_keys, shape)
                of_values = add_dot(operand(factor, shape), grad, of_values, shape)
                of_powers += tl.sum(own * of_power, 1)
        of_keys += (of_powers * places.scale)[:, None] * c[None, :]
        of_bias += of_powers
    at = head.to(tl.int64) * cut.length
    store_rows(found.key + at * shape.d, numbers, live, of_keys, shape.d, shape.padded_d)
    store_rows(found.value + at * shape.dv, numbers, live, of_values, shape.dv, shape.padded_dv)
    if has_bias:
        tl.store(found.bias + at + numbers, of_bias, mask=live)
