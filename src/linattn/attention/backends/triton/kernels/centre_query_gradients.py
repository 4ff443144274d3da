"""The kernel of the gradients of an expansion's queries, and of what the other gradients need of each row.

Letters as in centres.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.attention.backends.triton.kernels.blocks import (
    add_dot,
    at_head,
    dot,
    load_operand,
    operand,
)
from linattn.attention.backends.triton.kernels.centres import (
    block_around,
    load_centre,
    load_moments,
    load_peak,
    picked_rows,
    rows_at,
    seen_tokens,
    shares_of,
    steps_from,
    store_picked,
    tile_of,
)
from linattn.attention.backends.triton.kernels.row_gradients import SMALLEST


@triton.jit
def centre_query_gradients(
    query, key, value, bias, places, sorted_rows, states, grad_out, rows, scalars, found, cut,
    shape: tl.constexpr, has_bias: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """With π the normalised weights, g the gradient and h = g·v: Σ π·h, Σ π·h·k and Σ π·k give all of it."""
    tile, rest = tl.program_id(0) % sorted_rows.num_tiles, tl.program_id(0) // sorted_rows.num_tiles
    group, head = rest % cut.num_groups, rest // cut.num_groups
    starts = sorted_rows.starts + head.to(tl.int64) * (cut.num_groups * shape.num_centres + 1)
    centre, first, stop = tile_of(starts + group * shape.num_centres, tile, shape)
    if centre < shape.num_centres:
        token, at, row, there = rows_at(sorted_rows.order, head, first, stop, cut, shape)
        c = load_centre(places, head, centre, cut, shape)
        g = picked_rows(grad_out, row, token, there, cut.heads * cut.members, shape.dv, shape.padded_dv)
        grad = operand(g, shape)
        # (den, peak, gradient of den, gradient of its exponent)
        den = tl.load(rows[0] + at, mask=there, other=0.0)
        highest = tl.load(rows[1] + at, mask=there, other=float("inf"))
        is_dead = den < SMALLEST
        inverse = tl.where(is_dead, 0.0, 1 / tl.where(is_dead, 1.0, den))
        index = head * cut.num_groups + group if is_causal else head
        S_one, _, S_key, z_key = load_moments(states, index, centre, shape)
        scale = tl.exp2(load_peak(states[2], index, centre, shape) - highest) * inverse
        pulled = scale * tl.sum(g.to(tl.float32) * S_one[None, :], 1)
        if shape.order == 1:
            of_keys = dot(grad, tl.trans(operand(S_key, shape)), shape) * scale[:, None]
            keys = scale[:, None] * z_key[None, :]
        if is_causal:
            seen = tl.where(there, seen_tokens(token, sorted_rows.span), 0)
            num_blocks = (tl.max(seen, 0) - group * cut.span + shape.block - 1) // shape.block
            for i in range(group * cut.per_group, group * cut.per_group + num_blocks):
                numbers, k, powers, whole, kept = block_around(key, bias, places, c, head, i, cut, shape, has_bias)
                is_seen = (numbers[None, :] < seen[:, None]) & kept[None, :]
                power = tl.minimum(powers[None, :] + (whole[None, :] - highest[:, None]), 1.0)
                weights = tl.where(is_seen, tl.exp2(power), 0.0) * inverse[:, None]
                v = load_operand(at_head(value, head, cut.heads), value.token, numbers, kept, shape)
                turned = weights * dot(grad, tl.trans(v), shape)
                pulled += tl.sum(turned, 1)
                if shape.order == 1:
                    moved = operand(k, shape)
                    of_keys = add_dot(operand(turned, shape), moved, of_keys, shape)
                    keys = add_dot(operand(weights, shape), moved, keys, shape)
        delta = pulled - tl.load(rows[2] + at, mask=there, other=0.0) * tl.where(is_dead, 0.0, den)
        total = tl.full([shape.rows, shape.padded_d], 0.0, tl.float32)
        if shape.order == 1:
            x = picked_rows(query, row, token, there, cut.heads * cut.members, shape.d, shape.padded_d)
            steps = steps_from(x, c, there, places)
            share, square = shares_of(steps, places, head, cut)
            mean = tl.sum(steps * keys, 1)
            of_share = tl.sum(steps * of_keys, 1) - mean * pulled
            of_mean = tl.where(is_dead, 0.0, tl.load(rows[3] + at, mask=there, other=0.0)) - share * pulled
            # A step beyond the reach is as long whatever its length.
            shrink = tl.where(square > 0, of_share * share / tl.where(square > 0, square, 1.0), 0.0)
            total = share[:, None] * of_keys + of_mean[:, None] * keys - shrink[:, None] * steps
            delta += share * of_share + of_mean * mean
            tl.store(scalars.share + at, share, mask=there)
            tl.store(scalars.mean + at, mean, mask=there)
            tl.store(scalars.of_mean + at, of_mean, mask=there)
        store_picked(found, at, there, total * places.scale, shape.d, shape.padded_d)
        tl.store(scalars.inverse + at, inverse, mask=there)
        tl.store(scalars.delta + at, delta, mask=there)
